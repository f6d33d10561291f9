"""deploy/prometheus and deploy/grafana against a live pool, promtool and a real Prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import sqlalchemy as sa
import yaml
from operator_kit import (
    NODE,
    Operator,
    admit,
    commit_draws,
    hand_in,
    publish,
    register,
    until,
    without_unit,
)  # fmt: skip

from devnet.ports import free_port
from prime_broadcast import publish as layouts
from prime_broadcast.manifest import Trust
from prime_broadcast.relay import Relay
from prime_broadcast.server import Origin
from prime_core.checkpoint import SignedManifest
from prime_core.ids import ZERO_ADDRESS
from prime_core.messages import Heartbeat, HeartbeatAnswer, RelayAnnouncement
from prime_core.node import Hardware
from prime_core.signing import Domain
from prime_core.transport.client import OrchestratorClient
from prime_core.verdict import Reason
from prime_orchestrator.manager.history import LEAST_FILES
from prime_orchestrator.store import Store, batches, drift, nodes, opinions, schema
from prime_orchestrator.store.batches import BatchRow
from prime_orchestrator.store.opinions import OpinionRow
from prime_trainer.observe import MetricsServer, flat

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
STEP = {
    "step": 3, "applied": True, "reward": 0.5, "reward_by_target": {"2": 0.5}, "entropy": 1.0,
    "kl_old": 0.1, "kl_mismatch": 0.01, "gradient_norm": 1.0, "clipped": 0.1, "ratio_max": 2.0,
    "staleness": {"0": 4}, "length_error": {"2": 1.0}, "groups_alike": 0.25, "tokens_s": 10.0,
    "tokens_s_wall": 5.0, "seconds": {"fetch": 0.5},
}  # fmt: skip


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: install Prometheus (Debian: apt-get install prometheus)")
    return found


def promtool(*words: str) -> None:
    done = subprocess.run(
        [program("promtool"), *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_each_alert_fires_for_a_broken_pool_and_none_for_a_healthy_one() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "alerts.test.yml")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_has_the_form_that_grafana_imports(path: Path) -> None:
    board = json.loads(path.read_text())
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prime.yml").read_text())
    known = {source["uid"]: source["type"] for source in sources["datasources"]}
    assert board["uid"] == f"prime-{path.stem}"
    assert board["schemaVersion"] >= 38
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 0
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert known[panel["datasource"]["uid"]] == panel["datasource"]["type"]
        assert panel["type"] == "timeseries"
        assert panel["fieldConfig"]["defaults"]["unit"]
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} overlaps another panel"
        taken |= cells
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0


def queries() -> list[str]:
    """Every query of every dashboard."""
    return [
        target["expr"]
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]


def fill(store: Store) -> None:
    """Adds what validators and a sealed batch leave in the database."""
    machine = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())
    other = ZERO_ADDRESS
    with store.begin() as connection:
        nodes.admit(
            connection, other, speed_class=1, hardware=machine, runtime="process", now=time.time()
        )
        for node in (NODE.address, other):
            for number in range(LEAST_FILES):
                drift.add(connection, node, "plain/1 float32 cpu", {"sketch": number / 10})
        planted = "0x" + "ab" * 32
        opinions.plant(connection, planted, "int8", now=time.time())  # type: ignore[arg-type]
        row = OpinionRow(planted, NODE.address, int(Reason.NONE), "{}", time.time())  # type: ignore[arg-type]
        opinions.add(connection, row)
        connection.execute(sa.update(schema.submissions).values(compute_share=0.25))
        batches.add(connection, BatchRow(0, planted, "{}", 4, 500_000, 1, time.time()))  # type: ignore[arg-type]


def report(operator: Operator, url: str) -> None:
    """Announces a relay, and has the node report wrong chunks from it."""
    with OrchestratorClient(operator.url, NODE, "relay") as client:
        client.send("POST", "/v1/relays", RelayAnnouncement(url=url))
    with OrchestratorClient(operator.url, NODE) as client:
        client.post("/v1/heartbeat", Heartbeat(policy_version=0, lied=(url,)), HeartbeatAnswer)


def layout(operator: Operator, folder: Path) -> tuple[SignedManifest, Trust]:
    """Publishes a small policy in `folder`, signed by the pool's trainer."""
    trainer = operator.deployed.accounts[2]
    trust = Trust(trainer.address, Domain(chain_id=1, contract=ZERO_ADDRESS), operator.pool)
    source = operator.folder / "weights"
    source.mkdir()
    (source / "model.bin").write_bytes(bytes(100_000))
    manifest = layouts.publish(
        source, folder, pool=operator.pool, version=0, step=0, chunk_size=1 << 16
    )
    signed = manifest.signed(trainer, trust.domain)
    layouts.finalize(folder, signed)
    return signed, trust


