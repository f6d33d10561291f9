"""docs/cli.md names the commands that there are, and all that send."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from prime_node.cli import app as node_app
from prime_orchestrator.cli import deployment as deployment_cli
from prime_orchestrator.cli import pool as pool_cli
from prime_orchestrator.cli import rewards as rewards_cli
from prime_orchestrator.cli import slash as slash_cli
from prime_orchestrator.cli import terms as terms_cli
from prime_validator.cli import app as validator_app

DOC = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
WORDS = {word for code in re.findall(r"`([^`]+)`", DOC) for word in re.split(r"[\s|\\]+", code)}
SENDING_NOTHING = {("validator", name) for name in ("run", "doctor", "wallet new", "wallet show",
                                                    "juror run")}  # fmt: skip
GROUPS = {
    "pool": pool_cli.app, "validator": validator_app, "slash": slash_cli.app,
    "terms": terms_cli.app, "rewards": rewards_cli.app, "deployment": deployment_cli.app,
}  # fmt: skip


def commands(app: typer.Typer) -> dict[str, Any]:
    """Commands of an app, those of its groups as "group command"."""
    found: dict[str, Any] = {}
    top = typer.main.get_command(app)
    assert isinstance(top, TyperGroup)
    for name in top.commands:
        _, command, _ = top.resolve_command(typer.Context(top), [name])  # imports it
        if isinstance(command, TyperGroup):
            found |= {f"{name} {inner}": one for inner, one in command.commands.items()}
        else:
            found[name] = command
    return found


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_every_operator_command_is_in_the_page(group: str) -> None:
    for name in commands(GROUPS[group]):
        assert set(name.split()) <= WORDS, f"{group} {name}"


def test_every_owner_command_is_in_the_page() -> None:
    groups = ("stake", "node", "rewards", "work", "payout", "dispute", "leave")
    for name in commands(node_app):
        if name.split()[0] in groups:
            assert set(name.split()) <= WORDS, f"prime-node {name}"


def test_every_sending_command_rehearses_prints_calldata_and_speaks_json() -> None:
    sending = 0
    for group in ("pool", "validator", "slash", "terms"):
        for name, command in commands(GROUPS[group]).items():
            flags = {flag for option in command.params for flag in option.opts}
            if (group, name) in SENDING_NOTHING:
                continue
            assert "--json" in flags, f"orchestrator {group} {name}"
            if "--wallet" in flags:
                assert {"--dry-run", "--calldata"} <= flags, f"orchestrator {group} {name}"
                sending += 1
    assert sending > 20


def test_every_owner_command_that_sends_can_be_rehearsed() -> None:
    reading = {"show", "list", "consent", "explain"}
    for name, command in commands(node_app).items():
        if name.split()[0] not in ("stake", "node", "rewards", "work", "payout", "dispute"):
            continue
        flags = {flag for option in command.params for flag in option.opts}
        if name.split()[-1] not in reading:
            assert {"--dry-run", "--calldata", "--json"} <= flags, f"prime-node {name}"
        elif not name.endswith("consent"):
            assert "--json" in flags, f"prime-node {name}"
