"""`orchestrator serve` as a process: starts, joins a node on a real local chain, survives kills."""

from __future__ import annotations

import dataclasses
import http.client
import inspect
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest.mock import MagicMock
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
from operator_kit import (
    NODE,
    PASSWORD,
    RUN,
    Operator,
    admit,
    commit_draws,
    hand_in,
    publish,
    register,
    until,
)
from orchestrator_world import run_definition
from served import served
from typer.testing import CliRunner

from devnet.chain import Anvil
from devnet.ports import free_port
from devnet.s3 import BUCKET, SECRET_KEY, S3Server
from prime_chain.keystore import save_keystore
from prime_core.encoding import sha256
from prime_core.errors import PrimeError, UnavailableError, UntrustedError, UserError
from prime_core.loops import Loops
from prime_core.messages import Heartbeat, HeartbeatAnswer, ReceiptAnswer, Status, SubmissionInfo
from prime_core.storage.base import ObjectStore, digest_key
from prime_core.storage.directory import DirectoryStore
from prime_core.storage.signing import load_secret
from prime_core.transport.client import OrchestratorClient
from prime_orchestrator.cli.main import app
from prime_orchestrator.config import load
from prime_orchestrator.manager import loops as manager
from prime_orchestrator.serve import address_of, bind, place_of, run
from prime_orchestrator.store import Store, jobs, meta, open_store, policies, sqlite_url


def test_a_node_joins_on_chain_works_and_nothing_is_lost_by_a_kill(
    operator: Operator, empty_database: Store
) -> None:
    database = empty_database.engine.url.render_as_string(hide_password=False)
    register(operator.deployed, operator.pool)
    child = operator.serve(database=database)
    with OrchestratorClient(operator.url, NODE) as client:
        publish(operator, client)
        assert admit(client).invite.node == NODE.address
        beat = Heartbeat(policy_version=0)

        def works() -> bool:
            return client.post("/v1/heartbeat", beat, HeartbeatAnswer).directive == "work"

        until(works)
        pools = operator.deployed.contracts.pools
        assert pools.is_member(operator.pool, NODE.address)
        commit_draws(operator, empty_database)
        signed, receipt = hand_in(client, b"first file")

    child.kill()
    child.wait(120)
    with empty_database.begin() as connection:
        assert meta.get(connection, meta.RUN) == RUN.raw().decode()
        meta.drop(connection, meta.RUN)  # as a database of before
    child = operator.serve(database=database)
    with OrchestratorClient(operator.url, NODE) as client:
        again = client.post("/v1/submissions", signed, ReceiptAnswer, signed=False)
        assert again == receipt
        digest = receipt.receipt.submission_digest
        path = f"/v1/submissions/{digest}"
        until(lambda: client.get(path, SubmissionInfo).root is not None)
        status = client.get("/v1/status", Status)
        assert status.chain_reachable
        assert status.files == {"submitted": 1}
        until(lambda: pools.policy_digest(operator.pool, 0) is not None)
    child.send_signal(signal.SIGTERM)
    assert child.wait(120) == 0
    assert not (operator.data / "serve.json").exists()
    with empty_database.read() as connection:
        assert meta.get(connection, meta.RUN) == RUN.raw().decode()
        job = jobs.get(connection, digest)
        assert job is not None
        assert job.status == "open"
        assert policies.latest_version(connection) == 0


@pytest.mark.slow
def test_a_restart_needs_no_rpc_and_watchers_do_not_keep_it_alive(operator: Operator) -> None:
    child = operator.serve()
    child.send_signal(signal.SIGINT)
    assert child.wait(120) == 0
    child = operator.serve(rpc="http://127.0.0.1:9")
    with httpx.stream("GET", f"{operator.url}/v1/events", timeout=20) as events:
        line = next(events.iter_lines())
        status = Status.model_validate_json(line.removeprefix("data: "))
        assert status.latest_version is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 0


