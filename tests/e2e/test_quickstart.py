"""`orchestrator quickstart` on a chain configured like Base Sepolia, by an endpoint that answers
ten requests a second: it checks, waits for ether, goes on after a kill, and starts a pool that
serves. `make soak ARGS=base`: a node works in such a pool, a trainer trains, the node is paid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_kit import ROOT, processes_of, require_anvil, until

from devnet.chain import Anvil
from devnet.faulty import FaultyRpc, RpcFault
from devnet.ports import free_port
from prime_chain.costs import GAS_PRICE_ORACLE
from prime_chain.keystore import named_address
from prime_chain.networks import BASE_SEPOLIA
from prime_core.errors import UserError
from prime_orchestrator.quickstart import Plan, Quickstart

ORACLE = "0x366103e8025f5260205ff3"
"""1,000 wei for each byte of calldata: see tests/chain/test_chain_costs.py."""


def transactions(chain: Anvil, wallet: Path) -> int:
    """How many transactions a keystore's account has sent."""
    return int(chain.rpc("eth_getTransactionCount", named_address(wallet), "latest"), 16)


@contextmanager
def base(block_time: float = 2) -> Iterator[tuple[Anvil, FaultyRpc]]:
    """A chain with Base Sepolia's identifier, finality, base fee and L1 data fee, and an endpoint
    of it that answers ten requests a second. `block_time`: seconds; 2 on Base Sepolia."""
    require_anvil()
    fees = ("--block-base-fee-per-gas", "5000000")
    chain = Anvil(block_time=block_time, chain_id=BASE_SEPOLIA.chain_id, epoch_slots=8, extra=fees)
    with chain, closing(FaultyRpc(chain.url, [RpcFault("rate", a_second=10)])) as rpc:
        chain.rpc("anvil_setCode", GAS_PRICE_ORACLE, ORACLE)
        until(lambda: int(chain.rpc("eth_blockNumber"), 16) > 0, "a block")
        yield chain, rpc


