"""Findings of the `doctor` commands: what each check saw, and what to type next."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import typer

from prime_core.errors import PrimeError, UserError

Outcome = Literal["ok", "warning", "failed"]
MARKS = {"ok": "✓", "warning": "!", "failed": "✗"}


@dataclass(frozen=True)
class DoctorCheck:
    """One finding. `fix` is what to type or do; empty if nothing."""

    name: str
    outcome: Outcome
    found: str
    fix: str = ""


def failed(name: str, error: PrimeError, otherwise: str = "") -> DoctorCheck:
    """Returns the finding of a check that raised `error`; its fix is the error's hint, or
    `otherwise`."""
    hint = error.hint if isinstance(error, UserError) else ""
    return DoctorCheck(name, "failed", str(error), hint or otherwise)


def show(checks: Iterable[DoctorCheck], *, as_json: bool) -> bool:
    """Prints each finding when it is there, or all as one JSON list. Returns whether none
    failed."""
    shown: list[DoctorCheck] = []
    for check in checks:
        shown.append(check)
        if not as_json:
            typer.echo(f"{MARKS[check.outcome]} {check.name}: {check.found}")
            if check.fix:
                typer.echo(f"    → {check.fix}")
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in shown]))
    return all(check.outcome != "failed" for check in shown)
