"""Reading a chain and handing it signed transactions. No key lives here, and no wallet.

Every number from an endpoint is parsed strictly; reads name the block they are made at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from protocol.chain import codec
from protocol.chain.deployment import SOLIDITY_NAMES
from protocol.chain.errors import ChainRevertedError, DisagreementError, RpcError
from protocol.chain.networks import BlockTag, Network, by_chain_id
from protocol.chain.rpc import RevertSignal, RpcPool
from protocol.core import ids
from protocol.core.errors import MalformedError, UnavailableError, UserError
from protocol.core.ids import Address, Digest

BlockId = BlockTag | int
"""A tag, or a block's number."""
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A transaction not yet sent: print its calldata, dry-run it, or hand it to a Sender."""

    to: Address | None
    """None creates a contract."""
    data: bytes
    value: int = 0
    description: str = ""
    """What it does, in plain words, e.g. "deposit 100 PRIME of stake"."""

    def calldata(self) -> str:
        """The data as hex text, as a multisig wants it."""
        return "0x" + self.data.hex()


@dataclass(frozen=True)
class Block:
    """A block's header. Times in Unix seconds, fees in wei per gas."""

    number: int
    hash: Digest
    parent_hash: Digest
    time: int
    base_fee: int


@dataclass(frozen=True)
class Log:
    """One raw log."""

    address: Address
    topics: tuple[bytes, ...]
    data: bytes
    block: int
    block_hash: Digest
    log_index: int
    tx_hash: Digest


@dataclass(frozen=True)
class TxReceipt:
    """A mined transaction's outcome. `contract`: the address it created, if any."""

    tx_hash: Digest
    block: int
    block_hash: Digest
    success: bool
    gas_used: int
    contract: Address | None
    logs: tuple[Log, ...]


@dataclass(frozen=True)
class Fees:
    """EIP-1559 fees in wei per gas."""

    base_fee: int
    priority_fee: int
    max_fee: int


