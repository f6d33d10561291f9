"""`orchestrator pool invite|join|eject|ban|allow|pause|set-validator …`: who sits, who judges."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from prime_chain.chain_session import ChainSession, Done, PoolNumber, sends_transactions
from prime_core import ids
from prime_core.errors import UserError
from prime_core.given import read_given, write_given
from prime_core.node import Invite
from prime_core.signing import SignatureField, Strict
from prime_core.verdict import SignedOpinion

NodeAddress = Annotated[str, typer.Argument(help="Address of the node.")]
INVITE_SECONDS = 86_400
MAX_INVITE_BYTES = 1 << 16


class SignedInvite(Strict):
    """An invite as a file: anyone may carry it to the chain before its deadline."""

    invite: Invite
    signature: SignatureField


def add_to(app: typer.Typer) -> None:
    """Adds these commands to `orchestrator pool`."""
    members = (invite, join, eject, ban, unban, pause, start, list_only, allow)
    for function in (*members, set_validator, reject):
        app.command(function.__name__.replace("_", "-"))(function)


@sends_transactions
def invite(
    session: ChainSession,
    node: NodeAddress,
    pool: PoolNumber,
    out: Annotated[Path | None, typer.Option(help="File to write; else it is printed.")] = None,
    seconds: Annotated[
        int, typer.Option(help="How many seconds it is valid.", min=1)
    ] = INVITE_SECONDS,
) -> Done:
    """Sign an invite for a node. Anyone sends it by `pool join` or `prime-node`. Sends
    nothing.

    `orchestrator serve` does this by itself for every machine that solves its challenge.
    """
    signer = session.require_signer()
    if (manager := session.pool(pool).manager) != signer.address:
        raise UserError(
            f"pool {pool} is managed by {manager}, not by {signer.address}",
            hint="give that account's keystore by --wallet",
        )
    statement = Invite(
        pool=pool,
        node=ids.address(node),
        deadline=int(time.time()) + seconds,
    )
    signature = signer.sign(statement, session.deployment.domain_of(statement))
    signed = SignedInvite(invite=statement, signature=signature)
    if out is not None:
        write_given(out, f"{signed.model_dump_json(indent=2)}\n".encode())
    said = f"the invite is in {out}" if out is not None else signed.model_dump_json(indent=2)
    return Done(signed.model_dump(mode="json"), said)


@sends_transactions
def join(
    session: ChainSession,
    file: Annotated[Path, typer.Argument(help="Invite as `pool invite --out` wrote it.")],
) -> Done:
    """Send a signed invite: the node takes its seat. Anyone may do this."""
    from prime_chain import flows

    signed = read_invite(file)
    calls = flows.join(session.contracts, signed.invite, signed.signature)
    session.perform(calls)
    where = f"pool {signed.invite.pool}"
    said = f"node {signed.invite.node} sits in {where}"
    return Done({"pool": signed.invite.pool, "node": signed.invite.node}, said)


@sends_transactions
def eject(session: ChainSession, node: NodeAddress, pool: PoolNumber) -> Done:
    """Take a node's seat away. It may come back with a later invite, unless it is banned."""
    target = ids.address(node)
    session.perform([session.contracts.pools.eject(pool, target)])
    return Done({"pool": pool, "node": target}, f"node {target} is out of pool {pool}")


@sends_transactions
def ban(session: ChainSession, node: NodeAddress, pool: PoolNumber) -> Done:
    """Bar a node from coming back. One that sits in the pool is ejected first."""
    target = ids.address(node)
    pools = session.contracts.pools
    if pools.is_member(pool, target):
        session.perform([pools.eject(pool, target)])
    session.perform([pools.set_ban(pool, target, True)])
    return Done({"pool": pool, "node": target, "banned": True}, f"node {target} is barred")


@sends_transactions
def unban(session: ChainSession, node: NodeAddress, pool: PoolNumber) -> Done:
    """Let a barred node be invited again."""
    target = ids.address(node)
    session.perform([session.contracts.pools.set_ban(pool, target, False)])
    return Done({"pool": pool, "node": target, "banned": False}, f"node {target} may come back")


@sends_transactions
def pause(session: ChainSession, pool: PoolNumber) -> Done:
    """Stop admitting nodes for now. Members of the pool go on working."""
    session.perform([session.contracts.pools.pause(pool)])
    return Done({"pool": pool, "paused": True}, f"no node can join pool {pool} until it is started")


