"""`orchestrator slash …`: slash proposals, as anyone sees and carries them out; the arbiter's acts.

proposed ──window──▶ execute (anyone)      disputed ──not judged in time──▶ lapse (anyone)
cancel (arbiter, before execution)         disputed ──▶ confirm or overturn (arbiter)
appealed (an unpaid file) ──▶ restore (arbiter)
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from prime_chain.amounts import parse_amount, prime
from prime_chain.chain_session import (
    ChainSession,
    Done,
    File,
    PoolNumber,
    Rpc,
    open_contracts,
    sends_transactions,
)
from prime_core import ids
from prime_core.command_line import Json, Quorum, group
from prime_core.times import utc

app = group(
    "Slash proposals: list, carry out, judge, cancel; appeals for unpaid files; void reward roots."
)
Proposal = Annotated[str, typer.Argument(help="Digest of the submission that it is about.")]
OnlyPool = Annotated[
    int | None, typer.Option("--pool", help="Only this pool's.", min=0, max=(1 << 63) - 1)
]


@app.command("list")
def list_slashes(
    rpc: Rpc,
    deployment: File,
    pool: OnlyPool = None,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
) -> None:
    """List every proposal, oldest first."""
    from prime_chain import history

    with open_contracts(rpc, deployment, rpc_quorum) as contracts:
        found = [
            s
            for s in history.read_slashes(contracts.client, contracts.deployment)
            if pool in (None, s.pool)
        ]
    if json_output:
        typer.echo(json.dumps([one.as_json() for one in found]))
        return
    for one in found:
        typer.echo(f"{one.leaf}  {one.status}  {one.reason.name}  {prime(one.amount)}  {one.node}")
        for line in filter(None, (one.note, one.court_line())):
            typer.echo(f"    {line}")
    if not found:
        typer.echo("nothing was ever proposed")


@app.command()
@sends_transactions
def execute(session: ChainSession, proposal: Proposal) -> Done:
    """Execute an undisputed proposal after its window. Anyone may do this."""
    leaf = ids.digest(proposal)
    session.perform([session.contracts.slasher.execute(leaf)])
    return Done({"proposal": leaf, "state": "executed"}, f"the slash for {leaf} is executed")


@app.command()
@sends_transactions
def lapse(session: ChainSession, proposal: Proposal) -> Done:
    """End a dispute that was not judged in time. The deposit goes back. Anyone may do this."""
    leaf = ids.digest(proposal)
    session.perform([session.contracts.slasher.lapse(leaf)])
    return Done({"proposal": leaf, "state": "cancelled"}, f"the slash for {leaf} has lapsed")


@app.command()
@sends_transactions
def cancel(session: ChainSession, proposal: Proposal) -> Done:
    """Cancel a proposal before its execution. Only the arbiter may do this."""
    leaf = ids.digest(proposal)
    session.perform([session.contracts.slasher.cancel(leaf)])
    return Done({"proposal": leaf, "state": "cancelled"}, f"the slash for {leaf} is cancelled")


@app.command()
@sends_transactions
def disable(
    session: ChainSession,
    pool: PoolNumber,
    epoch: Annotated[int, typer.Option(help="Epoch of the reward root.", min=0)],
) -> Done:
    """Disable a reward root before it is claimable. Also disables all later roots. Only the
    arbiter may do this.

    Check it first: orchestrator rewards rebuild --epoch N.
    """
    session.perform([session.contracts.rewards.disable(pool, epoch)])
    facts = {"pool": pool, "epoch": epoch, "disabled": True}
    return Done(facts, f"the reward root of epoch {epoch} in pool {pool} is void")


@app.command()
@sends_transactions
def confirm(session: ChainSession, proposal: Proposal) -> Done:
    """Confirm a disputed slash. Only the arbiter may do this.

    The slash is executed, and the deposit is lost.
    Judge first: prime-node audit replay TRANSACTION.
    """
    leaf = ids.digest(proposal)
    session.perform([session.contracts.slasher.confirm(leaf)])
    return Done({"proposal": leaf, "judged": "confirmed"}, f"the slash for {leaf} is confirmed")


@app.command()
@sends_transactions
def overturn(session: ChainSession, proposal: Proposal) -> Done:
    """Overturn a slash. Only the arbiter may do this.

    The deposit goes back, and the authors pay from their bonds.
    Judge first: prime-node audit replay TRANSACTION.
    """
    leaf = ids.digest(proposal)
    session.perform([session.contracts.slasher.overturn(leaf)])
    return Done({"proposal": leaf, "judged": "overturned"}, f"the slash for {leaf} is overturned")


@app.command()
def appeals(
    rpc: Rpc,
    deployment: File,
    pool: OnlyPool = None,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
) -> None:
    """List every appeal for an unpaid file, oldest first."""
    from prime_chain import history

    with open_contracts(rpc, deployment, rpc_quorum) as contracts:
        found = [
            one
            for one in history.read_appeals(contracts.client, contracts.deployment)
            if pool in (None, one.pool)
        ]
    if json_output:
        typer.echo(json.dumps([one.as_json() for one in found]))
        return
    for one in found:
        said = f"restored with {prime(one.amount)}" if one.amount else utc(one.judge_by)
        typer.echo(f"{one.leaf}  pool {one.pool}  {one.node}  {said}")
    if not found:
        typer.echo("no file was ever appealed")


@app.command()
@sends_transactions
def restore(
    session: ChainSession,
    submission: Annotated[str, typer.Argument(help="Digest of the appealed submission.")],
    amount: Annotated[str, typer.Option(help="What the file earns, in PRIME, for example 0.25.")],
) -> Done:
    """Grant an appeal, so that the file is paid. Only the arbiter may do this.

    The next reward root adds the amount, at most what the largest file of its step earns.
    Judge first: prime-node audit replay SUBMISSION.
    """
    leaf, wei = ids.digest(submission), parse_amount(amount)
    session.perform([session.contracts.rewards.restore(leaf, wei)])
    text = f"the file {leaf} is to be paid with {prime(wei)}"
    return Done({"submission": leaf, "amount": str(wei), "restored": True}, text)


@app.command()
@sends_transactions
def announce_arbiter(
    session: ChainSession,
    account: Annotated[str, typer.Argument(help="Address of the next arbiter.")],
) -> Done:
    """Announce another arbiter. `apply-arbiter` puts it in force one unbonding period later.
    Only the arbiter or the governor may do this."""
    target = ids.address(account)
    session.perform([session.contracts.slasher.announce_arbiter(target)])
    return Done({"arbiter": target, "announced": True}, f"{target} is announced as arbiter")


@app.command()
@sends_transactions
def apply_arbiter(session: ChainSession) -> Done:
    """Put the announced arbiter in force. Anyone may, once its time has come."""
    session.perform([session.contracts.slasher.apply_arbiter()])
    return Done({"applied": True}, "the announced arbiter is in force")


@app.command()
def arbiter(
    rpc: Rpc, deployment: File, json_output: Json = False, rpc_quorum: Quorum = None
) -> None:
    """Show the arbiter, who judges disputes. It may cancel slashes and void reward roots."""
    with open_contracts(rpc, deployment, rpc_quorum) as contracts:
        slasher = contracts.slasher
        account, announced = slasher.arbiter(), slasher.announced_arbiter()
    following, act_at = announced or (None, None)
    if json_output:
        typer.echo(json.dumps({"arbiter": account, "next": following, "act_at": act_at}))
        return
    typer.echo(f"arbiter {account}")
    if act_at is not None:
        typer.echo(f"  {following} is announced; in force from {utc(act_at)} on")
