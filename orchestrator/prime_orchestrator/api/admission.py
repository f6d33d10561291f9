"""Admission: a timed hardware challenge, its solution, and the manager's invite.

    registered, staked? ──► turn ──► challenge ──► solution (timed, checked by Freivalds)
                                                       └──► rate; invite, intent `join`

A slow answer lowers the speed class but never fails a node; a wrong one fails. Nodes behind one
address are measured one at a time (speed.Turns). Stake and pay do not depend on speed. The outbox
sends the invite to Pools.join, so that a node needs no ETH; membership itself is a chain fact read
by the indexer. The store's copy of the chain gives a node's provider and its active stake, so a
node that could not be seated is refused before any work. A shadow node (shadow.py) needs neither;
it is measured too, but gets no invite. Runs with `cards` ask for a proof of cards instead of the
challenge (cards.py).
"""

from __future__ import annotations

import logging

import numpy as np

from prime_broadcast.peers import place_of, site_of
from prime_chain.amounts import prime
from prime_core.errors import ConflictError, NotFoundError, PolicyError, UntrustedError
from prime_core.ids import Address
from prime_core.logs import fields
from prime_core.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Challenge,
    ChallengeAnswer,
    SignedMemory,
    SignedPassport,
)
from prime_core.node import Hardware, Invite
from prime_core.run import RunDefinition
from prime_core.version import UPGRADE
from prime_orchestrator.api import shadow as shadow_work
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.connections import is_bounded
from prime_orchestrator.api.liveness import joining
from prime_orchestrator.manager import remeasuring, revisions, speed
from prime_orchestrator.manager.members import (
    active_stake,
    derive_node,
    membership,
    provider_of,
    slashed_sibling,
)
from prime_orchestrator.manager.settlement import CHAIN_BLOCK
from prime_orchestrator.store import (
    Connection,
    challenges,
    lock,
    meta,
    nodes,
    on_commit,
    passports,
    shadows,
    slashes,
)
from prime_orchestrator.store.challenges import ChallengeRow
from prime_orchestrator.store.intents import queue_intent
from prime_orchestrator.store.nodes import NodeRow
from prime_verify.proofs import hardware

log = logging.getLogger(__name__)

CHALLENGE_SECONDS = 120
MAX_OPEN_CHALLENGES = 8
MOST_UNPROVEN = 6
"""Proofs of cards that a node may begin within an hour and not pass: a node that skips work must
not be able to try until no skipped row is drawn, and each check takes CPU time."""
TURN_MS = 500
"""How long a node waits before it asks for its turn again."""
TURN_REASON = "another node behind this address is being measured"
INVITE_SECONDS = 3600


def challenge(
    backend: Backend, account: Address, request: AdmissionRequest, address: str = ""
) -> ChallengeAnswer:
    """Returns a challenge whose time starts now, or how long to wait for its turn among the nodes
    behind its `address`.

    Raises PolicyError if the machine does not meet the requirements, the node was ejected or has an
    open slash (its own or its provider's), has a seat and asks for shadow work, or too many
    challenges are open. Raises ConflictError if the node has no provider on chain yet, or one
    without enough stake; the chain is read with a delay, so retry.
    """
    with backend.store.read() as connection:
        run = revisions.next_run(connection, backend.context)
    if run.cards is not None:
        raise PolicyError(
            "this pool asks each node to prove its cards, and this node's program cannot, or it "
            f"started before the pool asked: upgrade it ({UPGRADE}) and start it again"
        )
    require(run, request.hardware)
    size, rounds = run.speed.challenge_size, run.speed.challenge_rounds
    row = issue(backend, account, request, address, size=size, rounds=rounds)
    if row is None:
        return ChallengeAnswer(challenge=None, retry_after_ms=TURN_MS, reason=TURN_REASON)
    return ChallengeAnswer(
        challenge=Challenge(
            id=row.id, seed=row.seed, size=row.size, rounds=row.rounds, deadline=row.deadline
        )
    )


def require(run: RunDefinition, hardware: Hardware) -> None:
    """Raises PolicyError if the machine does not meet the run's requirements."""
    if missing := run.requirements.shortfalls(hardware):
        raise PolicyError("the pool asks for " + "; ".join(missing))


