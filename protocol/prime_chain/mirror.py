"""A mirror: a copy of the published bytes that a pool's money and stake depend on.

The chain names lists of leaves, settlements and evidence by SHA-256 only. If the one party that
serves them stops, reward roots cannot be rebuilt or claimed, and slashes cannot be checked. Anyone
may keep a copy.

    chain's events ──► digests ──► the orchestrator, or another mirror ──► FOLDER ──► HTTP
        PoolCreated, RunRevised    run definitions
        RootPosted, LeafPosted     list of leaves; of each leaf: record, lease, verdict, table
        RewardRootPosted           settlement, its pages
        SlashProposed              evidence, rollout file, draws

A mirror answers under the orchestrator's paths, so that every command that audits works with a
mirror's URL in place of the orchestrator's. Objects are checked against their digests when they are
copied and again by their readers. Records (leases, submissions) are stored as they were served:
what they claim is signed, or names objects that are.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

from pydantic import BaseModel

from prime_chain.client import ChainClient
from prime_chain.events import (
    Event,
    LeafPosted,
    MirrorAnnounced,
    PoolCreated,
    RewardRootPosted,
    RootPosted,
    RunRevised,
    SlashProposed,
)
from prime_chain.history import read_events
from prime_core.deployment import Deployment
from prime_core.draws import DrawList
from prime_core.encoding import sha256
from prime_core.errors import (
    FatalError,
    MalformedError,
    NotFoundError,
    PolicyError,
    PrimeError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.messages import PoolInfo, SubmissionInfo
from prime_core.printing import printable
from prime_core.rollout import MAX_FILE_BYTES, Submission, decode_leaves
from prime_core.settlement import (
    SettledFile,
    Settlement,
    SettlementPage,
    is_full,
    parse_settlement,
)
from prime_core.storage.base import digest_key
from prime_core.storage.directory import DirectoryStore
from prime_core.task import SignedLease
from prime_core.transport import copies
from prime_core.transport.client import OrchestratorClient, run_bytes
from prime_core.transport.problems import CONTENT_TYPE, to_problem
from prime_core.verdict import Evidence, Outcome, Verdict
from prime_core.version import HEADER

log = logging.getLogger(__name__)
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

MAX_OBJECT_BYTES = 32 << 20
REORG_BLOCKS = 64
"""Blocks that are read again on each pass, because their events may have changed."""
UNAVAILABLE_IN_A_ROW = 3
"""Answers that fail in a row before a pass gives up. One that always fails stops nothing else."""
SOCKET_SECONDS = 30.0
MOST_CONNECTIONS = 64
"""Connections that a mirror serves at once; one more ends the oldest."""
MAX_SOURCES, SOURCE_SECONDS = 16, 10.0
"""Sources of one pool that are asked, and how long one may take to say which pool it serves, or to
begin another answer."""
REFUSALS = (NotFoundError, UnavailableError, UntrustedError, MalformedError, PolicyError)
EVERY_SECONDS = 30.0
"""Pause between two passes."""
LONGEST_PAUSE = 600.0
MAX_GB = 20
"""Size of a mirror unless its owner sets another, in 10^9 bytes."""
_PATH = re.compile(r"/v1/(objects|bytes|runs|leases|submissions)/(0x[0-9a-f]{64})")


class Source(Protocol):
    """Where published bytes come from. Each method raises NotFoundError, UnavailableError,
    UntrustedError or MalformedError."""

    def object(self, digest: Digest, limit: int) -> bytes: ...
    def run(self, digest: Digest) -> bytes: ...
    def lease(self, digest: Digest) -> SignedLease: ...
    def submission(self, digest: Digest) -> SubmissionInfo: ...


class HttpSource:
    """An orchestrator, or a mirror of one."""

    def __init__(self, client: OrchestratorClient) -> None:
        self._client = client
        self.gives_copies = True
        """False once the server did not know the request of `copies`."""

    def object(self, digest: Digest, limit: int) -> bytes:
        return self._client.get_object(digest, limit)

    def run(self, digest: Digest) -> bytes:
        return run_bytes(self._client, digest)

    def lease(self, digest: Digest) -> SignedLease:
        return self._client.get(f"/v1/leases/{digest}", SignedLease)

    def submission(self, digest: Digest) -> SubmissionInfo:
        return self._client.get(f"/v1/submissions/{digest}", SubmissionInfo)

    def copies(self, names: Sequence[str]) -> dict[str, bytes]:
        """Returns the bytes of `names` (KIND/DIGEST), asked for together. What the source lacks or
        is too large is left out; a server of before this request gives nothing. The answers have
        MOST_TAKEN bytes at most, or one answer more: no source fills the memory."""
        found: dict[str, bytes] = {}
        left = list(dict.fromkeys(names))
        taken = 0
        while left and self.gives_copies and taken < copies.MOST_TAKEN:
            asked = ",".join(left[: copies.MOST_NAMES])
            try:
                raw = self._client.request("GET", f"/v1/copies?names={asked}", b"", signed=False)
            except NotFoundError:
                self.gives_copies = False
                break
            given = copies.unpack(raw)
            if not given.keys() & left:
                left = left[copies.MOST_NAMES :]  # what is too large for an answer
            found |= {n: data for n in left if (data := given.get(n)) is not None}
            taken += len(raw)
            left = [name for name in left if name not in given]
        return found


class AnySource:
    """Several sources of one pool. Each item comes from the first source that serves it; a wrong
    or malformed item counts as not served."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)

    def object(self, digest: Digest, limit: int) -> bytes:
        return self._first(lambda source: source.object(digest, limit))

    def run(self, digest: Digest) -> bytes:
        return self._first(lambda source: source.run(digest))

    def lease(self, digest: Digest) -> SignedLease:
        return self._first(lambda source: source.lease(digest))

    def submission(self, digest: Digest) -> SubmissionInfo:
        return self._first(lambda source: source.submission(digest))

    def _first(self, read: Callable[[Source], T]) -> T:
        """Raises NotFoundError if every source lacks the item, UnavailableError if one could not be
        asked or served something else."""
        said: list[Exception] = []
        for source in self._sources:
            try:
                return read(source)
            except REFUSALS as error:
                said.append(error)
        if said and all(isinstance(error, NotFoundError) for error in said):
            raise NotFoundError(str(said[0]))
        raise UnavailableError("; ".join(map(str, said)) or "no source of the pool answers")


