"""A local chain: starts, waits for and ends an anvil process (chain id 31337).

The native binary is used, never the Node wrapper in `.bin`: ending that one leaves anvil alive.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from devnet.ports import free_port
from prime_core.errors import FatalError, UnavailableError, UserError
from prime_core.ids import Address
from prime_core.signing import LocalSigner, limit_recursion

CHAIN_ID = 31337
DEV_MNEMONIC = "test test test test test test test test test test test junk"
_HINT = (
    "install it with: make setup (npm package @foundry-rs/anvil), or set ANVIL to a native binary"
)
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: not safe after fork


def find_anvil() -> Path:
    """The native anvil: $ANVIL, else node_modules, else PATH. Raises UserError if there is none."""
    named = os.environ.get("ANVIL")
    if named:
        if not Path(named).is_file():
            raise UserError(f"ANVIL names {named}, which is not a file", hint=_HINT)
        return Path(named)
    system = {"Linux": "linux", "Darwin": "darwin"}.get(platform.system(), "linux")
    machine = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine(), "")
    root = Path(__file__).resolve().parent.parent
    package = root / "node_modules" / "@foundry-rs" / f"anvil-{system}-{machine}" / "bin" / "anvil"
    if package.is_file():
        return package
    found = shutil.which("anvil")
    if found is None or _is_script(Path(found)):
        raise UserError("no native anvil binary was found", hint=_HINT)
    return Path(found)


def _is_script(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def dev_signer(index: int) -> LocalSigner:
    """Anvil's public development account `index` (0 … 9): known to everyone, for local use only."""
    from eth_account import Account

    limit_recursion()
    Account.enable_unaudited_hdwallet_features()
    account = Account.from_mnemonic(DEV_MNEMONIC, account_path=f"m/44'/60'/0'/0/{index}")
    return LocalSigner(bytes(account.key))


def end_with_parent() -> None:
    """For Popen's `preexec_fn` (Linux): SIGTERM to the child when its parent dies, however it dies.

    Linux counts the *thread* that started the child as its parent: start children from a thread
    that lives as long as they should.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def keep_one_genesis(state: Path) -> None:
    """Removes every block 0 but the oldest from a state that anvil has dumped.

    Anvil 1.7.1 makes a new block 0 at each start and dumps it with the loaded one. From the second
    load on, either may become the chain's genesis.
    """
    dump = json.loads(state.read_bytes())
    first = [block for block in dump["blocks"] if int(block["header"]["number"], 16) == 0]
    if len(first) < 2:
        return
    oldest = min(first, key=lambda block: int(block["header"]["timestamp"], 16))
    rest = [block for block in dump["blocks"] if block not in first]
    partial = state.with_suffix(".partial")
    partial.write_text(json.dumps(dump | {"blocks": [oldest, *rest]}))
    partial.replace(state)


class Anvil:
    """A running anvil, as a context manager.

    `block_time` in seconds; None mines a block at once for each transaction. `port` 0 takes a free
    one. `state` names a file from which the chain is loaded and to which it is dumped at the end.
    Blocks become safe after `epoch_slots` blocks and final after twice as many.
    """

    def __init__(
        self,
        *,
        block_time: float | None = None,
        port: int = 0,
        state: Path | None = None,
        log: Path | None = None,
        chain_id: int = CHAIN_ID,
        epoch_slots: int = 1,
        extra: tuple[str, ...] = (),
    ) -> None:
        self._block_time = block_time
        self._port = port
        self._state = state
        self._log = log
        self._chain_id, self._epoch_slots = chain_id, epoch_slots
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None
        self._ids = itertools.count(1)
        self._http = httpx.Client(timeout=10.0, trust_env=False)

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self, timeout: float = 20.0) -> Anvil:
        """Starts the process and returns once it answers. Raises UserError or FatalError."""
        assert self._process is None, "already started"
        binary = find_anvil()
        if self._port == 0:
            self._port = free_port()
        elif _answers(self._port):
            raise UserError(
                f"port {self._port} is taken", hint="stop what listens there or name another port"
            )
        if self._state is not None and self._state.exists():
            keep_one_genesis(self._state)
        self._process = subprocess.Popen(
            [str(binary), *self._arguments()],
            stdin=subprocess.DEVNULL,
            stdout=self._log.open("ab") if self._log else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        deadline = time.monotonic() + timeout
        while True:
            if self._process.poll() is not None:
                code = self._process.returncode
                self._process = None
                raise FatalError(f"anvil ended at once with code {code} (port {self._port})")
            try:
                if int(self.rpc("eth_chainId"), 16) == self._chain_id:
                    return self
            except (UnavailableError, httpx.HTTPError):
                pass
            if time.monotonic() > deadline:
                self.stop()
                raise UnavailableError(f"anvil did not answer within {timeout:.0f} s")
            time.sleep(0.02)

    def _arguments(self) -> list[str]:
        arguments = [
            "--chain-id", str(self._chain_id), "--host", "127.0.0.1", "--port", str(self._port),
            "--slots-in-an-epoch", str(self._epoch_slots),
            "--mnemonic", DEV_MNEMONIC, "--quiet", *self._extra,
        ]  # fmt: skip
        if self._block_time is not None:
            arguments += ["--block-time", f"{self._block_time:g}"]
        if self._state is not None:
            arguments += ["--state", str(self._state)]
        return arguments

    def stop(self) -> None:
        """Ends the process; harmless when it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Anvil:
        return self if self._process is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._http.close()

    def rpc(self, method: str, *params: Any) -> Any:
        """One JSON-RPC call. Raises UnavailableError with the chain's message if it fails."""
        body = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        answer = json.loads(self._http.post(self.url, json=body).content)
        if "error" in answer:
            raise UnavailableError(f"{method}: {answer['error'].get('message')}")
        return answer["result"]

    def fund(self, address: Address, eth: float = 100.0) -> None:
        """Sets the account's balance, in ether."""
        self.rpc("anvil_setBalance", address, hex(int(eth * 10**18)))

    def mine(self, blocks: int = 1) -> None:
        """Mines `blocks`, one second of chain time apart."""
        self.rpc("anvil_mine", hex(blocks), hex(1))

    def mine_every(self, seconds: int) -> None:
        """From now on mines one block every `seconds`; 0 mines a block for each transaction."""
        self.rpc("evm_setIntervalMining", seconds)
        if seconds == 0:
            self.rpc("evm_setAutomine", True)

    def forward(self, seconds: int) -> None:
        """Moves the chain's clock forward and mines a block there."""
        self.rpc("evm_increaseTime", hex(seconds))
        self.rpc("evm_mine")

    def snapshot(self) -> Callable[[], None]:
        """Remembers the chain's state; the returned function goes back to it (once)."""
        handle = self.rpc("evm_snapshot")

        def revert() -> None:
            if not self.rpc("evm_revert", handle):
                raise FatalError("anvil did not go back to its snapshot")

        return revert


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
