"""`orchestrator doctor`: a healthy orchestrator passes; each fault is found, with its fix."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from operator_kit import PASSWORD, Operator
from typer.testing import CliRunner

from devnet.chain import Anvil
from devnet.deployed import Deployed, deploy_local
from devnet.s3 import BUCKET, SECRET_KEY, S3Server
from prime_chain.client import PaidFee
from prime_chain.keystore import save_keystore
from prime_core.doctor import DoctorCheck
from prime_core.ids import ZERO_ADDRESS
from prime_core.storage.signing import load_secret
from prime_orchestrator import doctor
from prime_orchestrator.cli.main import app
from prime_orchestrator.config import Settings, load
from prime_orchestrator.store import meta, open_store, sqlite_url
from prime_orchestrator.store.migrate import upgrade


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the machine that tests is of no concern."""
    monkeypatch.setattr(doctor, "LITTLE_DISK", 0)
    monkeypatch.setattr(doctor, "LEAST_DISK", 0)


@pytest.fixture(scope="module")
def _deployed_once(anvil: Anvil, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """On a chain of its own: other tests move the clock of the shared one."""
    with Anvil() as own:
        deployed = deploy_local(own, tmp_path_factory.mktemp("deployment"))
        yield deployed
        deployed.client.close()


@pytest.fixture
def ready(operator: Operator) -> Operator:
    """An operator whose files are safe, on a chain with a new block."""
    (operator.folder / "password").chmod(0o600)
    operator.deployed.anvil.mine(1)
    return operator


def found(operator: Operator, **changes: str) -> dict[str, DoctorCheck]:
    """The findings by name; of several with one name the last."""
    return {one.name: one for one in doctor.examine(lambda: load(operator.flags(**changes)))}


def outcomes(checks: dict[str, DoctorCheck], outcome: str) -> set[str]:
    return {name for name, one in checks.items() if one.outcome == outcome}


@pytest.mark.slow
def test_a_running_orchestrator_is_healthy_and_a_killed_one_is_found(ready: Operator) -> None:
    child = ready.serve()
    words = [
        word
        for name, value in ready.flags().items()
        if name not in ("host", "port")
        for word in (f"--{name.replace('_', '-')}", value)
    ]
    done = CliRunner().invoke(app, ["doctor", *words, "--json"])
    assert done.exit_code == 0, done.output
    checks = {one["name"]: one["outcome"] for one in json.loads(done.stdout)}
    assert set(checks) >= {
        "settings", "pool files", "wallet", "password file", "secret of URLs", "database",
        "objects", "disk of data", "open files", "server", "loops", "rpc", "clock",
        "contracts", "pool", "balance",
    }  # fmt: skip
    assert set(checks.values()) == {"ok"}, done.stdout
    assert PASSWORD not in done.stdout
    assert load_secret(ready.data / "store.secret").hex() not in done.stdout
    shown = CliRunner().invoke(app, ["doctor", *words])
    assert "✓ pool: " in shown.stdout
    child.kill()
    child.wait(120)
    checks_after = found(ready)
    assert outcomes(checks_after, "failed") == {"server", "loops"}
    assert "orchestrator serve" in checks_after["loops"].fix


def test_before_the_first_start_nothing_failed_and_nothing_is_made(ready: Operator) -> None:
    checks = found(ready)
    assert outcomes(checks, "failed") == set()
    assert outcomes(checks, "warning") == {"database", "objects", "server"}
    assert not ready.data.exists()


def test_a_wrong_setting_ends_the_checks(ready: Operator) -> None:
    words = ["doctor", "--rpc", ready.deployed.url, "--pool", "-1"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 1
    [only] = json.loads(done.stdout)
    assert (only["name"], only["outcome"]) == ("settings", "failed")
    assert "pool" in only["found"]


def test_files_and_keys_that_do_not_fit_are_named(ready: Operator) -> None:
    checks = found(ready, deployment=str(ready.folder / "none.json"))
    assert outcomes(checks, "failed") == {"pool files"}
    assert "contracts" not in checks
    (ready.folder / "wrong").write_text("wrong password")
    (ready.folder / "wrong").chmod(0o640)
    checks = found(ready, password_file=str(ready.folder / "wrong"))
    assert "password does not open" in checks["key files"].found
    (ready.folder / "password").chmod(0o640)
    assert found(ready)["password file"].outcome == "warning"
    (ready.folder / "password").chmod(0o644)
    assert found(ready)["password file"].fix == f"chmod 600 {ready.folder / 'password'}"
    key = bytes(ready.deployed.accounts[5].account.key)
    save_keystore(ready.folder / "stranger.json", key, PASSWORD, light=True)
    checks = found(ready, wallet=str(ready.folder / "stranger.json"))
    assert "is managed by" in checks["pool"].found
    assert checks["pool"].outcome == "failed"


def test_a_database_of_another_schema_or_pool_or_none_is_found(
    ready: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(sqlite_url(ready.data / "orchestrator.sqlite"))
    with store.begin():
        pass
    assert "is empty" in found(ready)["database"].found
    with store.begin() as connection:
        upgrade(connection, "0027")
    old = found(ready)["database"]
    assert old.outcome == "failed"
    assert "orchestrator store migrate" in old.fix
    store.migrate()
    assert found(ready)["database"].outcome == "ok"
    assert found(ready)["loops"].outcome == "warning"
    with store.begin() as connection:
        meta.put(connection, meta.SERVES, "1/0xPools/1")
    assert "belongs to pool 1/0xPools/1" in found(ready)["database"].found
    store.close()
    url = "postgresql://someone:hidden@127.0.0.1:9/none"
    monkeypatch.setenv("PRIME_ORCHESTRATOR_DATABASE", url)
    gone = found(ready)["database"]
    assert gone.outcome == "failed"
    assert "hidden" not in str(gone)


def test_an_object_store_that_cannot_be_used_is_found(
    ready: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ready.folder / "file"
    file.touch()
    assert found(ready, objects=str(file))["objects"].outcome == "failed"
    folder = ready.folder / "objects"
    folder.mkdir()
    assert found(ready, objects=str(folder))["objects"].outcome == "ok"
    assert not list(folder.iterdir())
    bucket = SimpleNamespace(clock_skew=lambda: 400.0, ends_uploads=lambda: None)
    monkeypatch.setattr(Settings, "open_objects", lambda *_: bucket)
    checks = found(ready, s3_bucket="pools")
    assert checks["S3 clock"].outcome == "failed"
    assert "+400 s" in checks["S3 clock"].found
    assert checks["S3 lifecycle"].outcome == "warning"
    assert "GetLifecycleConfiguration" in checks["S3 lifecycle"].found


@pytest.mark.slow
def test_a_bucket_is_tried_out_and_its_clock_read(ready: Operator, s3: S3Server) -> None:
    place = {"s3_bucket": BUCKET, "s3_endpoint": s3.url}
    checks = found(ready, **place)
    assert (checks["objects"].outcome, checks["S3 clock"].outcome) == ("ok", "ok")
    assert checks["S3 lifecycle"].outcome == "warning"
    assert SECRET_KEY not in str(checks)
    assert "no bucket" in found(ready, **place | {"s3_bucket": "elsewhere"})["objects"].found


def test_endpoints_that_do_not_serve_the_chain_are_found(ready: Operator) -> None:
    dead = "http://127.0.0.1:9"
    checks = found(ready, rpc=dead)
    assert outcomes(checks, "failed") == {"rpc", "quorum"}
    assert "contracts" not in checks
    file = json.loads(ready.deployed.path.read_text()) | {"chain_id": 84532}
    (ready.folder / "other.json").write_text(json.dumps(file))
    other = found(ready, deployment=str(ready.folder / "other.json"))
    assert "31337" in other["rpc"].found
    empty = Anvil().start()
    try:
        checks = found(ready, rpc=empty.url)
    finally:
        empty.stop()
    assert outcomes(checks, "failed") == {"contracts", "pool"}


def test_one_of_two_endpoints_is_enough_but_named(ready: Operator) -> None:
    settings = load(ready.flags() | {"rpc": ("http://127.0.0.1:9", ready.deployed.url)})
    checks = list(doctor.examine(lambda: settings))
    assert [one.outcome for one in checks if one.name == "rpc"] == ["warning", "ok"]
    assert not [one for one in checks if one.name == "quorum"]
    assert [one.outcome for one in checks if one.name == "contracts"] == ["ok"]


def test_old_blocks_and_clocks_that_are_off_are_found(
    ready: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "OLD_BLOCK_SECONDS", -1000)
    assert found(ready)["rpc"].outcome == "warning"  # a local chain makes blocks when asked to
    monkeypatch.setattr(doctor, "LOCAL", None)
    assert found(ready)["rpc"].outcome == "failed"
    client: Any = SimpleNamespace(block=lambda _: SimpleNamespace(time=time.time() + 600))
    [clock] = doctor._clock(client)
    assert clock.outcome == "failed"
    assert "behind the newest block" in clock.found


def test_an_account_without_a_day_s_ether_is_found(
    ready: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.intents, "mined_since", lambda *_: [("root", "0x1")] * 100)
    store = open_store(sqlite_url(ready.data / "orchestrator.sqlite"))
    store.migrate()

    def outcome(held: int) -> str:
        fee = PaidFee(ZERO_ADDRESS, 10, 0)
        client: Any = SimpleNamespace(balance=lambda _: held, paid_fee=lambda _: fee)
        [check] = doctor._balance(client, ready.deployed.accounts[1].address, store)
        return check.outcome

    assert [outcome(held) for held in (0, 999, 1000, 6999, 7000)] == [
        "failed", "failed", "warning", "warning", "ok"
    ]  # fmt: skip
    store.close()


def test_a_full_disk_and_few_open_files_are_found(
    ready: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1 << 70)
    assert found(ready)["disk of data"].outcome == "warning"
    monkeypatch.setattr(doctor, "LEAST_DISK", 1 << 70)
    monkeypatch.setattr(doctor, "KEPT_FILES", 1 << 70)
    checks = found(ready)
    assert outcomes(checks, "failed") == {"disk of data", "open files"}
    assert all(checks[name].fix for name in outcomes(checks, "failed"))


def test_a_check_that_does_not_end_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    end = threading.Event()

    def ask() -> list[DoctorCheck]:
        end.wait()
        return []

    [check] = doctor._bounded("slow", ask)
    end.set()
    assert (check.name, check.outcome) == ("slow", "failed")


def test_a_database_url_shows_no_password_and_a_wrong_port_is_no_traceback(
    ready: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "PRIME_ORCHESTRATOR_DATABASE"
    monkeypatch.setenv(variable, "postgresql://127.0.0.1:1/db?password=opensesame")
    check = found(ready)["database"]
    assert check.outcome == "failed"
    assert "127.0.0.1:1/db" in check.found
    assert "opensesame" not in str(check)
    monkeypatch.setenv(variable, "postgresql://name:opensesame@127.0.0.1:port/db")
    checks = found(ready)
    assert "database" in " ".join(outcomes(checks, "failed"))
    assert "opensesame" not in str(checks)


def test_a_silent_endpoint_delays_no_other(ready: Operator) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        urls = tuple(f"http://127.0.0.1:{one.getsockname()[1]}" for one in silent)
        settings = load(ready.flags()).model_copy(update={"rpc": urls, "rpc_quorum": 1})
        checks = [one for one in doctor.examine(lambda: settings) if one.name == "rpc"]
    assert len(checks) == 6
    assert {one.outcome for one in checks} == {"failed"}