class AnnouncedMirrors:
    """The mirrors that a pool's validators named on chain, as one source. It reads the chain and
    connects to the mirrors when an item is first needed. `close` ends the connections."""

    def __init__(
        self,
        client: ChainClient,
        deployment: Deployment,
        pool: int,
        *,
        allow_private: bool = False,
    ) -> None:
        self._chain = (client, deployment, pool)
        self._allow_private = allow_private
        self._opened = ExitStack()

    def close(self) -> None:
        self._opened.close()

    @cached_property
    def urls(self) -> dict[Address, str]:
        """URL of each validator's mirror, by the validator's address."""
        return announced(*self._chain)

    @cached_property
    def _sources(self) -> AnySource:
        _, deployment, pool = self._chain
        urls = self.urls.values()
        opened = open_sources([], urls, deployment, pool, allow_private=self._allow_private)
        return AnySource([HttpSource(one) for one in self._opened.enter_context(opened)])

    def object(self, digest: Digest, limit: int) -> bytes:
        return self._some().object(digest, limit)

    def run(self, digest: Digest) -> bytes:
        return self._some().run(digest)

    def lease(self, digest: Digest) -> SignedLease:
        return self._some().lease(digest)

    def submission(self, digest: Digest) -> SubmissionInfo:
        return self._some().submission(digest)

    def _some(self) -> AnySource:
        if not self.urls:
            raise NotFoundError("no validator of the pool names a mirror")
        return self._sources


class _NamedClient(OrchestratorClient):
    """A client of a mirror that a validator named on chain."""

    named = True