class ChainClient:
    """One chain behind one or more RPC endpoints.

    `chain_id` is checked against each endpoint before its first answer counts (UserError if they
    differ). All methods raise UnavailableError when no endpoint answers.
    """

    def __init__(
        self,
        rpc_urls: Sequence[str],
        chain_id: int,
        *,
        timeout: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.network: Network = by_chain_id(chain_id)
        self.chain_id = chain_id
        self._urls = tuple(dict.fromkeys(rpc_urls))
        self._timeout = timeout
        self._now = now
        self._pool = RpcPool(self._urls, chain_id, timeout=timeout, now=now)
        self._singles: list[ChainClient] | None = None

    def check(self) -> None:
        """Proves at start that an endpoint answers and serves the right chain."""
        self.block_number()

    def close(self) -> None:
        self._pool.close()
        for single in self._singles or ():
            single.close()

    def request(self, method: str, *params: Any) -> Any:
        """A raw JSON-RPC call, for what has no method here."""
        try:
            return self._pool.request(method, params)
        except RevertSignal as signal:
            raise codec.decode_revert(
                signal.data, all_artifacts(), "the call", signal.message
            ) from signal

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def block_number(self) -> int:
        """Number of the newest block."""
        return _number(self.request("eth_blockNumber"))

    def block(self, block: BlockId) -> Block:
        """The header at a tag or number. Raises UnavailableError if there is no such block yet."""
        raw = self.request("eth_getBlockByNumber", _block_id(block), False)
        if raw is None:
            raise UnavailableError(f"the chain has no block {block} yet")
        return _fields(
            lambda: Block(
                _number(raw["number"]),
                ids.digest(raw["hash"]),
                ids.digest(raw["parentHash"]),
                _number(raw["timestamp"]),
                _number(raw.get("baseFeePerGas", "0x0")),
            )
        )

    def call(
        self, call: Call, *, block: BlockId = "latest", sender: Address | None = None
    ) -> bytes:
        """eth_call: what `call` would return, also as a dry run of a write.

        Raises ChainRevertedError with the decoded custom error.
        """
        try:
            answer = self._pool.request("eth_call", [_request(call, sender), _block_id(block)])
        except RevertSignal as signal:
            raise self._reverted(signal, call) from signal
        return _bytes(answer)

    def estimate_gas(
        self, call: Call, sender: Address, *, block: BlockId | Literal["pending"] = "pending"
    ) -> int:
        """Gas that `call` needs, by default after the transactions that wait in the endpoint's
        pool (where it keeps such a state). Raises ChainRevertedError if it would revert."""
        try:
            return _number(
                self._pool.request("eth_estimateGas", [_request(call, sender), _block_id(block)])
            )
        except RevertSignal as signal:
            raise self._reverted(signal, call) from signal

    def balance(self, account: Address, block: BlockId = "latest") -> int:
        """Ether of an account, in wei."""
        return _number(self.request("eth_getBalance", account, _block_id(block)))

    def require_funds(self, account: Address) -> None:
        """Raises UserError if the account holds nothing to pay fees with: a sender would wait for
        it, a person wants to know at once."""
        if self.balance(account) == 0:
            faucet = ", from a faucet of that network" if self.network.testnet else ""
            raise UserError(
                f"the account {account} holds no ETH on {self.network.name} to pay fees with",
                hint=f"send it some{faucet}, then type the command again",
            )

    def nonce(self, account: Address, *, pending: bool = False) -> int:
        """Transactions mined from `account`; with `pending`, those waiting as well."""
        tag = "pending" if pending else "latest"
        return _number(self.request("eth_getTransactionCount", account, tag))

    def code(self, account: Address, block: BlockId = "latest") -> bytes:
        """Contract code at an address; empty for none."""
        return _bytes(self.request("eth_getCode", account, _block_id(block)))

    def fees(self) -> Fees:
        """What to offer now: the endpoint's tip, and twice the base fee on top."""
        base = self.block("latest").base_fee
        try:
            tip = _number(self.request("eth_maxPriorityFeePerGas"))
        except RpcError:  # not every endpoint has it
            tip = 10**9
        return Fees(base, max(tip, 1), 2 * base + max(tip, 1))

    def receipt(self, tx_hash: Digest) -> TxReceipt | None:
        """The outcome of a transaction, or None while it is not mined."""
        raw = self.request("eth_getTransactionReceipt", tx_hash)
        if raw is None:
            return None
        created = raw.get("contractAddress")
        return _fields(
            lambda: TxReceipt(
                ids.digest(raw["transactionHash"]),
                _number(raw["blockNumber"]),
                ids.digest(raw["blockHash"]),
                _number(raw["status"]) == 1,
                _number(raw["gasUsed"]),
                ids.address(created) if created else None,
                tuple(_log(one) for one in raw["logs"]),
            )
        )

    def knows(self, tx_hash: Digest) -> bool:
        """True if an endpoint has the transaction, mined or waiting."""
        return self.request("eth_getTransactionByHash", tx_hash) is not None

    def transaction(self, tx_hash: Digest) -> Call:
        """What a transaction asks for. Raises UnavailableError if no endpoint has it (yet)."""
        raw = self.request("eth_getTransactionByHash", tx_hash)
        if raw is None:
            raise UnavailableError(f"the endpoint does not have transaction {tx_hash}: try again")
        to = raw.get("to")
        return _fields(
            lambda: Call(
                ids.address(to) if to else None,
                _bytes(raw["input"]),
                _number(raw["value"]),
                f"transaction {tx_hash}",
            )
        )

    def logs(self, first: int, last: int, addresses: Sequence[Address]) -> list[Log]:
        """All logs of `addresses` in blocks first … last, in chain order.

        Raises RpcError if the endpoint finds the range too large.
        """
        query = {"fromBlock": hex(first), "toBlock": hex(last), "address": list(addresses)}
        raw = self.request("eth_getLogs", query)
        if not isinstance(raw, list):
            raise MalformedError("eth_getLogs did not answer with a list")
        found = _fields(lambda: [_log(one) for one in raw if not one.get("removed")])
        return sorted(found, key=lambda log: (log.block, log.log_index))

    # ── writing and agreement ────────────────────────────────────────────────────────────────

    def send_raw(self, raw: bytes) -> None:
        """Hands a signed transaction to an endpoint. Harmless if the chain already knows it.

        Raises RpcError with the node's reason if it is refused.
        """
        try:
            self.request("eth_sendRawTransaction", "0x" + raw.hex())
        except RpcError as error:
            words = error.message.lower()
            if "already known" not in words and "already imported" not in words:
                raise

    def agree(self, read: Callable[[ChainClient], T]) -> T:
        """What at least `network.min_agreeing` endpoints answer alike, each asked alone.

        Let `read` name a block's number, not a tag, or endpoints a block apart will differ.
        Raises DisagreementError if answers differ or too few endpoints answer.
        """
        wanted = self.network.min_agreeing
        if wanted <= 1:
            return read(self)
        answers: list[T] = []
        for single in self.singles():
            try:
                answers.append(read(single))
            except ChainRevertedError:
                raise
            except UnavailableError:
                continue
            if any(answer != answers[0] for answer in answers):
                raise DisagreementError("two RPC endpoints disagree on the chain's state")
            if len(answers) >= wanted:
                return answers[0]
        raise DisagreementError(
            f"{wanted} RPC endpoints must agree on {self.network.name}, but only "
            f"{len(answers)} of {len(self._urls)} answered"
        )

    def singles(self) -> list[ChainClient]:
        """One client for each endpoint."""
        if self._singles is None:
            self._singles = [
                ChainClient([url], self.chain_id, timeout=self._timeout, now=self._now)
                for url in self._urls
            ]
        return self._singles

    def _reverted(self, signal: RevertSignal, call: Call) -> ChainRevertedError:
        return codec.decode_revert(
            signal.data, all_artifacts(), call.description or "the call", signal.message
        )


def all_artifacts() -> list[codec.Artifact]:
    """Every committed contract: where custom errors are looked up."""
    return [codec.artifact(name) for name in SOLIDITY_NAMES.values()]


def _request(call: Call, sender: Address | None) -> dict[str, str]:
    request = {"data": call.calldata()}
    if call.to is not None:
        request["to"] = call.to
    if sender is not None:
        request["from"] = sender
    if call.value:
        request["value"] = hex(call.value)
    return request


def _block_id(block: BlockId | Literal["pending"]) -> str:
    return hex(block) if isinstance(block, int) else block


def _number(value: Any) -> int:
    if not isinstance(value, str) or not value.startswith("0x") or len(value) > 66:
        raise MalformedError(f"the RPC gave {str(value)[:80]!r} for a number")
    try:
        return int(value, 16)
    except ValueError as error:
        raise MalformedError(f"the RPC gave {value[:80]!r} for a number") from error


def _bytes(value: Any) -> bytes:
    if not isinstance(value, str) or not value.startswith("0x"):
        raise MalformedError(f"the RPC gave {str(value)[:80]!r} for bytes")
    try:
        return bytes.fromhex(value[2:])
    except ValueError as error:
        raise MalformedError("the RPC gave bytes that are not hex") from error


def _fields(build: Callable[[], T]) -> T:
    try:
        return build()
    except (KeyError, TypeError, AttributeError) as error:
        raise MalformedError(f"the RPC's answer lacks a field: {error}") from error


def _log(raw: Any) -> Log:
    return Log(
        ids.address(raw["address"]),
        tuple(_bytes(topic) for topic in raw["topics"]),
        _bytes(raw["data"]),
        _number(raw["blockNumber"]),
        ids.digest(raw["blockHash"]),
        _number(raw["logIndex"]),
        ids.digest(raw["transactionHash"]),
    )
