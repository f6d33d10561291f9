"""Run definitions from TOML: canonical, pinned, and refused with a name where they are wrong."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prime_core.errors import UserError
from prime_core.ids import ZERO_DIGEST
from prime_core.run import RunDefinition
from prime_envs.definition import run_from
from prime_envs.registry import environment_for
from prime_orchestrator.cli.run import app
from prime_verify.proofs.thresholds import newest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "run.toml"
MODEL = ROOT / "devnet" / "model"


def _new(source: Path, out: Path) -> None:
    words = ["new", str(source), "--model", str(MODEL), "--out", str(out)]
    CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False)


def test_the_published_example_makes_a_run_whose_environment_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _new(EXAMPLE, tmp_path / "run.json")
    written = (tmp_path / "run.json").read_bytes()
    run = RunDefinition.parse(written)
    assert run.raw() == written
    assert environment_for(run).name == "reverse"
    assert run.calibration == newest().digest()
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run.json")])
    assert run.digest() in shown.output
    monkeypatch.setitem(sys.modules, "prime_orchestrator.economics", None)
    with pytest.raises(ImportError):
        _new(EXAMPLE, tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists(), "without a package it writes nothing"


def test_a_run_that_pays_has_a_price_for_prompts_and_bounds_work_at_risk_unless_it_says_no(
    tmp_path: Path,
) -> None:
    source, out = tmp_path / "run.toml", tmp_path / "run.json"
    kept = [
        line
        for line in EXAMPLE.read_text().splitlines()
        if not line.startswith(("risk_factor_micro", "price_per_prompt_token"))
    ]
    source.write_text("\n".join(kept))
    words = ["new", str(source), "--model", str(MODEL), "--out", str(out)]
    said = CliRunner().invoke(app, words, catch_exceptions=False).output
    run = RunDefinition.parse(out.read_bytes())
    assert run.price_per_prompt_token == run.price_per_unit // 20
    assert run.risk_factor_micro == 900_000
    assert "leaves risk_factor_micro out; the run has risk_factor_micro = 900000" in said
    off = "risk_factor_micro = 0\nprice_per_prompt_token = 0"
    source.write_text("\n".join([off, *kept]))
    _new(source, tmp_path / "off.json")
    run = RunDefinition.parse((tmp_path / "off.json").read_bytes())
    assert run.risk_factor_micro == run.price_per_prompt_token == 0


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('name = "reverse"\n', 'name = "nothing"\n', "nothing"),
        ("max_staleness = 2", "max_staleness = 9", "max_staleness"),
        ("[budgets] ", "[bugdets] ", "budgets"),
        ("samples_per_group = 16", "samples_per_group = ", "TOML"),
        ("price_per_unit", "prize_per_unit", "price_per_unit"),
        ("temperature_micro", "top_p_micro = 900_000\ntemperature_micro", "top_p_micro"),
        ("[task]", '[cards]\nkinds = ["h900"]\ncounts = [4]\n\n[task]', "h900"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    source = tmp_path / "run.toml"
    text = EXAMPLE.read_text()
    assert old in text
    source.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=named):
        _new(source, tmp_path / "run.json")
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("environment", "reverse"),
        ("environment", {"name": "reverse", "arguments": "shortest = 3"}),
        ("budgets", [2, 6]),
        ("chat", "template"),
        ("conversation", "tools"),
        ("task", 3),
    ],
)
def test_what_is_no_table_is_named(name: str, value: object) -> None:
    values = {**tomllib.loads(EXAMPLE.read_text()), name: value}
    with pytest.raises(UserError, match=rf"run\.toml is not a run: .*{name}"):
        run_from(values, EXAMPLE, MODEL, ZERO_DIGEST)


def test_lengths_that_no_row_can_reach_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for most in (14, 13):
        values = {**tomllib.loads(EXAMPLE.read_text()), "max_output_tokens": most}
        run_from(values, EXAMPLE, MODEL, ZERO_DIGEST)
    (said,) = caplog.messages
    assert "lengths up to 14, but its rows end at max_output_tokens = 13" in said


def test_the_name_of_a_model_on_a_hub_is_no_folder(tmp_path: Path) -> None:
    words = ["new", str(EXAMPLE), "--model", "Qwen/Qwen3-0.6B", "--out", str(tmp_path / "run.json")]
    with pytest.raises(UserError, match=r"is not a model folder: it has no config\.json"):
        CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False)


def test_the_folder_of_the_run_definition_is_made(tmp_path: Path) -> None:
    _new(EXAMPLE, tmp_path / "new" / "folder" / "run.json")
    assert (tmp_path / "new" / "folder" / "run.json").is_file()
