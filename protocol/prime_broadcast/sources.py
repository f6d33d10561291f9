"""Where to fetch from: what each source has delivered so far, and whom to ask next.

Sources earn their place by measured throughput; failures cost a growing pause, a wrong chunk bans
the sender. A source that has never delivered is asked only while no proven one stands; otherwise it
is tried apart, with a chunk that proven sources fetch anyway (`newcomer`). Nodes ask origins only
when no relay or mirror is left, to spare the trainer's uplink. Relays ask other relays only when
nothing else is left, so that they do not wait for one another, and origins only while no bucket of
the pool's own stands.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prime_broadcast.plans import APPLY_RATE, Speed
from prime_core.errors import MalformedError
from prime_core.transport.addresses import authority

if TYPE_CHECKING:
    from prime_broadcast.access import Passes

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
BAN = 600.0
"""Seconds for which a sender of a wrong chunk is not asked again."""
SMOOTHING = 0.3
OVERDUE = 1.0
"""A request is overdue after this many seconds, or three times what the measured rate promises."""

MOST_SILENCES = 2
"""Silent requests in a row after which a source has to prove itself again."""


@dataclass
class Source:
    """One server under its base URL. Rates in bytes per second; times by the book's clock."""

    url: str
    role: str = "unknown"
    """"relay", "origin" or "mirror" once it was asked."""
    rate: float = 0.0
    whole_only: bool = False
    """It ignores ranges: files are read from their beginning, one at a time."""
    in_use: int = 0
    overdue_at: float = 0.0
    """When its present request should long have been answered."""
    failures: int = 0
    resting_until: float = 0.0
    banned: bool = False
    last_error: str = ""
    bytes_received: int = 0
    trials: int = 0
    """How often it was tried apart from the fetch."""
    silences: int = 0
    """How often in a row a request brought (almost) nothing and cost time."""

    @property
    def proven(self) -> bool:
        """Whether it delivered a verified chunk, and was not silent MOST_SILENCES times since."""
        return self.bytes_received > 0 and self.silences < MOST_SILENCES


@dataclass(frozen=True)
class Fault:
    """A source's fault, for reports and logs. `kind` "bad_data": its bytes had a wrong hash."""

    url: str
    kind: str
    reason: str

    @property
    def bad_data(self) -> bool:
        """Whether the source sent bytes with a wrong hash."""
        return self.kind == "bad_data"


