"""`orchestrator slash …`: slash proposals, as anyone sees and carries them out; the guardian.

proposed ──window──▶ execute (anyone)      disputed ──no word in time──▶ lapse (anyone)
cancel (guardian, until its power ends)    disputed: `orchestrator validator confirm|overturn`
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from orchestrator.desk import Desk, Done, File, Json, PoolNumber, Rpc, at_desk
from protocol.chain import history
from protocol.chain.amounts import prime
from protocol.chain.client import ChainClient
from protocol.chain.contracts import Contracts
from protocol.chain.deployment import Deployment
from protocol.core.verdict import Reason
from protocol.times import utc

app = typer.Typer(
    help="Slash proposals: list, carry out, and the guardian's cancel and disable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Proposal = Annotated[int, typer.Argument(help="Number of the slash proposal.", min=1)]


@app.command("list")
def list_slashes(
    rpc: Rpc,
    deployment: File,
    pool: Annotated[int | None, typer.Option("--pool", help="Only this pool's.", min=0)] = None,
    json_output: Json = False,
) -> None:
    """Every proposal, oldest first."""
    place = Deployment.load(deployment)
    client = ChainClient(rpc, place.chain_id)
    try:
        found = [s for s in history.read_slashes(client, place) if pool in (None, s.pool)]
    finally:
        client.close()
    if json_output:
        typer.echo(json.dumps([asdict(one) | {"amount": str(one.amount)} for one in found]))
        return
    for one in found:
        reason = Reason(one.reason).name
        typer.echo(f"{one.id}. {one.status}  {reason}  {prime(one.amount)}  node {one.node}")
    if not found:
        typer.echo("nothing was ever proposed")


@app.command()
@at_desk
def execute(desk: Desk, proposal: Proposal) -> Done:
    """Carry out an undisputed proposal whose window has closed. Anyone may."""
    desk.perform([desk.contracts.slasher.execute(proposal)])
    return Done({"proposal": proposal, "state": "executed"}, f"proposal {proposal} is executed")


@app.command()
@at_desk
def lapse(desk: Desk, proposal: Proposal) -> Done:
    """End a dispute that nobody judged in time: the deposit goes back. Anyone may."""
    desk.perform([desk.contracts.slasher.lapse(proposal)])
    return Done({"proposal": proposal, "state": "cancelled"}, f"proposal {proposal} has lapsed")


@app.command()
@at_desk
def cancel(desk: Desk, proposal: Proposal) -> Done:
    """Call a proposal off. By the guardian, until its power ends."""
    desk.perform([desk.contracts.slasher.cancel(proposal)])
    return Done({"proposal": proposal, "state": "cancelled"}, f"proposal {proposal} is called off")


@app.command()
@at_desk
def disable(
    desk: Desk,
    pool: PoolNumber,
    epoch: Annotated[int, typer.Option(help="Epoch of the reward root.", min=0)],
) -> Done:
    """Void a reward root that cannot be claimed yet, and all later ones. By the guardian.

    Check it first: orchestrator rewards rebuild --epoch N.
    """
    desk.perform([desk.contracts.rewards.disable(pool, epoch)])
    facts = {"pool": pool, "epoch": epoch, "disabled": True}
    return Done(facts, f"the reward root of epoch {epoch} in pool {pool} is void")


@app.command()
def guardian(rpc: Rpc, deployment: File, json_output: Json = False) -> None:
    """Who may cancel and disable, and until when."""
    place = Deployment.load(deployment)
    client = ChainClient(rpc, place.chain_id)
    try:
        contracts = Contracts(client, place)
        account, ends = contracts.slasher.guardian()
        now = client.block("latest").time
    finally:
        client.close()
    if json_output:
        typer.echo(json.dumps({"guardian": account, "ends": ends, "seconds_left": ends - now}))
    elif now >= ends:
        typer.echo(f"the power of guardian {account} has ended")
    else:
        typer.echo(f"guardian {account}: may cancel and disable until {utc(ends)}")
