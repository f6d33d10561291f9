"""The local chain's launcher: found, ready, and ended even if its parent is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from devnet.chain import CHAIN_ID, Anvil, dev_signer, find_anvil, keep_one_genesis
from devnet.ports import free_port
from prime_core.errors import FatalError, UnavailableError, UserError

pytestmark = pytest.mark.usefixtures("anvil")  # skips by name where it is missing


def _until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_it_serves_our_chain_id_and_leaves_nothing_behind() -> None:
    with Anvil() as chain:
        assert int(chain.rpc("eth_chainId"), 16) == CHAIN_ID
        pid, port = chain.pid, chain.port
        assert _alive(pid)
    assert not _alive(pid)
    assert not _listening(port)


def test_a_chain_that_is_loaded_again_keeps_its_first_block(tmp_path: Path) -> None:
    """Anvil dumps the block 0 that each start makes; the next load may take any of them."""
    state = tmp_path / "chain.json"
    with Anvil(state=state) as chain:
        chain.rpc("evm_mine")
        genesis = chain.rpc("eth_getBlockByNumber", "0x0", False)
    dump = json.loads(state.read_bytes())
    newer = json.loads(
        json.dumps(next(b for b in dump["blocks"] if b["header"]["number"] == "0x0"))
    )
    newer["header"]["timestamp"] = hex(int(genesis["timestamp"], 16) + 60)
    state.write_text(json.dumps(dump | {"blocks": [newer, *dump["blocks"], newer]}))
    keep_one_genesis(state)
    assert sorted(b["header"]["number"] for b in json.loads(state.read_bytes())["blocks"]) == [
        "0x0", "0x1",
    ]  # fmt: skip
    with Anvil(state=state) as chain:
        assert chain.rpc("eth_getBlockByNumber", "0x0", False)["hash"] == genesis["hash"]
        assert int(chain.rpc("eth_blockNumber"), 16) == 1


def test_the_native_binary_is_started_not_a_wrapper() -> None:
    with find_anvil().open("rb") as file:
        assert file.read(2) != b"#!"


def test_it_ends_when_its_parent_is_killed() -> None:
    code = (
        "from devnet.chain import Anvil; import time\n"
        "chain = Anvil().start(); print(chain.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert _until(lambda: not _alive(pid))


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is taken"):
            Anvil(port=port).start()


def test_a_binary_that_dies_is_reported_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANVIL", "/bin/false")
    with pytest.raises(FatalError, match="ended at once"):
        Anvil(port=free_port()).start()


def test_a_missing_binary_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANVIL", "/nonexistent/anvil")
    with pytest.raises(UserError) as caught:
        find_anvil()
    assert "make setup" in caught.value.hint


def test_blocks_come_by_the_clock_when_asked(anvil: Anvil) -> None:
    with Anvil(block_time=0.1) as chain:
        assert _until(lambda: int(chain.rpc("eth_blockNumber"), 16) >= 3)


def test_safe_and_finalized_follow_the_head_closely() -> None:
    with Anvil() as chain:
        chain.mine(10)
        numbers = [
            int(chain.rpc("eth_getBlockByNumber", tag, False)["number"], 16)
            for tag in ("latest", "safe", "finalized")
        ]
        assert numbers[0] - numbers[2] <= 3
        assert numbers[0] >= numbers[1] >= numbers[2]


def test_forward_moves_the_chains_clock(anvil: Anvil) -> None:
    def clock() -> int:
        return int(anvil.rpc("eth_getBlockByNumber", "latest", False)["timestamp"], 16)

    before = clock()
    revert = anvil.snapshot()
    anvil.forward(1000)
    assert clock() >= before + 1000
    revert()
    assert clock() == before


def test_fund_sets_a_balance_and_errors_carry_the_chains_words(anvil: Anvil) -> None:
    account = dev_signer(9).address
    revert = anvil.snapshot()
    anvil.fund(account, 2.5)
    assert int(anvil.rpc("eth_getBalance", account, "latest"), 16) == 25 * 10**17
    revert()
    with pytest.raises(UnavailableError, match="eth_nonsense"):
        anvil.rpc("eth_nonsense")


def test_development_accounts_are_anvils() -> None:
    assert dev_signer(0).address == "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266"
    assert dev_signer(9).address == "0xa0Ee7A142d267C1f36714E4a8F75612F20a79720"
