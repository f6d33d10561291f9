"""A validator's client for the orchestrator: signed requests and public reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from prime_broadcast.pool import PoolNames
from prime_core.checkpoint import SignedManifest
from prime_core.draws import DrawList, DrawReveal, SignedDrawCommitment
from prime_core.encoding import sha256
from prime_core.errors import MalformedError, PrimeError
from prime_core.ids import Digest
from prime_core.messages import ClassInfo, PoolInfo, UploadAnswer
from prime_core.rollout import MAX_FILE_BYTES
from prime_core.signing import Answer, Strict
from prime_core.transport.client import OrchestratorClient
from prime_core.transport.problems import from_problem
from prime_core.validator_messages import (
    ClaimAnswer,
    ClaimRequest,
    ClassList,
    CommitAnswer,
    CommitRequest,
    EntryAnswer,
    GivenOpinion,
    Job,
    KeepRequest,
    ObjectRequest,
    ReleaseRequest,
    RowsAnswer,
    RowsRequest,
    SealAnswer,
    SealRequest,
    TogetherAnswer,
    TogetherRequest,
)
from prime_core.verdict import Reason, SignedOpinion
from prime_engine.exact import NumericClass

MAX_OBJECT_BYTES = 32 << 20
TABLE_BYTES = 256 << 10
"""Larger tables are uploaded on their own."""
MOST_BYTES = 1 << 20
"""Most bytes of entries in one request, of which the orchestrator takes encoding.MAX_JSON_BYTES."""
GATHER_SECONDS = 0.01
"""A request waits this long for entries of other threads, whose files are judged together."""
KEPT_CLASSES = 64
"""Exact classes that are remembered; files name those of the newest policies."""
Entry = RowsRequest | SealRequest | GivenOpinion
Answered = TypeVar("Answered", bound=Strict)


class Empty(Answer):
    """{}"""


class ValidatorApi:
    """One session with an orchestrator; calls from several threads are serialized. `worker`
    distinguishes this process from others with the same key. Raises the same errors as
    OrchestratorClient."""

    def __init__(self, client: OrchestratorClient, worker: str) -> None:
        self.client = client
        self.worker = worker
        self._lock = threading.Lock()
        self._names = PoolNames(client)
        self._classes: dict[Digest, NumericClass] = {}
        self._together: Together | None = None

    def close(self) -> None:
        self.client.close()

    def pool(self) -> PoolInfo:
        with self._lock:
            return self.client.pool(refresh=True)

    def commit(self, commitments: Sequence[SignedDrawCommitment]) -> tuple[int, ...]:
        """Returns past epochs whose secrets the orchestrator does not have."""
        request = CommitRequest(commitments=tuple(commitments))
        return self._post("commitments", request, CommitAnswer).missing

    def reveal(self, shown: DrawReveal) -> None:
        self._post("reveals", shown, Empty)

    def claim(self, most: int) -> ClaimAnswer:
        """Claims files. The answer says whether the orchestrator takes several entries in one
        request; from then on, calls of several threads share requests."""
        request = ClaimRequest(worker=self.worker, most=most)
        answer = self._post("claims", request, ClaimAnswer)
        if answer.together != (self._together.most if self._together else 0):
            self._together = Together(self._post_together, answer.together)
        if not answer.together:
            self._together = None
        return answer

    def announce(self, classes: ClassList) -> None:
        """Announces the exact classes in which this machine repeats proof passes of a policy."""
        self._post("classes", classes, Empty)

    def exact_class(self, digest: Digest) -> NumericClass | None:
        """Returns the exact class of that digest; None if the orchestrator cannot say now."""
        if known := self._classes.get(digest):
            return known
        with self._lock:
            try:
                info = self.client.get(f"/v1/classes/{digest}", ClassInfo)
            except PrimeError:
                return None
            found = NumericClass(info.facts, Digest(info.fingerprint))
            if found.digest() != digest:
                return None
            if len(self._classes) >= KEPT_CLASSES:
                del self._classes[next(iter(self._classes))]
            self._classes[digest] = found
        return found

    def keep(self, submissions: Sequence[Digest]) -> None:
        request = KeepRequest(worker=self.worker, submissions=tuple(submissions))
        self._post("keep", request, Empty)

    def abstain(self, submission: Digest, reason: Reason, detail: str) -> None:
        """Gives the file up for good; it goes to another validator."""
        self._release(submission, "abstain", reason, detail)

    def delay(self, submission: Digest, reason: Reason, detail: str, seconds: int) -> None:
        """Postpones the file; it returns after `seconds`."""
        self._release(submission, "later", reason, detail, seconds)

    def rows_seen(self, submission: Digest, marks: Mapping[str, bool]) -> frozenset[str]:
        """Returns those of a file's row marks that other files have."""
        request = RowsRequest(submission=submission, marks=dict(marks))
        if self._together is not None:
            return frozenset(self._together.ask(request).marks)
        return frozenset(self._post("rows", request, RowsAnswer).marks)

    def seal(self, submission: Digest, seal: Digest) -> bool:
        """Seals an opinion; returns whether it is to be submitted now."""
        request = SealRequest(worker=self.worker, submission=submission, seal=seal)
        if self._together is not None:
            return self._together.ask(request).reveal
        return self._post("seals", request, SealAnswer).reveal

    def upload(self, submission: Digest, data: bytes) -> None:
        """Uploads a table or evidence of a file on which an opinion is sealed."""
        request = ObjectRequest(submission=submission, sha256=sha256(data), size=len(data))
        target = self._post("objects", request, UploadAnswer)
        if not target.exists:
            with self._lock:
                self.client.upload(target, data)

    def opinion(self, signed: SignedOpinion, table: bytes) -> None:
        """Submits a sealed opinion that is due, with the table that it names."""
        if self._together is not None and len(table) <= TABLE_BYTES:
            self._together.ask(GivenOpinion(signed=signed, table=table.decode()))
            return
        self.upload(Digest(signed.opinion.submission), table)
        self._post("opinions", signed, Empty)

    def file(self, job: Job) -> bytes:
        """Returns the bytes of a job's file, checked against the digest its node signed."""
        claim = job.submission.submission
        with self._lock:
            return self.client.download(job.file, limit=MAX_FILE_BYTES, sha256=claim.sha256)

    def object(self, digest: Digest) -> bytes:
        with self._lock:
            return self.client.get_object(digest, MAX_OBJECT_BYTES)

    def draw_list(self, digest: Digest) -> DrawList:
        """Returns a DrawList object. Raises MalformedError if it does not parse."""
        try:
            return DrawList.model_validate_json(self.object(digest))
        except ValueError as error:
            raise MalformedError("the lease's list of draw commitments does not parse") from error

    def run(self, digest: Digest | None = None) -> bytes:
        """Returns the bytes of the pool's first run definition, or of the revision with that
        digest."""
        path = "/v1/run" if digest is None else f"/v1/runs/{digest}"
        with self._lock:
            return self.client.request("GET", path, b"", signed=False)

    def policy(self, version: int) -> SignedManifest:
        with self._lock:
            return self._names.policy(version)

    def relays(self) -> list[str]:
        """Returns the URLs of the relays that serve policies."""
        with self._lock:
            return self._names.relays()

    def _release(
        self,
        submission: Digest,
        kind: Literal["abstain", "later"],
        reason: Reason,
        detail: str,
        seconds: int = 0,
    ) -> None:
        request = ReleaseRequest(
            worker=self.worker, submission=submission, kind=kind, reason=int(reason),
            detail=detail[:2048], seconds=seconds,
        )  # fmt: skip
        self._post("release", request, Empty)

    def _post_together(self, request: TogetherRequest) -> TogetherAnswer:
        return self._post("together", request, TogetherAnswer)

    def _post(self, path: str, body: Strict, answer: type[Answered]) -> Answered:
        with self._lock:
            return self.client.post(f"/v1/validators/{path}", body, answer)


