"""The gateway's answers from lease to verdict: what it signed for a call is accepted, everything
else is rejected on evidence that an auditor replays. Once with the real programs between: worker,
bridge, agent, gateway and a site."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
from judging_kit import HONEST, LIAR, JudgedPool, small_run
from money_kit import MANAGER, key
from served import served, serving

from prime_core.clock import Clock
from prime_core.gateway import Gateway, GatewayAnswer, GatewayCall
from prime_core.ids import Digest
from prime_core.run import Conversation, RunDefinition
from prime_core.signing import LocalSigner
from prime_core.task import SignedLease
from prime_core.verdict import Reason
from prime_envs.base import Problem
from prime_envs.environments.reverse import Reverse
from prime_envs.registry import BUILT_IN, environment_ref
from prime_envs.tools import Observation
from prime_node.api import NodeApi
from prime_node.bridge import Bridge
from prime_node.lease_broker import Connections, Deliveries, LeaseBroker, OpenLeases
from prime_node.revisions import Revisions
from prime_node.spool import Spool, TaskUploads
from prime_node.worker.client import BridgeClient
from prime_node.worker.rollout_builder import Job, Options, RolloutBuilder
from prime_orchestrator.gateway.service import CallService, Pool, Settings, create_app
from prime_orchestrator.gateway.upstreams import OpenApiTool, Web, make
from prime_orchestrator.store import open_store, sqlite_url
from prime_orchestrator.store.gateway_records import Records
from prime_verify import build
from prime_verify.rollout_file import FileRow, read_rollout_file, write_rollout_file

GATEWAY, STRANGER = key(40), key(41)


class Fetches(Reverse):
    """Every turn of the model's counts as a call of the gateway's tool."""

    name = "fetches"

    def observe(self, problem: Problem, turns: Sequence[str]) -> Observation | None:
        return Reverse.observe(self, problem, [f"<fetch>{turn}</fetch>" for turn in turns])

    def observation_text(self, said: str) -> str:
        return said


@dataclass
class Signs:
    """Answers each call with another prompt, signed for `lease_digest`; none for those of
    sample number `silent`."""

    lease_digest: Digest
    signer: LocalSigner = GATEWAY
    silent: int = -1
    text: str = "04|word>"
    calls: list[GatewayCall] = field(default_factory=list)

    def answer(self, call: GatewayCall) -> GatewayAnswer | None:
        self.calls.append(call)
        if call.sample == self.silent:
            return None
        return call.answered(self.lease_digest, self.text, self.signer)


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """A socket at the gateway's place. It refuses connections until a gateway listens on it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as found:
        found.bind(("127.0.0.1", 0))
        yield found


@pytest.fixture
def panel_run(bound: socket.socket) -> Iterator[RunDefinition]:
    BUILT_IN["fetches"] = __name__
    run = small_run()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    gateway = Gateway(url=url, key=GATEWAY.address, tools=("fetch-1",))
    yield run.model_copy(
        update={
            "environment": environment_ref(
                "fetches", {}, run.budgets, train_size=100, heldout_size=10
            ),
            "conversation": Conversation(turns=3, tools=("fetch-1",), gateway=gateway),
            "max_output_tokens": 64,
            "schema_version": 4,
        }
    )
    del BUILT_IN["fetches"]


def made(panel: JudgedPool, signed: SignedLease, lease_digest: Digest, answers: Signs) -> bytes:
    engine = panel.engines.engine(0, signed.lease.policy_digest)
    run = panel.mgr.context.run
    return build.build_rollout_file(signed, lease_digest, run, engine, panel.environment, answers)


def test_signed_answers_are_accepted_and_an_outage_accuses_no_one(panel: JudgedPool) -> None:
    """All rows of one sample number get no answer: they end there, and are paid."""
    row = panel.judged(lambda signed, lease: made(panel, signed, lease, Signs(lease, silent=1)))
    assert (row.status, row.reason) == ("accepted", Reason.NONE), row
    file = read_rollout_file(panel.file(row))
    assert file.metadata.schema_version == "3"
    assert {one.finish_reason for one in file.rows if one.sample == 1} >= {"tool_limit"}
    assert any(len(one.gateway) == 2 and len(one.spans) == 5 for one in file.rows)
    assert row.units == sum(len(one.model_tokens) for one in file.rows)


