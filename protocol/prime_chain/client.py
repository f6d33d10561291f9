"""Reads a chain and submits signed transactions to it. Holds no key.

Every number from an endpoint is parsed strictly. Every read names its block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from prime_chain import codec
from prime_chain.errors import (
    BadAnswerError,
    ChainRevertedError,
    DisagreementError,
    NotThereError,
    RangeTooLargeError,
    RpcError,
    WrongChainError,
)
from prime_chain.networks import POLL_SECONDS, BlockTag, Network, by_chain_id
from prime_chain.rpc import Parse, RevertSignal, RpcPool, number
from prime_core import ids
from prime_core.deployment import SOLIDITY_NAMES
from prime_core.errors import MalformedError, UnavailableError, UserError
from prime_core.ids import Address, Digest

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
    description: str = field(default="", compare=False)
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
class PaidFee:
    """What a mined transaction cost its sender, in wei: gas used times the effective price, and on
    an OP-stack chain the L1 data fee, which `l1` names (zero elsewhere)."""

    sender: Address
    total: int
    l1: int


@dataclass(frozen=True)
class Fees:
    """EIP-1559 fees in wei per gas."""

    base_fee: int
    priority_fee: int
    max_fee: int


class ChainClient:
    """One chain behind one or more RPC endpoints.

    `chain_id` is checked against each endpoint before its first answer counts. `quorum` is the
    number of endpoints that must give the same blocks, logs, receipts, and reads on which money or
    stake depends: by default the network's number, and with three endpoints or more at least their
    majority. `poll_seconds` is the longest pause of code that waits for an event on chain. All
    methods raise UnavailableError if no endpoint gives a good answer.
    """

    def __init__(
        self,
        rpc_urls: Sequence[str],
        chain_id: int,
        *,
        timeout: float = 10.0,
        quorum: int | None = None,
        poll_seconds: float = POLL_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.network: Network = by_chain_id(chain_id)
        self.chain_id = chain_id
        self.poll_seconds = poll_seconds
        self._use(
            RpcPool.open(
                rpc_urls,
                chain_id,
                timeout=timeout,
                block_time=self.network.block_time,
                now=now,
            )
        )
        count = len(self._pool.endpoints)
        self._at_stake = quorum or self.network.min_agreeing
        if quorum is None:
            majority = count // 2 + 1 if count > 2 else 1
            quorum = min(count, max(self.network.min_agreeing, majority))
        elif not 1 <= quorum <= count:
            raise UserError(
                f"a quorum of {quorum} among {count} RPC endpoints",
                hint="give a number from 1 to that of the endpoints",
            )
        self.quorum = quorum

    def _use(self, pool: RpcPool) -> None:
        self._pool = pool
        self._singles: list[ChainClient] | None = None

    def check(self) -> None:
        """Checks that an endpoint answers. Raises UserError if all that answer serve another
        chain."""
        try:
            self.block_number()
        except WrongChainError as error:
            raise UserError(
                str(error), hint="give the --rpc of that chain, or the --deployment of this one"
            ) from error

    def close(self) -> None:
        self._pool.close()

    def request(self, method: str, *params: Any, parse: Parse[T] = lambda value: value) -> T:
        """Makes a JSON-RPC call and returns the parsed answer. If `parse` raises MalformedError,
        the endpoint is at fault, and the next one is asked."""
        try:
            return self._pool.request(method, params, parse)
        except RevertSignal as signal:
            raise codec.decode_revert(
                signal.data, all_artifacts(), "the call", signal.message
            ) from signal

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def block_number(self) -> int:
        """Returns the number of the newest block that a quorum of endpoints has."""
        return self._pool.highest(self.quorum, "eth_blockNumber", (), number, heads=True)

    def agreed_read(
        self, call: Call, parse: Callable[[bytes], T], *, block: BlockId = "latest"
    ) -> T:
        """Like `read`, but a quorum of endpoints must agree. For reads on which money or stake
        depends.

        A tag means the newest block with that tag that a quorum has. Raises as `agree`.
        """
        found = self.numbered(block)
        return self.agree(lambda one: one.read(call, parse, block=found), at_stake=False)

    def agreed_block(self, block: BlockId) -> Block:
        """Returns the header on which a quorum of endpoints agrees: of a number, or of the newest
        block with a tag that a quorum has. Raises NotThereError if there is none yet."""
        found = self._highest_at(block) if isinstance(block, str) else block
        return self.agree(lambda one: one.block(found), at_stake=False)

    def numbered(self, block: BlockId) -> BlockId:
        """Returns a block that means the same to all endpoints: for a tag, the number of the newest
        such block that a quorum has. Use it before several reads at one block, so that the number
        is asked for once."""
        several = len(self._pool.endpoints) > 1
        return self._highest_at(block) if several and isinstance(block, str) else block

    def _highest_at(self, tag: BlockTag) -> int:
        if tag == "latest":
            return self.block_number()

        def parse(raw: Any) -> int:
            if raw is None:
                raise NotThereError(f"the chain has no block {tag} yet")
            return number(raw["number"])

        return self._pool.highest(self.quorum, "eth_getBlockByNumber", (tag, False), parse)

    def agreed_receipt(self, tx_hash: Digest) -> TxReceipt | None:
        """Returns the outcome of a transaction if a quorum of endpoints agrees on it, else None."""
        seen: list[TxReceipt] = []
        for single in self._in_order():
            try:
                receipt = single.receipt(tx_hash)
            except UnavailableError:
                continue
            if receipt is None:
                continue
            seen.append(receipt)
            alike = [one for one in seen if one.block_hash == receipt.block_hash]
            if sum(one.success == receipt.success for one in alike) >= self.quorum:
                return receipt
        return None

    def user_of_nonce(self, account: Address, nonce: int, head: int) -> tuple[Digest, int] | None:
        """Returns hash and block of the mined transaction that used `nonce`; None if none did up to
        block `head`. Raises UnavailableError if no endpoint shows it."""
        low, step = head, 1
        if self.agree(lambda one: one.nonce(account, head), at_stake=False) <= nonce:
            return None
        high = head
        while low > 0 and self.nonce(account, low) > nonce:
            high, low, step = low, max(0, low - step), 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            if self.nonce(account, middle) > nonce:
                high = middle
            else:
                low = middle

        def parse(raw: Any) -> Digest:
            for one in raw["transactions"]:
                if ids.address(one["from"]) == account and number(one["nonce"]) == nonce:
                    return ids.digest(one["hash"])
            raise MalformedError(f"block {high} lacks the transaction with nonce {nonce}")

        found = self.agree(
            lambda one: one.request("eth_getBlockByNumber", hex(high), True, parse=parse),
            at_stake=False,
        )
        return found, high

    def block(self, block: BlockId) -> Block:
        """The header at a tag or number. Raises NotThereError if there is no such block yet."""

        def parse(raw: Any) -> Block:
            if raw is None:
                raise NotThereError(f"the chain has no block {block} yet")
            found = Block(
                number(raw["number"]),
                ids.digest(raw["hash"]),
                ids.digest(raw["parentHash"]),
                number(raw["timestamp"]),
                number(raw.get("baseFeePerGas", "0x0")),
            )
            if isinstance(block, int) and found.number != block:
                raise MalformedError(f"block {found.number} was given for block {block}")
            return found

        return self.request("eth_getBlockByNumber", _block_id(block), False, parse=parse)

    def call(
        self, call: Call, *, block: BlockId = "latest", sender: Address | None = None
    ) -> bytes:
        """eth_call: what `call` would return, also as a dry run of a write.

        Raises ChainRevertedError with the decoded custom error.
        """
        return self.read(call, lambda data: data, block=block, sender=sender)

    def read(
        self,
        call: Call,
        parse: Callable[[bytes], T],
        *,
        block: BlockId = "latest",
        sender: Address | None = None,
    ) -> T:
        """What `call` returns, as `parse` reads it; see `call`. What does not parse
        (MalformedError) is the endpoint's fault."""
        try:
            return self._pool.request(
                "eth_call",
                [_request(call, sender), _block_id(block)],
                lambda raw: parse(_bytes(raw)),
            )
        except RevertSignal as signal:
            raise self._reverted(signal, call) from signal

    def estimate_gas(
        self, call: Call, sender: Address, *, block: BlockId | Literal["pending"] = "pending"
    ) -> int:
        """Gas that `call` needs, by default after the transactions that wait in the endpoint's
        pool (where it keeps such a state). Raises ChainRevertedError if it would revert."""
        params = [_request(call, sender), _block_id(block)]
        try:
            return self._pool.request("eth_estimateGas", params, number)
        except RevertSignal as signal:
            raise self._reverted(signal, call) from signal

    def balance(self, account: Address, block: BlockId = "latest") -> int:
        """Ether of an account, in wei."""
        return self.request("eth_getBalance", account, _block_id(block), parse=number)

    def require_funds(self, account: Address) -> None:
        """Raises UserError if the account has no ETH for fees. Without this check a sender would
        wait for funds and the user would not know why."""
        if self.balance(account) == 0:
            faucet = ", from a faucet of that network" if self.network.testnet else ""
            raise UserError(
                f"the account {account} holds no ETH on {self.network.name} to pay fees with",
                hint=f"send it some{faucet}, then type the command again",
            )

    def nonce(self, account: Address, block: BlockId | Literal["pending"] = "latest") -> int:
        """Returns how many transactions of `account` are mined up to `block`; with "pending", it
        also counts those waiting."""
        return self.request("eth_getTransactionCount", account, _block_id(block), parse=number)

    def pending_nonce(self, account: Address) -> int:
        """Returns the next nonce after the transactions that wait in the transaction pools of a
        quorum of endpoints."""
        params = (account, "pending")
        return self._pool.highest(self.quorum, "eth_getTransactionCount", params, number)

    def code(self, account: Address, block: BlockId = "latest") -> bytes:
        """Contract code at an address; empty for none."""
        found = self.numbered(block)
        return self.agree(
            lambda one: one.request("eth_getCode", account, _block_id(found), parse=_bytes),
            at_stake=False,
        )

    def fees(self) -> Fees:
        """What to offer now: the endpoint's tip, and twice the base fee on top."""
        base = self.block("latest").base_fee
        try:
            tip = self.request("eth_maxPriorityFeePerGas", parse=number)
        except RpcError:  # not every endpoint has it
            tip = 10**9
        return Fees(base, max(tip, 1), 2 * base + max(tip, 1))

    def paid_fee(self, tx_hash: Digest) -> PaidFee | None:
        """Returns the fee of a mined transaction and who paid it; None while the endpoint has no
        receipt of it."""

        def parse(raw: Any) -> PaidFee | None:
            if raw is None:
                return None
            l1_fee = number(raw["l1Fee"]) if raw.get("l1Fee") else 0
            gas_fee = number(raw["gasUsed"]) * number(raw["effectiveGasPrice"])
            return PaidFee(ids.address(raw["from"]), gas_fee + l1_fee, l1_fee)

        return self.request("eth_getTransactionReceipt", tx_hash, parse=parse)

    def receipt(self, tx_hash: Digest) -> TxReceipt | None:
        """The outcome of a transaction, or None while no endpoint shows it as mined."""

        def parse(raw: Any) -> TxReceipt:
            if raw is None:
                raise NotThereError(f"no endpoint has a receipt of {tx_hash}")
            created = raw.get("contractAddress")
            found = TxReceipt(
                ids.digest(raw["transactionHash"]),
                number(raw["blockNumber"]),
                ids.digest(raw["blockHash"]),
                number(raw["status"]) == 1,
                number(raw["gasUsed"]),
                ids.address(created) if created else None,
                tuple(parse_log(one) for one in raw["logs"]),
            )
            if found.tx_hash != tx_hash:
                raise MalformedError(f"a receipt of {found.tx_hash} was given for {tx_hash}")
            return found

        try:
            return self.request("eth_getTransactionReceipt", tx_hash, parse=parse)
        except NotThereError:
            return None

    def knows(self, tx_hash: Digest) -> bool:
        """True if any endpoint has the transaction, mined or waiting."""
        try:
            self.transaction(tx_hash)
        except NotThereError:
            return False
        return True

    def transaction(self, tx_hash: Digest) -> Call:
        """What a transaction asks for. Raises NotThereError if no endpoint has it (yet)."""

        def parse(raw: Any) -> Call:
            if raw is None:
                raise NotThereError(f"the endpoint does not have transaction {tx_hash}: try again")
            if ids.digest(raw["hash"]) != tx_hash:
                raise MalformedError(f"transaction {raw['hash']} was given for {tx_hash}")
            to = raw.get("to")
            return Call(
                ids.address(to) if to else None,
                _bytes(raw["input"]),
                number(raw["value"]),
                f"transaction {tx_hash}",
            )

        return self.request("eth_getTransactionByHash", tx_hash, parse=parse)

    def logs(
        self,
        first: int,
        last: int,
        addresses: Sequence[Address],
        topics: Sequence[bytes | Sequence[bytes] | None] = (),
    ) -> list[Log]:
        """All logs of `addresses` in blocks first … last, in chain order. `topics`: at each place
        one topic, several of which one must match, or None for any.

        Raises RangeTooLargeError if the range holds too much for one answer.
        """
        wanted: list[list[bytes] | None] = [
            None if one is None else [one] if isinstance(one, bytes) else list(one)
            for one in topics
        ]
        query: dict[str, Any] = {
            "fromBlock": hex(first),
            "toBlock": hex(last),
            "address": list(addresses),
        }
        if wanted:
            query["topics"] = [
                None if one is None else ["0x" + topic.hex() for topic in one] for one in wanted
            ]
        allowed = frozenset(addresses)

        def parse(raw: Any) -> list[Log]:
            if not isinstance(raw, list):
                raise MalformedError("eth_getLogs did not answer with a list")
            found = [parse_log(one) for one in raw if not one.get("removed")]
            for log in found:
                if not first <= log.block <= last or log.address not in allowed:
                    raise MalformedError("a log that was not asked for")
                for place, choices in enumerate(wanted):
                    if choices and (len(log.topics) <= place or log.topics[place] not in choices):
                        raise MalformedError("a log that was not asked for")
            found.sort(key=lambda log: (log.block, log.log_index))
            if len({(log.block, log.log_index) for log in found}) != len(found):
                raise MalformedError("a log that comes twice")
            return found

        return self.request("eth_getLogs", query, parse=parse)

    # ── writing and agreement ────────────────────────────────────────────────────────────────

    def send_raw(self, raw: bytes) -> None:
        """Hands a signed transaction to every endpoint that is not at fault. Harmless if the chain
        already knows it.

        Raises RpcError with an endpoint's reason if all refuse it.
        """
        refusal: UnavailableError | None = None
        taken = False
        for single in self._in_order():
            if taken and single._pool.endpoints[0].resting():
                continue
            try:
                single.request("eth_sendRawTransaction", "0x" + raw.hex())
            except RpcError as error:
                words = error.message.lower()
                if "already known" in words or "already imported" in words:
                    taken = True
                else:
                    refusal = error
            except UnavailableError as error:
                refusal = refusal or error
            else:
                taken = True
        if not taken and refusal is not None:
            raise refusal

    def agree(self, read: Callable[[ChainClient], T], *, at_stake: bool = True) -> T:
        """Asks each endpoint alone and returns the answer that a quorum of them gives. An endpoint
        with another answer rests. With a quorum of one and two endpoints, both are asked; one
        answer is enough only if the other endpoint gives none.

        Args: `read` must name a block's number, not a tag, because endpoints may be a block apart.
        With `at_stake`, the quorum is at least the network's, even if fewer endpoints are
        configured.

        Raises ChainRevertedError if a quorum says that the call reverts, DisagreementError if no
        answer has a quorum.
        """
        clients = self._in_order()
        quorum = max(self.quorum, self._at_stake) if at_stake else self.quorum
        if len(clients) == 1 and quorum == 1:
            return read(self)
        need = max(quorum, min(2, len(clients)))
        votes: list[tuple[T | ChainRevertedError, list[ChainClient]]] = []
        failures: list[str] = []
        too_large: RangeTooLargeError | None = None
        for single in clients:
            answer: T | ChainRevertedError
            try:
                answer = read(single)
            except ChainRevertedError as error:
                answer = error
            except (UnavailableError, MalformedError) as error:
                failures.append(f"{single.name}: {error}")
                if isinstance(error, RangeTooLargeError):
                    too_large = error
                continue
            for known, voters in votes:
                if _alike(known, answer):
                    voters.append(single)
                    break
            else:
                votes.append((answer, [single]))
            if max(len(voters) for _, voters in votes) >= need:
                break
        best, backers = max(votes, key=lambda vote: len(vote[1]), default=(None, []))
        if len(backers) < quorum and too_large is not None:
            raise too_large
        if not votes:
            raise UnavailableError("no RPC endpoint answers: " + "; ".join(failures))
        if len(backers) < quorum or (len(votes) > 1 and len(backers) < need):
            said = f"{len(votes)} different answers" if len(votes) > 1 else "too few answers"
            raise DisagreementError(
                f"the RPC endpoints disagree on {self.network.name}, {need} must agree: {said}; "
                f"{len(failures)} of {len(clients)} did not answer"
                + (" (" + "; ".join(failures) + ")" if failures else "")
            )
        for _, voters in votes:
            for single in voters if voters is not backers else ():
                single._pool.endpoints[0].failed(
                    BadAnswerError("it disagrees with the other endpoints on the chain's state")
                )
        if isinstance(best, ChainRevertedError):
            raise best
        return cast(T, best)

    def agreed_logs(
        self,
        first: int,
        last: int,
        addresses: Sequence[Address],
        topics: Sequence[bytes | Sequence[bytes] | None] = (),
    ) -> list[Log]:
        """Like `logs`, but a quorum of endpoints must agree. If no answer has a quorum, a log still
        counts if each endpoint that left it out shows it in its transaction's receipt. Raises as
        `agree`."""
        try:
            return self.agree(lambda one: one.logs(first, last, addresses, topics), at_stake=False)
        except DisagreementError:
            answers: dict[ChainClient, list[Log]] = {}
            for single in self.singles():
                try:
                    answers[single] = single.logs(first, last, addresses, topics)
                except UnavailableError:
                    continue
            if len(answers) < max(2, self.quorum):
                raise
            union = {log for logs in answers.values() for log in logs}
            for single, logs in answers.items():
                left_out = union - set(logs)
                for tx_hash in {log.tx_hash for log in left_out}:
                    receipt = single.receipt(tx_hash)
                    shown = set(receipt.logs) if receipt is not None else set()
                    if {log for log in left_out if log.tx_hash == tx_hash} - shown:
                        raise
                if left_out:
                    single._pool.endpoints[0].failed(
                        BadAnswerError(f"it left {len(left_out)} logs out of its answer")
                    )
            return sorted(union, key=lambda log: (log.block, log.log_index))

    def distrust(self, why: str) -> None:
        """Makes the endpoint that is asked first rest, because its answer was found to be
        incomplete."""
        if len(self._pool.endpoints) > 1:
            self._pool.ordered()[0].failed(BadAnswerError(why))

    @property
    def name(self) -> str:
        """The endpoints, without their keys."""
        return ", ".join(endpoint.name for endpoint in self._pool.endpoints)

    def singles(self) -> list[ChainClient]:
        """One client for each endpoint, in the configured order; they share what is known of the
        endpoints' faults."""
        if self._singles is None:
            self._singles = []
            for endpoint in self._pool.endpoints:
                single = copy(self)
                single._use(RpcPool([endpoint], self.network.block_time))
                single.quorum = single._at_stake = 1
                self._singles.append(single)
        return self._singles

    def _in_order(self) -> list[ChainClient]:
        order = {endpoint: place for place, endpoint in enumerate(self._pool.ordered())}
        return sorted(self.singles(), key=lambda one: order[one._pool.endpoints[0]])

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


def _alike(one: object, other: object) -> bool:
    if isinstance(one, ChainRevertedError) and isinstance(other, ChainRevertedError):
        same = one.arguments == other.arguments or one.name == "Unknown"  # words may differ
        return one.name == other.name and same
    return type(one) is type(other) and one == other


def _bytes(value: Any) -> bytes:
    if not isinstance(value, str) or not value.startswith("0x"):
        raise MalformedError(f"the RPC gave {str(value)[:80]!r} for bytes")
    try:
        return bytes.fromhex(value[2:])
    except ValueError as error:
        raise MalformedError("the RPC gave bytes that are not hex") from error


def parse_log(raw: Any) -> Log:
    """A log as JSON-RPC gives it. Raises MalformedError, KeyError or TypeError."""
    return Log(
        codec.known_address(raw["address"]),
        tuple(_bytes(topic) for topic in raw["topics"]),
        _bytes(raw["data"]),
        number(raw["blockNumber"]),
        ids.digest(raw["blockHash"]),
        number(raw["logIndex"]),
        ids.digest(raw["transactionHash"]),
    )
