"""Following the chain's events: bounded eth_getLogs, parent-hash check, rollback.

    poll(trail) ──> Confirmed(block, events) …    read up to `block`, nothing missing
                └─> Retracted(block)              drop everything above `block`, then poll again

The consumer owns the cursor. It stores each step's `block` and events in one transaction, and
passes the blocks that it remembers (`trail`, oldest first; the last one is the cursor). With more
blocks, less is read again after a reorganization; correctness needs only the cursor. No server-side
filter is used, so any endpoint works. If many machines serve one URL, a block can be visible before
its logs are: wait for confirmations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from prime_chain import codec
from prime_chain.client import Block, ChainClient, Log
from prime_chain.errors import BadAnswerError, NotThereError, RpcError
from prime_chain.events import EVENTS, Event, decode
from prime_core.deployment import SOLIDITY_NAMES, Deployment
from prime_core.errors import MalformedError, UnavailableError
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.signing import ContractName


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
MAX_STEPS = 64
"""Most steps of one poll."""
FREE_FOR_ALL = frozenset({"SeatsAllowed", "Funded", "BondAdded"})
"""Events that any account can make a pool emit for next to nothing. No program needs them."""


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
    `max_span` bounds one eth_getLogs, in blocks. The token's transfers are not watched. With
    `pool`, only that pool's events are asked for, and of all accounts those named in `of_all`
    (their `block_time` may be that of a later block of the same step).
    """

    def __init__(
        self,
        client: ChainClient,
        deployment: Deployment,
        *,
        confirmations: int | None = None,
        max_span: int = 2000,
        pool: int | None = None,
        of_all: Collection[str] = (),
    ) -> None:
        self._client = client
        self._deployment = deployment
        self._queries = (
            [Query([a for a, name in deployment.addresses().items() if name != "token"])]
            if pool is None
            else [*pool_queries(deployment, pool), *named_queries(deployment, of_all)]
        )
        self._of_all = frozenset(of_all)
        network = client.network
        self._confirmations = network.confirmations if confirmations is None else confirmations
        self._max_span = max_span
        self._span = min(500, max_span)
        self.top = 0
        """The newest block that may be reported, as of the last `poll`."""

    @property
    def start(self) -> BlockRef:
        """The cursor of a consumer that has read nothing: just before the deployment."""
        return BlockRef(max(self._deployment.block - 1, 0), ZERO_DIGEST)

    def poll(self, trail: Sequence[BlockRef] = ()) -> Iterator[Step]:
        """What happened since the last block of `trail`, up to the head at the time of the call.

        Each step must be stored before the next is asked for. Raises UnavailableError when no
        endpoint answers or the chain changes faster than it can be read: poll again later.
        """
        cursor = trail[-1] if trail else self.start
        self.top = top = self._client.block_number() - self._confirmations
        suspect = top <= cursor.number  # else the next block's parent shows whether it stands
        for _ in range(MAX_STEPS):
            if suspect and not self._holds(cursor, top):
                cursor = common_ancestor(trail[:-1], self._hash_at, self.start)
                trail = [ref for ref in trail if ref.number <= cursor.number]
                yield Retracted(cursor)
            if top <= cursor.number:
                return
            step = self._read(cursor, top)
            suspect = step is None  # the chain changed meanwhile, or the range was too large
            if step is None:
                continue
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
            return self._client.agreed_block(number).hash
        except NotThereError:
            if number > self._client.block_number():
                return None
            raise

    def _read(self, cursor: BlockRef, top: int) -> Confirmed | None:
        """One range after the cursor; None if a reorg crossed it."""
        last_number = min(top, cursor.number + self._span)
        client = self._client
        last = client.agreed_block(last_number)
        first = last if last_number == cursor.number + 1 else client.agreed_block(cursor.number + 1)
        if cursor.hash != ZERO_DIGEST and first.parent_hash != cursor.hash:
            return None
        try:
            logs = self._logs(first.number, last.number)
        except UnavailableError as error:
            # too much for one answer, or for the time it may take: ask for less
            asked = last.number - cursor.number
            self._span = next_span(asked, False, self._max_span)
            if asked == 1 or not isinstance(error, RpcError):
                raise
            return None
        self._span = next_span(self._span, True, self._max_span)
        headers: dict[int, Block] = {first.number: first, last.number: last}
        events = self._events(logs, headers, last.time)
        if events is None:
            return None
        # Still the same chain after the logs were read? Then they are of this chain.
        if client.agreed_block(last.number).hash != last.hash:
            return None
        return Confirmed(BlockRef(last.number, last.hash), last.time, tuple(events))

    def read_again(self, first: int, last: int) -> list[Event]:
        """The events of blocks first … last, asked for once more; for what is found missing.

        A range that is too much for one answer is halved. Raises UnavailableError, also if the
        chain changed meanwhile.
        """
        found: list[Event] = []
        span = self._max_span
        while first <= last:
            until = min(last, first + span - 1)
            try:
                events = self._events(self._logs(first, until), {}, None)
            except RpcError:
                if until == first:
                    raise
                span = next_span(until - first + 1, False, self._max_span)
                continue
            if events is None:
                raise UnavailableError("the chain changed while it was read")
            found += events
            first = until + 1
        return found

    def block_of(self, tx_hash: Digest) -> int | None:
        """The block that holds a transaction, as a quorum shows it; None if none does."""
        receipt = self._client.agreed_receipt(tx_hash)
        return None if receipt is None else receipt.block

    def distrust(self, why: str) -> None:
        """Something is missing from what was read: the next endpoint is asked first."""
        self._client.distrust(why)

    def _logs(self, first: int, last: int) -> list[Log]:
        found: list[Log] = []
        for query in self._queries:
            found += self._client.agreed_logs(first, last, query.addresses, query.topics)
        if len(self._queries) > 1:
            found.sort(key=lambda log: (log.block, log.log_index))
        return found

    def _events(
        self, logs: Sequence[Log], headers: dict[int, Block], default_time: int | None
    ) -> list[Event] | None:
        """The logs decoded; None if one is of a block that is not on the chain."""
        events: list[Event] = []
        for log in logs:
            header = headers.get(log.block)
            timeless = default_time is not None and self._name(log) in self._of_all
            if header is None and not timeless:
                header = headers[log.block] = self._client.agreed_block(log.block)
            if header is not None and header.hash != log.block_hash:
                return None
            time = header.time if header is not None else default_time
            assert time is not None
            try:
                event = decode(log, time, self._deployment)
            except MalformedError as error:
                raise BadAnswerError(f"a log of another contract: {error}") from error
            if event is not None:
                events.append(event)
        return events

    @staticmethod
    def _name(log: Log) -> str:
        return _NAMES.get(log.topics[0], "") if log.topics else ""


