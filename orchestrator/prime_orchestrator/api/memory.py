"""Proof of memory (prime_verify/proofs/memory.py), the first part of a proof of cards (cards.py).

    sizes, seed ──► the node fills its cards ──► tokens ──► vectors: the time starts ──► commitment
                                                                                             │
                     the proof of cards ◄── time against `most_seconds` ◄── marks ◄── drawn blocks

The sizes follow from the claimed memory and the vendor's rate. The time from vectors to commitment,
less the smallest round trip of the tokens (at most MOST_TRIP), must not exceed what reading takes
with some slack. A machine that holds fewer blocks than it claims must make the others in that time,
or fetch them from elsewhere; what it invents is found by the draw.
"""

from __future__ import annotations

import logging

from prime_core.errors import ConflictError, PolicyError, PrimeError
from prime_core.ids import Address
from prime_core.messages import (
    CardsEcho,
    MemoryAnswer,
    MemoryCommitment,
    MemoryDraw,
    MemoryProved,
)
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.cards import MemoryState, State, echoed, open_proof
from prime_orchestrator.manager import remeasuring
from prime_orchestrator.store import challenges
from prime_verify.proofs.memory import Block, Fill, MemoryProof

log = logging.getLogger(__name__)

DRAWN = 24
"""Blocks that are drawn of each card. One that holds half of them and invents the rest passes with
a chance of 6·10⁻⁸, one that holds three quarters with 0.1 %."""
MOST_DRAWN = 256
"""Most blocks of a node: the orchestrator makes them again, 3 to 8 ms each."""
MOST_TRIP = 0.1
"""Longest round trip in seconds that is subtracted: a node can delay its tokens."""
MAX_BLOCKS = MOST_DRAWN * Fill(1 << 27, 2048, 8, cards=64, rounds=1).opened_bytes


def filled(
    backend: Backend,
    account: Address,
    challenge_id: str,
    request: CardsEcho,
    *,
    arrived_at: float,
    connection: str,
) -> MemoryAnswer:
    """Takes the announcement that the cards are filled, and measures the round trip by further
    tokens. The last answer holds the seed of the vectors: then the time starts.

    Raises NotFoundError, PolicyError (another node's, too late), ConflictError (no open proof,
    another token, announced before).
    """
    with backend.store.begin() as store:
        row, state = open_proof(store, account, challenge_id, arrived_at, for_update=True)
        memory = _memory(state)
        if memory.vectors is not None:
            raise ConflictError("the cards were already announced as filled; begin another proof")
        state = echoed(backend, state, request, arrived_at, connection)
        if state.token is None:
            started = {"vectors": backend.salt(), "started_at": state.sent_at}
            memory = memory.model_copy(update=started)
            state = state.model_copy(update={"memory": memory})
        challenges.set_cards(store, row.id, state.model_dump_json())
    return MemoryAnswer(token=state.token, vectors=memory.vectors)


def _memory(state: State) -> MemoryState:
    if state.memory is None:
        raise ConflictError("this proof of cards has no proof of memory; begin another")
    return state.memory


def commitment(
    backend: Backend,
    account: Address,
    challenge_id: str,
    request: MemoryCommitment,
    *,
    arrived_at: float,
    connection: str,
) -> MemoryDraw:
    """Stops the time at the commitment's arrival, and draws the blocks to open.

    Raises NotFoundError, PolicyError (another node's, too late), ConflictError (before the vectors,
    or a second commitment).
    """
    with backend.store.begin() as store:
        row, state = open_proof(store, account, challenge_id, arrived_at, for_update=True)
        memory = _memory(state)
        if memory.vectors is None:
            raise ConflictError(
                "the vectors have not been sent; announce first that the cards are filled"
            )
        if memory.root is not None:
            raise ConflictError("the blocks already have a commitment; begin another proof")
        fill = memory.fill
        drawn = fill.cards * max(1, min(DRAWN, MOST_DRAWN // fill.cards))
        waited = arrived_at - memory.started_at
        trip = min(MOST_TRIP, state.round_trip(connection))
        memory = memory.model_copy(
            update={
                "root": request.root,
                "subtracted": min(trip, max(0.0, waited)),
                "seconds": max(0.0, waited - trip),
                "blocks": fill.drawn(backend.random(8 * drawn)),
            }
        )
        state = state.model_copy(update={"memory": memory})
        challenges.set_cards(store, row.id, state.model_dump_json())
    log.info(
        "node %s says that it filled %d cards with %d MiB each in %d ms, and read them in %d ms",
        account, fill.cards, memory.megabytes, request.fill_ms, request.device_ms,
    )  # fmt: skip
    return MemoryDraw(blocks=memory.blocks)


def awaited(backend: Backend, account: Address, challenge_id: str) -> int:
    """Returns the size in bytes of the awaited opening. Raises as `opening` does."""
    with backend.store.read() as store:
        _, state = open_proof(store, account, challenge_id, backend.now())
    return _expected(_memory(state))


def _expected(memory: MemoryState) -> int:
    if memory.root is None:
        raise ConflictError("the blocks have no commitment yet; send it first")
    if memory.opened:
        raise ConflictError("the blocks are already open; begin another proof")
    return len(memory.blocks) * memory.fill.opened_bytes


def opening(
    backend: Backend, account: Address, challenge_id: str, body: bytes, *, arrived_at: float
) -> MemoryProved:
    """Checks the time and the opening; the proof of cards may go on.

    Only one opening counts, and one that is refused ends the whole proof. Raises NotFoundError,
    PolicyError (another node's, too late, or more time than reading takes), ConflictError,
    MalformedError, UntrustedError.
    """
    with backend.store.begin() as store:
        row, state = open_proof(store, account, challenge_id, arrived_at, for_update=True)
        memory = _memory(state)
        _expected(memory)
        memory = memory.model_copy(update={"opened": True})
        state = state.model_copy(update={"memory": memory})
        challenges.set_cards(store, row.id, state.model_dump_json())
    assert memory.root is not None, "_expected"
    assert memory.vectors is not None, "a commitment comes after them"
    proof = MemoryProof(state.work.operands, memory.vectors, memory.fill, memory.root)
    try:
        _check_time(memory, state.kind)
        proof.check([Block(*block) for block in memory.blocks], body)
    except PrimeError as error:
        log.warning("node %s did not prove its cards' memory: %s", account, error)
        with backend.store.begin() as store:
            challenges.use(store, row.id)
        backend.turns.done(account)
        remeasuring.refused(backend.store, account, str(error), backend.now())
        raise
    token = backend.salt()
    state = state.model_copy(
        update={
            "memory": memory.model_copy(update={"proved": True}),
            "token": token,
            "prepared": False,
            "trips": (),
            "sent_at": backend.now(),
        }
    )
    with backend.store.begin() as store:
        challenges.set_cards(store, row.id, state.model_dump_json())
    return MemoryProved(token=token, proved_memory_mb=memory.megabytes)


def _check_time(memory: MemoryState, kind: str) -> None:
    """Raises PolicyError with the numbers if the blocks were not read in time."""
    if not memory.most_seconds or memory.seconds <= memory.most_seconds:
        return
    named = f"{memory.fill.cards} x {kind}" if memory.fill.cards > 1 else kind
    raise PolicyError(
        f"reading {memory.megabytes} MiB of each card of {named} took {memory.seconds:.3f} s, and "
        f"this pool allows {memory.most_seconds:.3f} s: "
        "there is less memory than claimed, other work runs on the cards, or the connection is "
        "slow; stop other work, and prove them again"
    )
