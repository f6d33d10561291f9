"""`orchestrator calibrate`: an object named by its SHA-256, signed, where validators find
it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.calibrate_cli import app
from orchestrator.validator_cli import run_calibration
from protocol.chain.deployment import Deployment, Periods
from protocol.chain.keystore import save_keystore
from protocol.core import encoding, ids
from protocol.core.calibration import CalibrationStatement, SignedCalibration
from protocol.core.errors import UnavailableError, UserError
from protocol.core.messages import ContractAddresses
from protocol.core.signing import CONTRACT_NAMES, LocalSigner
from protocol.proofs import thresholds
from protocol.storage.directory import DirectoryStore
from protocol.verification import calibrate
from protocol.verification.setups import synthetic_run

SIGNER = LocalSigner(b"\xa7" * 32)


def _deployment() -> Deployment:
    addresses = {n: ids.address("0x" + f"{i:02x}" * 20) for i, n in enumerate(CONTRACT_NAMES, 160)}
    return Deployment(
        chain_id=31337, contracts=ContractAddresses(**addresses), block=0, periods=Periods()
    )


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
    place = _deployment()
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
    signed = SignedCalibration.model_validate_json(Path(said["signed"]).read_bytes())
    domain = place.domain_of(CalibrationStatement)
    assert signed.statement.calibration == said["digest"]
    assert signed.statement.recover(domain, signed.signature) == SIGNER.address == signed.signer
    run = synthetic_run(5).model_copy(update={"calibration": said["digest"]})
    found = run_calibration(run, DirectoryStore(tmp_path / "objects"))
    assert found is not None
    assert found.setup("plain/1", "float32", "cpu") is not None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--wallet", "w.json"], "both a keystore and a network"),
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
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], int]]:
    """(device, engines, set-ups kept) of each measurement, none of which takes place."""
    calls: list[tuple[str, list[str], int]] = []
    shipped = thresholds.shipped()

    def measure(
        models: list[Path], *, python_of: dict[str, Path | None], device: str, scale: float,
        keep: thresholds.Calibration | None,
    ) -> tuple[thresholds.Calibration, list[str]]:  # fmt: skip
        calls.append((device, sorted(python_of), len(keep.setups) if keep else 0))
        if device == "cuda":
            raise UnavailableError("no set-up runs here")
        return shipped, ["one that is missing"]

    monkeypatch.setattr(calibrate, "calibrate", measure)
    return calls


def test_every_engine_and_device_at_hand_is_measured_and_the_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, list[str], int]]
) -> None:
    python = tmp_path / "engines" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setenv("PRIME_VLLM_HOME", str(tmp_path / "engines"))
    out = tmp_path / "c.json"
    words = ["--out", str(out), "--json", "--device", "cpu", "--device", "cuda"]
    said = CliRunner().invoke(app, words, catch_exceptions=False)
    kept = len(thresholds.shipped().setups)
    assert asked == [("cpu", ["plain", "vllm"], 0), ("cuda", ["plain", "vllm"], kept)]
    answer = json.loads(said.stdout.strip().splitlines()[-1])
    assert answer["left_out"] == ["one that is missing", "cuda: no set-up runs here"]
    assert answer["digest"] == thresholds.shipped().digest() == encoding.sha256(out.read_bytes())


def test_where_nothing_could_be_measured_nothing_is_written(
    tmp_path: Path, asked: list[tuple[str, list[str], int]]
) -> None:
    out = tmp_path / "c.json"
    with pytest.raises(UnavailableError, match="no set-up runs here"):
        CliRunner().invoke(
            app, ["--out", str(out), "--device", "cuda"],
            catch_exceptions=False, standalone_mode=False,
        )  # fmt: skip
    assert not out.exists()
