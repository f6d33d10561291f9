"""`orchestrator pool …`: a pool's life on chain, by its manager's key.

Transactions are journalled: a command that was interrupted is taken up again by typing it again.
Who may sit in the pool and who judges: prime_orchestrator/cli/pool_members.py. What talks to the
chain is imported when a command is called, so that `--help` answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_chain.amounts import parse_amount, prime
from prime_chain.chain_session import (
    Amount,
    ChainSession,
    Done,
    File,
    PoolNumber,
    Rpc,
    open_contracts,
    pool_of,
    sends_transactions,
)
from prime_core import ids
from prime_core.command_line import Json, Quorum, group
from prime_core.errors import FatalError
from prime_core.ids import Address
from prime_core.run_file import read_run
from prime_core.times import utc
from prime_orchestrator.cli import pool_members as pool_members_cli

if TYPE_CHECKING:
    from prime_chain.contracts import Contracts
    from prime_chain.transaction_queue import Intent

LOCAL_CHAIN = 31337
"""On this chain one validator may be enough (Pools.LOCAL_CHAIN)."""

app = group("Create, fund, show and end a pool; choose its nodes and validators.")


@app.command()
@sends_transactions
def create(
    session: ChainSession,
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
    """Create a pool and appoint its validators. Prints its number.

    Typed again with the same arguments it finishes or repeats its answer; for a second pool of the
    same run, name another --journal. Warns of each cheat that the run's prices, stake and sampling
    make pay, and says what to change.
    """
    from prime_chain.contracts import PoolConfig
    from prime_orchestrator.economics import warnings

    definition = read_run(run, exact=True)
    session.deployment.check_run(definition)
    signs, judges = ids.address(trainer), [ids.address(v) for v in validator or ()]
    single = len(set(judges)) == 1 and session.deployment.chain_id == LOCAL_CHAIN
    agree = quorum or (1 if single else 2)
    if faucet:
        session.send(f"faucet/{definition.digest()}", session.contracts.token.faucet())
    config = PoolConfig(
        trainer=signs,
        run_digest=definition.digest(),
        stake_per_seat=definition.stake_per_seat,
        slash_amount=definition.slash_amount,
        capacity=capacity,
        quorum=agree,
        lease_seconds=definition.lease_seconds,
    )
    call = session.contracts.pools.create(config)
    done = session.send(f"create/{definition.digest()}/{signs}/{capacity}/{agree}", call)
    if done is None:  # the validators are appointed once the number is known
        if session.mode == "dry-run":
            number = session.contracts.pools.count() + 1  # unless another pool is made before
            session.perform(
                [session.contracts.pools.set_validator(number, one, True) for one in judges]
            )
        return Done({}, "")
    pool = _created(session, done)
    for account in judges:
        session.send(
            f"validator/{pool}/{account}",
            session.contracts.pools.set_validator(pool, account, True),
        )
    facts = {
        "pool": pool,
        "manager": session.account,
        "trainer": signs,
        "validators": judges,
        "run_digest": definition.digest(),
        "transaction": done.tx_hash,
    }
    said = f"pool {pool} is created for run {definition.digest()}"
    if doubt := too_few(judges, agree):
        facts["warning"] = doubt
        said += f"\nwarning: {doubt}"
    doubts = warnings(definition)
    said += "".join(f"\nwarning: {one['text']}" for one in doubts)
    return Done(facts | {"warnings": doubts}, said)


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
@sends_transactions
def fund(session: ChainSession, pool: PoolNumber, amount: Amount) -> Done:
    """Add to what the pool can pay out as rewards. Anyone may do this."""
    from prime_chain import flows

    wei = parse_amount(amount)
    session.require_tokens(wei)
    session.pool(pool)
    session.perform(flows.fund_pool(session.contracts, session.account, pool, wei))
    free = session.contracts.rewards.funds(pool).free
    facts = {"pool": pool, "added": str(wei), "free": str(free)}
    return Done(facts, f"pool {pool} has {prime(free)} free for rewards")


@app.command()
@sends_transactions
def bond(session: ChainSession, pool: PoolNumber, amount: Amount) -> Done:
    """Add to the bond that pays work if the manager does not. Anyone may do this.

    It comes back by `refund` alone, when the pool has ended and its last work is paid.
    """
    from prime_chain import flows

    wei = parse_amount(amount)
    session.require_tokens(wei)
    session.pool(pool)
    session.perform(flows.bond_pool(session.contracts, session.account, pool, wei))
    bonded = session.contracts.rewards.bond_of(pool)
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
    """Show a pool on chain: who runs it, members, money."""
    from prime_chain import history

    with open_contracts(rpc, deployment, rpc_quorum) as contracts:
        found = pool_of(contracts, pool)
        rules, funds = contracts.pools.rules_of(pool), contracts.rewards.funds(pool)
        judgement = contracts.pools.judgement_of(pool)
        refundable_at = contracts.rewards.refundable_at(pool)
        bonded, silent = contracts.rewards.bond_of(pool), contracts.rewards.silent_from(pool)
        validators = history.validators(contracts.client, contracts.deployment, pool)
    facts: dict[str, Any] = {"pool": pool, **asdict(found), **asdict(rules), **asdict(judgement)}
    facts |= {
        "stake_per_seat": str(found.stake_per_seat),
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
    state = " (ended)" if found.ended else " (paused: no node can join)" if rules.paused else ""
    typer.echo(f"pool {pool}{state}{', listed providers only' if rules.list_only else ''}")
    typer.echo(f"  manager   {found.manager}")
    typer.echo(f"  trainer   {found.trainer}")
    typer.echo(f"  judged by {', '.join(validators) or 'none: appoint one with set-validator'}")
    if doubt:
        typer.echo(f"            {doubt}")
    typer.echo(f"  quorum    {judgement.quorum}; a slash takes {prime(judgement.slash_amount)}")
    typer.echo(f"  run       {found.run_digest}")
    typer.echo(f"  nodes     {found.members} of {found.capacity}")
    typer.echo(f"  stake     {prime(found.stake_per_seat)} a seat")
    typer.echo(f"  rewards   {prime(funds.free)} free, {prime(funds.reserved)} promised")
    typer.echo(f"  bond      {prime(bonded)}")
    if silent is not None:
        typer.echo(f"            without a root, anyone may post a table from {utc(silent)} on")
    if refundable_at is not None:
        typer.echo(f"            what is free can be refunded from {utc(refundable_at)} on")


@app.command()
@sends_transactions
def end(session: ChainSession, pool: PoolNumber) -> Done:
    """End a pool for good: no new members, policies or work.

    Reward roots for its last work are posted as before; `refund` waits for them.
    """
    if not session.sends or not session.pool(pool).ended:
        session.send(f"end/{pool}", session.contracts.pools.end(pool))
    when = session.contracts.rewards.refundable_at(pool) if session.sends else None
    facts = {"pool": pool, "ended": True, "refundable_at": when}
    later = "" if when is None else f"; what is free can be refunded from {utc(when)} on"
    return Done(facts, f"pool {pool} is ended{later}")


@app.command()
@sends_transactions
def refund(session: ChainSession, pool: PoolNumber) -> Done:
    """Take back an ended pool's bond and unowed funds. After a year, also
    unclaimed rewards.

    Not before its last work can have been rooted, judged and promised its pay: `show` says when.
    """
    before = _money(session.contracts, pool)
    session.perform([session.contracts.rewards.refund(pool)])
    back = before - _money(session.contracts, pool)
    facts = {"pool": pool, "refunded": str(back)}
    return Done(facts, f"{prime(back)} of pool {pool} went back to its manager")


def _money(contracts: Contracts, pool: int) -> int:
    funds = contracts.rewards.funds(pool)
    return funds.free + funds.reserved + contracts.rewards.bond_of(pool)


pool_members_cli.add_to(app)


def _created(session: ChainSession, done: Intent) -> int:
    from prime_chain import history
    from prime_chain.events import PoolCreated

    assert done.tx_hash is not None
    for event in history.transaction_events(session.client, session.deployment, done.tx_hash):
        if isinstance(event, PoolCreated):
            return event.pool
    raise FatalError(f"transaction {done.tx_hash} created no pool")
