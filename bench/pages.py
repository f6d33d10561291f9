"""The cost of API pages and commands with many rows of strangers or a long record; part of
`bench strangers`.

nodes, status   44,000 shadow nodes lie in the store, which admission bounds to 512
work list       `prime-node work list` of a node with 461 and with 10,000 receipts
sessions        50,000 strangers opened a session and revoked it; a tick deletes what is old
flood           requests of an honest client while strangers revoke sessions that they never had

The audit's figures are those of commit 3760542 on another day; wall time where the unit says so.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

from bench import seats
from bench.form import Row
from devnet.chain import Anvil
from prime_core import encoding, ids, version
from prime_core.errors import FatalError
from prime_core.ids import ZERO_DIGEST
from prime_core.messages import NODES_PAGE, ReceiptAnswer, RevokeRequest
from prime_core.node import Hardware, SessionRevocation
from prime_core.rollout import Receipt, SignedSubmission, Submission
from prime_core.signing import LocalSigner
from prime_core.task import Lease, SignedLease
from prime_node.spool import Spool
from prime_orchestrator.api import status
from prime_orchestrator.api.liveness import LifeTicks
from prime_orchestrator.store import nodes, schema

SHADOWS = 44_000
RECORDS = (461, 10_000)
"""Receipts of a node: as the audit had, and as many as a journal keeps."""
FLOODERS = 4
HONEST = 200
"""Requests of the honest client with and without the flood."""
AUDIT = "audit, commit 3760542"
_MACHINE = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())


# ── pages ────────────────────────────────────────────────────────────────────────────────────────


def shadow_pages(pool: seats.Pool) -> list[Row]:
    """Size and CPU time of the first page of nodes, of all pages, and of a status."""
    backend, now = pool.backend, pool.clock[0]
    pool.seat(5, honest=True)
    with backend.store.begin() as connection:
        nodes.admit(
            connection, ids.address(f"0x{1 << 90:040x}"), hardware=_MACHINE, runtime="process",
            now=now + 1, status="shadow",
        )  # fmt: skip
        table = schema.nodes
        pattern = dict(
            connection.execute(sa.select(table).where(table.c.status == "shadow")).mappings().one()
        )
        connection.execute(
            sa.insert(table),
            [
                pattern | {"address": ids.address(f"0x{(1 << 90) + at:040x}")}
                for at in range(1, SHADOWS)
            ],
        )

    def nodes_read() -> status.NodeList:
        return status.NodeList(backend)

    def pages() -> list[str]:
        found, last = [listed.page("", None)], json.loads(listed.page("", None))
        while len(last) == NODES_PAGE:
            found.append(listed.page(last[-1]["node"], None))
            last = json.loads(found[-1])
        return found

    def first() -> str:
        return listed.page("", None)

    def picture() -> bytes:
        return status.status(backend).model_dump_json().encode()

    listed = nodes_read()
    every = pages()
    if sum(len(json.loads(one)) for one in every) != SHADOWS + 5:
        raise FatalError("the pages do not hold every node")
    shown = status.status(backend).nodes
    members = sum(one.status == "active" for one in shown)
    return [
        Row("shadow_nodes_page_mb", max(map(len, every)) / 1e6,
            f"MB, largest page of /v1/nodes with {SHADOWS:,} shadow nodes", 1.0,
            peer=8.8, peer_name=AUDIT),
        Row("shadow_nodes_page_ms", 1e3 * _cpu(first), "CPU ms, first page of /v1/nodes"),
        Row("shadow_nodes_read_ms", 1e3 * _cpu(nodes_read),
            "CPU ms, all nodes for /v1/nodes, made at most once a second"),
        Row("shadow_status_mb", len(picture()) / 1e6,
            f"MB, /v1/status with {SHADOWS:,} shadow nodes", 1.0),
        Row("shadow_status_ms", 1e3 * _cpu(picture),
            "CPU ms, /v1/status, made at most once a second", 500,
            peer=25_000, peer_name=f"{AUDIT}, wall time, for each reader"),
        Row("shadow_status_members", members, "of 5 members in /v1/status", 5, "higher"),
    ]  # fmt: skip


def _cpu(work: Callable[[], object], times: int = 5) -> float:
    """CPU seconds of one call, the median of some."""
    work()
    spent = []
    for _ in range(times):
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def revoked_sessions(pool: seats.Pool, count: int = 50_000) -> Row:
    """CPU time of the tick that runs every second, in the transaction that issuing leases waits
    for."""
    now = int(pool.clock[0])
    accounts = [ids.address(f"0x{(1 << 100) + at:040x}") for at in range(count)]
    with pool.backend.store.begin() as connection:
        connection.execute(
            sa.insert(schema.sessions),
            [
                {
                    "key_id": _digest("session", at), "account": account, "scope": "node",
                    "issued_at": now, "expiry": now + 3600, "revoked": True,
                }
                for at, account in enumerate(accounts)
            ],
        )  # fmt: skip
        connection.execute(
            sa.insert(schema.revocations),
            [{"account": account, "revoked_before": now} for account in accounts],
        )
    life = LifeTicks(pool.backend)
    return Row("revoked_tick_ms", 1e3 * _cpu(life.tick),
               f"CPU ms, a tick with {count:,} revoked sessions of strangers", 10,
               peer=82, peer_name="commit aaa4d05")  # fmt: skip


# ── the work list ────────────────────────────────────────────────────────────────────────────────


def work_lists(pool: seats.Pool, port: int, root: Path) -> list[Row]:
    """CPU time of the command and of the API process that it asks, for each of RECORDS; and of a
    plain `work list`, which shows 20."""
    node = LocalSigner(b"\x21" * 32)
    pool.seat(1, honest=True, names=[node.address])
    anvil = Anvil(log=root / "anvil.log").start()
    try:
        anvil.mine(3)
        deployment = root / "deployment.json"
        deployment.write_text(pool.backend.context.deployment.model_dump_json())
        rows, there = [], 0
        for count in RECORDS:
            _record(pool, node, root / "node", range(there, count))
            there = count
            for last in (20, count):
                audited = last == RECORDS[0]
                rows.append(
                    Row(
                        f"work_list_{last}_of_{count}_s",
                        _list(port, anvil.url, deployment, root / "node", last),
                        "CPU s, command and API", 5,
                        peer=104 if audited else None,
                        peer_name=f"{AUDIT}, wall time" if audited else "",
                    )
                )  # fmt: skip
    finally:
        anvil.stop()
    return rows


def _list(port: int, rpc: str, deployment: Path, data: Path, last: int) -> float:
    """CPU seconds of the command and, meanwhile, of this process, which serves the API. Raises
    FatalError if it does not list every receipt."""
    program = Path(sys.executable).with_name("prime-node")
    command = [str(program), "work", "list", "--last", str(last), "--json"]
    named = {
        "ORCHESTRATOR": f"http://127.0.0.1:{port}", "RPC": rpc, "DEPLOYMENT": str(deployment),
        "DATA": str(data), "POOL": "1",
    }  # fmt: skip
    settings = {f"PRIME_NODE_{name}": value for name, value in named.items()}
    before, served = resource.getrusage(resource.RUSAGE_CHILDREN), time.process_time()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | settings
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0 or len(json.loads(done.stdout)) != last:
        raise FatalError(f"work list --last {last} ended with {done.returncode}: {done.stderr}")
    child = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return child + time.process_time() - served


def _record(pool: seats.Pool, node: LocalSigner, data: Path, numbers: range) -> None:
    """Files of the node with their receipts, in the store and in the node's journal."""
    context, now = pool.backend.context, int(pool.clock[0])
    claim = Submission(
        pool=context.pool, lease_digest=ZERO_DIGEST, node=node.address, step=0,
        policy_digest=ZERO_DIGEST, sha256=ZERO_DIGEST, size=1, rows=1, valid_until=now + 86_400,
    )  # fmt: skip
    body = SignedSubmission(
        submission=claim, node=node.address, signature=node.sign(claim, context.domain(claim))
    ).model_dump_json()
    arrived = Receipt(submission_digest=ZERO_DIGEST, received_at=now)
    manager = pool.backend.manager
    receipt = ReceiptAnswer(
        receipt=arrived, signature=manager.sign(arrived, context.domain(arrived))
    ).model_dump_json()
    given = Lease(
        pool=context.pool, step=0, node=node.address, index=0, policy_digest=ZERO_DIGEST,
        run_digest=context.run.digest(), target=2, salt=ZERO_DIGEST, deadline=now + 60,
    )  # fmt: skip
    lease = SignedLease(
        lease=given, signature=manager.sign(given, context.domain(given)), policy_version=0
    ).model_dump_json()
    names = {at: (_digest("file", at), _digest("lease", at)) for at in numbers}
    with pool.backend.store.begin() as connection:
        connection.execute(
            sa.insert(schema.submissions),
            [
                {
                    "digest": file, "lease_digest": held, "node": node.address, "step": 0,
                    "policy_version": 0, "sha256": file, "size": 1, "body": body,
                    "receipt": receipt, "received_at": now + at / 1e6, "status": "accepted",
                    "units": 1,
                }
                for at, (file, held) in names.items()
            ],
        )  # fmt: skip
    Spool(data / "spool", now=time.time)  # makes the journal
    with sqlite3.connect(data / "spool" / "journal.sqlite") as journal:
        journal.executemany(
            "INSERT INTO entries (lease_digest, submission_digest, body, state, receipt, "
            "created_at, lease) VALUES (?, ?, ?, 'receipted', ?, ?, ?)",
            [
                (held, file, body, receipt, now + at / 1e6, lease)
                for at, (file, held) in names.items()
            ],
        )
    journal.close()