@dataclass
class _Waiting:
    """An entry, its size in bytes, and its answer or what sending it raised."""

    entry: Entry
    size: int
    answer: EntryAnswer | None = None
    error: BaseException | None = None


@dataclass
class Together:
    """Sends entries of several threads with `post`, at most `most` and MOST_BYTES a request. Those
    made at about the same time share a request, and so do those made while another is under way.
    Thread-safe."""

    post: Callable[[TogetherRequest], TogetherAnswer]
    most: int
    _waiting: list[_Waiting] = field(default_factory=list)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, entry: Entry) -> EntryAnswer:
        """Returns the answer to one entry. Raises the orchestrator's refusal of this entry, or the
        error of the whole request."""
        mine = _Waiting(entry, len(entry.model_dump_json()))
        with self._guard:
            self._waiting.append(mine)
        while mine.answer is None and mine.error is None:
            with self._turn:
                if mine.answer is None and mine.error is None:
                    time.sleep(GATHER_SECONDS)
                    self._send(self._next())
        if mine.error is not None:
            raise mine.error
        assert mine.answer is not None
        if mine.answer.problem:
            raise from_problem(mine.answer.status, mine.answer.problem.encode())
        return mine.answer

    def _next(self) -> list[_Waiting]:
        """Takes the entries of the next request, at least one, in their order."""
        with self._guard:
            count, size = 1, self._waiting[0].size
            for one in self._waiting[1 : self.most]:
                size += one.size
                if size > MOST_BYTES:
                    break
                count += 1
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _send(self, some: list[_Waiting]) -> None:
        rows = [one for one in some if isinstance(one.entry, RowsRequest)]
        seals = [one for one in some if isinstance(one.entry, SealRequest)]
        given = [one for one in some if isinstance(one.entry, GivenOpinion)]
        try:
            found = self.post(
                TogetherRequest(
                    rows=tuple(one.entry for one in rows),  # type: ignore[misc]
                    seals=tuple(one.entry for one in seals),  # type: ignore[misc]
                    opinions=tuple(one.entry for one in given),  # type: ignore[misc]
                )
            )
            answers = (*found.rows, *found.seals, *found.opinions)
            numbers = (len(found.rows), len(found.seals), len(found.opinions))
            if numbers != (len(rows), len(seals), len(given)):
                raise MalformedError("the orchestrator answered another number of entries")
        except BaseException as error:
            for one in some:
                one.error = error
            return
        for one, answer in zip((*rows, *seals, *given), answers, strict=True):
            one.answer = answer
