"""`orchestrator calibrate`: an object named by its SHA-256, signed, where validators find
it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pools import deployment
from typer.testing import CliRunner

from prime_chain.keystore import save_keystore
from prime_core import encoding
from prime_core.calibration import CalibrationStatement
from prime_core.errors import UnavailableError, UserError
from prime_core.signing import LocalSigner
from prime_core.storage.directory import DirectoryStore
from prime_orchestrator.cli.calibrate import app
from prime_orchestrator.context import read_object
from prime_verify import calibrate
from prime_verify.proofs import thresholds
from prime_verify.proofs.thresholds import parse_signed
from prime_verify.setups import synthetic_run

Asked = tuple[str, str, list[str], int]
SIGNER, OTHER = LocalSigner(b"\xa7" * 32), LocalSigner(b"\xa8" * 32)


@pytest.fixture(autouse=True)
def _no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_VLLM_HOME", str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_the_run_names_what_was_written_and_the_signature_says_by_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "BATCH_FILES", {64: 1})
    monkeypatch.setattr(calibrate, "LENGTHS", (5,))
    monkeypatch.setattr(calibrate, "DTYPES", ("float32",))
    place = deployment()
    place_file, wallet, password = (tmp_path / name for name in ("d.json", "w.json", "pw"))
    place_file.write_text(place.model_dump_json())
    save_keystore(wallet, SIGNER.account.key, "secret", light=True)
    password.write_text("secret\n")
    out = tmp_path / "calibration.json"
    answer = CliRunner().invoke(
        app,
        [
            *("--out", str(out), "--objects", str(tmp_path / "objects"), "--json"),
            *("--deployment", str(place_file), "--wallet", str(wallet)),
            *("--password-file", str(password)),
        ],
        catch_exceptions=False,
    )
    said = json.loads(answer.stdout.strip().splitlines()[-1])
    assert said["digest"] == encoding.sha256(out.read_bytes())
    assert said["signer"] == SIGNER.address
    run = synthetic_run(5).model_copy(update={"calibration": said["digest"]})
    raw = read_object(DirectoryStore(tmp_path / "objects"), run.calibration)
    found = parse_signed(raw, SIGNER.address, place.domain_of(CalibrationStatement))
    assert found.setup("plain/1", "float32", "cpu") is not None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--wallet", "w.json"], "both a keystore and a network"),
        (["--sign", "c.json"], "no key is given to sign it"),
        (["--second"], "no key is given to sign it"),
        (["--python", "other=/bin/true"], "names no engine"),
        (["--python", "vllm"], "names no engine"),
        (["--python", "vllm=/nowhere/python"], "no interpreter"),
        (["--out", "/nowhere/c.json"], "/nowhere/c.json cannot be written"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    tmp_path: Path, words: list[str], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        CliRunner().invoke(
            app, ["--out", str(tmp_path / "c.json"), *words],
            catch_exceptions=False, standalone_mode=False,
        )  # fmt: skip
    assert not (tmp_path / "c.json").exists()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """(device, replay device, engines, setups kept) of each measurement; none takes place."""
    calls: list[Asked] = []
    shipped = thresholds.shipped()

    def measure(
        models: list[Path], *, python_of: dict[str, Path | None], device: str, replay_device: str,
        scale: float, keep: thresholds.Calibration | None,
    ) -> tuple[thresholds.Calibration, list[str]]:  # fmt: skip
        kept = len(keep.setups) if keep else 0
        calls.append((device, replay_device, sorted(python_of), kept))
        if device == "cuda":
            raise UnavailableError("no setup runs here")
        return shipped, ["one that is missing"]

    monkeypatch.setattr(calibrate, "calibrate", measure)
    return calls


def test_every_engine_and_device_at_hand_is_measured_and_the_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Asked]
) -> None:
    python = tmp_path / "engines" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setenv("PRIME_VLLM_HOME", str(tmp_path / "engines"))
    out = tmp_path / "c.json"
    words = ["--out", str(out), "--json", "--device", "cpu", "--device", "cuda"]
    said = CliRunner().invoke(app, words, catch_exceptions=False)
    kept = len(thresholds.shipped().setups)
    both = ["plain", "vllm"]  # replayed on one: limits for two would not go together
    assert asked == [("cpu", "cpu", both, 0), ("cuda", "cpu", both, kept)]
    answer = json.loads(said.stdout.strip().splitlines()[-1])
    assert answer["left_out"] == ["one that is missing", "cuda: no setup runs here"]
    assert answer["digest"] == thresholds.shipped().digest() == encoding.sha256(out.read_bytes())


def test_what_was_measured_elsewhere_is_signed_by_the_manager_without_measuring_it_again(
    tmp_path: Path, asked: list[Asked]
) -> None:
    place, wallet, password = (tmp_path / name for name in ("d.json", "w.json", "pw"))
    place.write_text(deployment().model_dump_json())
    save_keystore(wallet, SIGNER.account.key, "secret", light=True)
    password.write_text("secret\n")
    measured, out = tmp_path / "measured.json", tmp_path / "c.json"
    words = ["--out", str(measured), "--device", "cpu"]
    said = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "not signed: no pool is judged by it until its manager signs it" in said.stdout
    words = ["--out", str(out), "--sign", str(measured), "--wallet", str(wallet)]
    words += ["--deployment", str(place), "--password-file", str(password)]
    said = CliRunner().invoke(app, words, catch_exceptions=False)
    assert f"signed by {SIGNER.address}" in said.stdout
    assert len(asked) == 1
    domain = deployment().domain_of(CalibrationStatement)
    found = thresholds.parse_signed(out.read_bytes(), SIGNER.address, domain)
    assert found.setups == thresholds.shipped().setups
    words[words.index(str(measured))] = str(out)
    with pytest.raises(UserError, match="two parties"):
        CliRunner().invoke(app, [*words, "--second"], catch_exceptions=False, standalone_mode=False)
    wallet.unlink()
    save_keystore(wallet, OTHER.account.key, "secret", light=True)
    said = CliRunner().invoke(app, [*words, "--second"], catch_exceptions=False)
    assert f"signed by {OTHER.address} too" in said.stdout
    found = thresholds.parse_signed(out.read_bytes(), SIGNER.address, domain)
    assert found.second is not None


def test_where_nothing_could_be_measured_nothing_is_written(
    tmp_path: Path, asked: list[Asked]
) -> None:
    out = tmp_path / "c.json"
    with pytest.raises(UnavailableError, match="no setup runs here"):
        CliRunner().invoke(
            app, ["--out", str(out), "--device", "cuda"],
            catch_exceptions=False, standalone_mode=False,
        )  # fmt: skip
    assert not out.exists()
