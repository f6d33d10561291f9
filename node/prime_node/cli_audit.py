"""`prime-node audit`: every slash from the chain, and the validator's own check run again.

`list`, `show` and `export` need neither torch nor docker; `replay` needs the engine (torch).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_core.command_line import group
from prime_core.printing import printable
from prime_core.times import utc
from prime_node.cli_common import Json, configured, print_json, tree_lines

if TYPE_CHECKING:
    from prime_node.config import Settings

audit_app = group("Check what others were slashed or paid for.")
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

    from prime_chain.contracts import prime
    from prime_chain.history import read_slashes
    from prime_node.cli_owner import open_link

    link = open_link(settings)
    try:
        found = [
            slash for slash in read_slashes(link.client, link.deployment) if slash.pool == link.pool
        ]
    finally:
        link.close()
    if as_json:
        print_json([slash.as_json() for slash in found])
        return
    if not found:
        typer.echo(f"nobody was slashed in pool {link.pool}")
    for s in found:
        typer.echo(f"{s.leaf}")
        said = f"{s.status}  {s.reason.name}  {prime(s.amount)}  proposed {utc(s.proposed_at)}"
        typer.echo(f"   {said}")
        if s.note:
            typer.echo(f"   {s.note}")
        typer.echo(f"   node         {s.node}")
        typer.echo(f"   transaction  {s.ended_tx or s.proposed_tx}")


@audit_app.command("show")
@configured
def audit_show(settings: Settings, subject: Subject, as_json: Json = False) -> None:
    """What is published on a slash or a submission."""
    from prime_node.audit import published

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
    from prime_node.audit import export

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
    from prime_node.audit import replay

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