def serves(url: str, started: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether the pool that `started` runs answers."""
    assert started.poll() is None, log.read_text()
    try:
        return httpx.get(f"{url}/v1/pool").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.forge
@pytest.mark.timeout(1200)
def test_a_pool_from_nothing_on_a_chain_like_base_sepolia(tmp_path: Path) -> None:
    folder, port = tmp_path / "pool", free_port()
    url = f"http://127.0.0.1:{port}"
    with base(block_time=1) as (chain, rpc):
        words = [
            sys.executable, "-m", "prime_orchestrator.cli.main", "quickstart", str(folder),
            "--network", "base-sepolia", "--rpc", rpc.url, "--port", str(port), "--json",
            "--run", str(ROOT / "docs/examples/run-devnet.toml"),
            "--model", str(ROOT / "devnet/model"),
        ]  # fmt: skip

        def typed(*more: str, code: int) -> list[dict[str, Any]]:
            done = subprocess.run(
                [*words, *more], capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == code, done.stdout + done.stderr
            return [json.loads(line) for line in done.stdout.splitlines()]

        def states(found: list[dict[str, Any]]) -> dict[str, str]:
            return {one["name"]: one["state"] for one in found if "name" in one}

        looked = typed("--check", code=0)
        assert not folder.exists()
        assert states(looked) | {"keys": "to do", "public URL": "note"} == states(looked)
        assert "with an L1 data fee" in next(one["said"] for one in looked if one["name"] == "fees")
        assert states(looked)["deployment"] == "done"

        waits = typed(code=64)
        assert states(waits) == {"network": "done", "keys": "done", "ether": "waits"}
        keys = sorted(folder.glob("*.json"))
        assert len(keys) == 6
        assert all(file.stat().st_mode & 0o077 == 0 for file in [*keys, folder / "password"])
        for file in keys:
            account = named_address(file)
            assert (account.lower() in waits[-1]["said"].lower()) == (
                file.stem not in ("relay", "trainer")
            )
            chain.fund(account, 0.2)

        with (tmp_path / "killed.log").open("w") as log:
            killed = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
            until(lambda: list(folder.glob("deployment.journal.sqlite")) != [], "a transaction")
            os.killpg(killed.pid, signal.SIGKILL)
            killed.wait()
        assert not (folder / "pool.json").exists()
        done = typed(code=0)
        assert set(states(done).values()) == {"done"}
        sent = [transactions(chain, file) for file in keys]
        answered = rpc.asked.total() - rpc.injected["rate"]
        assert states(typed(code=0)) == states(done), "typed again, it does nothing"
        assert rpc.asked.total() - rpc.injected["rate"] - answered <= 11, rpc.asked
        assert [transactions(chain, file) for file in keys] == sent
        assert set(states(typed("--check", code=0)).values()) <= {"done", "note"}
        pools = json.loads((folder / "deployment.json").read_text())["contracts"]["pools"]
        code = chain.rpc("eth_getCode", pools, "latest")
        chain.rpc("anvil_setCode", pools, "0x")  # another chain, or one that was started again
        assert typed(code=64)[-1]["said"].startswith("code of Pools: there is no Pools")
        chain.rpc("anvil_setCode", pools, code)

        said = tmp_path / "started.log"
        with said.open("w") as log:
            started = subprocess.Popen([*words, "--start"], stdout=log, stderr=log)
        try:
            until(lambda: serves(url, started, said), "an answer")
            pool = httpx.get(f"{url}/v1/pool").json()
            assert (pool["chain_id"], pool["pool"]) == (BASE_SEPOLIA.chain_id, 1)
            relays = f"{url}/v1/relays"
            until(lambda: httpx.get(relays).json() != [], "the relay among those that nodes ask")
            started.send_signal(signal.SIGTERM)
            assert started.wait(60) == 0
        finally:
            started.kill()
            started.wait()
        assert processes_of(folder) == []
        assert rpc.injected["rate"] > 0, "the endpoint's limit was never reached"


PERIODS = {
    "epoch": 20, "validity": 120, "slash-window": 20, "dispute-window": 20,
    "reward-delay": 10, "unbonding": 200,
}  # fmt: skip
"""Seconds, as few as blocks of two seconds allow."""


@pytest.mark.soak
@pytest.mark.forge
@pytest.mark.timeout(1800)
def test_a_node_works_and_is_paid_on_a_chain_like_base_sepolia(tmp_path: Path) -> None:
    """All programs share the endpoint's ten requests a second."""
    folder, port = tmp_path / "pool", free_port()
    url, program = f"http://127.0.0.1:{port}", Path(sys.executable).parent
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("w") as log:
            running.append(
                subprocess.Popen(
                    [program / words[0], *words[1:]], cwd=tmp_path, stdout=log, stderr=log
                )
            )
        return running[-1]

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program / words[0], *words[1:]],
            cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    with base() as (chain, rpc):
        quickstart = [
            "orchestrator", "quickstart", str(folder), "--network", "base-sepolia",
            "--rpc", rpc.url, "--port", str(port), "--validators", "1",
            "--run", str(ROOT / "docs/examples/run-devnet.toml"),
            "--model", str(ROOT / "devnet/model"),
            *(word for name, value in PERIODS.items() for word in (f"--{name}", str(value))),
        ]  # fmt: skip
        try:
            waits = typed(*quickstart)
            assert waits.returncode == UserError.exit_code, waits.stderr
            for file in folder.glob("*.json"):
                chain.fund(named_address(file), 0.2)
            pool = start("pool", *quickstart, "--start")
            until(lambda: serves(url, pool, tmp_path / "pool.log"), "an answer", 600)

            password = ("--password-file", str(folder / "password"))
            made = typed("prime-node", "wallet", "new", "--out", f"{folder}/node.json", *password)
            assert made.returncode == 0, made.stderr
            chain.fund(named_address(folder / "node.json"), 0.2)
            node = (
                *("--orchestrator", url, "--rpc", rpc.url, "--data", str(folder / "node")),
                *("--deployment", str(folder / "deployment.json")),
                *("--wallet", str(folder / "node.json"), *password),
            )
            start("node", "prime-node", "join", *node, "--runtime", "process")
            trainer = start(
                "trainer", "trainer", "run", f"@{ROOT / 'docs/examples/run-devnet.trainer.toml'}",
                "--orchestrator", url, "--model", str(ROOT / "devnet/model"), "--steps", "2",
                "--wallet", str(folder / "trainer.json"), *password,
                "--data", str(folder / "trainer"),
            )  # fmt: skip
            assert trainer.wait(900) == 0, (tmp_path / "trainer.log").read_text()

            until(
                lambda: typed("prime-node", "rewards", "claim", *node).returncode == 0,
                "a claim", 600,
            )  # fmt: skip
            shown = json.loads(typed("prime-node", "rewards", "show", *node, "--json").stdout)
            assert int(shown["paid"]) > 0
            assert rpc.injected["rate"] > 0, "the endpoint's limit was never reached"
        finally:
            for process in reversed(running):
                process.send_signal(signal.SIGTERM)
            for process in running:
                try:
                    process.wait(120)
                finally:
                    process.kill()
        assert processes_of(folder) == []


def test_a_pool_that_others_reach_needs_the_relays_url_too(tmp_path: Path) -> None:
    plan = Plan(
        folder=tmp_path / "pool", network=BASE_SEPOLIA, rpc=("http://127.0.0.1:9",),
        run=ROOT / "docs/examples/run-devnet.toml", model=ROOT / "devnet/model",
        public_url="https://pool.example",
    )  # fmt: skip
    with closing(Quickstart(plan, print)) as steps:
        assert steps.lacks_urls
    with closing(Quickstart(replace(plan, public_url=""), print)) as steps:
        assert not steps.lacks_urls
        assert steps.commands()["relay"][4:6] == ["--port", "0"]
        assert "--origin-url" not in steps.commands()["trainer"]
    there = replace(plan, relay_url="https://relay.example")
    with closing(Quickstart(there, print)) as steps:
        assert steps.lacks_urls
    there = replace(there, origin_url="https://origin.example")
    with closing(Quickstart(there, print)) as steps:
        assert not steps.lacks_urls
        words = ["--port", "8480", "--public-url", "https://relay.example"]
        assert steps.commands()["relay"][4:8] == words
        words = ["--origin-port", "8475", "--origin-url", "https://origin.example"]
        assert steps.commands()["trainer"][-4:] == words
    words = [
        *("quickstart", str(plan.folder), "--network", "base-sepolia", "--rpc", *plan.rpc),
        *("--run", str(plan.run), "--model", str(plan.model), "--public-url", plan.public_url),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "prime_orchestrator.cli.main", *words, "--start"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == UserError.exit_code
    assert "add --relay-url" in done.stderr
    assert not plan.folder.exists()
