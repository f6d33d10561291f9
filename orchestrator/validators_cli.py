"""`orchestrator validator …`: a validator's bond, its role, and its word in disputes.

The bond is stake like any other: in the vault, slashable, free again after the unbonding period. A
proposal that another validator overturns is paid from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from orchestrator.desk import Desk, Done, File, Json, PoolNumber, Rpc, at_desk, pool_of
from protocol.chain import flows, history
from protocol.chain.amounts import parse_amount, prime
from protocol.chain.client import ChainClient
from protocol.chain.contracts import Binding, Contracts
from protocol.chain.deployment import Deployment
from protocol.core import ids
from protocol.times import utc

app = typer.Typer(
    help="A validator's bond, role, and word in disputes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Tokens = Annotated[str, typer.Argument(help="Amount of PRIME, like 100 or 12.5.")]
Proposal = Annotated[int, typer.Argument(help="Number of the slash proposal.", min=1)]


@app.command()
@at_desk
def bond(desk: Desk, amount: Tokens) -> Done:
    """Put stake behind the verdicts that this account will give."""
    wei = parse_amount(amount)
    desk.require_tokens(wei)
    desk.perform(flows.stake(desk.contracts, desk.account, wei))
    return _stands(desk)


@app.command()
@at_desk
def unbond(desk: Desk, amount: Tokens) -> Done:
    """Start to take the bond out; it stays slashable until it is withdrawn."""
    desk.perform([desk.contracts.vault.unbond(parse_amount(amount))])
    return _stands(desk)


@app.command()
@at_desk
def rebond(desk: Desk, amount: Tokens) -> Done:
    """Bond again what is on its way out."""
    desk.perform([desk.contracts.vault.rebond(parse_amount(amount))])
    return _stands(desk)


@app.command()
@at_desk
def withdraw(desk: Desk) -> Done:
    """Take out the stake whose unbonding has ended."""
    desk.perform([desk.contracts.vault.withdraw()])
    return _stands(desk)


@app.command()
@at_desk
def resign(desk: Desk, pool: PoolNumber) -> Done:
    """Give up the role in a pool; proposals that are open stay open."""
    desk.perform([desk.contracts.pools.resign(pool)])
    facts = {"pool": pool, "validator": desk.account, "on": False}
    return Done(facts, f"{desk.account} judges no longer in pool {pool}")


@app.command()
@at_desk
def confirm(desk: Desk, proposal: Proposal) -> Done:
    """Find the same as the proposer of a disputed slash: it is carried out, the deposit lost.

    Judge first: prime-node audit replay TRANSACTION.
    """
    desk.perform([desk.contracts.slasher.confirm(proposal)])
    return Done({"proposal": proposal, "judged": "confirmed"}, f"proposal {proposal} is confirmed")


@app.command()
@at_desk
def overturn(desk: Desk, proposal: Proposal) -> Done:
    """Find otherwise than the proposer: the deposit goes back, the proposer pays from its bond.

    Judge first: prime-node audit replay TRANSACTION.
    """
    desk.perform([desk.contracts.slasher.overturn(proposal)])
    facts = {"proposal": proposal, "judged": "overturned"}
    return Done(facts, f"proposal {proposal} is overturned")


@app.command()
def status(
    rpc: Rpc,
    deployment: File,
    account: Annotated[str, typer.Argument(help="Address of the validator.")],
    pool: PoolNumber,
    json_output: Json = False,
) -> None:
    """Whether the account may judge, what its bond is, which proposals wait for a word."""
    place = Deployment.load(deployment)
    meant = ids.address(account)
    client = ChainClient(rpc, place.chain_id)
    try:
        found = _status(Contracts(client, place), meant, pool)
    finally:
        client.close()
    if json_output:
        typer.echo(json.dumps(found))
        return
    active, needed = int(found["active"]), int(found["bond_needed"])
    able = "may propose" if found["may_propose"] else "may not propose"
    typer.echo(f"validator {meant} of pool {pool}: {able}")
    ask = f"no; the manager types: orchestrator pool set-validator {meant} --pool {pool}"
    typer.echo(f"  appointed  {'yes' if found['appointed'] else ask}")
    typer.echo(f"  bond       {prime(active)}, {prime(needed)} needed")
    typer.echo(f"  held       {prime(int(found['pending']))} by open slashes")
    typer.echo(f"  answers to {Binding(**found['bound']).words() or 'nobody'}")
    for one in found["unbonding"]:
        typer.echo(f"  unbonding  {prime(int(one['amount']))} until {utc(one['mature_at'])}")
    for slash in found["disputes"]:
        typer.echo(f"  disputed   proposal {slash['id']} over node {slash['node']}")


def _status(contracts: Contracts, account: ids.Address, pool: int) -> dict[str, Any]:
    client = contracts.client
    view = flows.stake_view(contracts, account, client.block("latest").time)
    needed = contracts.slasher.validator_bond()
    appointed = contracts.pools.is_validator(pool, account)
    manager = pool_of(contracts, pool).manager
    bound_elsewhere = needed > 0 and view.bound.manager not in (None, manager)
    slashes = history.read_slashes(client, contracts.deployment)
    return {
        "validator": account,
        "pool": pool,
        "appointed": appointed,
        "may_propose": appointed and view.unbondable >= needed and not bound_elsewhere,
        "bound": asdict(view.bound),
        "active": str(view.active),
        "bond_needed": str(needed),
        "pending": str(view.pending),
        "withdrawable": str(view.withdrawable),
        "unbonding": [asdict(one) | {"amount": str(one.amount)} for one in view.unbonding],
        "disputes": [
            {"id": one.id, "node": one.node, "proposed_tx": one.proposed_tx}
            for one in slashes
            if one.pool == pool and one.status == "disputed"
        ],
    }


def _stands(desk: Desk) -> Done:
    view = flows.stake_view(desk.contracts, desk.account, desk.client.block("latest").time)
    facts = {
        "validator": desk.account,
        "active": str(view.active),
        "unbonding": str(sum(one.amount for one in view.unbonding)),
    }
    return Done(facts, f"{desk.account} has {prime(view.active)} bonded")