def _digest(word: str, number: int) -> str:
    return encoding.sha256(f"{word} {number}".encode())


# ── the flood ────────────────────────────────────────────────────────────────────────────────────


def flood(pool: seats.Pool, port: int, count: int) -> list[Row]:
    """Times of honest requests alone and during revocations by strangers, who wait for no pause:
    they come from loopback, so no limit of an address holds them back."""
    url = f"http://127.0.0.1:{port}"
    quiet = _honest(url)
    with _revoking(pool, url, count) as sent:
        loud = _honest(url)
        revoked = sent()
    return [
        Row("flood_quiet_p50_ms", 1e3 * quiet, "ms, wall, an honest request alone",
            peer=67, peer_name=AUDIT),
        Row("flood_p50_ms", 1e3 * loud,
            f"ms, wall, during {revoked:,.0f} revocations a second by {FLOODERS} connections",
            peer=394, peer_name=AUDIT),
        Row("flood_p50_ratio", loud / quiet, "times the request alone",
            peer=394 / 67, peer_name=AUDIT),
    ]  # fmt: skip


def _honest(url: str) -> float:
    """Median seconds of a request that reads the store."""
    times = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(HONEST):
            began = time.monotonic()
            client.get("/healthz").raise_for_status()
            times.append(time.monotonic() - began)
    return statistics.median(times)