@contextmanager
def open_sources(
    urls: Sequence[str],
    mirrors: Collection[str],
    deployment: Deployment,
    pool: int,
    *,
    allow_private: bool = False,
) -> Iterator[list[OrchestratorClient]]:
    """Clients of those orchestrators (`urls`, which the user named) and `mirrors` (which validators
    named on chain) that answer in time for this pool of this deployment, at most MAX_SOURCES. They
    are asked at once, each in a thread, so that one that is silent delays the others only once."""
    found: list[OrchestratorClient] = []
    every = list(dict.fromkeys([*urls, *mirrors]))
    try:
        for at in range(0, len(every), MAX_SOURCES):
            if len(found) >= MAX_SOURCES:
                break
            asked: list[tuple[OrchestratorClient, Future[PoolInfo]]] = []
            for url in every[at : at + MAX_SOURCES]:
                try:
                    kind = OrchestratorClient if url in urls else _NamedClient
                    client = kind(url, allow_private=allow_private, timeout=SOURCE_SECONDS)
                except UserError as error:
                    log.warning("%s is not asked: %s", printable(url), printable(str(error)))
                    continue
                asked.append((client, _pool_of(client)))
            wait([answer for _, answer in asked], timeout=SOURCE_SECONDS)
            for client, answer in asked:
                if _serves(client, answer, deployment, pool):
                    found.append(client)
                elif answer.done():
                    client.close()
        yield found[:MAX_SOURCES]
    finally:
        for client in found:
            client.close()


def _pool_of(client: OrchestratorClient) -> Future[PoolInfo]:
    """Asks in a thread which pool `client` serves. The thread may outlive its caller's timeout,
    because a server can send the head of an answer as slowly as it likes."""
    answer: Future[PoolInfo] = Future()

    def ask() -> None:
        try:
            answer.set_result(client.pool())
        except Exception as error:  # raised where the answer is read
            answer.set_exception(error)

    threading.Thread(target=ask, name="source", daemon=True).start()
    return answer


def _serves(
    client: OrchestratorClient, answer: Future[PoolInfo], deployment: Deployment, pool: int
) -> bool:
    try:
        info = answer.result(timeout=0)
    except TimeoutError:
        log.warning("%s is not asked: no answer in time", printable(client.base_url))
        return False
    except (UserError, *REFUSALS) as error:
        log.warning("%s is not asked: %s", printable(client.base_url), printable(str(error)))
        return False
    named = (info.chain_id, info.contracts, info.pool)
    return named == (deployment.chain_id, deployment.contracts, pool)


@dataclass
class Copied:
    """Result of one pass. `waiting`: leaves without a verdict yet. `missing`: what the source did
    not serve, and why."""

    new: int = 0
    bytes: int = 0
    waiting: int = 0
    missing: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {
            "new": self.new,
            "bytes": self.bytes,
            "waiting": self.waiting,
            "missing": dict(sorted(self.missing.items())),
        }


