"""A stranger's events on a local chain, emitted by our own contracts.

A contract of the stranger's calls one of ours CALLS times in a transaction, by turns:

    Pools.allow of another pool         left out by the topic of the pool
    Pools.allow of the network's pool   left out by the topic of the event
    Registry.setRevokedBefore           of any account: every orchestrator reads it
"""

from __future__ import annotations

import threading
import time

from devnet.chain import Anvil, dev_signer
from prime_chain.client import Call
from prime_chain.contracts import Contracts
from prime_core import ids

CALLS = 2_000
"""Calls, and events, of one transaction."""
GAS = 30_000_000
STRANGER = ids.address("0x" + "5a" * 20)
CODE = bytes.fromhex(
    "60446060600037"  # byte 0: memory[0:68] = the call
    "600035"  # push the number of calls
    "5b8015603457"  # byte 10: if none is left, go to 52
    "600060006044600060006040355af1"  # make the call
    "15604057"  # if it failed, go to 64
    "60245160203501602452"  # add the step to the call's last word
    "60019003600a56"  # one call less, go to 10
    "5b6000356000540160005500"  # byte 52: storage[0] += the number of calls; stop
    "5b60006000fd"  # byte 64: revert
)
"""The stranger's contract. Input: number of calls, step, whom to call, the call (68 bytes)."""


class ForeignEvents:
    """Sends them; `ours` and `other` are pools of the deployment that `contracts` reads."""

    def __init__(self, anvil: Anvil, contracts: Contracts, ours: int, other: int) -> None:
        self._anvil, self._contracts = anvil, contracts
        self._ours, self._other = ours, other
        self._sent = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, count: int, seconds: float) -> None:
        """Sends `count` events more (rounded up to whole transactions), evenly over `seconds`."""
        if self._thread is None:
            self._anvil.rpc("anvil_setCode", STRANGER, "0x" + CODE.hex())
            self._anvil.rpc("evm_setBlockGasLimit", hex(100 * GAS))
        transactions = range(self._sent, self._sent + -(-count // CALLS))
        self._sent = transactions.stop
        self._thread = threading.Thread(
            target=self._send, args=(transactions, seconds), name="foreign-events", daemon=True
        )
        self._thread.start()

    def emitted(self) -> int:
        """Number of events so far, as the stranger's contract counts them."""
        return int(self._anvil.rpc("eth_getStorageAt", STRANGER, "0x0", "latest"), 16)

    def over(self) -> bool:
        """Whether all events that were begun are on the chain."""
        return self.emitted() >= self._sent * CALLS

    def close(self) -> None:
        """Sends no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _send(self, transactions: range, seconds: float) -> None:
        began = time.monotonic()
        sender = dev_signer(9).address
        for at in transactions:
            due = began + seconds * (at - transactions.start) / len(transactions)
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return
            call, step = self._call(at)
            words = (CALLS, step, int(call.to or "0", 16))
            data = b"".join(word.to_bytes(32, "big") for word in words) + call.data
            self._anvil.rpc(
                "eth_sendTransaction",
                {"from": sender, "to": STRANGER, "gas": hex(GAS), "data": "0x" + data.hex()},
            )

    def _call(self, at: int) -> tuple[Call, int]:
        """What transaction `at` calls first, and by how much the last word grows each time."""
        pools, registry = self._contracts.pools, self._contracts.registry
        if at % 3 == 2:
            return registry.set_revoked_before(STRANGER, 1 + at * CALLS), 1
        return pools.allow(self._other if at % 3 == 0 else self._ours, True), 0