Change = Callable[[list[FileRow]], None]


def first(rows: Sequence[FileRow]) -> int:
    return next(n for n, row in enumerate(rows) if len(row.gateway) > 1)


def forged(rows: list[FileRow]) -> None:
    """The text of an answer is another, and so are the tokens: no one signed it."""
    at = first(rows)
    one, *rest = rows[at].gateway
    rows[at] = replace(rows[at], gateway=(one.model_copy(update={"text": "04|lied>"}), *rest))


def changed_tokens(rows: list[FileRow]) -> None:
    """The answer is what was signed, and the model read something else."""
    at = first(rows)
    tokens = list(rows[at].output_tokens)
    tokens[rows[at].spans[0] + 1] ^= 1
    rows[at] = replace(rows[at], output_tokens=tuple(tokens))


def replayed(rows: list[FileRow]) -> None:
    """The answer to the first call is given again for the second."""
    at = first(rows)
    one = rows[at].gateway[0]
    rows[at] = replace(rows[at], gateway=(one, one.model_copy(update={"turn": 1})))


def of_another_row(rows: list[FileRow]) -> None:
    at = first(rows)
    other = next(r for n, r in enumerate(rows) if n != at and len(r.gateway) > 1)
    rows[at] = replace(rows[at], gateway=other.gateway)


def dropped(rows: list[FileRow]) -> None:
    """The answer's tokens stay, without what was signed."""
    at = first(rows)
    rows[at] = replace(rows[at], gateway=())


def rewritten(change: Change, answers: Callable[[Digest], Signs]) -> Callable[..., bytes]:
    def make(panel: JudgedPool, signed: SignedLease, lease_digest: Digest) -> bytes:
        file = read_rollout_file(made(panel, signed, lease_digest, answers(lease_digest)))
        rows = list(file.rows)
        change(rows)
        return write_rollout_file(rows, file.metadata)

    return make


def kept(rows: list[FileRow]) -> None:
    pass


LIES = {
    "forged": rewritten(forged, Signs),
    "changed tokens": rewritten(changed_tokens, Signs),
    "replayed answer": rewritten(replayed, Signs),
    "answer of another row": rewritten(of_another_row, Signs),
    "dropped answer": rewritten(dropped, Signs),
    "cassette of another lease": rewritten(kept, lambda _: Signs(Digest("0x" + "11" * 32))),
    "signed by a stranger": rewritten(kept, lambda lease: Signs(lease, STRANGER)),
}


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_about_the_gateway_is_slashed_on_evidence(
    panel: JudgedPool, lie: Callable[[JudgedPool, SignedLease, Digest], bytes]
) -> None:
    row = panel.judged(lambda signed, lease: lie(panel, signed, lease), LIAR)
    assert (row.status, row.reason) == ("rejected", Reason.WRONG_OBSERVATION), row
    found = panel.audit(panel.slash(row))
    assert found.result == "match", found


@pytest.mark.slow
def test_an_answer_to_no_call_is_not_paid(panel: JudgedPool) -> None:
    def spare(rows: list[FileRow]) -> None:
        at = first(rows)
        more = rows[at].gateway[0].model_copy(update={"turn": 9})
        rows[at] = replace(rows[at], gateway=(*rows[at].gateway, more))

    lie = rewritten(spare, Signs)
    row = panel.judged(lambda signed, lease: lie(panel, signed, lease))
    assert (row.status, row.reason) == ("void", Reason.WRONG_ROWS), row


# ── with the programs between ────────────────────────────────────────────────────────────────────


class Site(BaseHTTPRequestHandler):
    """Answers each query with another prompt, or as if it were broken."""

    asked: ClassVar[list[str]] = []
    text: ClassVar[str] = "04|word>"
    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.status)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def a_gateway(
    panel: JudgedPool, site: str, folder: Path, bound: socket.socket
) -> Iterator[Records]:
    """A gateway on the socket of the URL that the run pins, whose tool asks the site."""
    context = panel.mgr.context
    document = {
        "servers": [{"url": site}],
        "paths": {
            "/": {"get": {"operationId": "find", "parameters": [{"name": "q", "in": "query"}]}}
        },
    }
    (folder / "api.json").write_text(json.dumps(document))
    settings = OpenApiTool(kind="openapi", document=folder / "api.json", operation="find")
    store = open_store(sqlite_url(folder / "gateway.sqlite"))
    records = Records(store)
    work = context.deployment.domain("work")
    pool = Pool(context.pool, MANAGER.address, work, lambda _: context.run)
    tools = {"fetch-1": make(settings, Web(loopback=work.chain_id == 31337))}
    service = CallService(
        pool,
        GATEWAY,
        records,
        tools,
        Settings(data=folder, calls_per_second=1000),
        Clock(panel.mgr.now),
    )
    with closing(store), serving(create_app(service), bound):
        yield records