def issue(
    backend: Backend,
    account: Address,
    request: AdmissionRequest,
    address: str,
    *,
    size: int,
    rounds: int,
    cards: str | None = None,
) -> ChallengeRow | None:
    """Writes a challenge, or returns None if it is not the node's turn. `cards`: the state of a
    proof of cards. Raises as `challenge` does, but for the requirements."""
    now = backend.now()
    limited = request.shadow and is_bounded(address)
    row = ChallengeRow(
        id=backend.random(16).hex(),
        node=account,
        seed=backend.salt(),
        size=size,
        rounds=rounds,
        issued_at=now,
        deadline=int(now) + CHALLENGE_SECONDS,
        hardware=request.hardware.model_dump_json(),
        runtime=request.task_runtime,
        shadow=request.shadow,
        place=place_of(address) if limited else None,
        site=site_of(address) if limited else None,
        cards=cards,
    )
    _look(backend, account, row.shadow, row.place)
    if not backend.turns.take(address or account, account, now):
        return None
    try:
        with backend.store.begin() as connection:
            _add(connection, row)
    except PolicyError:
        backend.turns.done(account)
        raise
    return row


def _add(connection: Connection, row: ChallengeRow) -> None:
    """Writes the challenge. Raises PolicyError if the node, or its address, began too many."""
    if row.place is not None:
        lock(connection, shadow_work.LOCK)
        shadow_work.check_place(connection, row.place, row.node, row.issued_at)
    if challenges.open_for(connection, row.node, row.issued_at) >= MAX_OPEN_CHALLENGES:
        raise PolicyError(f"{MAX_OPEN_CHALLENGES} challenges are open already; answer one")
    if row.cards is not None:
        lock(connection, f"cards {row.node}")
        if challenges.unproven(connection, row.node, row.issued_at - 3600) >= MOST_UNPROVEN:
            raise PolicyError(
                f"{MOST_UNPROVEN} proofs of this node's cards failed or were left within the "
                "hour: find out why, and join again in an hour"
            )
    challenges.add(connection, row)


def _look(backend: Backend, account: Address, shadow: bool, place: str | None = None) -> None:
    """Refuses as `_check_admissible` and `shadow.check_place` do, but in a read transaction that
    does not block writers: anyone may ask, and reading the chain's events takes time. The binding
    checks are made with the invite, and with the challenge."""
    with backend.store.read() as connection:
        shadow_work.check_place(connection, place, account, backend.now())
        _check_admissible(connection, backend, account, nodes.get(connection, account), shadow)


def _check_admissible(
    connection: Connection, backend: Backend, account: Address, node: NodeRow | None, shadow: bool
) -> None:
    """Raises PolicyError if the account may not be admitted in this way, ConflictError if it may be
    once its provider has acted on chain."""
    if node is not None and node.status in ("ejected", "quarantined"):
        raise PolicyError(f"the node is {node.status} and cannot be admitted")
    if slashes.has_open(connection, account):  # a node that left would return unquarantined
        raise PolicyError("a slash of the node is under way; until it ends it cannot be admitted")
    if not shadow:
        seated = node is not None and node.status in ("active", "silent")
        caught = None if seated else slashed_sibling(connection, account)
        if caught is not None:
            raise PolicyError(
                f"a slash of {caught}, a node of the same provider, is under way; "
                "until it ends no other one is admitted"
            )
        if not seated and membership(connection, account)[0] != "member":
            _check_provider(connection, backend, account)
        return
    if node is None or node.status != "shadow":
        shadow_work.room_of(connection, backend.now())
    seated = membership(connection, account)[0] == "member"
    if seated or (node is not None and node.status in ("active", "silent")):
        raise PolicyError(
            "a node with a seat works for pay: leave the pool (prime-node leave) before "
            "--shadow, or use another wallet"
        )


def _check_provider(connection: Connection, backend: Backend, account: Address) -> None:
    """Checks whether Pools.join could seat the node. The contract also requires
    stake for the provider's other seats, which only it can count."""
    seen = meta.get(connection, CHAIN_BLOCK)
    by = "no block has been read yet" if seen is None else f"as of block {seen}"
    provider = provider_of(connection, account)
    if provider is None:
        raise ConflictError(
            f"node {account} has no provider on chain ({by}); with the owner's wallet type: "
            "prime-node node add FILE (FILE comes from prime-node node consent)"
        )
    least = backend.context.run.stake_per_seat
    staked = active_stake(connection, provider)
    if staked < least:
        raise ConflictError(
            f"provider {provider} has {prime(staked)} of active stake ({by}), and a seat asks for "
            f"{prime(least)}; with the owner's wallet type: "
            f"prime-node stake add {prime(least - staked).removesuffix(' PRIME')}"
        )


def solution_limit(backend: Backend) -> int:
    """Returns the largest body size of a solution in bytes."""
    speed = backend.context.run.speed
    return hardware.solution_bytes(speed.challenge_size, speed.challenge_rounds)


