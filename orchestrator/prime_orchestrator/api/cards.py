"""Proof of cards (prime_verify/proofs/cards.py) at admission and later (manager/remeasuring.py),
for runs with `cards`.

    claimed cards ──► sizes, operands ──► proof of memory (memory.py; older nodes make none)
                                                                │
            commitment: the time ends ◄── order: it starts ◄── echoes
                │
            drawn cells ──► opening ──► rate against known cards ──► invite, passport

The sizes come from the claimed cards: all of them compute at once, and at the vendor's rate the
work takes `work_ms`. From the time between order and commitment, the smallest of the echoes' round
trips is subtracted: at most MOST_TRIP and MOST_SHARE of the time, and only if all came over one
connection. A machine with fewer or slower cards than it claims takes longer, and is refused with
the numbers.
"""

from __future__ import annotations

import logging
import math
from typing import Annotated

import numpy as np
from pydantic import Field

from prime_core.errors import ConflictError, NotFoundError, PolicyError, PrimeError
from prime_core.ids import Address
from prime_core.known_cards import KNOWN, KnownCard, check_rate, known_card
from prime_core.messages import (
    AdmissionAnswer,
    CardsAnswer,
    CardsCommitment,
    CardsDraw,
    CardsEcho,
    CardsRequest,
    CardsWork,
    MemoryWork,
    SignedMemory,
    SignedPassport,
)
from prime_core.node import HardwarePassport, MemoryPassport
from prime_core.run import MICRO, Cards
from prime_core.signing import DigestField, Strict
from prime_core.version import UPGRADE
from prime_orchestrator.api import admission
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.manager import remeasuring, revisions
from prime_orchestrator.store import Connection, challenges, passports
from prime_orchestrator.store.challenges import ChallengeRow
from prime_verify.proofs.cards import Cell, Proof, Work
from prime_verify.proofs.memory import Fill, fill_of, most_seconds

log = logging.getLogger(__name__)

ECHOES = 4
"""Round trips that are measured."""
MOST_TRIP = 0.2
"""Longest round trip in seconds that is subtracted: a node can delay its echoes."""
MOST_SHARE = 0.1
"""Largest share of the time that is subtracted."""
DRAWN = 24
"""Cells to open. A node that computes 80 % of the rows passes with a chance of 0.5 %, one that
computes half of them with 6·10⁻⁸."""
GPU_SIZES = (16_384, 32_768, 2048)
CPU_SIZES = (1024, 1024, 128)
NO_MEMORY_PROOF = (
    "this pool asks each node to prove its cards' memory, and this node's program cannot: upgrade "
    f"it ({UPGRADE}) and start it again"
)
MAX_OPENING = DRAWN * Work(*GPU_SIZES, cards=64, rounds=1 << 15).cell_bytes
Seconds = Annotated[float, Field(allow_inf_nan=False)]


class MemoryState(Strict):
    """A proof of memory under way. `most_seconds` 0: the time is not judged."""

    work: MemoryWork
    most_seconds: Seconds
    needed: bool
    vectors: DigestField | None = None
    started_at: Seconds = 0.0
    root: DigestField | None = None
    subtracted: Seconds = 0.0
    seconds: Seconds = 0.0
    blocks: tuple[tuple[int, int], ...] = ()
    opened: bool = False
    proved: bool = False

    @property
    def fill(self) -> Fill:
        return Fill(**self.work.model_dump())

    @property
    def megabytes(self) -> int:
        """Memory of a card in MiB that is filled."""
        return self.fill.card_bytes >> 20


class State(Strict):
    """A proof under way, as stored with its challenge. Times in Unix seconds; `connection` is the
    client's address and port."""

    kind: str
    memory_mb: int
    least_share_micro: int
    work: CardsWork
    order: DigestField
    token: DigestField | None
    prepared: bool = False
    """The first echo has come. It measures no round trip: before it the cards were prepared."""
    sent_at: Seconds
    connection: str
    trips: tuple[Seconds, ...] = ()
    started_at: Seconds | None = None
    root: DigestField | None = None
    subtracted: Seconds = 0.0
    seconds: Seconds = 0.0
    device_ms: int = 0
    cells: tuple[tuple[int, int, int], ...] = ()
    memory: MemoryState | None = None
    """None only in proofs that an older orchestrator began."""

    @property
    def sizes(self) -> Work:
        values = self.work.model_dump(exclude={"operands"})
        return Work(**values)

    def trip(self, waited: float, connection: str) -> float:
        """Seconds to subtract from those between order and commitment."""
        return min(self.round_trip(connection), MOST_SHARE * waited)

    def round_trip(self, connection: str) -> float:
        """The smallest round trip in seconds, at most MOST_TRIP."""
        if connection != self.connection or len(self.trips) < ECHOES:
            return 0.0
        return min(*self.trips, MOST_TRIP)

    @property
    def lacks_memory(self) -> bool:
        """Whether the run asks for a proof of memory and there was none."""
        return self.memory is not None and self.memory.needed and not self.memory.proved