@dataclass
class SourceBook:
    """Thread-safe memory of sources over many fetches. `clock` in seconds, monotonic."""

    clock: Callable[[], float] = time.monotonic
    public_only: bool = False
    """Connect only to public addresses, also when a host name resolves to a private one."""
    passes: Passes | None = None
    """With which requests are signed, for servers that let only signed ones in."""
    apply_rate: float = 0.0
    """Bytes of resulting weights a second at which deltas were applied here; 0: not yet."""
    _sources: dict[str, Source] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def get(self, url: str) -> Source:
        """The record of a base URL. Raises MalformedError unless it is http(s) with a host."""
        with self._lock:
            if known := self._sources.get(url):
                return known
            url = normal_url(url)
            if url not in self._sources:
                self._sources[url] = Source(url)
            return self._sources[url]

    def authorization(self, url: str) -> str | None:
        """The Authorization field for requests to a source, if they are signed."""
        return self.passes.header(url) if self.passes is not None else None

    def urls(self, urls: Iterable[str]) -> list[str]:
        """The usable ones among `urls`, normalized, without doubles, in order."""
        found: dict[str, None] = {}
        for url in urls:
            try:
                found[normal_url(url)] = None
            except MalformedError:
                continue
        return list(found)

    def pick(
        self,
        urls: Collection[str],
        excluded: Collection[str],
        per_source: int,
        *,
        asked: Collection[str] = (),
        unproven: bool = False,
        length: int = 0,
        last_resorts: Sequence[str] = ("origin",),
        starving: bool = False,
    ) -> Source | None:
        """Takes the best free source for `length` bytes, or None. Give it back with `good`, `bad`,
        `sent_bad_data` or `release`.

        Sources in `excluded` or `asked`, and those that rest or are banned, are not taken. Proven
        sources come before all others, and the roles `last_resorts` come last, in their order,
        except while the fetch is `starving`: then they come first. Among equals the fastest wins,
        then one that was never asked, then list order. An unproven source has one request at a
        time. With `unproven`, the result is None if the best is proven.
        """
        with self._lock:
            now = self.clock()
            known = [self.get(url) for url in urls if url not in excluded]
            alive = [s for s in known if not s.banned or s.resting_until <= now]
            standing = [s for s in alive if s.resting_until <= now]
            if any(s.proven and s.url not in asked for s in standing):
                standing = [s for s in standing if s.proven]
            last = [
                s
                for s in standing
                if s.role in last_resorts and not s.in_use and s.url not in asked
            ]
            if starving and last:
                standing = last
            else:
                preferred = [s for s in standing if s.role not in last_resorts]
                for role in last_resorts:
                    if any(not s.in_use or now <= s.overdue_at for s in preferred):
                        break
                    preferred += [s for s in standing if s.role == role]
                standing = preferred
            free = [
                s
                for s in standing
                if s.url not in asked
                and s.in_use < (per_source if s.proven and not s.whole_only else 1)
            ]
            if not free:
                return None
            best = max(free, key=lambda s: s.rate or (-s.failures if s.failures else math.inf))
            if unproven and best.proven:
                return None
            best.in_use += 1
            promised = 3 * length / best.rate if best.rate else 0.0
            best.overdue_at = now + max(OVERDUE, promised)
            return best

    def newcomer(
        self, urls: Collection[str], last_resorts: Sequence[str] = ("origin",)
    ) -> Source | None:
        """Takes the unproven source that was tried least often, if some proven source stands.
        Give it back as one from `pick`."""
        with self._lock:
            now = self.clock()
            known = [self.get(url) for url in urls]
            if not any(s.proven and s.resting_until <= now for s in known):
                return None
            new = [
                s
                for s in known
                if not (s.proven or s.banned or s.in_use or self.spares(s, urls, last_resorts))
                and s.resting_until <= now
            ]
            if not new:
                return None
            chosen = min(new, key=lambda s: s.trials)
            chosen.trials += 1
            chosen.in_use += 1
            return chosen

    def spares(self, source: Source, urls: Collection[str], last_resorts: Sequence[str]) -> bool:
        """Whether a source is not tried apart: its role is the last of `last_resorts`, or a proven
        one of `urls` has a role that comes before it."""
        if source.role not in last_resorts:
            return False
        not_before = last_resorts[last_resorts.index(source.role) :]
        with self._lock:
            now = self.clock()
            proven = [s for s in map(self.get, urls) if s.proven and s.resting_until <= now]
        return len(not_before) == 1 or any(s.role not in not_before for s in proven)

    def may_mirror(self, urls: Collection[str]) -> bool:
        """Returns whether one of `urls` may be asked now and is a mirror, or its role is not known
        yet."""
        with self._lock:
            now = self.clock()
            return any(
                s.role in ("mirror", "unknown") and not s.banned and s.resting_until <= now
                for s in map(self.get, urls)
            )

    def next_chance(self, urls: Collection[str], excluded: Collection[str]) -> float | None:
        """Seconds until some source may be asked (0 if one only is busy); None if all are banned
        or excluded."""
        with self._lock:
            now = self.clock()
            waits = [
                max(0.0, s.resting_until - now)
                for s in (self.get(url) for url in urls if url not in excluded)
                if not s.banned
            ]
            return min(waits, default=None)

    def speed(self, urls: Collection[str], parallel: int) -> Speed | None:
        """What the best `parallel` of these sources gave together; None if none was measured."""
        with self._lock:
            now = self.clock()
            rates = [
                source.rate
                for source in (self.get(url) for url in self.urls(urls))
                if source.rate and source.resting_until <= now
            ]
        if not rates:
            return None
        bandwidth = sum(sorted(rates, reverse=True)[:parallel])
        return Speed(bandwidth, self.apply_rate or APPLY_RATE)

    def applied(self, count: int, seconds: float) -> None:
        """A delta gave `count` bytes of weights in `seconds`."""
        with self._lock:
            rate = count / max(seconds, 1e-6)
            self.apply_rate = (
                rate
                if not self.apply_rate
                else self.apply_rate + SMOOTHING * (rate - self.apply_rate)
            )

    def good(self, source: Source, count: int, seconds: float) -> None:
        """`count` verified bytes came in `seconds`."""
        with self._lock:
            source.in_use -= 1
            source.failures = source.silences = 0
            source.banned = False
            source.bytes_received += count
            rate = count / max(seconds, 1e-6)
            source.rate = (
                rate if not source.rate else source.rate + SMOOTHING * (rate - source.rate)
            )

    def bad(
        self, source: Source, reason: str, *, pause: float | None = None, silent: bool = False
    ) -> None:
        """It failed, stalled or lacks the object: it rests, longer each time. `silent`: it brought
        (almost) nothing and cost time; it loses its standing the second time in a row."""
        with self._lock:
            source.in_use -= 1
            source.failures += 1
            source.silences += silent
            source.last_error = reason
            grown = FIRST_PAUSE * 2.0 ** min(source.failures - 1, 10)
            source.resting_until = self.clock() + min(LONGEST_PAUSE, pause or grown)
            source.rate /= 2

    def wait(self, source: Source, pause: float) -> None:
        """It asked for patience: a chunk is still on its way to it. No fault."""
        with self._lock:
            source.in_use -= 1
            source.last_error = "it is still waiting for the chunk itself"
            source.resting_until = self.clock() + min(LONGEST_PAUSE, pause)

    def sent_bad_data(self, source: Source, reason: str) -> None:
        """Notes that the source sent bytes with a wrong hash; it is not used for BAN seconds."""
        with self._lock:
            source.in_use -= 1
            source.banned = True
            source.last_error = reason
            source.resting_until = self.clock() + BAN

    def release(self, source: Source) -> None:
        """Not used after all, through no fault of its own."""
        with self._lock:
            source.in_use -= 1


def normal_url(url: str) -> str:
    """Base URL: host in lower case, no default port, no trailing slash. Raises MalformedError
    unless http(s) with a host and without credentials, query or fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as the socket does
    except ValueError as error:
        raise MalformedError(f"not a URL: {url[:120]!r}") from error
    fit = parts.scheme in ("http", "https") and parts.hostname and port != 0
    if not fit or parts.username or parts.password or parts.query or parts.fragment:
        raise MalformedError(f"not the base URL of a source: {url[:120]!r}")
    if any(ord(letter) <= 32 or ord(letter) >= 127 for letter in url):
        raise MalformedError(f"not the base URL of a source: {url[:120]!r}")
    return f"{parts.scheme}://{authority(url)}{parts.path.rstrip('/')}"