class Mirror:
    """Copies what one pool's events name into `folder`.

    It never deletes. At `max_bytes` it stops to copy and reports the rest as missing. Only `hold`
    may be called from other threads; reading the folder at the same time is safe.
    """

    def __init__(
        self,
        folder: Path,
        deployment: Deployment,
        pool: int,
        source: HttpSource,
        *,
        max_bytes: int,
    ) -> None:
        self.store = DirectoryStore(folder)
        self.held = sum(self.store.size(key) for key in self.store.keys(""))
        self._deployment = deployment
        self.pool = pool
        self._source = source
        self._max_bytes = max_bytes
        self._writing = threading.Lock()
        self._done: set[Event | Digest] = set()
        self._given: dict[Digest, SubmissionInfo] = {}
        self._failures = 0
        self._pass = Copied()
        self._refused = False  # whether something found no room in this step of a pass

    def update(self, events: Sequence[Event]) -> Copied:
        """Copies what `events` (all of the pool's so far) name and the folder lacks.

        Evidence and settlements come first: a slash can be disputed for hours only. Raises
        UnavailableError if the source does not answer.
        """
        self._pass = Copied()
        self._source.gives_copies = True  # the server may be a newer one since the last pass
        mine = [e for e in events if getattr(e, "pool", None) == self.pool]
        for step in (self._definition, self._slash, self._reward_root, self._work_root):
            self._refused = False
            for event in mine:
                if event not in self._done and step(event):
                    self._done.add(event)
        return self._pass

    def describe(self, info: PoolInfo, url: str) -> None:
        """Stores the pool's facts with `url`, at which this mirror is reached, as the server's
        name: clients refuse a server that gives another name than the one they use."""
        mine = info.model_copy(update={"orchestrator": url})
        self.store.put("pool", mine.model_dump_json().encode())

    def hold(self, data: bytes) -> None:
        """Stores an object of the caller that the source may never serve. If mirror or disk is
        full, it only logs that."""
        with self._writing:
            key = digest_key(sha256(data))
            if self.store.exists(key):
                return
            if self.held + len(data) > self._max_bytes:
                log.warning("%s is not kept: %s", key, self._full)
                return
            try:
                self.store.put(key, data)
            except UnavailableError as error:
                log.warning("%s is not kept: %s", key, error)
                return
            self.held += len(data)

    @property
    def _full(self) -> str:
        return f"the mirror is full ({self._max_bytes} bytes)"

    # -- what each event names; True once all of it is held -------------------------------------

    def _definition(self, event: Event) -> bool:
        if not isinstance(event, PoolCreated | RunRevised):
            return False
        name = event.run_digest
        return self._copied(f"runs/{name}", lambda: self._source.run(name)) is not None

    def _slash(self, event: Event) -> bool:
        if not isinstance(event, SlashProposed):
            return False
        evidence = self._parsed(Evidence, event.evidence)
        record = self._submission(event.leaf, again=True)
        if evidence is None:
            return False
        file = self._object(evidence.submission.submission.sha256, MAX_FILE_BYTES)
        return self._draws(evidence.lease) and record and file is not None

    def _draws(self, lease: SignedLease) -> bool:
        """The secrets are published a lease time after the draw: their absence is not an error."""
        if lease.opening is None:
            return True
        listed = self._parsed(DrawList, lease.opening.draws)
        if listed is None:
            return False
        names = [signed.commitment.commitment for signed in listed.commitments] + [listed.second]
        self._objects(names)
        shown = [self._object(name, due=False) for name in names]
        return None not in shown

    def _reward_root(self, event: Event) -> bool:
        if not isinstance(event, RewardRootPosted):
            return False
        settlement = self._read(event.object, parse_settlement, "Settlement")
        if settlement is None:
            return False
        held = self._verdicts(settlement.files)
        return all([held, *(self._page(name, settlement) for name in settlement.pages)])

    def _page(self, name: Digest, settlement: Settlement) -> bool:
        part = self._parsed(SettlementPage, name)
        if part is None:
            return False
        if not is_full(part, name, settlement):
            self._pass.missing[str(name)] = "it is not a full page"
            return False
        return self._verdicts(part.files)

    def _verdicts(self, files: Sequence[SettledFile]) -> bool:
        names = [file.verdict for file in files if file.verdict != ZERO_DIGEST]
        held = True
        for some in _chunks(names):
            self._verdicts_with_tables(some)
            for name in some:
                held = self._verdict(name) and held
        return held

    def _work_root(self, event: Event) -> bool:
        if self._is_full():  # later roots find no room either
            return False
        if isinstance(event, LeafPosted):
            return self._submissions([event.leaf])
        if not isinstance(event, RootPosted) or event.leaves_object == ZERO_DIGEST:
            return False
        data = self._object(event.leaves_object)
        if data is None:
            return False
        try:
            leaves = decode_leaves(data)
        except MalformedError as error:
            self._pass.missing[str(event.leaves_object)] = str(error)
            return True  # another copy would be the same
        domain = self._deployment.domain_of(Submission)
        return self._submissions([leaf.submission.digest(domain) for leaf in leaves])

    def _submissions(self, leaves: Sequence[Digest]) -> bool:
        """Like `_submission` for each leaf, with few requests for all of them together."""
        held = True
        for some in _chunks([name for name in leaves if name not in self._done]):
            self._records(some)
            for name in some:
                if self._is_full():
                    return False
                held = self._submission(name) and held
        return held

    def _is_full(self) -> bool:
        return self._refused

    def _submission(self, name: Digest, *, again: bool = False) -> bool:
        """Copies a leaf's record, its lease, and what its verdict names. Returns whether the record
        is final, that is void or with a verdict, and all of it is stored. A final record is not
        fetched a second time, except with `again`, for a slash: an acceptance may have been
        withdrawn."""
        if name in self._done and not again:
            return True
        key = f"submissions/{name}"
        info = None if again else self._given.pop(name, None) or self._whole(key)
        if info is None:
            info = self._asked(key, lambda: self._source.submission(name))
            if info is None or not self._put(key, info.model_dump_json().encode()):
                return False
        lease_digest = info.lease_digest
        lease = self._copied(
            f"leases/{lease_digest}",
            lambda: self._source.lease(lease_digest).model_dump_json().encode(),
        )
        if info.verdict is None and info.status != "void":
            self._pass.waiting += 1
            return False
        if lease is None or not (info.verdict is None or self._verdict(info.verdict)):
            return False
        self._done.add(name)
        return True

    def _whole(self, key: str) -> SubmissionInfo | None:
        """The stored record of a leaf, if it is final and what it names is stored."""
        try:
            info = SubmissionInfo.model_validate_json(self.store.get(key, MAX_FILE_BYTES))
        except (NotFoundError, MalformedError, ValueError):
            return None
        named = [] if info.verdict is None else [digest_key(info.verdict)]
        final = named or info.status == "void"
        there = all(map(self.store.exists, (f"leases/{info.lease_digest}", *named)))
        return info if final and there else None

    def _verdict(self, name: Digest) -> bool:
        if name in self._done:
            return True
        verdict = self._parsed(Verdict, name)
        if verdict is None:
            return False
        try:
            deciding = verdict.deciding.opinion
        except MalformedError as error:
            self._pass.missing[str(name)] = str(error)
            return False
        held = [self._object(deciding.table)]
        if deciding.outcome == Outcome.REJECTED:
            held.append(self._object(deciding.evidence))
        if None in held:
            return False
        self._done.add(name)
        return True

    # -- several at once: what these do not get is asked for by its own path ---------------------

    def _records(self, leaves: Sequence[Digest]) -> None:
        """Asks for the records of those leaves that are not held in full, and stores them, their
        leases, verdicts and tables."""
        held = {name: self._whole(f"submissions/{name}") for name in leaves}
        self._given = {name: info for name, info in held.items() if info is not None}
        found = self._together([f"submissions/{name}" for name in leaves if held[name] is None])
        records: list[SubmissionInfo] = []
        for key, data in found.items():
            with suppress(ValueError):
                info = SubmissionInfo.model_validate_json(data)
                if self._put(key, info.model_dump_json().encode()):
                    self._given[Digest(key.partition("/")[2])] = info
                    records.append(info)
        leases = [f"leases/{info.lease_digest}" for info in records]
        found = self._together([key for key in leases if not self.store.exists(key)])
        for key, data in found.items():
            with suppress(ValueError):
                self._put(key, SignedLease.model_validate_json(data).model_dump_json().encode())
        self._verdicts_with_tables([info.verdict for info in records if info.verdict])

    def _verdicts_with_tables(self, names: Sequence[Digest]) -> None:
        named: list[Digest] = []
        for data in self._objects([name for name in names if name not in self._done]):
            with suppress(MalformedError, ValueError):
                deciding = Verdict.model_validate_json(data).deciding.opinion
                rejected = deciding.outcome == Outcome.REJECTED
                named += [deciding.table, deciding.evidence] if rejected else [deciding.table]
        self._objects(named)

    def _objects(self, names: Sequence[Digest]) -> list[bytes]:
        """Stores those objects that the folder lacks. Returns what was fetched."""
        lacking = [name for name in names if not self.store.exists(digest_key(name))]
        found = self._together([f"objects/{name}" for name in lacking])
        for data in found.values():
            self._put(digest_key(sha256(data)), data)
        return list(found.values())

    def _together(self, names: Sequence[str]) -> dict[str, bytes]:
        try:
            return self._source.copies(names)
        except REFUSALS:
            return {}

    # -- copying --------------------------------------------------------------------------------

    def _parsed(self, kind: type[M], digest: Digest) -> M | None:
        return self._read(digest, kind.model_validate_json, kind.__name__)

    def _read(self, digest: Digest, parse: Callable[[bytes], T], kind: str) -> T | None:
        data = self._object(digest)
        if data is None:
            return None
        try:
            return parse(data)
        except ValueError:
            self._pass.missing[str(digest)] = f"it is not a valid {kind}"
            return None

    def _object(
        self, digest: Digest, limit: int = MAX_OBJECT_BYTES, *, due: bool = True
    ) -> bytes | None:
        key = digest_key(digest)
        return self._copied(key, lambda: self._source.object(digest, limit), limit, due=due)

    def _copied(
        self,
        key: str,
        fetch: Callable[[], bytes],
        limit: int = MAX_OBJECT_BYTES,
        *,
        due: bool = True,
    ) -> bytes | None:
        """Returns the bytes under `key`, fetched if the folder lacks them. Returns None if they
        cannot be fetched; if they are `due`, they are then listed as missing."""
        if self.store.exists(key):
            try:
                return self.store.get(key, limit)
            except MalformedError as error:  # a file that something names as another kind of object
                self._pass.missing[key] = str(error)
                return None
        data = self._asked(key, fetch, due=due)
        return data if data is not None and self._put(key, data) else None

    def _put(self, key: str, data: bytes) -> bool:
        """Stores `data` unless it is there. False if the mirror is full."""
        with self._writing:
            old = self.store.get(key, MAX_FILE_BYTES) if self.store.exists(key) else None
            if old == data:
                return True
            if self.held + len(data) > self._max_bytes:
                self._pass.missing[key], self._refused = self._full, True
                return False
            self.store.put(key, data)
            self.held += len(data) - len(old or b"")
        self._pass.new += old is None
        self._pass.bytes += len(data)
        return True

    def _asked(self, key: str, fetch: Callable[[], T], *, due: bool = True) -> T | None:
        """Returns what `fetch` returns, or None with an entry in `missing` if the source refuses
        it."""
        try:
            found = fetch()
        except (NotFoundError, UntrustedError, MalformedError, UnavailableError) as error:
            gone = isinstance(error, UnavailableError)
            self._failures = self._failures + 1 if gone else 0
            if self._failures >= UNAVAILABLE_IN_A_ROW:
                self._failures = 0
                raise
            if due:
                self._pass.missing[key] = str(error)
            return None
        self._failures = 0
        return found