def begin(
    backend: Backend, account: Address, request: CardsRequest, address: str, connection: str
) -> CardsAnswer:
    """Returns the sizes of a proof and the first token, or how long to wait for a turn.

    Raises PolicyError if the run asks for no proof or for other cards, and as
    `admission.challenge` does.
    """
    with backend.store.read() as reader:
        run = revisions.next_run(reader, backend.context)
    if run.cards is None:
        raise PolicyError("this pool asks for no proof of cards; upgrade this node's program")
    try:
        known = known_card(request.cards)
        _check_asked(run.cards, known, len(request.cards))
        admission.require(run, request.hardware)
        if known.judged:  # what is proved counts
            proved = request.hardware.model_copy(update={"gpus": request.cards})
            admission.require(run, proved)
    except PolicyError as error:
        remeasuring.refused(backend.store, account, str(error), backend.now())
        raise
    work = _work(run.cards, known, len(request.cards))
    memory_mb = min(card.memory_mb for card in request.cards)
    state = State(
        kind=known.kind,
        memory_mb=memory_mb,
        memory=_memory(run.cards, known, len(request.cards), memory_mb),
        least_share_micro=run.cards.least_share_micro,
        work=CardsWork(operands=backend.salt(), **vars(work)),
        order=backend.salt(),
        token=backend.salt(),
        sent_at=backend.now(),
        connection=connection,
    )
    row = admission.issue(
        backend, account, request, address, size=work.inner, rounds=work.rounds,
        cards=state.model_dump_json(),
    )  # fmt: skip
    if row is None:
        return CardsAnswer(retry_after_ms=admission.TURN_MS, reason=admission.TURN_REASON)
    return CardsAnswer(
        id=row.id,
        work=state.work,
        memory=None if state.memory is None else state.memory.work,
        token=state.token,
        deadline=row.deadline,
    )


def _check_asked(asked: Cards, known: KnownCard, count: int) -> None:
    if known.kind in asked.kinds and count in asked.counts:
        return
    counts = " or ".join(map(str, asked.counts))
    kinds = " or ".join(asked.kinds)
    raise PolicyError(
        f"the pool asks for {counts} x {kinds}, and this machine claims {count} x {known.kind}: "
        "use another machine, or name the cards to use with the setting gpus"
    )


def _work(asked: Cards, known: KnownCard, count: int) -> Work:
    """Sizes with which each card computes for `work_ms` at the vendor's rate."""
    rows, inner, columns = GPU_SIZES if known.judged else CPU_SIZES
    wanted = known.tera * 1e12 * asked.work_ms / 1000
    rounds = max(1, math.ceil(wanted / (rows * inner * columns)))
    return Work(rows, inner, columns, cards=count, rounds=rounds)


def _memory(asked: Cards, known: KnownCard, count: int, memory_mb: int) -> MemoryState:
    fill = fill_of(known, count, memory_mb)
    return MemoryState(
        work=MemoryWork(**vars(fill)),
        most_seconds=most_seconds(known, fill),
        needed=asked.prove_memory,
    )


def echoed(
    backend: Backend, state: State, request: CardsEcho, arrived_at: float, connection: str
) -> State:
    """Takes a token back and measures a round trip. The new state has no token once ECHOES were
    measured over one connection. Raises ConflictError for another token."""
    if state.token is None or request.token != state.token:
        raise ConflictError("the token is not the last one of this proof; begin it again")
    counts = state.prepared and connection == state.connection
    trips = (*state.trips, max(0.0, arrived_at - state.sent_at)) if counts else ()
    return state.model_copy(
        update={
            "token": None if len(trips) >= ECHOES else backend.salt(),
            "prepared": True,
            "trips": trips,
            "connection": connection,
            "sent_at": backend.now(),
        }
    )


def echo(
    backend: Backend,
    account: Address,
    challenge_id: str,
    request: CardsEcho,
    *,
    arrived_at: float,
    connection: str,
) -> CardsAnswer:
    """Measures a round trip and returns the next token, or the order: then the time starts. An
    echo over another connection starts the measurement again.

    Raises NotFoundError, PolicyError (another node's, too late, or a run that asks for a proof of
    memory before this one), ConflictError (no open proof, another token).
    """
    with backend.store.begin() as store:
        row, state = open_proof(store, account, challenge_id, arrived_at, for_update=True)
        if not state.lacks_memory:
            state = echoed(backend, state, request, arrived_at, connection)
            if state.token is None:
                state = state.model_copy(update={"started_at": state.sent_at})
            challenges.set_cards(store, row.id, state.model_dump_json())
    if state.lacks_memory:
        remeasuring.refused(backend.store, account, NO_MEMORY_PROOF, backend.now())
        raise PolicyError(NO_MEMORY_PROOF)
    order = state.order if state.token is None else None
    return CardsAnswer(id=row.id, token=state.token, order=order, deadline=row.deadline)


def open_proof(
    store: Connection, account: Address, challenge_id: str, at: float, *, for_update: bool = False
) -> tuple[ChallengeRow, State]:
    """Returns an open proof of cards. Raises NotFoundError, PolicyError (another node's, too late),
    ConflictError (a challenge of another kind, or answered before)."""
    found = challenges.get(store, challenge_id, for_update=for_update)
    row = admission.check_open(found, account, at)
    if row.cards is None:
        raise ConflictError("the challenge is not a proof of cards")
    return row, State.model_validate_json(row.cards)


