"""`orchestrator relay` against a real orchestrator: learns, checks, serves, announces, ends."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from broadcast_world import CHUNK, STRANGER, Run, same_files, until
from pools import deployment, run_definition
from pydantic import TypeAdapter
from served import listen, serving
from stores import migrate

from prime_broadcast.access import Passes
from prime_broadcast.client import fetch
from prime_broadcast.publish import finalize, publish
from prime_broadcast.server import Origin
from prime_broadcast.sources import SourceBook
from prime_chain.keystore import save_keystore
from prime_core.checkpoint import SignedManifest
from prime_core.deployment import Deployment
from prime_core.errors import UnavailableError
from prime_core.messages import PolicyList, RelayAnnouncement, RelayInfo
from prime_core.signing import LocalSigner
from prime_core.storage.directory import DirectoryStore
from prime_core.transport.client import Empty, OrchestratorClient
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.cli.main import main
from prime_orchestrator.context import PoolContext
from prime_orchestrator.store import open_store, sqlite_url

TRAINER, MANAGER = (LocalSigner(bytes([number]) * 32) for number in (91, 92))
RELAYER_KEY = bytes([93]) * 32
RELAYS = TypeAdapter(list[RelayInfo])


@dataclass
class Pool:
    """An orchestrator that listens, and a trainer who publishes to it."""

    url: str
    run: Run
    origin: Origin
    deployment: Deployment
    client: OrchestratorClient
    versions: int = 0

    def publish(self) -> SignedManifest:
        version = self.versions
        self.versions += 1
        folder = self.run.folder / f"checkpoint-{version}"
        if version:
            self.run.step()
            self.run.checkpoint(folder)
        manifest = publish(
            folder, self.run.root, pool=1, version=version, step=version, chunk_size=CHUNK
        )
        signed = manifest.signed(TRAINER, self.deployment.domain("pools"))
        finalize(self.run.root, signed)
        self.client.post("/v1/policies", signed, Empty)
        return signed

    def reader(self, signer: LocalSigner) -> SourceBook:
        """Sources for someone who signs what he asks for."""
        return SourceBook(passes=Passes(signer, self.deployment.domain("registry")))

    def relays(self) -> dict[str, tuple[int, ...]]:
        raw = self.client.request("GET", "/v1/relays", b"", signed=False)
        return {info.url: info.versions for info in RELAYS.validate_json(raw)}


@pytest.fixture
def pool(run: Run, tmp_path: Path) -> Iterator[Pool]:
    from prime_broadcast.manifest import build_manifest

    base = run.checkpoint(run.folder / "checkpoint-0")
    manifest = build_manifest(base, pool=1, version=0, step=0, chunk_size=CHUNK)
    definition = run_definition(base_model=manifest.result_digest)
    deployed = deployment()
    listener, url = listen()
    store = open_store(sqlite_url(tmp_path / "orchestrator.sqlite"))
    migrate(store)
    backend = Backend(
        context=PoolContext(deployment=deployed, pool=1, manager=MANAGER.address, run=definition),
        store=store,
        objects=DirectoryStore(tmp_path / "objects", url, b"s" * 32),
        manager=MANAGER,
        trainer=TRAINER.address,
        audience=url,
        relay_accounts=frozenset({LocalSigner(RELAYER_KEY).address}),
        now=time.time,
        random=random.Random(7).randbytes,
    )
    with (
        closing(store),
        serving(create_app(backend), listener),
        Origin(run.root) as origin,
        OrchestratorClient(url, TRAINER, "trainer") as client,
        OrchestratorClient(url, TRAINER, "relay") as announcer,
    ):
        announcer.post("/v1/relays", RelayAnnouncement(url=origin.url), Empty)
        yield Pool(url, run, origin, deployed, client)


@contextmanager
def relay_process(orchestrator: str, data: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "prime_orchestrator.cli.main",
                "relay",
                "--orchestrator",
                orchestrator,
            ),
            *("--data", str(data), "--port", "0", "--poll", "0.2", *flags),
        ],
        stdout=(data.parent / f"{data.name}.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def log_of(data: Path) -> list[dict[str, object]]:
    raw = (data.parent / f"{data.name}.log").read_text().splitlines()
    return [json.loads(line) for line in raw if line.startswith("{")]


def url_of(data: Path) -> str:
    until(lambda: (data / "relay.json").exists(), "the relay's address")
    return str(json.loads((data / "relay.json").read_text())["url"])


@pytest.fixture
def wallet_flags(tmp_path: Path) -> list[str]:
    save_keystore(tmp_path / "relay.keystore", RELAYER_KEY, "password", light=True)
    (tmp_path / "password").write_text("password\n")
    return [
        *("--wallet", str(tmp_path / "relay.keystore")),
        *("--password-file", str(tmp_path / "password")),
    ]


@pytest.mark.slow
def test_policies_reach_nodes_through_announced_relays_and_a_relay_of_a_relay(
    pool: Pool, tmp_path: Path, wallet_flags: list[str]
) -> None:
    with relay_process(pool.url, tmp_path / "a", *wallet_flags) as first:
        url = url_of(tmp_path / "a")
        zero = pool.publish()
        until(lambda: pool.relays().get(url) == (0,), "the relay's announcement")
        with relay_process(pool.url, tmp_path / "b", *wallet_flags, "--upstream", url) as second:
            below = url_of(tmp_path / "b")
            before = pool.origin.counters.bytes_sent
            until(lambda: pool.relays().get(below) == (0,), "the second relay's announcement")
            book = pool.reader(TRAINER)
            fetch(zero, [below], tmp_path / "n" / "0", book=book, patience=10.0)
            assert pool.origin.counters.bytes_sent == before, "it feeds from the first relay"
            one = pool.publish()
            until(lambda: pool.relays().get(below) == (0, 1), "version 1 at the second relay")
            listed = pool.client.get("/v1/policies", PolicyList).policies
            assert [signed.manifest.version for signed in listed] == [1, 0]
            fetch(one, [below], tmp_path / "n" / "1", book=book, patience=10.0)
            second.send_signal(signal.SIGTERM)
            assert second.wait(120) == 0
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 0
    assert same_files(tmp_path / "n" / "0", pool.run, 0)
    assert same_files(tmp_path / "n" / "1", pool.run, 1)
    assert "trouble" not in {line["event"] for line in log_of(tmp_path / "a")}


def test_without_a_wallet_a_relay_serves_and_announces_nothing(pool: Pool, tmp_path: Path) -> None:
    signed = pool.publish()
    with relay_process(pool.url, tmp_path / "a"):
        url = url_of(tmp_path / "a")
        until(lambda: any(e["event"] == "complete" for e in log_of(tmp_path / "a")), "version 0")
        with pytest.raises(UnavailableError, match="401 sign the request"):
            fetch(signed, [url], tmp_path / "n" / "0", patience=0.2)
        book = pool.reader(TRAINER)
        fetch(signed, [url], tmp_path / "n" / "0", book=book, patience=10.0)
        assert url not in pool.relays()
        words = ["relay", "--orchestrator", pool.url, "--data", str(tmp_path / "a")]
        second = subprocess.run(
            [sys.executable, "-m", "prime_orchestrator.cli.main", *words],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (second.returncode, "another relay" in second.stderr) == (64, True), second.stderr
    assert same_files(tmp_path / "n" / "0", pool.run, 0)


def test_a_relay_may_serve_members_only_or_anyone(pool: Pool, tmp_path: Path) -> None:
    signed = pool.publish()
    members = ("--access", "members", "--allow", TRAINER.address)
    with relay_process(pool.url, tmp_path / "a", *members):
        url = url_of(tmp_path / "a")
        until(lambda: any(e["event"] == "complete" for e in log_of(tmp_path / "a")), "version 0")
        with pytest.raises(UnavailableError, match="is not a member here"):
            fetch(signed, [url], tmp_path / "n", book=pool.reader(STRANGER), patience=0.2)
        fetch(signed, [url], tmp_path / "n", book=pool.reader(TRAINER), patience=10.0)
    with relay_process(pool.url, tmp_path / "b", "--access", "anyone"):
        fetch(signed, [url_of(tmp_path / "b")], tmp_path / "m", patience=10.0)


def test_a_relay_that_knows_the_trainer_refuses_what_another_signed(
    pool: Pool, tmp_path: Path
) -> None:
    pool.publish()
    with relay_process(pool.url, tmp_path / "a", "--trainer", STRANGER.address):
        until(lambda: any(e["event"] == "refused" for e in log_of(tmp_path / "a")), "a refusal")
        assert not [e for e in log_of(tmp_path / "a") if e["event"] == "learned"]


@pytest.mark.parametrize(
    ("flags", "said", "code"),
    [
        (["--upstream", "nonsense"], "give --upstream", 64),
        (["--trainer", "0x12"], "not an Ethereum address", 65),
        (["--rpc", "http://127.0.0.1:1"], "--rpc needs --deployment", 64),
        (["--wallet", "/nowhere/keystore", "--password-file", "/nowhere/pw"], "/nowhere", 64),
        (["--port", "TAKEN"], "cannot listen on", 64),
        (
            ["--orchestrator", "http://127.0.0.1:9", "--first-answer-seconds", "0"],
            "no answer for 0 s at this first start: check the address",
            69,
        ),
    ],
)
def test_mistakes_are_one_sentence_and_an_exit_code(
    pool: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    said: str,
    code: int,
) -> None:
    flags = [str(pool.origin.port) if flag == "TAKEN" else flag for flag in flags]
    command = ["orchestrator", "relay", "--orchestrator", pool.url, "--data", str(tmp_path / "a")]
    monkeypatch.setattr(sys, "argv", [*command, *flags])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended.value.code == code
    assert said in capsys.readouterr().err