@contextmanager
def _revoking(pool: seats.Pool, url: str, count: int) -> Iterator[Callable[[], float]]:
    """Strangers revoke until the block ends, each request by another key, from another process;
    gives their requests a second."""
    backend, bodies = pool.backend, []
    for number in range(count):
        stranger = LocalSigner((1 << 200 | number + 1).to_bytes(32, "big"))
        end = SessionRevocation(
            account=stranger.address, orchestrator=backend.audience,
            revoked_before=int(pool.clock[0]),
        )  # fmt: skip
        signature = stranger.sign(end, backend.context.domain(end))
        bodies.append(RevokeRequest(revocation=end, signature=signature).model_dump_json())
    spawn = multiprocessing.get_context("spawn")
    over, sent = spawn.Event(), spawn.Array("q", FLOODERS)
    strangers = [
        spawn.Process(target=_revoke, args=(url, bodies[at::FLOODERS], over, sent, at))
        for at in range(FLOODERS)
    ]
    for one in strangers:
        one.start()
    try:
        while not all(sent[:]):  # all are under way
            if any(one.exitcode for one in strangers):
                raise FatalError("a stranger's revocation was refused")
            time.sleep(0.05)
        began, before = time.monotonic(), sum(sent[:])
        yield lambda: (sum(sent[:]) - before) / (time.monotonic() - began)
    finally:
        over.set()
        for one in strangers:
            one.join()


def _revoke(url: str, bodies: list[str], over: Any, sent: Any, at: int) -> None:
    """One stranger: the bodies in turn until `over`."""
    head = {version.HEADER: str(version.SPOKEN[-1])}
    with httpx.Client(base_url=url, timeout=60, headers=head) as client:
        for body in itertools.cycle(bodies):
            if over.is_set():
                return
            client.post("/v1/sessions/revoke", content=body).raise_for_status()
            sent[at] += 1