@dataclass(frozen=True)
class Query:
    """One eth_getLogs: addresses, and topics by place."""

    addresses: list[Address]
    topics: tuple[list[bytes] | bytes | None, ...] = ()


def pool_queries(
    deployment: Deployment, pool: int, contracts: Collection[ContractName] = ()
) -> list[Query]:
    """What asks for all events of `contracts` (all by default) that have `pool` indexed, but for
    FREE_FOR_ALL: one query for each place it has."""
    number = pool.to_bytes(32, "big")
    places: dict[int, tuple[set[Address], list[bytes]]] = {}
    for kind in EVENTS.values():
        item = _item(kind)
        indexed = [str(entry["name"]) for entry in item.inputs if entry.get("indexed")]
        if kind.__name__ in FREE_FOR_ALL or (contracts and kind.CONTRACT not in contracts):
            continue
        if "pool" in indexed:
            addresses, selectors = places.setdefault(indexed.index("pool"), (set(), []))
            addresses.add(deployment.address(kind.CONTRACT))
            selectors.append(item.selector)
    return [
        Query(sorted(addresses), (sorted(selectors), *[None] * place, number))
        for place, (addresses, selectors) in sorted(places.items())
    ]


def named_queries(deployment: Deployment, names: Collection[str]) -> list[Query]:
    """What asks for all events of these names, whichever account they are of."""
    kinds = [EVENTS[name] for name in sorted(names)]
    if not kinds:
        return []
    addresses = sorted({deployment.address(kind.CONTRACT) for kind in kinds})
    return [Query(addresses, (sorted(_item(kind).selector for kind in kinds),))]


def _item(kind: type[Event]) -> codec.Item:
    found = codec.artifact(SOLIDITY_NAMES[kind.CONTRACT]).events.values()
    return next(item for item in found if item.name == kind.__name__)


_NAMES = {_item(kind).selector: name for name, kind in EVENTS.items()}
