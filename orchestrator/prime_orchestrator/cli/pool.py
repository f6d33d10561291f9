"""`orchestrator pool …`: a pool's life on chain, by its manager's key.

Transactions are journalled: a command that was interrupted is taken up again by typing it again.
Who may sit in the pool and who judges: prime_orchestrator/cli/pool_members.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from prime_chain import flows, history
from prime_chain.amounts import parse_amount, prime
from prime_chain.client import ChainClient
from prime_chain.contracts import Contracts, PoolConfig
from prime_chain.desk import Amount, Desk, Done, File, Json, PoolNumber, Rpc, at_desk, pool_of
from prime_chain.events import PoolCreated
from prime_chain.journal import Intent
from prime_core import ids
from prime_core.command_line import Quorum, group
from prime_core.deployment import Deployment
from prime_core.errors import FatalError
from prime_core.ids import Address
from prime_core.run_file import read_run
from prime_core.times import utc
from prime_orchestrator.cli import pool_members as pool_members_cli

LOCAL_CHAIN = 31337
"""On this chain one validator may be enough (Pools.LOCAL_CHAIN)."""

app = group("Create, fund, show and end a pool; say who sits in it and who judges.")


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
    quorum: Annotated[
        int | None,
        typer.Option(
            help="Validators that must agree to reject or slash (default: 2; 1 for one).",
            min=1,
            max=3,
        ),
    ] = None,
    faucet: Annotated[
        bool, typer.Option("--faucet", help="Take 10,000 test tokens first (test networks).")
    ] = False,
) -> Done:
    """Create a pool for a run definition and appoint its validators; prints its number.

    Typed again with the same arguments it finishes or repeats its answer; for a second pool of the
    same run, name another --journal.
    """
    definition = read_run(run, exact=True)
    desk.deployment.check_run(definition)
    signs, judges = ids.address(trainer), [ids.address(v) for v in validator or ()]
    lone = len(set(judges)) == 1 and desk.deployment.chain_id == LOCAL_CHAIN
    agree = quorum or (1 if lone else 2)
    if faucet:
        desk.send(f"faucet/{definition.digest()}", desk.contracts.token.faucet())
    config = PoolConfig(
        trainer=signs,
        run_digest=definition.digest(),
        stake_per_class=definition.stake_per_class,
        slash_amount=definition.slash_amount,
        capacity=capacity,
        quorum=agree,
        lease_seconds=definition.lease_seconds,
    )
    call = desk.contracts.pools.create(config)
    done = desk.send(f"create/{definition.digest()}/{signs}/{capacity}/{agree}", call)
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
    if doubt := too_few(judges, agree):
        facts["warning"] = doubt
        said += f"\nwarning: {doubt}"
    return Done(facts, said)


def too_few(validators: Sequence[Address], quorum: int) -> str:
    """What is wrong with so few validators; empty if nothing is."""
    if len(set(validators)) >= max(2, quorum):
        return ""
    if len(set(validators)) < quorum:
        return (
            f"nothing can be rejected or slashed: {quorum} validators must agree; "
            "appoint more: orchestrator pool set-validator"
        )
    return "one key alone rejects and slashes: that is for tests on a local chain only"


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
@at_desk
def bond(desk: Desk, pool: PoolNumber, amount: Amount) -> Done:
    """Add to the bond that pays the pool's work if its manager does not. Anyone may.

    It comes back by `refund` alone, when the pool has ended and its last work is paid.
    """
    wei = parse_amount(amount)
    desk.require_tokens(wei)
    desk.pool(pool)
    desk.perform(flows.bond_pool(desk.contracts, desk.account, pool, wei))
    bonded = desk.contracts.rewards.bond_of(pool)
    facts = {"pool": pool, "added": str(wei), "bond": str(bonded)}
    return Done(facts, f"pool {pool} has a bond of {prime(bonded)}")


@app.command()
def show(
    rpc: Rpc,
    deployment: File,
    pool: PoolNumber,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
) -> None:
    """What the chain says of a pool: who runs it, its members, its money."""
    place = Deployment.load(deployment)
    client = ChainClient(rpc, place.chain_id, quorum=rpc_quorum)
    try:
        contracts = Contracts(client, place)
        found = pool_of(contracts, pool)
        rules, funds = contracts.pools.rules_of(pool), contracts.rewards.funds(pool)
        judgement = contracts.pools.judgement_of(pool)
        refundable_at = contracts.rewards.refundable_at(pool)
        bonded, silent = contracts.rewards.bond_of(pool), contracts.rewards.silent_from(pool)
        validators = history.validators(client, place, pool)
    finally:
        client.close()
    facts: dict[str, Any] = {"pool": pool, **asdict(found), **asdict(rules), **asdict(judgement)}
    facts |= {
        "stake_per_class": str(found.stake_per_class),
        "slash_amount": str(judgement.slash_amount),
        "free": str(funds.free),
        "reserved": str(funds.reserved),
        "bond": str(bonded),
        "refundable_at": refundable_at,
        "silent_from": silent,
        "validators": validators,
    }
    if doubt := too_few(validators, judgement.quorum):
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
    typer.echo(f"  quorum    {judgement.quorum}; a slash takes {prime(judgement.slash_amount)}")
    typer.echo(f"  run       {found.run_digest}")
    typer.echo(f"  nodes     {found.members} of {found.capacity}")
    typer.echo(f"  stake     {prime(found.stake_per_class)} a speed class")
    typer.echo(f"  rewards   {prime(funds.free)} free, {prime(funds.reserved)} promised")
    typer.echo(f"  bond      {prime(bonded)}")
    if silent is not None:
        typer.echo(f"            without a root, anyone may post a table from {utc(silent)} on")
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
    """Take back the bond of an ended pool and what it promised to nobody; a year later also what
    nobody claimed.

    Not before its last work can have been rooted, judged and promised its pay: `show` says when.
    """
    before = _money(desk.contracts, pool)
    desk.perform([desk.contracts.rewards.refund(pool)])
    back = before - _money(desk.contracts, pool)
    facts = {"pool": pool, "refunded": str(back)}
    return Done(facts, f"{prime(back)} of pool {pool} went back to its manager")


def _money(contracts: Contracts, pool: int) -> int:
    funds = contracts.rewards.funds(pool)
    return funds.free + funds.reserved + contracts.rewards.bond_of(pool)


pool_members_cli.add_to(app)


def _created(desk: Desk, done: Intent) -> int:
    assert done.tx_hash is not None
    for event in history.transaction_events(desk.client, desk.deployment, done.tx_hash):
        if isinstance(event, PoolCreated):
            return event.pool
    raise FatalError(f"transaction {done.tx_hash} created no pool")
