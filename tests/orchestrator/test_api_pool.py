"""Policies, relays, batches, rewards, status, events, metrics and pages."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa
from orchestrator_world import World, run_definition, signer

from prime_chain.amounts import ETHER
from prime_core.batch import BatchFile, BatchManifest, SignedBatch
from prime_core.encoding import merkle_verify, reward_leaf, sha256
from prime_core.ids import ZERO_DIGEST, Digest, to_bytes
from prime_core.messages import BatchAnswer, NodeInfo, PolicyList, PoolInfo, RewardInfo, Status
from prime_core.run import RunDefinition
from prime_core.settlement import RewardEntry, Settlement
from prime_core.storage.base import digest_key, put_object
from prime_core.transport.client import OrchestratorClient
from prime_core.verdict import Reason
from prime_orchestrator.api import status as status_module
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.routes.watch import MAX_WATCHERS, StatusFeed
from prime_orchestrator.cli import status as status_cli
from prime_orchestrator.manager import endings
from prime_orchestrator.manager.funding import Funding
from prime_orchestrator.store import batches, intents, meta, nodes, schema
from prime_orchestrator.store.batches import BatchRow

# -- the pool and its policies -----------------------------------------------------------------


def test_the_run_definition_is_served_to_the_byte(world: World) -> None:
    raw = world.http.get("/v1/run").content
    info = PoolInfo.model_validate_json(world.http.get("/v1/pool").content)
    assert sha256(raw) == info.run_digest
    assert RunDefinition.parse(raw) == run_definition()
    assert (info.latest_version, info.manager) == (0, world.manager.address)


def test_the_trainer_publishes_one_version_after_the_other(world: World) -> None:
    trainer = world.login(world.trainer, "trainer")
    assert world.post("/v1/policies", world.manifest(1), trainer).json() == {}
    assert world.post("/v1/policies", world.manifest(1), trainer).json() == {}
    assert world.post("/v1/policies", world.manifest(3), trainer).status_code == 409
    other = world.manifest(1, b"other weights")
    assert world.post("/v1/policies", other, trainer).status_code == 409
    listed = PolicyList.model_validate_json(world.http.get("/v1/policies").content)
    assert [signed.manifest.version for signed in listed.policies] == [1, 0]
    assert listed.policies[0] == world.manifest(1)
    with world.backend.store.read() as connection:
        queued = intents.pending(connection)
    assert [(i.id, i.arguments()["signature"]) for i in queued] == [
        ("policy:1", world.manifest(1).signature)
    ]


def test_a_policy_of_an_older_step_is_refused_and_the_same_step_is_not(world: World) -> None:
    trainer = world.login(world.trainer, "trainer")
    assert world.post("/v1/policies", world.manifest(1, step=5), trainer).status_code == 200
    refused = world.post("/v1/policies", world.manifest(2, step=4), trainer)
    assert refused.status_code == 409
    assert "policy 2 is of step 4, but policy 1 is of step 5" in refused.text
    assert world.post("/v1/policies", world.manifest(2, step=5), trainer).status_code == 200
    listed = PolicyList.model_validate_json(world.http.get("/v1/policies").content)
    assert [signed.manifest.step for signed in listed.policies] == [5, 5, 0]


def test_a_reader_with_the_current_policies_gets_no_body(world: World) -> None:
    before = world.http.get("/v1/policies")
    again = world.http.get("/v1/policies", headers={"If-None-Match": before.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    world.post("/v1/policies", world.manifest(1), world.login(world.trainer, "trainer"))
    after = world.http.get("/v1/policies", headers={"If-None-Match": before.headers["etag"]})
    assert after.status_code == 200
    assert after.headers["etag"] != before.headers["etag"]
    assert len(PolicyList.model_validate_json(after.content).policies) == 2


def test_a_policy_signed_by_another_is_refused(world: World) -> None:
    trainer = world.login(world.trainer, "trainer")
    forged = world.manifest(1).model_copy(update={"signature": world.manifest(2).signature})
    assert world.post("/v1/policies", forged, trainer).status_code == 401
    assert world.post("/v1/policies", world.manifest(1), world.member(1)).status_code == 403


def test_policy_0_is_the_base_model_of_the_run(make_world: Any) -> None:
    world = make_world(base_model=sha256(b"the right base"))
    trainer = world.login(world.trainer, "trainer")
    answer = world.post("/v1/policies", world.manifest(0), trainer)
    assert (answer.status_code, "base model" in answer.text) == (401, True)


# -- relays ------------------------------------------------------------------------------------


# -- batches -----------------------------------------------------------------------------------


def seal(world: World, step: int) -> SignedBatch:
    """A sealed batch of one file and its table, both in the store."""
    file, table = (put_object(world.backend.objects, b"%d" % (step * 2 + i)) for i in (0, 1))
    manifest = BatchManifest(
        pool=1,
        step=step,
        run_digest=world.backend.context.run.digest(),
        files=(
            BatchFile(
                sha256=file,
                size=1,
                table=table,
                submission_digest=sha256(b"s"),
                policy_version=0,
                groups=(0,),
            ),
        ),
        rows=2,
        policy_versions=(0,),
        seed=ZERO_DIGEST,
    )
    signed = SignedBatch(manifest=manifest, signature=world.backend.sign(manifest.statement()))
    row = BatchRow(step, manifest.digest(), signed.model_dump_json(), 2, 250_000, 1, world.clock())
    with world.backend.store.begin() as connection:
        batches.add(connection, row)
    return signed


def test_a_batch_is_not_found_until_sealed_then_comes_with_a_url_for_each_object(
    world: World,
) -> None:
    trainer = world.login(world.trainer, "trainer")
    assert world.send("GET", "/v1/batches/0", b"", trainer).status_code == 404
    assert world.http.get("/v1/batches/0/manifest").status_code == 404
    sealed = seal(world, 0)
    raw = world.send("GET", "/v1/batches/0", b"", trainer).content
    answer = BatchAnswer.model_validate_json(raw)
    assert answer.batch == sealed
    [file] = sealed.manifest.files
    assert set(answer.urls) == {file.sha256, file.table}
    for name, url in answer.urls.items():
        assert sha256(world.http.get(url).content) == name
    public = world.http.get("/v1/batches/0/manifest").content
    assert SignedBatch.model_validate_json(public) == sealed


def test_a_batch_whose_files_were_removed_is_refused_with_what_to_do(world: World) -> None:
    """Also by a trainer that skips bad batches: it would publish a policy of nothing."""
    file = seal(world, 0).manifest.files[0]
    trainer = world.login(world.trainer, "trainer")
    page = {"digest": "0x", "files": 1, "epoch": 0, "first_received": 0.0, "last_received": 0.0}
    where = {"digest": to_bytes(file.submission_digest), "lease_digest": bytes(32), "place": 0}
    with world.backend.store.begin() as connection:
        connection.execute(sa.insert(schema.archive_pages).values(**page, id=1, kept_days=40))
        connection.execute(sa.insert(schema.archived).values(**where, page=1))
    assert world.send("GET", "/v1/batches/0", b"", trainer).status_code == 200, "still there"
    world.backend.objects.delete(digest_key(file.sha256))
    refused = world.send("GET", "/v1/batches/0", b"", trainer)
    assert refused.status_code == 409
    assert "40 days after they were received" in refused.text
    assert "start the trainer from its checkpoint" in refused.text


def test_batches_are_the_trainers(world: World) -> None:
    seal(world, 0)
    assert world.http.get("/v1/batches/0").status_code == 400
    assert world.send("GET", "/v1/batches/0", b"", world.member(1)).status_code == 403


@pytest.mark.parametrize("step", ["-1", "x", "1.0", "1e3", "9" * 30, "٣", "%20"])
def test_a_step_is_a_whole_number(world: World, step: str) -> None:
    assert world.http.get(f"/v1/batches/{step}/manifest").status_code == 400


# -- rewards -----------------------------------------------------------------------------------


def test_rewards_are_the_newest_confirmed_roots_entry_with_its_proof(world: World) -> None:
    mine, other = signer(1).address, signer(2).address
    entries = tuple(
        RewardEntry(node=node, cumulative=amount)
        for node, amount in sorted(((mine, "70"), (other, "30")), key=lambda e: e[0].lower())
    )
    settlement = Settlement(
        chain_id=31337,
        pool=1,
        epoch=4,
        previous=ZERO_DIGEST,
        as_of_block=9,
        files=(),
        slashes=(),
        entries=entries,
        cumulative_total="100",
    )
    published = put_object(world.backend.objects, settlement.canonical())
    files = [  # settled; held in a settled epoch; forfeited; of a later root; of no root yet
        ("a", 7, "70", "earned", 1),
        ("b", 5, "50", "held", 1),
        ("c", 2, "20", "forfeited", 1),
        ("d", 3, "30", "earned", 2),
        ("e", 4, "40", "earned", None),
    ]

    def posted(epoch: int, name: Digest) -> None:
        with world.backend.store.begin() as connection:
            connection.execute(
                sa.insert(schema.reward_roots).values(
                    epoch=epoch, root=name, cumulative_total="100", object=name, created_at=1.0,
                    claimable_at=1234,
                )
            )  # fmt: skip

    def asked() -> RewardInfo:
        return RewardInfo.model_validate_json(world.http.get(f"/v1/rewards/{mine}").content)

    posted(4, published)
    with world.backend.store.begin() as connection:
        for number, epoch in ((1, 4), (2, 5)):
            root = sha256(f"root {number}".encode())
            connection.execute(
                sa.insert(schema.roots).values(
                    id=number, root=root, leaves_object=root, count=1, created_at=1.0,
                    chain_seq=number, epoch=epoch, posted_at=1, block=1,
                )
            )  # fmt: skip
        for key, units, amount, status, root_id in files:
            name = sha256(key.encode())
            connection.execute(
                sa.insert(schema.submissions).values(
                    digest=name, lease_digest=name, node=mine, step=0, policy_version=0,
                    sha256=name, size=1, body="{}", receipt="{}", received_at=1.0,
                    status="accepted", units=units, root_id=root_id,
                )
            )  # fmt: skip
            connection.execute(
                sa.insert(schema.credits).values(
                    submission_digest=name, node=mine, units=units, amount=amount, earned_at=1,
                    status=status,
                )
            )  # fmt: skip
    info = asked()
    assert (info.epoch, info.cumulative, info.claimable_at) == (4, "70", 1234)
    assert merkle_verify(settlement.root(), reward_leaf(mine, 70), info.proof)
    assert (info.pending_units, info.forfeited) == (5 + 3 + 4, "20")
    world.backend.objects.delete(digest_key(published))
    assert asked() == info, "the object is read once"
    later = settlement.model_copy(update={"epoch": 5, "entries": (), "cumulative_total": "0"})
    posted(5, later.digest())
    assert world.http.get(f"/v1/rewards/{mine}").status_code == 404, "its object is missing"
    put_object(world.backend.objects, later.canonical())
    assert (asked().epoch, asked().cumulative, asked().proof) == (5, "0", ())


def test_a_node_without_rewards_has_none(world: World) -> None:
    info = RewardInfo.model_validate_json(
        world.http.get(f"/v1/rewards/{signer(1).address}").content
    )
    assert (info.epoch, info.cumulative, info.proof) == (None, "0", ())
    assert world.http.get("/v1/rewards/0x12").status_code == 400


# -- status, events, metrics, pages ------------------------------------------------------------


def status(world: World) -> Status:
    return Status.model_validate_json(world.http.get("/v1/status").content)


def test_status_is_one_picture_of_the_store(world: World) -> None:
    world.hand_in(world.member(1))
    seal(world, 0)
    with world.backend.store.begin() as connection:
        intents.queue_intent(connection, kind="root", key="x", payload={}, now=1.0)
        sent = {"status": "sent", "tx_hash": sha256(b"tx"), "updated_at": 2.0}
        connection.execute(sa.update(schema.intents).values(**sent))
        connection.execute(
            sa.insert(schema.slashes).values(
                submission_digest=sha256(b"bad"),
                node=signer(2).address,
                validator=signer(3).address,
                evidence=sha256(b"e"),
                reason=4,
                amount="50",
                status="queued",
                created_at=3.0,
            )
        )
    seen = status(world)
    assert (seen.step, seen.latest_version, seen.published) == (1, 0, (0,))
    assert seen.files == {"submitted": 1}
    assert [node.status for node in seen.nodes] == ["active"]
    assert [batch["mean_reward_micro"] for batch in seen.batches] == [250_000]
    assert [(t["kind"], t["status"]) for t in seen.transactions] == [("root", "sent")]
    assert [(s["reason"], s["status"]) for s in seen.slashes] == [("wrong_activations", "queued")]
    assert not seen.chain_reachable
    assert (seen.owed, "owed" in status_cli.text(seen)) == (None, False)


def test_status_and_metrics_show_what_the_pool_owes_and_that_it_gives_no_lease(
    world: World,
) -> None:
    for owed, warned in ((5, False), (6, True)):
        found = Funding(owed=owed * ETHER, money=5 * ETHER, at=world.clock())
        with world.backend.store.begin() as connection:
            meta.put(connection, "funding", found.model_dump_json())
        world.clock.advance(5)
        shown = status_cli.text(status(world))
        assert f"owed: {owed} PRIME; bond and free funds: 5 PRIME" in shown
        assert ("NO LEASE IS GIVEN" in shown) == warned
    assert 'prime_pool_money{kind="owed"} 6.0' in world.http.get("/metrics").text


def test_the_chain_is_reachable_while_it_was_seen_lately(world: World) -> None:
    with world.backend.store.begin() as connection:
        meta.put(connection, meta.CHAIN_SEEN_AT, str(int(world.clock())))
    assert status(world).chain_reachable
    world.clock.advance(31)
    assert not status(world).chain_reachable


def test_a_pool_without_batch_or_policy_is_stalled_and_a_closed_one_has_ended(
    world: World,
) -> None:
    started = int(world.clock())
    assert world.backend.context.run.lease_seconds == 60
    world.clock.advance(60)
    assert (status(world).activity, status(world).activity_since) == ("running", started)
    world.clock.advance(1)
    assert (status(world).activity, status(world).activity_since) == ("stalled", started)
    seal(world, 0)
    world.clock.advance(100)
    seal(world, 1)
    sealed = int(world.clock())
    world.clock.advance(300)
    assert (status(world).activity, status(world).activity_since) == ("running", sealed)
    world.clock.advance(1)
    assert (status(world).activity, status(world).activity_since) == ("stalled", sealed)
    world.on_chain("PoolEnded", pool=2)
    assert status(world).activity == "stalled"
    world.on_chain("PoolEnded", pool=1)
    assert (status(world).activity, status(world).activity_since) == ("ended", 1)


def test_status_and_nodes_count_what_is_void_through_the_pools_fault(world: World) -> None:
    session = world.member(1)
    for data, reason in ((b"a", Reason.UNROOTED), (b"b", Reason.MALFORMED)):
        digest = world.hand_in(session, data)
        with world.backend.store.begin() as connection:
            endings.void(connection, digest, reason, world.clock())
    seen = status(world)
    assert (seen.files["void"], seen.expired_unjudged) == (2, 1)
    assert [(node.void, node.expired_unjudged) for node in seen.nodes] == [(2, 1)]
    text = status_cli.text(seen)
    assert "2 void (1 expired unjudged: the pool's fault)" in text


def test_events_are_statuses_sent_when_something_changed(world: World) -> None:
    async def watch() -> list[str]:
        feed = StatusFeed(world.backend)
        seen = []
        async for event in feed.events(""):
            seen.append(event)
            if len(seen) == 2:
                feed.end()
            elif len(seen) == 1:
                world.clock.advance(1)  # the status carries the time
        return seen

    events = asyncio.run(asyncio.wait_for(watch(), 30))
    assert len(events) == 3
    assert events.pop() == f"event: end\ndata: {int(world.clock())}\n\n"
    for event in events:
        assert event.startswith("data: ")
        assert event.endswith("\n\n")
        Status.model_validate_json(event.removeprefix("data: "))


def test_too_many_watchers_are_turned_away(world: World) -> None:
    feed: StatusFeed = world.http.app.state.feed  # type: ignore[attr-defined]
    with ExitStack() as held:
        for _ in range(MAX_WATCHERS):
            held.enter_context(feed.watchers.one(""))
        assert world.http.get("/v1/events").status_code == 503


def test_metrics_are_prometheus_text(world: World) -> None:
    world.hand_in(world.member(1))
    world.http.request("WEIRD", "/v1/none")
    answer = world.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    pattern = re.compile(r'[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [0-9.e+-]+')
    assert all(line.startswith("# ") or pattern.fullmatch(line) for line in lines)
    assert 'prime_nodes{status="active"} 1.0' in lines
    assert 'prime_submissions{status="submitted"} 1.0' in lines
    assert 'prime_second_opinions_waiting{said="rejected"} 0.0' in lines
    assert "prime_rejections_lapsed 0.0" in lines
    assert any(line.startswith('prime_http_requests_total{method="other"') for line in lines)


def test_health_is_the_databases(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.http.get("/healthz").json() == {"status": "ok"}
    world.backend.store.close()

    def gone(*_: Any) -> Any:
        from prime_core.errors import UnavailableError

        raise UnavailableError("the database cannot be used")

    monkeypatch.setattr("prime_orchestrator.store.engine.Store.read", gone)
    answer = world.http.get("/healthz")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


def test_the_dashboard_serves_its_own_files_only(world: World) -> None:
    page = world.http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for asset in re.findall(r'(?:href|src)="(/dashboard/[^"]+)"', page.text):
        assert world.http.get(asset).status_code == 200, asset
    for trick in ("..%2fapp.py", "%2e%2e", "none.js", "index.html%00"):
        assert world.http.get(f"/dashboard/{trick}").status_code == 404


def test_node_infos_count_what_became_of_files(world: World) -> None:
    session = world.member(1)
    digest: Digest = world.hand_in(session)
    table = schema.submissions
    with world.backend.store.begin() as connection:
        connection.execute(
            sa.update(table).where(table.c.digest == digest).values(status="accepted", units=77)
        )
        assert nodes.get(connection, session.account.address) is not None
    [info] = world.http.get("/v1/nodes").json()
    assert (info["accepted"], info["rejected"], info["void"], info["units"]) == (1, 0, 0, 77)


@pytest.mark.slow
def test_the_api_process_needs_neither_torch_nor_docker() -> None:
    code = (
        "import sys, prime_orchestrator.api.app, prime_orchestrator.serve;"
        "import prime_orchestrator.cli.main;"
        "bad = {'torch', 'transformers', 'docker', 'vllm'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_versions_in_status_are_those_published(world: World) -> None:
    world.publish(3)
    assert status(world).published == (0, 1, 2, 3)


def test_numbers_of_thousands_of_digits_are_malformed(world: World) -> None:
    digits = "9" * 5000
    assert world.http.get(f"/v1/batches/{digits}/manifest").status_code == 400
    raw = world.http.post("/v1/sessions", content=b"{}", headers={"content-length": digits})
    assert raw.status_code == 400


def test_nodes_are_listed_a_page_at_a_time_and_one_owner_s_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_orchestrator.api.status.NODES_PAGE", 4)
    monkeypatch.setattr("prime_core.transport.client.NODES_PAGE", 4)
    members = [world.member(number) for number in range(1, 10)]
    first = world.http.get("/v1/nodes").json()
    assert len(first) == 4
    client = OrchestratorClient("http://testserver")
    client._http = world.http
    listed = [info.node for info in client.nodes()]
    assert listed == sorted(member.account.address for member in members)
    owner = client.get(f"/v1/nodes/{listed[0]}", NodeInfo).provider
    assert {info.provider for info in client.nodes(owner)} == {owner}
    assert list(client.nodes(signer(77).address)) == []
    assert world.http.get(f"/v1/nodes/{signer(77).address}").status_code == 404


def test_a_node_s_submissions_are_listed_newest_first_a_page_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_orchestrator.api.status.SUBMISSIONS_PAGE", 2)
    monkeypatch.setattr("prime_core.transport.client.SUBMISSIONS_PAGE", 2)
    world.publish(0)
    node, other = world.member(1), world.member(2)
    digests = []
    for number in range(5):
        world.clock.advance(1)
        digests.append(world.hand_in(node, b"file %d" % number))
    client = OrchestratorClient("http://testserver")
    client._http = world.http
    listed = [info.submission_digest for info in client.submissions(node.account.address)]
    assert listed == digests[::-1]
    assert list(client.submissions(other.account.address)) == []
    query = f"/v1/submissions?node={other.account.address}&before={digests[0]}"
    assert world.http.get(query).status_code == 404
    assert world.http.get("/v1/submissions").status_code == 400


def test_many_readers_of_the_status_cost_one_picture(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []
    real = status_module.status

    def counted(backend: Backend) -> Status:
        made.append(world.clock())
        return real(backend)

    monkeypatch.setattr(status_module, "status", counted)
    monkeypatch.setattr("prime_orchestrator.api.kept.EVERY_SECONDS", 3600.0)
    answers = {world.http.get("/v1/status").content for _ in range(20)}
    assert len(made) == 1
    assert len(answers) == 1
    Status.model_validate_json(answers.pop())


def test_many_readers_of_the_nodes_cost_one_reading(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []
    real = status_module.NodeList

    def counted(backend: Backend) -> status_module.NodeList:
        made.append(world.clock())
        return real(backend)

    node = world.member(1).account.address
    monkeypatch.setattr(status_module, "NodeList", counted)
    monkeypatch.setattr("prime_orchestrator.api.kept.EVERY_SECONDS", 3600.0)
    found = [
        [info["node"] for info in world.http.get(f"/v1/nodes?after=0x{n:040x}").json()]
        for n in range(20)
    ]
    assert found == [[node]] * 20
    assert len(made) == 1