def test_what_does_not_fit_is_refused_before_anything_is_written(operator: Operator) -> None:
    folder = operator.folder
    (folder / "wrong").write_text("wrong password")
    (folder / "other.json").write_bytes(
        run_definition(epoch_seconds=10, validity_seconds=30, name="another").raw()
    )
    (folder / "long.json").write_bytes(run_definition().raw())
    key = bytes(operator.deployed.accounts[5].account.key)
    save_keystore(folder / "stranger.json", key, PASSWORD, light=True)
    for changes, complaint in (
        ({"password_file": str(folder / "wrong")}, "password does not open"),
        ({"deployment": str(folder / "none.json")}, "deployment file"),
        ({"run": str(folder / "none.json")}, "there is no run definition"),
        ({"run": str(folder / "password")}, "is not a run definition"),
        ({"run": str(folder / "long.json")}, "epoch_seconds"),
        ({"run": str(folder / "other.json")}, "digest"),
        ({"wallet": str(folder / "stranger.json")}, "is managed by"),
        ({"pool": "77"}, "pool 77 is not on chain"),
    ):
        assert complaint in operator.refused(**changes)
    with pytest.raises(UnavailableError):
        run(load(operator.flags(rpc="http://127.0.0.1:9")))
    store = open_store(sqlite_url(operator.data / "orchestrator.sqlite"))
    with store.read() as connection:
        assert meta.get(connection, "serves") is None
    store.close()


def test_a_chain_without_the_contracts_is_said_in_one_sentence(operator: Operator) -> None:
    """Such as a local chain that was made again."""
    empty = Anvil().start()
    try:
        assert "are not on this chain" in operator.refused(rpc=empty.url)
    finally:
        empty.stop()


