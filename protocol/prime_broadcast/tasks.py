"""What a fetch has yet to bring, and what it has counted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prime_broadcast.landing import ChunkClaim, Landing
from prime_broadcast.layout import Item
from prime_broadcast.sources import Fault, SourceBook
from prime_broadcast.transfer import SLOWEST, Sink
from prime_core.errors import UnavailableError

TOO_SLOW = 3.0
"""A chunk that takes more seconds than this, and ten times the usual, is fetched elsewhere."""
HEDGE_AFTER = 1.0
"""A chunk is asked of one more source after this many seconds, or three usual chunk times."""
SILENT_AFTER = 0.5
"""A request that brought less than `SLOWEST` promises in this many seconds is silent: if all
requests for a chunk are, every unproven source is asked too, and one proven source at a time."""


class GoneError(UnavailableError):
    """A source said that it will never have this again, and no other has it."""


@dataclass
class ChunkStats:
    """Bytes and counts of one run. `kept` chunks were there already; `refetched` came twice."""

    bytes_received: int = 0
    bytes_written: int = 0
    chunks: int = 0
    kept: int = 0
    refetched: int = 0
    first_chunk_seconds: float | None = None
    by_source: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


@dataclass
class Asked:
    """One request for a chunk: when it began, and how many bytes it brought so far."""

    since: float
    received: int = 0

    def silent(self, now: float) -> bool:
        """Whether it brings less than the slowest source that is kept."""
        spent = now - self.since
        return spent > SILENT_AFTER and self.received < spent * SLOWEST


def all_silent(requests: Iterable[Asked], now: float) -> bool:
    """Whether those requests that had time to bring something are silent; False if none had."""
    old = [asked for asked in requests if now - asked.since > SILENT_AFTER]
    return bool(old) and all(asked.silent(now) for asked in old)


@dataclass
class Counting:
    """A sink that counts for `asked` what arrives in `sink`."""

    sink: Sink
    asked: Asked

    def room(self) -> memoryview:
        return self.sink.room()

    def arrived(self, count: int) -> None:
        self.asked.received += count
        self.sink.arrived(count)


@dataclass(eq=False)
class ChunkTask:
    """One chunk that is still missing. `beginning`: bytes of it that an earlier fetch left, not yet
    verified; `running`: its requests by URL; `claimed` once it is verified, `done` once it is
    written."""

    item: Item
    index: int
    beginning: int = 0
    excluded: set[str] = field(default_factory=set)
    running: dict[str, Asked] = field(default_factory=dict)
    gone: bool = False
    claim: ChunkClaim = field(default_factory=ChunkClaim)
    done: bool = False

    @property
    def claimed(self) -> bool:
        return self.claim.taken

    def landing(self, folder: Path, buffer: memoryview, begun: int, *, early: bool) -> Landing:
        """Its way into its file under `folder`."""
        path, span = folder / self.item.name, self.item.span(self.index)
        return Landing(path, span, self.claim, begun, buffer, early=early)


def missing_chunks_error(
    missing: Collection[ChunkTask], urls: Sequence[str], book: SourceBook
) -> UnavailableError:
    """The error of a fetch that no source can continue, with each source's last answer."""
    answers = [f"{url}: {book.get(url).last_error or 'no answer yet'}" for url in urls[:8]]
    kind = GoneError if any(task.gone for task in missing) else UnavailableError
    return kind(
        f"no source delivers {next(iter(missing)).item.address} "
        f"({len(missing)} chunks are missing): " + "; ".join(answers)
    )