def commitment(
    backend: Backend,
    account: Address,
    challenge_id: str,
    request: CardsCommitment,
    *,
    arrived_at: float,
    connection: str,
) -> CardsDraw:
    """Stops the time at the commitment's arrival, and draws the cells to open.

    Raises NotFoundError, PolicyError (another node's, too late), ConflictError (before the order,
    or a second commitment).
    """
    with backend.store.begin() as store:
        row, state = open_proof(store, account, challenge_id, arrived_at, for_update=True)
        if state.started_at is None:
            raise ConflictError("the proof's order is not out yet: send the tokens back first")
        if state.root is not None:
            raise ConflictError("the proof is committed to already; begin another")
        waited = max(1e-6, arrived_at - state.started_at)
        trip = state.trip(waited, connection)
        state = state.model_copy(
            update={
                "root": request.root,
                "subtracted": trip,
                "seconds": waited - trip,
                "device_ms": request.device_ms,
                "cells": state.sizes.cells(backend.random(8 * DRAWN)),
            }
        )
        challenges.set_cards(store, row.id, state.model_dump_json())
    backend.turns.done(account)
    return CardsDraw(cells=state.cells)


def awaited(backend: Backend, account: Address, challenge_id: str) -> int:
    """Returns the size in bytes of the awaited opening. Raises as `opening` does."""
    with backend.store.read() as store:
        _, state = open_proof(store, account, challenge_id, backend.now())
    if state.root is None:
        raise ConflictError("the proof is not committed to yet")
    return len(state.cells) * state.sizes.cell_bytes


def opening(
    backend: Backend, account: Address, challenge_id: str, body: bytes, *, arrived_at: float
) -> AdmissionAnswer:
    """Checks the opening and the measured rate, signs the node's passport and invites the node.

    Only one opening counts. Raises NotFoundError, PolicyError (another node's, too late, or a rate
    that the claimed cards do not have), ConflictError, MalformedError, UntrustedError.
    """
    with backend.store.begin() as store:
        row, state = open_proof(store, account, challenge_id, arrived_at, for_update=True)
        if state.root is None:
            raise ConflictError("the proof is not committed to yet")
        challenges.use(store, row.id)
    work = state.sizes
    proof = Proof(state.work.operands, state.order, work, state.root)
    generator = np.random.default_rng(int.from_bytes(backend.random(16), "big"))
    try:
        proof.check([Cell(*cell) for cell in state.cells], body, generator)
        rate = work.card_multiply_adds / state.seconds
        known = KNOWN[state.kind]
        check_rate(known, work.cards, rate / 1e12, state.least_share_micro / MICRO)
    except PrimeError as error:
        log.warning("node %s did not prove its cards: %s", account, error)
        remeasuring.refused(backend.store, account, str(error), backend.now())
        raise
    passport = HardwarePassport(
        pool=backend.context.pool,
        node=account,
        kind=state.kind,
        cards=work.cards,
        card_gmacs=int(rate / 1e9),
        claimed_memory_mb=state.memory_mb,
        measured_ms=round(1000 * state.seconds),
        round_trip_ms=round(1000 * state.subtracted),
        claimed_ms=state.device_ms,
        root=state.root,
        measured_at=int(backend.now()),
    )
    signed = SignedPassport(passport=passport, signature=backend.sign(passport))
    memory = _signed_memory(backend, passport, state.memory)
    return admission.admit(backend, account, row, work.cards * rate / 1e6, signed, memory)


def _signed_memory(
    backend: Backend, passport: HardwarePassport, memory: MemoryState | None
) -> SignedMemory | None:
    """What was proved of the cards' memory; None if it is only claimed."""
    if memory is None or memory.root is None or not memory.proved:
        return None
    found = MemoryPassport(
        pool=passport.pool,
        node=passport.node,
        kind=passport.kind,
        cards=passport.cards,
        proved_memory_mb=memory.megabytes,
        measured_ms=round(1000 * memory.seconds),
        most_ms=round(1000 * memory.most_seconds),
        round_trip_ms=round(1000 * memory.subtracted),
        root=memory.root,
        measured_at=passport.measured_at,
    )
    return SignedMemory(memory=found, signature=backend.sign(found))


def passport_of(backend: Backend, account: Address) -> SignedPassport:
    """Returns the node's passport. Raises NotFoundError if it proved no cards."""
    with backend.store.read() as store:
        found = passports.get(store, account)
    if found is None:
        raise NotFoundError(f"node {account} has proved no cards")
    return found


def memory_of(backend: Backend, account: Address) -> SignedMemory:
    """Returns what the node proved of its cards' memory. Raises NotFoundError if it is only
    claimed."""
    with backend.store.read() as store:
        found = passports.memory(store, account)
    if found is None:
        raise NotFoundError(f"node {account} has not proved its cards' memory")
    return found
