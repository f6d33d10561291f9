"""`prime-node work`: receipts, and posting what the manager forgot. Needs no torch, no docker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from prime_core.command_line import group
from prime_core.times import parse_utc, utc
from prime_node.cli_common import DryRun, Json, configured, print_json
from prime_node.cli_owner import OwnerContext, open_link, send_calls

if TYPE_CHECKING:
    from prime_chain.client import Call
    from prime_node.config import Settings

work_app = group("Files handed in: are they on chain?")


@work_app.command("list")
@configured
def work_list(
    settings: Settings,
    last: Annotated[int, typer.Option(min=1, help="At most this many, the newest.")] = 20,
    since: Annotated[
        str | None, typer.Option(help="Received at this time or later, like 2026-11-20T19:05Z.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Receipts of the agent in this data folder, and whether the chain holds their files."""
    from prime_node.state import DataFolder
    from prime_node.work import read_receipts, received_since, standing

    every = read_receipts(DataFolder(settings.data))
    chosen = received_since(every, parse_utc(since) if since is not None else 0)
    entries = chosen[-last:]
    link = open_link(settings)
    try:
        found = standing(link, entries, settings.orchestrator)
    finally:
        link.close()
    if as_json:
        print_json([one.as_json() for one in found])
        return
    if len(chosen) > last:
        typer.echo(f"{len(chosen) - last} older receipts are not shown: --last {len(chosen)}")
    for one in found:
        line = f"{one.entry.submission_digest}  {one.state}"
        if one.state in ("forgotten", "waiting", "unknown"):
            since, until = utc(one.post_from), utc(one.post_until)
            line += f"  may be posted from {since} to {until}"
        typer.echo(line)
    if not every:
        typer.echo(f"the data folder {settings.data} holds no receipt")
    elif not found:
        typer.echo(f"no receipt is from {since} or later")


@work_app.command("post")
@configured
def work_post(
    settings: Settings,
    submission: Annotated[
        str | None, typer.Argument(help="Submission digest; by default all that are forgotten.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Root a file that the manager receipted and then ignored for an epoch. Any account may."""
    from prime_core import ids
    from prime_node.state import DataFolder
    from prime_node.work import pick, post_call, read_receipts, standing

    named = ids.digest(submission) if submission is not None else None

    def calls(context: OwnerContext) -> list[Call]:
        entries = read_receipts(DataFolder(settings.data))
        found = standing(context.link, entries, settings.orchestrator)
        return [post_call(context.link, one.entry) for one in pick(found, named)]

    send_calls(settings, calls, dry_run=dry_run, as_json=as_json)