def _chunks(names: Sequence[Digest]) -> Iterator[Sequence[Digest]]:
    for at in range(0, len(names), copies.MOST_NAMES):
        yield names[at : at + copies.MOST_NAMES]


class Follower:
    """Keeps a mirror up to date with the chain."""

    def __init__(self, mirror: Mirror, client: ChainClient, deployment: Deployment) -> None:
        self._mirror = mirror
        self._client = client
        self._deployment = deployment
        self._events: dict[Event, None] = {}
        self._next = deployment.block
        self.last = Copied()

    def tick(self) -> Copied:
        """Reads what is new on chain and copies what it names. Raises UnavailableError."""
        head = self._client.block_number()
        first = max(self._deployment.block, self._next - REORG_BLOCKS)
        found = read_events(
            self._client,
            self._deployment,
            contracts=("pools", "work", "rewards", "slasher"),
            first=first,
            last=head,
            pool=self._mirror.pool,
        )
        self._events |= dict.fromkeys(found)
        self._next = head + 1
        self.last = self._mirror.update(list(self._events))
        new = self.last
        if new.new or new.missing:
            log.info(
                "mirror: %d new (%d bytes), %d held in all", new.new, new.bytes, self._mirror.held
            )
        for key, why in list(new.missing.items())[:8]:
            log.warning("mirror: %s is not served: %s", key, why)
        return new


