"""`prime-node audit`: every slash from the chain, and the validator's own check run again.

`list`, `show` and `export` need neither torch nor docker; `replay` needs the engine (torch).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node.cli_common import Json, configured, print_json, tree_lines
from node.config import Settings
from protocol.core.printing import printable
from protocol.times import utc

audit_app = typer.Typer(help="Check what others were slashed or paid for.", no_args_is_help=True)
Subject = Annotated[
    str,
    typer.Argument(help="Transaction, evidence digest or submission digest (0x + 64 digits)."),
]
Folder = Annotated[Path, typer.Argument(help="A new or empty folder.")]
Subjects = Annotated[
    list[str],
    typer.Argument(help="Transactions, evidence digests or submission digests."),
]
EXIT_STATUS = {"match": 0, "accepted": 0, "mismatch": 65, "cannot tell": 69}


@audit_app.command("list")
@configured
def audit_list(settings: Settings, as_json: Json = False) -> None:
    """Every slash of the pool, from the chain's events."""
    from dataclasses import asdict

    from node.cli_owner import open_link
    from protocol.chain.contracts import prime
    from protocol.chain.history import read_slashes
    from protocol.core.verdict import Reason

    link = open_link(settings)
    try:
        found = [
            slash for slash in read_slashes(link.client, link.deployment) if slash.pool == link.pool
        ]
    finally:
        link.close()
    if as_json:
        print_json([asdict(slash) | {"amount": str(slash.amount)} for slash in found])
        return
    if not found:
        typer.echo(f"nobody was slashed in pool {link.pool}")
    for s in found:
        when, reason = utc(s.proposed_at), Reason(s.reason).name
        typer.echo(f"{s.id}. {s.status}  {reason}  {prime(s.amount)}  proposed {when}")
        typer.echo(f"   node         {s.node}")
        typer.echo(f"   transaction  {s.ended_tx or s.proposed_tx}")


@audit_app.command("show")
@configured
def audit_show(settings: Settings, subject: Subject, as_json: Json = False) -> None:
    """What is published on a slash or a submission."""
    from node.audit import published

    found = published(settings, subject)
    if as_json:
        print_json(found)
    else:
        typer.echo("\n".join([subject, *tree_lines(found, indent=1)]))


@audit_app.command("export")
@configured
def audit_export(
    settings: Settings, subject: Subject, folder: Folder, as_json: Json = False
) -> None:
    """Write all that an audit rests on into a folder: file, lease, run, verdict, evidence."""
    from node.audit import export

    written = [str(path) for path in export(settings, subject, folder)]
    if as_json:
        print_json(written)
    else:
        typer.echo("\n".join(written))


@audit_app.command("replay")
@configured
def audit_replay(settings: Settings, subject: Subjects, as_json: Json = False) -> None:
    """Run the validator's own code again: match, accepted, mismatch, or cannot tell.

    With several subjects, --json prints one object a line; the exit code is that of the worst.
    """
    from node.audit import replay

    worst = 0
    for one in subject:
        found = replay(settings, one)
        worst = max(worst, EXIT_STATUS[found.result])
        if as_json:
            print_json(found.as_json(), compact=len(subject) > 1)
            continue
        typer.echo(f"{found.result}: {printable(found.detail)}")
        if found.expected is not None:
            here = found.found.name if found.found is not None else "–"
            typer.echo(f"  published {found.expected.name}, found here {here}")
        for name, (said, own) in found.statistics.items():
            typer.echo(printable(f"  {name}: {said} published, {own} here"))
        for note in found.notes:
            typer.echo(printable(f"  note: {note}"))
    raise typer.Exit(worst)