@pytest.mark.slow
def test_a_taken_port_and_a_second_server_are_said_in_one_sentence(operator: Operator) -> None:
    operator.serve()
    assert "another orchestrator is serving" in operator.refused()
    port = operator.url.rpartition(":")[2]
    second = operator.arguments(data=str(operator.folder / "other"), port=port)
    done = subprocess.run(second, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == UserError.exit_code
    [said] = done.stderr.strip().splitlines()
    assert said.startswith(f"orchestrator: cannot listen on 127.0.0.1:{port}: Address already")
    assert said.endswith("(0 takes a free port)")
    moved = load(operator.flags(pool="2"))
    with pytest.raises(UserError, match="another orchestrator"):
        run(moved)


@pytest.mark.slow
def test_an_upload_that_breaks_off_leaves_nothing(operator: Operator) -> None:
    operator.serve()
    objects = DirectoryStore(
        operator.data / "objects", operator.url, load_secret(operator.data / "store.secret")
    )
    data = os.urandom(1 << 20)
    key, expires = digest_key(sha256(data)), int(time.time()) + 60
    target = objects.signed_put(key, len(data), sha256(data), expires)
    folder = operator.data / "objects" / "sha256"
    url = httpx.URL(target.url)
    with socket.create_connection((url.host, url.port or 0), timeout=20) as peer:
        head = f"PUT {url.raw_path.decode()} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}"
        peer.sendall(head.encode() + b"\r\n\r\n" + data[: 600 << 10])
        until(lambda: folder.is_dir() and any(folder.iterdir()))  # it is being written
        assert not objects.exists(key)
    until(lambda: not any(folder.iterdir()))
    assert httpx.put(target.url, content=data, headers=target.headers).status_code == 204
    assert httpx.get(objects.signed_get(key, expires)).content == data


@pytest.mark.slow
def test_servers_on_one_database_accept_each_others_signed_urls(
    operator: Operator, empty_database: Store
) -> None:
    """Each from a data folder of its own, with one folder of objects."""
    shared = {
        "database": empty_database.engine.url.render_as_string(hide_password=False),
        "objects": str(operator.folder / "objects"),
    }
    folders = [operator.data, operator.folder / "another"]
    seed = load_secret(operator.data / "store.secret")  # of a deployment of before
    for folder in folders:
        operator.serve(data=str(folder), **shared)
    assert [load_secret(folder / "store.secret") for folder in folders] == [seed, seed]
    urls = [json.loads((folder / "serve.json").read_text())["url"] for folder in folders]
    for number, (signer, other) in enumerate((urls, urls[::-1])):
        data = b"a file, signed by %d" % number
        key, expires = digest_key(sha256(data)), int(time.time()) + 60
        objects = DirectoryStore(operator.folder / "objects", signer, seed)
        target = objects.signed_put(key, len(data), sha256(data), expires)
        at_other = target.url.replace(signer, other)
        assert httpx.put(at_other, content=data, headers=target.headers).status_code == 204
        read = objects.signed_get(key, expires)
        assert [httpx.get(read.replace(signer, one)).content for one in urls] == [data, data]


def test_the_databases_secret_wins_and_is_replaced_by_a_command(
    either_store: Store, tmp_path: Path
) -> None:
    database = either_store.engine.url.render_as_string(hide_password=False)
    settings = [load({"data": tmp_path / name, "database": database}) for name in ("a", "b")]

    def opened() -> list[ObjectStore]:
        return [one.open_objects("http://x", "", either_store) for one in settings]

    def accepts(store: ObjectStore, url: str) -> bool:
        key, query = url.removeprefix("http://x/v1/store/").split("?")
        try:
            store.check_url("GET", key, parse_qsl(query), now=1)
        except UntrustedError:
            return False
        return True

    load_secret(settings[1].secret_file)  # it was alone before
    before, url = opened(), opened()[0].signed_get("a", 100)
    assert all(accepts(one, url) for one in before)
    with either_store.begin() as connection:
        meta.put(connection, meta.SERVES, "31337/0xPools/1")
    words = ["store", "rotate-secret", "--database", database]
    assert "start every serve process" in CliRunner().invoke(app, words).output
    after = opened()
    assert not any(accepts(one, url) for one in after)
    assert all(accepts(one, after[1].signed_get("a", 100)) for one in after)
    first, second = (load_secret(one.secret_file) for one in settings)
    assert first == second
    with pytest.raises(UnavailableError):
        settings[0].open_objects("", "").signed_get("a", 100)


FILE = b"a file"


@pytest.mark.slow
def test_files_go_to_a_bucket_past_the_orchestrator(
    operator: Operator, s3: S3Server, store: Store
) -> None:
    """Every request of the orchestrator to S3 passes a proxy: none carries a byte of the file."""
    register(operator.deployed, operator.pool)
    database = store.engine.url.render_as_string(hide_password=False)
    with recording(s3.url) as (proxy, asked):
        place = {"s3_bucket": BUCKET, "s3_endpoint": proxy, "s3_public_endpoint": s3.url}
        child = operator.serve(database=database, log_level="debug", **place)
        _hand_in_past_the_orchestrator(operator, s3, store)
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 0
    about = [(method, sent) for method, path, sent in asked if sha256(FILE)[2:] in path]
    assert {("HEAD", 0), ("PUT", 0)} <= set(about) <= {("HEAD", 0), ("PUT", 0), ("DELETE", 0)}
    assert not (operator.data / "objects").exists()
    log = (operator.folder / "serve.log").read_text()
    assert "serving pool" in log
    assert SECRET_KEY not in log
    assert "X-Amz-Signature" not in log


def _hand_in_past_the_orchestrator(operator: Operator, s3: S3Server, store: Store) -> None:
    with OrchestratorClient(operator.url, NODE) as client:
        publish(operator, client)
        admit(client)
        beat = Heartbeat(policy_version=0)
        until(lambda: client.post("/v1/heartbeat", beat, HeartbeatAnswer).directive == "work")
        commit_draws(operator, store)
        signed, _ = hand_in(client, FILE)
        assert client.get_object(signed.submission.sha256) == FILE
        moved = httpx.get(f"{operator.url}/v1/objects/{signed.submission.sha256}")
        assert moved.headers["location"].startswith(f"{s3.url}/{BUCKET}/{place_of_pool(operator)}/")


@contextmanager
def recording(url: str) -> Iterator[tuple[str, list[tuple[str, str, int]]]]:
    """URL of a proxy in front of `url`; method, path and length of the body of each request that
    passed it."""
    asked: list[tuple[str, str, int]] = []

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with closing(http.client.HTTPConnection(urlsplit(url).netloc)) as server:
                server.request(self.command, self.path, body, dict(self.headers))
                answer = server.getresponse()
                data = answer.read()
            asked.append((self.command, self.path, len(body)))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with served(Proxy) as found:
        yield found, asked


def place_of_pool(operator: Operator) -> str:
    return place_of(operator.deployed.deployment, operator.pool)


@pytest.mark.slow
def test_a_bucket_that_cannot_serve_is_said_in_one_sentence(
    operator: Operator, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"s3_bucket": BUCKET, "s3_endpoint": s3.url}
    assert "there is no bucket" in operator.refused(**here | {"s3_bucket": "elsewhere"})
    assert "not in both" in operator.refused(**here, objects=str(operator.folder / "objects"))
    assert "without a bucket" in operator.refused(s3_endpoint=s3.url)
    assert "begins with http" in operator.refused(**here | {"s3_endpoint": "localhost:9000"})
    assert "credentials" in operator.refused(**here | {"s3_endpoint": "http://a:b@localhost"})
    with pytest.raises(UnavailableError, match="does not answer"):
        run(load(operator.flags(**here | {"s3_endpoint": f"http://127.0.0.1:{free_port()}"})))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "refuses these credentials" in operator.refused(**here)


# -- the parts, without a process ---------------------------------------------------------------


def test_a_taken_port_is_the_users_error() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(UserError, match="cannot listen") as caught:
            bind("127.0.0.1", port)
        assert "--port" in caught.value.hint


def test_a_socket_on_every_address_is_reached_at_this_machine() -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        assert address_of(listener).startswith("http://127.0.0.1:")


def test_a_loop_outlives_passing_trouble() -> None:
    calls: list[int] = []
    done = threading.Event()

    def tick() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise UnavailableError("the RPC does not answer")
        done.set()

    crashes: list[int] = []
    loops = Loops(on_crash=lambda: crashes.append(1))
    loops.start("test", tick, 0.01)
    assert done.wait(20)
    loops.stop()
    loops.raise_crash()
    assert crashes == []


def test_a_defect_in_a_loop_is_loud_and_ends_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = threading.Event()

    def tick() -> None:
        raise ZeroDivisionError("a defect")

    loops = Loops(on_crash=ended.set)
    loops.start("test", tick, 0.01)
    assert ended.wait(20)
    loops.stop()
    with pytest.raises(ZeroDivisionError):
        loops.raise_crash()
    assert "the test loop met a defect" in caplog.text
    assert not issubclass(ZeroDivisionError, PrimeError)


@pytest.mark.parametrize(
    ("tick", "failing"), [("chain_tick", "check_events"), ("money_tick", "settle_epochs")]
)
def test_a_step_that_fails_in_each_tick_keeps_no_other_from_running(
    tick: str, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoints hide a reward root, or a table's object cannot be read: others decide."""
    names = getattr(manager.ManagerLoops, tick).__code__.co_names
    steps = {name for name in names if inspect.isfunction(getattr(manager, name, None))}
    calls: list[str] = []
    for name in steps:
        error = UnavailableError("not there") if name == failing else None
        step = MagicMock(return_value=[], side_effect=error)
        monkeypatch.setattr(manager, name, lambda *_, n=name, s=step: (calls.append(n), s())[1])
    fields = {field.name: MagicMock() for field in dataclasses.fields(manager.ManagerLoops)}
    with pytest.raises(UnavailableError):
        getattr(manager.ManagerLoops(**fields), tick)()
    assert len(steps) > 4
    assert set(calls) == steps
