"""The node's side of a proof of its cards and of their memory (cards.py and memory.py of
prime_verify/proofs), at admission to a run with `cards`, and whenever the pool measures them
again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from prime_core.errors import NotFoundError, UnavailableError, UntrustedError
from prime_core.ids import Address, Digest, Signature
from prime_core.known_cards import CPU
from prime_core.messages import (
    AdmissionAnswer,
    CardsAnswer,
    CardsCommitment,
    CardsEcho,
    CardsRequest,
    MemoryAnswer,
    MemoryCommitment,
    MemoryWork,
)
from prime_core.node import Gpu, Hardware, HardwarePassport, MemoryPassport
from prime_core.run import Cards
from prime_node.api import NodeApi
from prime_node.config import RuntimeName
from prime_node.fingerprint import require_seen
from prime_verify.proofs.cards import Cell, Prover, Work
from prime_verify.proofs.memory import Block, Fill, MemoryProver

log = logging.getLogger("prime.node.join")
MOST_ECHOES = 64


def turn_seconds(retry_after_ms: int) -> float:
    """Returns how long to wait before asking for a turn again: as long as the pool says, within
    bounds."""
    return min(max(50, retry_after_ms), 60_000) / 1000


def claimed(asked: Cards, hardware: Hardware) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Returns the cards that this machine claims, and the device of each. A machine without cards,
    or in a run of processors, claims its processor. Raises UserError if torch does not see them."""
    if not hardware.gpus or set(asked.kinds) == {"cpu"}:
        return (Gpu(model=CPU, memory_mb=hardware.memory_mb),), ("numpy",)
    require_seen(hardware.gpus)
    return hardware.gpus, tuple(f"cuda:{number}" for number in range(len(hardware.gpus)))


def prove(
    api: NodeApi,
    asked: Cards,
    hardware: Hardware,
    runtime: RuntimeName,
    *,
    throttle: float = 1.0,
    shadow: bool = False,
    stop: threading.Event | None = None,
) -> AdmissionAnswer | None:
    """Proves this machine's cards to the pool, all at once.

    Returns None if `stop` was set before the turn came. Raises PolicyError if the pool refuses the
    cards or their measured rate, UserError if torch does not see them. `throttle` N makes the proof
    N times slower (development); `shadow` requests no seat.
    """
    stop = stop or threading.Event()
    cards, devices = claimed(asked, hardware)
    wish = CardsRequest(hardware=hardware, task_runtime=runtime, shadow=shadow, cards=cards)
    try:
        return _prove(api, wish, devices, throttle, stop)
    finally:
        _release(devices)


def _release(devices: Sequence[str]) -> None:
    """Gives the cards' memory back, which the worker's engine needs next."""
    if devices != ("numpy",):
        import torch

        torch.cuda.empty_cache()


def _prove(
    api: NodeApi,
    wish: CardsRequest,
    devices: Sequence[str],
    throttle: float,
    stop: threading.Event,
) -> AdmissionAnswer | None:
    while (begun := api.begin_cards(wish)).work is None:
        if stop.wait(turn_seconds(begun.retry_after_ms)):
            return None
    sizes = begun.work.model_dump(exclude={"operands"})
    work = Work(**sizes)
    if work.cards != len(devices):
        raise UntrustedError(
            f"the pool asks for a proof of {work.cards} cards, and this machine claimed "
            f"{len(devices)}"
        )
    token = begun.token
    if begun.memory is not None:
        token = _prove_memory(api, begun, wish, devices)
    prover = Prover(begun.work.operands, work, devices)
    answer = begun.model_copy(update={"token": token})
    for _ in range(MOST_ECHOES):
        if answer.order is not None or answer.token is None:
            break
        answer = api.echo_cards(begun.id, CardsEcho(token=answer.token))
    if answer.order is None:
        raise UnavailableError("the orchestrator did not start the proof of cards")
    started = time.monotonic()
    root = prover.commit(answer.order)
    seconds = time.monotonic() - started
    if throttle > 1.0:
        time.sleep(seconds * (throttle - 1.0))
    commitment = CardsCommitment(root=root, device_ms=round(1000 * seconds))
    drawn = api.commit_cards(begun.id, commitment)
    opening = prover.open([Cell(*cell) for cell in drawn.cells])
    admitted = api.open_cards(begun.id, opening)
    log.info("proved %d x %s in %.2f s", len(wish.cards), wish.cards[0].model, seconds)
    return admitted


