"""Operators filter JSON logs by node, lease or file: each change has its fields."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from typing import Any

import pytest
from money_kit import MANAGER, NODE, OTHER, VALIDATOR, ManagerSide

from prime_core import logs
from prime_core.ids import ZERO_DIGEST
from prime_core.messages import Heartbeat, LeaseRequest
from prime_core.verdict import Reason, reason_digest
from prime_orchestrator.api import leasing, publishing
from prime_orchestrator.api.liveness import SILENT, LifeTicks, heartbeats
from prime_orchestrator.manager.batches import seal_ready_batches
from prime_orchestrator.manager.indexer import derive_slash
from prime_orchestrator.manager.members import apply_node_event, derive_node
from prime_orchestrator.store import chain
from prime_orchestrator.store.engine import on_commit


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> io.StringIO:
    """What the programs log, as JSON, as a process of pool 1."""
    monkeypatch.setattr(logs, "_process_fields", logs.Fields(pool=1))
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logs.formatter("json"))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler])
    caplog.set_level(logging.INFO)
    return text


def lines(written: io.StringIO) -> list[dict[str, Any]]:
    """The fields of the events with a kind, without what every event has."""
    found = [json.loads(line) for line in written.getvalue().splitlines()]
    assert all(one.pop("pool") == 1 for one in found)
    given = ("event", "level", "logger", "timestamp")
    return [
        {name: value for name, value in one.items() if name not in given}
        for one in found
        if "kind" in one
    ]


def on_chain(mgr: ManagerSide, name: str, **args: Any) -> None:
    with mgr.store.begin() as connection:
        number = len(chain.events(connection, "SlashProposed"))
        chain.add_event(
            connection, block_hash=ZERO_DIGEST, log_index=number, block=1, block_time=1,
            tx_hash=ZERO_DIGEST, name=name, args=args,
        )  # fmt: skip


def test_a_file_s_events_name_it_its_node_and_its_lease(
    mgr: ManagerSide, written: io.StringIO
) -> None:
    good = mgr.judge(mgr.submit(NODE))
    bad = mgr.judge(mgr.submit(NODE), Reason.WRONG_SKETCH)
    proposed = {"executable_at": 9, "evidence": ZERO_DIGEST, "amount": "5"}
    reason = reason_digest(Reason.WRONG_SKETCH)
    accused = {"leaf": bad.digest, "node": NODE.address, "reason": reason}
    on_chain(mgr, "SlashProposed", **accused, **proposed)
    for _ in range(2):  # said once
        with mgr.store.begin() as connection:
            derive_slash(connection, mgr.context, bad.digest, mgr.now())
    on_chain(mgr, "SlashExecuted", leaf=bad.digest, amount="5")
    with mgr.store.begin() as connection:
        derive_slash(connection, mgr.context, bad.digest, mgr.now())
    node, by, why = {"node": NODE.address}, {"validator": VALIDATOR.address}, "WRONG_SKETCH"
    none = {"reason": "NONE"}
    slash = {"kind": "slash", "submission": bad.digest, "reason": why, **node}
    assert lines(written) == [
        {"kind": "file", "status": "received", **good.about()},
        {"kind": "opinion", "status": "accepted", **none, **by, **good.about()},
        {"kind": "verdict", "status": "accepted", **none, **good.about()},
        {"kind": "file", "status": "received", **bad.about()},
        {"kind": "opinion", "status": "rejected", "reason": why, **by, **bad.about()},
        {"kind": "node", "status": "quarantined", "reason": "rejected", **node},
        slash | {"status": "queued"},
        {"kind": "verdict", "status": "rejected", "reason": why, **bad.about()},
        slash | {"status": "proposed"},
        slash | {"status": "executed"},
    ]


def test_leases_nodes_policies_and_batches_have_fields(
    mgr: ManagerSide, written: io.StringIO
) -> None:
    for _ in range(2):
        mgr.judge(mgr.submit(NODE))
    assert seal_ready_batches(mgr.store, mgr.objects, MANAGER, mgr.context, mgr.now) == [0]
    answer = leasing.lease(mgr.backend, NODE.address, LeaseRequest(policy_version=0))
    assert answer.lease is not None
    digest = answer.lease.lease.digest(mgr.context.domain(answer.lease.lease))
    life = LifeTicks(mgr.backend)
    while mgr.now() <= answer.lease.lease.deadline:
        mgr.now.time += 9  # a longer gap would excuse it
        life.tick()
    heartbeats(mgr.backend, [(NODE.address, Heartbeat(policy_version=0))])
    publishing.publish(mgr.backend, mgr.manifest(1))
    mgr.admit(OTHER)
    on_chain(mgr, "NodeLeft", pool=1, node=OTHER.address)
    with mgr.store.begin() as connection:
        derive_node(connection, mgr.context, OTHER.address, mgr.now())
    lease = {"kind": "lease", "lease": digest, "node": NODE.address, "step": 1, "policy": 0}
    assert [one for one in lines(written) if one["kind"] not in ("file", "opinion", "verdict")] == [
        {"kind": "batch", "status": "sealed", "step": 0},
        lease | {"status": "given"},
        {"kind": "node", "status": "silent", "node": NODE.address, "reason": SILENT},
        lease | {"status": "expired"},
        {"kind": "node", "status": "active", "node": NODE.address, "reason": "heartbeat"},
        {"kind": "policy", "status": "published", "policy": 1, "step": 1},
        {"kind": "node", "status": "left", "node": OTHER.address, "reason": "left"},
    ]


def test_an_event_is_logged_after_its_commit_and_not_if_it_is_rolled_back(
    mgr: ManagerSide, written: io.StringIO
) -> None:
    for fails in (True, False):
        with contextlib.suppress(ZeroDivisionError), mgr.store.begin() as connection:
            on_commit(connection, divmod, 1, 0)  # raises, and hides neither the commit nor the log
            apply_node_event(connection, mgr.context, NODE.address, "rejected", mgr.now())
            assert lines(written) == []
            if fails:
                raise ZeroDivisionError
    rejected = {"kind": "node", "status": "quarantined", "reason": "rejected"}
    assert lines(written)[-1] == rejected | {"node": NODE.address}
