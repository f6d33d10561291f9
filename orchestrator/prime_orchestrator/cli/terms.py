"""`orchestrator terms …`: the dispute deposit and the validators' bond, and who may move them.

announce (governor) ──delay of one unbonding, seen by all──▶ apply (anyone)
hand-over (governor) ──▶ accept (the new one)      renounce: the terms never move again
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_chain.amounts import parse_amount, prime
from prime_chain.chain_session import (
    ChainSession,
    Done,
    File,
    Rpc,
    open_contracts,
    sends_transactions,
)
from prime_core import ids
from prime_core.command_line import Json, Quorum, group
from prime_core.times import utc

if TYPE_CHECKING:
    from prime_chain.contracts import Contracts

app = group("The dispute deposit, the validators' bond, and who may move them.")


@app.command()
def show(rpc: Rpc, deployment: File, json_output: Json = False, rpc_quorum: Quorum = None) -> None:
    """Show the terms that hold, those announced, and the governor."""
    with open_contracts(rpc, deployment, rpc_quorum) as contracts:
        found = facts_of(contracts)
    if json_output:
        typer.echo(json.dumps(found))
        return
    typer.echo(f"dispute deposit  {prime(int(found['dispute_deposit']))}")
    typer.echo(f"validator bond   {prime(int(found['validator_bond']))}")
    typer.echo(f"governor         {found['governor'] or 'none: the terms never move'}")
    if found["pending_governor"]:
        typer.echo(f"offered to       {found['pending_governor']}")
    if announced := found["announced"]:
        deposit, bond = prime(int(announced["dispute_deposit"])), prime(int(announced["bond"]))
        typer.echo(
            f"announced        deposit {deposit}, bond {bond}, from {utc(announced['act_at'])} on"
        )


@app.command()
@sends_transactions
def announce(
    session: ChainSession,
    deposit: Annotated[str, typer.Option(help="Dispute deposit in whole tokens, or 0.")],
    bond: Annotated[str, typer.Option(help="Validators' bond in whole tokens, or 0.")],
) -> Done:
    """Announce terms, which apply after the delay. Only the governor may do this."""
    session.perform([session.contracts.slasher.announce_terms(_amount(deposit), _amount(bond))])
    return _done(session, "announced")


@app.command()
@sends_transactions
def apply(session: ChainSession) -> Done:
    """Let announced terms apply whose delay is over. Anyone may do this."""
    session.perform([session.contracts.slasher.apply_terms()])
    return _done(session, "applied")


@app.command("hand-over")
@sends_transactions
def hand_over(
    session: ChainSession,
    to: Annotated[str, typer.Argument(help="The new governor, e.g. a multisig.")],
) -> Done:
    """Offer the governor's role. It moves once the other has accepted it."""
    session.perform([session.contracts.slasher.hand_over(ids.address(to))])
    return _done(session, "offered")


@app.command()
@sends_transactions
def accept(session: ChainSession) -> Done:
    """Take over the governor's role that was offered."""
    session.perform([session.contracts.slasher.accept_governor()])
    return _done(session, "accepted")


@app.command()
@sends_transactions
def renounce(session: ChainSession) -> Done:
    """Give the governor's role up for good. The terms never change again."""
    session.perform([session.contracts.slasher.renounce_governor()])
    return _done(session, "renounced")


def facts_of(contracts: Contracts) -> dict[str, Any]:
    """The terms and roles of the slasher, amounts as decimal text in wei."""
    slasher = contracts.slasher
    announced = slasher.announced()
    return {
        "dispute_deposit": str(slasher.dispute_deposit()),
        "validator_bond": str(slasher.validator_bond()),
        "governor": slasher.governor(),
        "pending_governor": slasher.pending_governor(),
        "announced": None
        if announced is None
        else {
            "dispute_deposit": str(announced.dispute_deposit),
            "bond": str(announced.validator_bond),
            "act_at": announced.act_at,
        },
    }


def _amount(text: str) -> int:
    return 0 if text.strip() == "0" else parse_amount(text)


def _done(session: ChainSession, what: str) -> Done:
    facts = facts_of(session.contracts)
    return Done(facts | {"act": what}, f"{what}; see: orchestrator terms show")