def _prove_memory(
    api: NodeApi, begun: CardsAnswer, wish: CardsRequest, devices: Sequence[str]
) -> Digest:
    """Proves the cards' memory; returns the token with which the proof of cards goes on. Raises
    UnavailableError if the cards have no room for it."""
    assert begun.work is not None, "_prove"
    assert begun.memory is not None, "_prove"
    fill = _fill(begun.memory, wish.cards)
    started = time.monotonic()
    try:
        prover = MemoryProver(begun.work.operands, fill, devices)
    except RuntimeError as error:  # of torch
        _release(devices)
        raise UnavailableError(
            f"the cards have no room for the {fill.card_bytes >> 20} MiB each that the pool asks "
            f"this node to fill: stop what else runs on them ({error})"
        ) from error
    filled = time.monotonic()
    answer = MemoryAnswer(token=begun.token)
    for _ in range(MOST_ECHOES):
        if answer.vectors is not None or answer.token is None:
            break
        answer = api.announce_filled(begun.id, CardsEcho(token=answer.token))
    if answer.vectors is None:
        raise UnavailableError("the orchestrator did not start the proof of memory")
    reading = time.monotonic()
    root = prover.commit(answer.vectors)
    read = time.monotonic()
    commitment = MemoryCommitment(
        root=root,
        fill_ms=round(1000 * (filled - started)),
        device_ms=round(1000 * (read - reading)),
    )
    drawn = api.commit_memory(begun.id, commitment)
    opening = prover.open([Block(*block) for block in drawn.blocks])
    del prover
    _release(devices)
    proved = api.open_blocks(begun.id, opening)
    log.info(
        "proved %d MiB of memory on each card: filled in %.1f s, read in %.3f s",
        proved.proved_memory_mb, filled - started, read - reading,
    )  # fmt: skip
    return proved.token


def _fill(asked: MemoryWork, claimed: Sequence[Gpu]) -> Fill:
    """The sizes that the pool asks for. Raises UntrustedError if they are of other cards."""
    fill = Fill(**asked.model_dump())
    least = min(card.memory_mb for card in claimed)
    if fill.cards != len(claimed) or fill.card_bytes > least << 20:
        raise UntrustedError(
            f"the pool asks to fill {fill.cards} cards with {fill.card_bytes >> 20} MiB each, and "
            f"this machine claimed {len(claimed)} with {least} MiB"
        )
    return fill


def passport(api: NodeApi, node: Address) -> HardwarePassport | None:
    """Returns the node's hardware passport, or None if it proved no cards. Raises UntrustedError if
    it is not the pool manager's for this node."""
    try:
        signed = api.passport(node)
    except NotFoundError:
        return None
    _check_signed(api, node, signed.passport, signed.signature)
    return signed.passport


def proved_memory(api: NodeApi, node: Address) -> MemoryPassport | None:
    """Returns what the node proved of its cards' memory, or None if it is only claimed. Raises as
    `passport` does."""
    try:
        signed = api.proved_memory(node)
    except NotFoundError:
        return None
    _check_signed(api, node, signed.memory, signed.signature)
    return signed.memory


def _check_signed(
    api: NodeApi, node: Address, said: HardwarePassport | MemoryPassport, signature: Signature
) -> None:
    pool = api.client.pool()
    signer = said.recover(api.client.domain("pools"), signature)
    if (signer, said.node, said.pool) != (pool.manager, node, pool.pool):
        raise UntrustedError("the hardware passport is not the pool manager's for this node")