def keep(follower: Follower, stop: threading.Event, seconds: float) -> None:
    """Updates the mirror every `seconds` until `stop`, with longer pauses while chain or source do
    not answer."""
    pause = seconds
    while not stop.is_set():
        try:
            follower.tick()
            pause = seconds
        except UnavailableError as error:
            pause = min(2 * pause, LONGEST_PAUSE)
            log.warning("the mirror tries again in %.0f s: %s", pause, error)
        stop.wait(pause)


def announced(client: ChainClient, deployment: Deployment, pool: int) -> dict[Address, str]:
    """URL of each validator's mirror, by the validator's address, from the chain's events."""
    found: dict[Address, str] = {}
    for event in read_events(client, deployment, contracts=("work",), pool=pool):
        if isinstance(event, MirrorAnnounced):
            found[event.validator] = event.url
    return {who: url for who, url in found.items() if url}


# -- serving ------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    """Serves each connection in a thread, MOST_CONNECTIONS at most. A new connection then replaces
    the oldest, so that slow clients keep no other out."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: dict[socket.socket, None] = {}
        self._change = threading.Condition()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._change:
            if len(self._open) >= MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                with suppress(OSError):  # it ended meanwhile
                    oldest.shutdown(socket.SHUT_RDWR)
                self._change.wait_for(lambda: oldest not in self._open, SOCKET_SECONDS)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._change:
            self._open.pop(request, None)
            self._change.notify_all()
        super().shutdown_request(request)


