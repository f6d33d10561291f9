"""Following the chain's events: bounded eth_getLogs, parent-hash check, rollback.

    poll(trail) ──> Confirmed(block, events) …    read up to `block`, nothing missing
                └─> Retracted(block)              drop everything above `block`, then poll again

The consumer owns the cursor: it stores each step's `block` and events in one transaction, and hands
in the blocks it remembers (`trail`, oldest first, the last one its cursor). The more it remembers,
the less is read again after a reorg; correctness needs only the cursor. No server-side filters, so
any endpoint will do and none has to remember us. Where many machines stand behind one URL, a log
may be missing for a moment where its block is shown already: that is what confirmations are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from protocol.chain.client import Block, ChainClient
from protocol.chain.deployment import Deployment
from protocol.chain.errors import RpcError
from protocol.chain.events import Event, decode
from protocol.core.errors import UnavailableError
from protocol.core.ids import ZERO_DIGEST, Address, Digest


@dataclass(frozen=True)
class BlockRef:
    """A block by number and hash."""

    number: int
    hash: Digest


@dataclass(frozen=True)
class Confirmed:
    """All events after the cursor up to and including `block`, in chain order."""

    block: BlockRef
    block_time: int
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Retracted:
    """Blocks above `block` left the chain: forget their events; `block` is the cursor now."""

    block: BlockRef


Step = Confirmed | Retracted


def next_span(size: int, worked: bool, largest: int) -> int:
    """The next range in blocks: halved after a refusal, half as much again after a success."""
    return max(1, size // 2) if not worked else min(largest, size + size // 2 + 1)


def common_ancestor(
    trail: Sequence[BlockRef], hash_at: Callable[[int], Digest | None], start: BlockRef
) -> BlockRef:
    """The newest block of `trail` (ascending) that is still on the chain, else `start`.

    If a block is on the chain, so are all before it: a binary search over the trail.
    """
    low, high = 0, len(trail)
    while low < high:
        middle = (low + high) // 2
        if hash_at(trail[middle].number) == trail[middle].hash:
            low = middle + 1
        else:
            high = middle
    return trail[low - 1] if low else start


class Watcher:
    """Reads the deployment's events; see the module's docstring.

    `confirmations` blocks must lie on top of what is reported (the network's number if None);
    `max_span` bounds one eth_getLogs, in blocks. The token's transfers are not watched.
    """

    def __init__(
        self,
        client: ChainClient,
        deployment: Deployment,
        *,
        confirmations: int | None = None,
        max_span: int = 2000,
    ) -> None:
        self._client = client
        self._deployment = deployment
        self._addresses: list[Address] = [
            a for a, name in deployment.addresses().items() if name != "token"
        ]
        network = client.network
        self._confirmations = network.confirmations if confirmations is None else confirmations
        self._max_span = max_span
        self._span = min(500, max_span)

    @property
    def start(self) -> BlockRef:
        """The cursor of a consumer that has read nothing: just before the deployment."""
        return BlockRef(max(self._deployment.block - 1, 0), ZERO_DIGEST)

    def poll(self, trail: Sequence[BlockRef] = (), *, max_steps: int = 64) -> Iterator[Step]:
        """What happened since the last block of `trail`; ends when the head is reached.

        Each step must be stored before the next is asked for. Raises UnavailableError when no
        endpoint answers or the chain changes faster than it can be read: poll again later.
        """
        cursor = trail[-1] if trail else self.start
        for _ in range(max_steps):
            top = self._client.block_number() - self._confirmations
            if not self._holds(cursor, top):
                cursor = common_ancestor(trail[:-1], self._hash_at, self.start)
                trail = [ref for ref in trail if ref.number <= cursor.number]
                yield Retracted(cursor)
                continue
            if top <= cursor.number:
                return
            step = self._read(cursor, top)
            if step is None:
                continue  # the chain changed under our hands: look at the cursor again
            yield step
            cursor = step.block
            trail = [*trail, cursor]

    def _holds(self, cursor: BlockRef, top: int) -> bool:
        """True unless the chain shows another block at the cursor's height, or has shrunk."""
        if cursor.hash == ZERO_DIGEST:
            return True
        if cursor.number > top + self._confirmations:
            # A shorter chain: a lagging endpoint, or a reorg? Only a block can tell.
            raise UnavailableError(
                f"the endpoint is at block {top + self._confirmations}, behind {cursor.number}"
            )
        return self._hash_at(cursor.number) == cursor.hash

    def _hash_at(self, number: int) -> Digest | None:
        try:
            return self._client.block(number).hash
        except RpcError:
            raise
        except UnavailableError:
            if number > self._client.block_number():
                return None
            raise

    def _read(self, cursor: BlockRef, top: int) -> Confirmed | None:
        """One range after the cursor; None if a reorg crossed it."""
        last_number = min(top, cursor.number + self._span)
        last = self._client.block(last_number)
        first = last if last_number == cursor.number + 1 else self._client.block(cursor.number + 1)
        if cursor.hash != ZERO_DIGEST and first.parent_hash != cursor.hash:
            return None
        try:
            logs = self._client.logs(first.number, last.number, self._addresses)
        except RpcError:
            if self._span == 1 or last.number == first.number:
                raise
            self._span = next_span(last.number - cursor.number, False, self._max_span)
            return None
        self._span = next_span(self._span, True, self._max_span)
        headers: dict[int, Block] = {first.number: first, last.number: last}
        events: list[Event] = []
        for log in logs:
            if log.block not in headers:
                headers[log.block] = self._client.block(log.block)
            header = headers[log.block]
            if header.hash != log.block_hash:
                return None
            event = decode(log, header.time, self._deployment)
            if event is not None:
                events.append(event)
        # Still the same chain after the logs were read? Then they are of this chain.
        if self._client.block(last.number).hash != last.hash:
            return None
        return Confirmed(BlockRef(last.number, last.hash), last.time, tuple(events))
