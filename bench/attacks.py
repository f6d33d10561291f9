"""`bench attacks`: what each attack on the chain layer costs an honest party."""

from __future__ import annotations

import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import seats
from bench.form import Row
from devnet.chain import CHAIN_ID, Anvil, dev_signer
from devnet.faulty import KINDS, FaultyRpc, RpcFault
from prime_chain import client as chain_client
from prime_chain import codec
from prime_chain.client import Call, ChainClient
from prime_chain.events import decode
from prime_chain.sender import Sender
from prime_core import ids
from prime_core.clock import Clock
from prime_core.errors import UnavailableError
from prime_core.ids import Address, Digest
from prime_core.messages import Heartbeat
from prime_orchestrator.api import liveness
from prime_orchestrator.store import Store, chain, open_store, sqlite_url

PACKAGES = ("httpx", "sqlalchemy")
PROVIDERS = 2_000
HEARTBEATS_FROM, HEARTBEATS_EACH = 50, 20
"""Nodes, and heartbeats of each."""


def run(quick: bool) -> list[Row]:
    """All rows."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = [_index_rate(root, 5_000 if quick else 50_000)]
        rows += _spam(root, 20_000 if quick else 1_000_000)
        rows += _dropped(root)
        anvil = Anvil(log=root / "anvil.log").start()
        try:
            anvil.mine(3)
            rows += _endpoints(anvil)
            rows.append(_hidden_receipts(anvil, root))
        finally:
            anvil.stop()
    return rows


def _index_rate(root: Path, count: int) -> Row:
    """Logs of strangers that no topic filters out: from JSON values to the store."""
    deployment = seats.made_up()
    item = next(i for i in codec.artifact("StakeVault").events.values() if i.name == "Deposited")
    accounts = [secrets.token_hex(20) for _ in range(PROVIDERS)]
    raw = [
        {
            "address": deployment.address("vault").lower(),
            "topics": ["0x" + item.selector.hex(), "0x" + "00" * 12 + accounts[at % PROVIDERS]],
            "data": f"0x{at + 1:064x}",
            "blockNumber": hex(at // 20),
            "blockHash": f"0x{at // 20:064x}",
            "logIndex": hex(at % 20),
            "transactionHash": "0x" + secrets.token_hex(32),
        }
        for at in range(count)
    ]
    store = _store(root / "rate.sqlite")
    began = time.process_time()
    logs = [chain_client.parse_log(one) for one in raw]
    events = [event for log in logs if (event := decode(log, 0, deployment)) is not None]
    with store.begin() as connection:
        chain.fold(connection, [(e.block, e.name, e.args()) for e in events], count // 20)
    took = time.process_time() - began
    store.close()
    if len(events) != count:
        raise UnavailableError(f"{len(events)} of {count} logs were indexed")
    return Row("index_logs_cpu_s", count / took, "logs/CPU s", 10_000, "higher")


def _spam(root: Path, count: int) -> list[Row]:
    """What a signed request reads of the chain, and what a heartbeat costs, in a quiet store and
    after strangers' events."""
    folder = root / "spam"
    folder.mkdir()
    pool = seats.Pool.make(folder)
    pool.seat(HEARTBEATS_FROM, honest=True)
    store = pool.backend.store
    quiet, beats = _request_seconds(store), _heartbeat_seconds(pool)
    accounts = [ids.address("0x" + secrets.token_hex(20)) for _ in range(PROVIDERS)]
    for first in range(0, count, 10_000):
        happened: list[tuple[int, str, dict[str, Any]]] = [
            (at // 20, "Deposited", {"provider": accounts[at % PROVIDERS], "amount": 1})
            for at in range(first, min(count, first + 10_000))
        ]
        with store.begin() as connection:
            chain.fold(connection, happened, happened[-1][0])
            chain.add_step(connection, happened[-1][0], Digest(f"0x{first:064x}"))
    loud, loud_beats = _request_seconds(store), _heartbeat_seconds(pool)
    store.close()
    return [
        Row("spam_request_cpu_ms", loud * 1e3, "CPU ms"),
        Row("spam_request_cpu_ratio", loud / quiet, "times the quiet store", 1.5),
        Row("spam_heartbeat_p95_cpu_ms", loud_beats * 1e3, "CPU ms"),
        Row("spam_heartbeat_p95_ratio", loud_beats / beats, "times the quiet store", 1.5),
    ]


def _dropped(root: Path) -> list[Row]:
    """Accepted files that ten seats cost an honest pool by dropping every lease."""
    established, fresh = seats.measure(root)
    unit = "% of accepted files"
    return [
        Row("dropped_leases_first_life", 100 * established.first, unit, 50),
        Row("dropped_leases_after", 100 * established.after, unit, 10),
        Row("dropped_leases_start_first_life", 100 * fresh.first, unit, 67),
        Row("dropped_leases_start_after", 100 * fresh.after, unit, 10),
    ]


def _store(path: Path) -> Store:
    store = open_store(sqlite_url(path))
    store.migrate()
    return store


def _request_seconds(store: Store) -> float:
    """Median CPU seconds of the reads that admission and every session check make."""
    times = []
    for at in range(200):
        account = Address(ids.address(f"0x{at + 1:040x}"))
        began = time.process_time()
        with store.read() as connection:
            chain.revoked_before(connection, account)
            chain.state(connection, "provider", account)
            chain.state(connection, "stake", account)
            chain.events(connection, "NodeJoined", subject=account)
        times.append(time.process_time() - began)
    return sorted(times)[len(times) // 2]


def _heartbeat_seconds(pool: seats.Pool) -> float:
    """CPU seconds of a heartbeat, 95th percentile, each in a transaction of its own."""
    times = []
    beat = Heartbeat(policy_version=0)
    for _ in range(HEARTBEATS_EACH):
        for node in pool.honest:
            began = time.process_time()
            liveness.heartbeats(pool.backend, [(node, beat)])
            times.append(time.process_time() - began)
    return sorted(times)[len(times) * 95 // 100]


def _endpoints(anvil: Anvil) -> list[Row]:
    """One endpoint of three at fault in every way; and one that hangs."""
    survived = 0
    account = dev_signer(1).address
    spare = FaultyRpc(anvil.url)
    for kind in KINDS:
        bad = FaultyRpc(anvil.url, [RpcFault(kind, seconds=0.05 if kind == "delay" else 60)])
        client = ChainClient([bad.url, anvil.url, spare.url], CHAIN_ID, timeout=0.5)
        number = client.block_number()
        truth = ChainClient([anvil.url], CHAIN_ID).agreed_block(number)
        same = client.agreed_block(number) == truth
        survived += same and client.agree(lambda one: one.balance(account, 0)) > 0
        client.close()
        bad.close()
    hung = FaultyRpc(anvil.url, [RpcFault("hang")])
    clock = [0.0]
    client = ChainClient([hung.url, anvil.url], CHAIN_ID, timeout=1.0, now=lambda: clock[0])
    began = time.monotonic()
    for _ in range(60):  # a minute of one read a second
        client.balance(account)
        clock[0] += 1
    waited = time.monotonic() - began
    client.close()
    hung.close()
    spare.close()
    return [
        Row("rpc_fault_kinds_survived", survived, f"of {len(KINDS)}", len(KINDS), "higher"),
        Row("rpc_hung_first_timeouts", waited, "time-outs in 60 reads", 2),
    ]


def _hidden_receipts(anvil: Anvil, root: Path) -> Row:
    """Payments made by one intent while an endpoint hides receipts and transactions."""
    proxy = FaultyRpc(anvil.url, [RpcFault("omit")])
    client = ChainClient([proxy.url], CHAIN_ID)
    clock = [time.time()]
    sender = Sender(client, dev_signer(3), root / "sender.sqlite", clock=Clock(lambda: clock[0]))
    to = ids.address("0x" + secrets.token_hex(20))
    sender.submit("pay", Call(to, b"", 100, "pay 100 wei"))
    for _ in range(12):
        sender.tick()
        anvil.mine(3)
        clock[0] += 30
    paid = ChainClient([anvil.url], CHAIN_ID).balance(to) / 100
    sender.close()
    client.close()
    proxy.close()
    return Row("hidden_receipt_payments", paid, "payments by one intent", 1)