def pages_of(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=20).raise_for_status().text


@pytest.mark.slow
@pytest.mark.forge
def test_every_query_of_the_dashboards_finds_a_live_pool(
    operator: Operator, store: Store, tmp_path: Path
) -> None:
    server = program("prometheus")
    register(operator.deployed, operator.pool)
    operator.serve(database=store.engine.url.render_as_string(hide_password=False))
    with OrchestratorClient(operator.url, NODE) as client:
        publish(operator, client)
        admit(client)
        beat = Heartbeat(policy_version=0)
        until(lambda: client.post("/v1/heartbeat", beat, HeartbeatAnswer).directive == "work")
        commit_draws(operator, store)
        hand_in(client, b"a file")
    fill(store)
    signed, trust = layout(operator, tmp_path / "layout")
    trainer = MetricsServer(0)
    trainer.show(dict(flat(STEP)))
    try:
        with Origin(tmp_path / "layout") as origin, Relay(tmp_path / "relay", trust) as relay:
            relay.offer([signed], [[f"http://127.0.0.1:{free_port()}", origin.url]])
            until(lambda: "prime_broadcast_received_bytes_total{" in pages_of(relay.url))
            report(operator, relay.url)
            urls = {
                "orchestrator": operator.url,
                "broadcast": relay.url,
                "trainer": trainer.url.removesuffix("/metrics"),
            }
            assert not [name for url in urls.values() for name in without_unit(pages_of(url))]
            with_answers(server, scraping(urls, tmp_path), tmp_path)
    finally:
        trainer.stop()


def scraping(urls: dict[str, str], folder: Path) -> Path:
    """The configuration of deploy/prometheus with these targets and short intervals."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs.keys() == urls.keys()
    for name, job in jobs.items():
        job["static_configs"] = [{"targets": [urlsplit(urls[name]).netloc]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def with_answers(server: str, config: Path, folder: Path) -> None:
    """Runs Prometheus until each query has found series; fails by naming those that have not."""
    address = f"127.0.0.1:{free_port()}"
    log = (folder / "prometheus.log").open("w")
    child = subprocess.Popen(
        [
            server, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={address}",
        ],
        stdout=log, stderr=log,
    )  # fmt: skip
    log.close()
    empty = queries()
    assert len(empty) > 40

    def found(query: str) -> list[Any]:
        answer = httpx.get(f"http://{address}/api/v1/query", params={"query": query}, timeout=20)
        assert answer.status_code == 200, f"{query}: {answer.text}"
        return list(answer.json()["data"]["result"])

    def answers() -> bool:
        assert child.poll() is None, (folder / "prometheus.log").read_text()
        try:
            if httpx.get(f"http://{address}/-/ready", timeout=20).status_code == 503:
                return False  # it opens its store, and answers no query
            empty[:] = [query for query in empty if not found(query)]
        except httpx.TransportError:
            return False
        return not empty

    try:
        deadline = time.monotonic() + 120
        while not answers():
            assert time.monotonic() < deadline, f"no series: {empty}"
            time.sleep(0.25)
        rules = httpx.get(f"http://{address}/api/v1/rules", timeout=20).json()["data"]["groups"]
        assert all(rule["health"] != "err" for group in rules for rule in group["rules"])
    finally:
        child.terminate()
        child.wait(60)