class MirrorServer:
    """Serves a mirror's folder over HTTP in threads of its own, until `close`."""

    def __init__(self, folder: Path, listen: str) -> None:
        """`listen` is HOST:PORT. Raises UserError if nothing can listen there."""
        store = DirectoryStore(folder)
        host, _, port = listen.rpartition(":")

        class Handler(_Handler):
            objects = store

        try:
            self._server = _Server((host.strip("[]"), int(port)), Handler)
        except (OSError, ValueError, OverflowError) as error:
            raise UserError(
                f"the mirror cannot listen on {listen}: {error}",
                hint="name a free HOST:PORT, like 127.0.0.1:8090",
            ) from error
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="mirror")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_Reply = tuple[int, bytes, dict[str, str]]
"""Status, body and headers."""


class _Handler(BaseHTTPRequestHandler):
    objects: DirectoryStore
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_SECONDS
    disable_nagle_algorithm = True  # head and body are two writes: answers would wait 40 ms

    def do_GET(self) -> None:
        try:
            status, body, headers = self._found()
        except Exception:
            log.exception("a defect of this mirror")
            problem = FatalError("a defect of this mirror; its log says more")
            status, body, headers = self._problem(problem)
        self._answer(status, body, headers)

    def _found(self) -> _Reply:
        path, _, query = self.path.partition("?names=")
        if path == "/v1/copies":
            return self._copies(unquote(query))
        found = _PATH.fullmatch(self.path)
        kind, name = (found[1], Digest(found[2])) if found else ("", ZERO_DIGEST)
        if kind == "objects":
            if not self.objects.exists(digest_key(name)):
                return self._missing(name)
            return 307, b"", {"Location": f"/v1/bytes/{name}"}
        if kind:
            key = digest_key(name) if kind == "bytes" else f"{kind}/{name}"
        elif self.path == "/v1/pool":
            key = "pool"
        else:
            return self._missing(self.path[:200])
        try:
            data = self.objects.get(key, MAX_FILE_BYTES)
        except NotFoundError:
            return self._missing(name)
        kind = "application/octet-stream" if kind == "bytes" else "application/json"
        return 200, data, {"Content-Type": kind}

    def _copies(self, query: str) -> _Reply:
        def read(kind: str, name: Digest, limit: int) -> bytes:
            key = digest_key(name) if kind == "objects" else f"{kind}/{name}"
            return self.objects.get(key, limit)

        try:
            body = copies.pack(copies.parse_names(query), read)
        except MalformedError as error:
            return self._problem(error)
        return 200, body, {"Content-Type": "application/octet-stream"}

    def _missing(self, name: str) -> _Reply:
        return self._problem(NotFoundError(f"this mirror has no {name}"))

    def _problem(self, error: PrimeError) -> _Reply:
        status, said = to_problem(error)
        return status, json.dumps(said).encode(), {"Content-Type": CONTENT_TYPE}

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        asked = self.headers.get(HEADER, "")
        fields = {HEADER: asked if asked.isdigit() and len(asked) < 6 else "1"}
        for name, value in (fields | headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug("mirror: " + format, *args)
