"""`prime-node audit`: every slash from the chain, and the validator's own check run again."""

from __future__ import annotations

import typer

audit_app = typer.Typer(help="Check what others were slashed or paid for.", no_args_is_help=True)
