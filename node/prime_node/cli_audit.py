"""`prime-node audit`: every slash from the chain, and the validator's own check run again.

`list`, `show` and `export` need neither torch nor docker; `replay` needs the engine (torch).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_core.command_line import Json, group
from prime_core.printing import printable
from prime_core.times import utc
from prime_node.cli_common import ReplayDevice, ReplayDtype, configured, print_json, tree_lines

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
    """List every slash of the pool, from the chain's events."""

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
        typer.echo(f"no node was slashed in pool {link.pool}")
    for s in found:
        typer.echo(f"{s.leaf}")
        said = f"{s.status}  {s.reason.name}  {prime(s.amount)}  proposed {utc(s.proposed_at)}"
        typer.echo(f"   {said}")
        for line in filter(None, (s.note, s.court_line())):
            typer.echo(f"   {line}")
        typer.echo(f"   node         {s.node}")
        typer.echo(f"   transaction  {s.ended_tx or s.proposed_tx}")


@audit_app.command("show")
@configured
def audit_show(settings: Settings, subject: Subject, as_json: Json = False) -> None:
    """Show what is published on a slash or a submission."""
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
    """Write all that an audit needs into a folder. This includes file, lease, run, verdict
    and evidence."""
    from prime_node.audit import export

    written = [str(path) for path in export(settings, subject, folder)]
    if as_json:
        print_json(written)
    else:
        typer.echo("\n".join(written))


@audit_app.command("replay")
@configured
def audit_replay(
    settings: Settings,
    subject: Subjects,
    device: ReplayDevice = "cpu",
    dtype: ReplayDtype = "float32",
    as_json: Json = False,
) -> None:
    """Repeat a judgement with the validator's code.

    The result is match, accepted, mismatch or cannot tell. With several subjects, --json
    prints one object a line; the exit code is that of the worst.
    """
    from prime_node.audit import replay

    worst = 0
    for one in subject:
        found = replay(settings, one, device=device, dtype=dtype)
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


@audit_app.command("mirrors")
@configured
def audit_mirrors(settings: Settings, as_json: Json = False) -> None:
    """List the validators' mirrors, as announced on chain."""
    from prime_chain.mirror import announced
    from prime_node.cli_owner import open_link

    link = open_link(settings)
    try:
        found = announced(link.client, link.deployment, link.pool)
    finally:
        link.close()
    if as_json:
        print_json([{"validator": who, "url": url} for who, url in found.items()])
        return
    if not found:
        typer.echo(f"no validator of pool {link.pool} names a mirror")
    for who, url in found.items():
        typer.echo(f"{url}  {who}")


@audit_app.command("mirror")
@configured
def audit_mirror(
    settings: Settings,
    folder: Annotated[Path, typer.Argument(help="Folder of the copy; made if missing.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on until SIGTERM.")] = False,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve the copy there; implies --follow.")
    ] = "",
    url: Annotated[
        str, typer.Option(help="URL at which others reach it (default: http://HOST:PORT).")
    ] = "",
    max_gb: Annotated[float, typer.Option(help="Largest size of the folder.", min=0)] = 20,
    as_json: Json = False,
) -> None:
    """Copy what rewards and slashes depend on. This includes settlements, evidence and lists
    of leaves.

    Anyone may do this. If the orchestrator stops, rewards can be claimed and slashes checked from
    the copy: give the mirror's URL in place of the orchestrator's. Exits with 69 if something that
    the chain names is not served.
    """
    from prime_chain.mirror import EVERY_SECONDS, MirrorServer, keep
    from prime_core.waiting import until_stopped
    from prime_node.audit import mirroring

    reached = url or (f"http://{listen}" if listen else "")
    with mirroring(settings, folder, reached, max_gb) as follower:
        copied = follower.tick()
        if as_json:
            print_json(copied.as_json())
        else:
            typer.echo(
                f"{copied.new} new ({copied.bytes} bytes), {copied.waiting} files without a "
                f"verdict, {len(copied.missing)} missing"
            )
            for key, why in copied.missing.items():
                typer.echo(printable(f"  missing {key}: {why}"))
        if not follow and not listen:
            raise typer.Exit(69 if copied.missing else 0)
        server = MirrorServer(folder, listen) if listen else None
        try:
            keep(follower, until_stopped(), EVERY_SECONDS)
        finally:
            if server is not None:
                server.close()
