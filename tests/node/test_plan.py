"""`prime-node plan`, and the table that docs/nodes.md has from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prime_core.errors import UserError
from prime_core.node import Gpu
from prime_node import fingerprint
from prime_node.cli import app

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "docs" / "examples" / "models"


def planned(model: str, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and JSON of `prime-node plan --json`."""
    command = ["plan", "--model", str(MODELS / f"{model}.json"), "--json", *words]
    done = CliRunner().invoke(app, command)
    return done.exit_code, json.loads(done.stdout)


def test_the_page_s_table_is_what_the_command_says() -> None:
    page = (ROOT / "docs" / "nodes.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ") and "GB |" in line
    ]
    assert len(rows) == 14
    for model, cards, *shown in rows:
        _, [found] = planned(model, "--gpus", cards)
        if not found["fits"]:
            assert shown == ["does not fit", *["–"] * 5], (model, cards)
            continue
        weights = f"{found['weights_per_card'] / 1e9:.1f}"
        numbers = [found[name] for name in ("cache_tokens", "longest_row", "rows_at_once")]
        ways = [str(found["tensor_parallel"]), str(found["engines"])]
        assert shown == [*ways, weights, *(f"{number:,}" for number in numbers)], (model, cards)


def test_the_cards_that_verify_a_32b_model_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "scale-32b.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if re.match(r"\| \dx\d+GB \|", line)
    ]
    assert len(rows) == 8
    for cards, weights, working, policies in rows:
        replay = planned("qwq-32b", "--gpus", cards)[1][0]["replay"]
        assert f"{replay['weights_per_card'] / 1e9:.1f}" == weights, cards
        assert f"{replay['working_per_card'] / 1e9:.1f}" == working, cards
        assert replay["policies"] == (0 if policies.startswith("none") else int(policies)), cards


def test_it_says_whether_a_validator_can_replay_there() -> None:
    command = ["plan", "--model", str(MODELS / "qwq-32b.json"), "--gpus", "3x24GB", "--gpus"]
    said = CliRunner().invoke(app, [*command, "1x80GB"]).stdout
    assert "files cannot be verified on 3 x 24 GB" in said
    assert "files can be verified on 1 x 80 GB, with 1 policy loaded" in said


def test_it_fails_only_if_no_set_of_cards_holds_the_model() -> None:
    status, found = planned("qwq-32b", "--gpus", "1x24GB", "--gpus", "4x24GB")
    assert (status, [one["fits"] for one in found]) == (0, [False, True])
    assert "does not fit on 1 x 24 GB" in found[0]["why"]
    assert planned("qwq-32b", "--gpus", "1x24GB")[0] == UserError.exit_code


def test_without_a_set_it_takes_this_machine_s_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tuple(Gpu(model="NVIDIA L4", memory_mb=mb) for mb in (24_000, 23_034))
    monkeypatch.setattr(fingerprint, "read_gpus", lambda: cards)
    _, [found] = planned("qwen2.5-7b")
    assert (found["cards"], found["card_bytes"]) == (2, 23_034 << 20)
    monkeypatch.setattr(fingerprint, "read_gpus", lambda: ())
    done = CliRunner().invoke(app, ["plan", "--model", str(MODELS / "qwen2.5-7b.json")])
    assert isinstance(done.exception, UserError)
    assert "shows no GPU" in str(done.exception)
