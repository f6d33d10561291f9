"""`orchestrator pool …`: a pool's life on chain, by its manager's key.

Transactions are journalled: a command that was interrupted is taken up again by typing it again.
Who may sit in the pool and who judges: orchestrator/pool_members_cli.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator import pool_members_cli
from orchestrator.desk import Amount, Desk, Done, File, Json, PoolNumber, Rpc, at_desk, pool_of
from protocol.chain import flows, history
from protocol.chain.amounts import parse_amount, prime
from protocol.chain.client import ChainClient
from protocol.chain.contracts import Contracts
from protocol.chain.deployment import Deployment
from protocol.chain.events import PoolCreated
from protocol.chain.journal import Intent
from protocol.core import ids
from protocol.core.errors import FatalError
from protocol.core.ids import ZERO_ADDRESS, Address
from protocol.run_file import read_run
from protocol.times import utc

app = typer.Typer(
    help="Create, fund, show and end a pool; say who sits in it and who judges.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
@at_desk
def create(
    desk: Desk,
    run: Annotated[Path, typer.Option(help="Run definition (canonical JSON).")],
    trainer: Annotated[str, typer.Option(help="Account that signs policies.")],
    validator: Annotated[
        list[str] | None, typer.Option(help="Account to appoint as validator; repeat for more.")
    ] = None,
    capacity: Annotated[int, typer.Option(help="Most nodes at a time.", min=1)] = 1000,
    treasury: Annotated[
        str, typer.Option(help="Account that receives slashed stake; burned if not given.")
    ] = "",
    faucet: Annotated[
        bool, typer.Option("--faucet", help="Take 10,000 test tokens first (test networks).")
    ] = False,
) -> Done:
    """Create a pool for a run definition and appoint its validators; prints its number.

    Typed again with the same arguments it finishes or repeats its answer; for a second pool of the
    same run, name another --journal.
    """
    definition = read_run(run)
    desk.deployment.check_run(definition)
    signs, judges = ids.address(trainer), [ids.address(v) for v in validator or ()]
    pays = ids.address(treasury) if treasury else ZERO_ADDRESS
    if faucet:
        desk.send(f"faucet/{definition.digest()}", desk.contracts.token.faucet())
    call = desk.contracts.pools.create(
        signs, definition.digest(), definition.stake_per_class, capacity, pays
    )
    done = desk.send(f"create/{definition.digest()}/{signs}/{capacity}/{pays}", call)
    if done is None:  # the validators are appointed once the number is known
        if desk.mode == "dry-run":
            number = desk.contracts.pools.count() + 1  # unless another pool is made before
            desk.perform([desk.contracts.pools.set_validator(number, one, True) for one in judges])
        return Done({}, "")
    pool = _created(desk, done)
    for account in judges:
        desk.send(
            f"validator/{pool}/{account}", desk.contracts.pools.set_validator(pool, account, True)
        )
    facts = {
        "pool": pool,
        "manager": desk.account,
        "trainer": signs,
        "validators": judges,
        "run_digest": definition.digest(),
        "transaction": done.tx_hash,
    }
    said = f"pool {pool} is created for run {definition.digest()}"
    if doubt := lone_judge(judges):
        facts["warning"] = doubt
        said += f"\nwarning: {doubt}"
    return Done(facts, said)


def lone_judge(validators: Sequence[Address]) -> str:
    """What is wrong with so few validators; empty if nothing is."""
    if len(set(validators)) >= 2:
        return ""
    harm = "every slash can be disputed away" if validators else "nobody can slash"
    return (
        f"{harm}: a dispute is judged by another validator than the proposer; "
        "appoint two: orchestrator pool set-validator"
    )


@app.command()
@at_desk
def fund(desk: Desk, pool: PoolNumber, amount: Amount) -> Done:
    """Add to what the pool can pay out as rewards. Anyone may."""
    wei = parse_amount(amount)
    desk.require_tokens(wei)
    desk.pool(pool)
    desk.perform(flows.fund_pool(desk.contracts, desk.account, pool, wei))
    free = desk.contracts.rewards.funds(pool).free
    facts = {"pool": pool, "added": str(wei), "free": str(free)}
    return Done(facts, f"pool {pool} has {prime(free)} free for rewards")


@app.command()
def show(rpc: Rpc, deployment: File, pool: PoolNumber, json_output: Json = False) -> None:
    """What the chain says of a pool: who runs it, its members, its money."""
    place = Deployment.load(deployment)
    client = ChainClient(rpc, place.chain_id)
    try:
        contracts = Contracts(client, place)
        found = pool_of(contracts, pool)
        rules, funds = contracts.pools.rules_of(pool), contracts.rewards.funds(pool)
        refundable_at = contracts.rewards.refundable_at(pool)
        validators = history.validators(client, place, pool)
    finally:
        client.close()
    facts: dict[str, Any] = {"pool": pool, **asdict(found), **asdict(rules)}
    facts |= {
        "stake_per_class": str(found.stake_per_class),
        "free": str(funds.free),
        "reserved": str(funds.reserved),
        "refundable_at": refundable_at,
        "validators": validators,
    }
    if doubt := lone_judge(validators):
        facts["warning"] = doubt
    if json_output:
        typer.echo(json.dumps(facts))
        return
    state = " (ended)" if found.ended else " (paused: nobody joins)" if rules.paused else ""
    typer.echo(f"pool {pool}{state}{', listed providers only' if rules.list_only else ''}")
    typer.echo(f"  manager   {found.manager}")
    typer.echo(f"  trainer   {found.trainer}")
    typer.echo(f"  judged by {', '.join(validators) or 'nobody: appoint one by set-validator'}")
    if doubt:
        typer.echo(f"            {doubt}")
    burned = int(found.treasury, 16) == 0
    typer.echo(f"  treasury  {'none: slashed stake is burned' if burned else found.treasury}")
    typer.echo(f"  run       {found.run_digest}")
    typer.echo(f"  nodes     {found.members} of {found.capacity}")
    typer.echo(f"  stake     {prime(found.stake_per_class)} a speed class")
    typer.echo(f"  rewards   {prime(funds.free)} free, {prime(funds.reserved)} promised")
    if refundable_at is not None:
        typer.echo(f"            what is free can be refunded from {utc(refundable_at)} on")


@app.command()
@at_desk
def end(desk: Desk, pool: PoolNumber) -> Done:
    """End a pool for good: no new members, policies or work.

    Reward roots for its last work are posted as before; `refund` waits for them.
    """
    if not desk.sends or not desk.pool(pool).ended:
        desk.send(f"end/{pool}", desk.contracts.pools.end(pool))
    when = desk.contracts.rewards.refundable_at(pool) if desk.sends else None
    facts = {"pool": pool, "ended": True, "refundable_at": when}
    later = "" if when is None else f"; what is free can be refunded from {utc(when)} on"
    return Done(facts, f"pool {pool} is ended{later}")


@app.command()
@at_desk
def refund(desk: Desk, pool: PoolNumber) -> Done:
    """Take back what an ended pool has promised to nobody; a year later also what nobody claimed.

    Not before its last work can have been rooted, judged and promised its pay: `show` says when.
    """
    before = _money(desk.contracts, pool)
    desk.perform([desk.contracts.rewards.refund(pool)])
    back = before - _money(desk.contracts, pool)
    facts = {"pool": pool, "refunded": str(back)}
    return Done(facts, f"{prime(back)} of pool {pool} went back to its manager")


def _money(contracts: Contracts, pool: int) -> int:
    funds = contracts.rewards.funds(pool)
    return funds.free + funds.reserved


pool_members_cli.add_to(app)


def _created(desk: Desk, done: Intent) -> int:
    assert done.tx_hash is not None
    for event in history.transaction_events(desk.client, desk.deployment, done.tx_hash):
        if isinstance(event, PoolCreated):
            return event.pool
    raise FatalError(f"transaction {done.tx_hash} created no pool")