@sends_transactions
def start(session: ChainSession, pool: PoolNumber) -> Done:
    """Let nodes into a paused pool again."""
    session.perform([session.contracts.pools.start(pool)])
    return Done({"pool": pool, "paused": False}, f"nodes may join pool {pool}")


@sends_transactions
def list_only(
    session: ChainSession,
    pool: PoolNumber,
    off: Annotated[bool, typer.Option("--off", help="Let any provider in again.")] = False,
) -> Done:
    """Let only listed providers in. The network itself asks for stake alone."""
    session.perform([session.contracts.pools.set_allow_list(pool, not off)])
    whom = "any provider" if off else "listed providers only"
    return Done({"pool": pool, "list_only": not off}, f"pool {pool} lets in {whom}")


@sends_transactions
def allow(
    session: ChainSession,
    provider: Annotated[
        list[str], typer.Argument(help="Address of a provider; several are allowed.")
    ],
    pool: PoolNumber,
    off: Annotated[bool, typer.Option("--off", help="Take it off the list.")] = False,
) -> Done:
    """Add providers to the pool's list. --off removes them."""
    providers = [ids.address(one) for one in provider]
    session.perform([session.contracts.pools.set_listed(pool, one, not off) for one in providers])
    said = f"{len(providers)} provider(s) {'off' if off else 'on'} the list of pool {pool}"
    return Done({"pool": pool, "providers": providers, "listed": not off}, said)


@sends_transactions
def set_validator(
    session: ChainSession,
    account: Annotated[str, typer.Argument(help="Address of the validator.")],
    pool: PoolNumber,
    off: Annotated[bool, typer.Option("--off", help="Dismiss it.")] = False,
) -> Done:
    """Appoint a validator, or dismiss it by --off."""
    target = ids.address(account)
    session.perform([session.contracts.pools.set_validator(pool, target, not off)])
    said = f"{target} {'judges no longer' if off else 'judges'} in pool {pool}"
    return Done({"pool": pool, "validator": target, "on": not off}, said)


@sends_transactions
def reject(
    session: ChainSession,
    submission: Annotated[str, typer.Argument(help="Digest of the submission.")],
    pool: PoolNumber,
    opinions: Annotated[Path, typer.Argument(help="File with the opinions (JSON list).")],
    orchestrator: Annotated[str, typer.Option(help="URL that serves the list of leaves.")],
) -> Done:
    """Reject a submission within its validity. It is not paid; no stake is taken. Anyone may
    who has the opinions of the pool's quorum."""
    from prime_chain import history
    from prime_chain.leaves import find_leaf
    from prime_core.transport.client import OrchestratorClient

    leaf = ids.digest(submission)
    said = read_opinions(opinions)
    number = {
        one.validator: role.number
        for one in said
        if (role := session.contracts.pools.validator_of(pool, one.validator)) is not None
    }
    said.sort(key=lambda one: number.get(one.validator, 0))
    events = history.read_events(session.client, session.deployment, contracts=("work",), pool=pool)
    with OrchestratorClient(orchestrator) as server:
        found = find_leaf(
            session.client, session.deployment, events, pool, leaf, None, server.get_object
        )
    work = session.contracts.work
    session.perform([work.reject(found.signed.submission, found.root.seq, found.proof, said)])
    text = f"submission {leaf} of pool {pool} earns nothing"
    return Done({"pool": pool, "submission": leaf}, text)


def read_opinions(path: Path) -> list[SignedOpinion]:
    """Opinions as the orchestrator serves them. Raises UserError if the file holds none."""
    hint = "save the list `opinions` of GET /v1/submissions/DIGEST/opinions"
    raw = read_given(path, "list of opinions", hint)
    try:
        found = TypeAdapter(list[SignedOpinion]).validate_json(raw)
    except ValidationError as error:
        raise UserError(f"{path} holds no opinions", hint=hint) from error
    if not found:
        raise UserError(f"{path} holds no opinions", hint=hint)
    return found


def read_invite(path: Path) -> SignedInvite:
    """A signed invite from its file. Raises UserError if it cannot be read or is none."""
    hint = "make one with: orchestrator pool invite"
    raw = read_given(path, "signed invite", hint, limit=MAX_INVITE_BYTES)
    try:
        return SignedInvite.model_validate(json.loads(raw))
    except (ValidationError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a signed invite", hint=hint) from error