def awaited(backend: Backend, account: Address, challenge_id: str) -> int:
    """Returns the size in bytes of the solution to an open challenge of the account, before it is
    read.

    Raises NotFoundError, PolicyError (another node's, too late), ConflictError (answered before).
    """
    with backend.store.read() as connection:
        row = challenges.get(connection, challenge_id)
    row = check_open(row, account, backend.now())
    return hardware.solution_bytes(row.size, row.rounds)


def check_open(row: ChallengeRow | None, account: Address, arrived_at: float) -> ChallengeRow:
    """Returns the challenge if the account may answer it at that time. Raises NotFoundError,
    PolicyError (another node's, too late), ConflictError (answered before)."""
    if row is None:
        raise NotFoundError("there is no such challenge")
    if row.node != account:
        raise PolicyError("the challenge is another node's")
    if arrived_at > row.deadline:
        raise PolicyError("the challenge's deadline has passed; ask for another")
    if row.used:
        raise ConflictError("the challenge was answered before; ask for another")
    return row


def solution(
    backend: Backend, account: Address, challenge_id: str, body: bytes, *, arrived_at: float
) -> AdmissionAnswer:
    """Checks an answer that had arrived completely at `arrived_at`, and invites the node.

    A node that is already admitted (measured again, or restarted) gets no second invite while its
    first is pending. Raises NotFoundError, PolicyError (another node's, too late), ConflictError
    (answered before), UntrustedError (wrong products).
    """
    with backend.store.begin() as connection:
        row = challenges.get(connection, challenge_id)
        row = check_open(row, account, arrived_at)
        if row.cards is not None:
            raise ConflictError("the challenge is a proof of cards; send its commitment")
        if not challenges.use(connection, challenge_id):
            raise ConflictError("the challenge was answered before; ask for another")
    backend.turns.done(account)
    products = hardware.decode_solution(body, row.size, row.rounds)
    generator = np.random.default_rng(int.from_bytes(backend.random(16), "big"))
    if not hardware.check(row.seed, row.size, row.rounds, products, generator):
        raise UntrustedError("the challenge's products are wrong; ask for another")
    seconds = max(arrived_at - row.issued_at, 1e-6)
    rate = hardware.multiply_adds(row.size, row.rounds) / seconds / 1e6
    return admit(backend, account, row, rate)


def admit(
    backend: Backend,
    account: Address,
    row: ChallengeRow,
    rate: float,
    passport: SignedPassport | None = None,
    memory: SignedMemory | None = None,
) -> AdmissionAnswer:
    """Records a node's rate (million multiply-adds per second) and its passport, with what was
    proved of its memory, and invites it. Raises as `challenge` does: its provider or a slash may
    have changed since."""
    context, now = backend.context, backend.now()
    _look(backend, account, row.shadow)
    measured = AdmissionAnswer(mmacs_per_second=int(rate))
    with backend.store.begin() as connection:
        if row.shadow:
            lock(connection, shadow_work.LOCK)
        node = nodes.lock_row(connection, account)
        _check_admissible(connection, backend, account, node, row.shadow)
        challenges.set_rate(connection, row.id, rate)
        if passport is not None:
            passports.put(connection, passport, memory)
            remeasuring.passed(connection, account)
        standing = "none" if node is None else node.status
        seated = standing in ("active", "silent") or (
            standing == "admitted" and joining(connection, account)[0] == "wait"
        )
        known = standing == "shadow" if row.shadow else seated
        if not known:
            if row.shadow and (idle := shadow_work.room_of(connection, now)) is not None:
                shadows.forget_node(connection, idle)
            nodes.admit(
                connection,
                account,
                hardware=Hardware.model_validate_json(row.hardware),
                runtime=row.runtime,
                now=now,
                status="shadow" if row.shadow else "admitted",
            )
            on_commit(connection, log.info, "node %s is admitted", account, extra=fields(
                kind="node", node=account, status="shadow" if row.shadow else "admitted",
            ))  # fmt: skip
        current = nodes.get(connection, account)
        if current is not None:
            solved = challenges.rates_of(connection, [account]).get(account, ())
            speed.refresh(connection, context.run, current, backend.medians, solved=solved, now=now)
        if known or row.shadow:  # shadow nodes get no invite
            return measured
        derive_node(connection, context, account, now)  # already a member if this store is new
        invite = Invite(
            pool=context.pool,
            node=account,
            deadline=int(now) + INVITE_SECONDS,
        )
        signature = backend.sign(invite)
        current = nodes.get(connection, account)
        if current is not None and current.status == "admitted":
            queue_intent(
                connection,
                kind="join",
                key=f"{account}:{invite.deadline}",
                payload={"invite": invite.model_dump(mode="json"), "signature": signature},
                now=now,
            )
    return measured.model_copy(update={"invite": invite, "signature": signature})