@contextmanager
def a_worker(panel: JudgedPool, signed: SignedLease, folder: Path) -> Iterator[RolloutBuilder]:
    """The honest worker, whose only way out is its agent's bridge, with `signed` as open lease."""
    run, url = panel.mgr.context.run, "http://127.0.0.1:1"
    policies: Any = None
    api, gateway_api = NodeApi(url, HONEST), NodeApi(url, HONEST)
    open_leases, domain = OpenLeases(), panel.mgr.context.deployment.domain("work")
    open_leases.add(signed.lease.digest(domain), signed)
    broker = LeaseBroker(
        Connections(api, gateway_api, HONEST, domain),
        Revisions(run, fetch=lambda _: run, check=lambda _: None, prepare=lambda _: None),
        policies,
        Deliveries(TaskUploads(folder / "uploads"), Spool(folder / "spool", now=time.time)),
        open_leases,
        now=time.time,
    )
    bridge = Bridge(folder / "b", broker, task_uid=os.getuid())
    bridge.start()
    worker = RolloutBuilder(run, Options(bridge.path, panel.policies, folder))
    try:
        yield worker
    finally:
        worker.stop()
        bridge.close()
        api.close()
        gateway_api.close()


def a_job(worker: RolloutBuilder, signed: SignedLease, lease_digest: Digest) -> Job:
    bridge = BridgeClient(worker.options.socket)
    return Job(signed, lease_digest, bridge.for_lease(lease_digest))


@pytest.fixture
def site() -> Iterator[str]:
    Site.asked.clear()
    Site.text, Site.status = "04|word>", 200
    with served(Site) as url:
        yield url


@pytest.mark.slow
def test_a_nodes_conversation_with_a_site_is_accepted(
    panel: JudgedPool, site: str, tmp_path: Path, bound: socket.socket
) -> None:
    """A worker that makes its file again asks nothing again and gets the same bytes."""
    with a_gateway(panel, site, tmp_path, bound) as records:

        def make(signed: SignedLease, lease_digest: Digest) -> bytes:
            with a_worker(panel, signed, tmp_path) as worker:
                first = worker.build(a_job(worker, signed, lease_digest)).path.read_bytes()
                asked, Site.text = len(Site.asked), "05|other>"
                again = worker.build(a_job(worker, signed, lease_digest))
                assert again.path.read_bytes() == first
                assert len(Site.asked) == asked > 0
            return first

        row = panel.judged(make)
        assert (row.status, row.reason) == ("accepted", Reason.NONE), row
        rows = read_rollout_file(panel.file(row)).rows
        assert any(len(one.gateway) == 2 and len(one.spans) == 5 for one in rows)
        assert {one.text for line in rows for one in line.gateway} == {"04|word>"}
        assert len(Site.asked) == len(list(records.cassette())), "equal requests are asked once"


@pytest.mark.slow
@pytest.mark.parametrize("gateway_runs", [True, False])
def test_an_outage_of_site_or_gateway_ends_rows_and_accuses_no_one(
    panel: JudgedPool, site: str, tmp_path: Path, bound: socket.socket, gateway_runs: bool
) -> None:
    Site.status = 503

    def make(signed: SignedLease, lease_digest: Digest) -> bytes:
        with a_worker(panel, signed, tmp_path) as worker:
            return worker.build(a_job(worker, signed, lease_digest)).path.read_bytes()

    if gateway_runs:
        with a_gateway(panel, site, tmp_path, bound):
            row = panel.judged(make)
    else:
        row = panel.judged(make)
    assert (row.status, row.reason) == ("accepted", Reason.NONE), row
    rows = read_rollout_file(panel.file(row)).rows
    assert {one.finish_reason for one in rows} & {"tool_limit"}
    assert not any(one.gateway for one in rows)
    assert row.units == sum(len(one.model_tokens) for one in rows)
