"""One transaction sender per key, on a durable queue.

    submit(id, call) ──> queued ──sign, record, send──> sent ──receipt──> confirmed | failed
                            ^                              |
                            └── nonce taken by a stranger ─┘

`tick` looks at the chain once. It settles mined transactions, sends lost ones again, replaces stuck
ones (lowest nonce first, with fees raised by at least an eighth, up to a cap), and sends queued
ones in order. Everything is recorded before it is sent, so a process killed at any instant goes on
where it was. An intent id succeeds at most once. On a temporary error (no RPC, no funds, fees above
the cap) the intent stays where it is, with a note of what it waits for. A sent transaction cannot
be cancelled.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prime_chain.client import Block, Call, ChainClient, Fees, TxReceipt
from prime_chain.errors import ChainRevertedError, RpcError
from prime_chain.transaction_queue import Attempt, Intent, TransactionQueue
from prime_core import ids
from prime_core.clock import Clock
from prime_core.errors import MalformedError, UnavailableError
from prime_core.ids import Address, Digest
from prime_core.signing import LocalSigner

log = logging.getLogger(__name__)

ACT_SECONDS = 3600
"""Time in which a command that is typed again does not repeat what an interrupted one did."""
_YOUNG_BLOCKS = 32
"""Blocks' time after the last receipt in which its block is checked again."""
_REFUSED = "the endpoint refuses it"
_REORG_BLOCKS = 256
"""How far below the newest mined intent others are looked at again after a reorganization."""


@dataclass(frozen=True)
class FeePolicy:
    """`max_fee`: cap in wei per gas. `stuck_seconds` until a waiting transaction is replaced;
    `resend_seconds` until it is broadcast again. `in_flight`: sent and not yet mined, at most."""

    max_fee: int
    stuck_seconds: float
    resend_seconds: float
    in_flight: int = 16


def default_policy(client: ChainClient) -> FeePolicy:
    """The network's cap; ten blocks until stuck, three until sent again."""
    network = client.network
    return FeePolicy(network.max_fee_wei, 10 * network.block_time, 3 * network.block_time)


class Sender:
    """Sends transactions from one local key; see the module's docstring.

    Several threads and processes may share a queue: ticks exclude one another. `agree` is for
    senders that put stake at risk: a call's dry run must then end alike on as many endpoints as the
    network asks.
    """

    def __init__(
        self,
        client: ChainClient,
        signer: LocalSigner,
        queue: Path | TransactionQueue,
        *,
        policy: FeePolicy | None = None,
        agree: bool = False,
        clock: Clock = Clock(),
    ) -> None:
        self.client = client
        self.address: Address = signer.address
        self._clock = clock
        if isinstance(queue, Path):
            queue = TransactionQueue(queue, signer.address, client.chain_id)
        self._queue = queue
        self._thread_lock = threading.Lock()
        self._dispatch = _Dispatch(
            client,
            signer,
            self._queue,
            policy or default_policy(client),
            agree=agree,
            now=clock.now,
        )

    @property
    def trouble(self) -> str:
        """Why the last tick could not finish; empty if it could."""
        return self._dispatch.trouble

    def submit(self, intent_id: str, call: Call) -> Intent:
        """Writes `call` down under `intent_id`; the same id and call again change nothing.

        Raises ConflictError if the id stands for another call. Needs no RPC.
        """
        self._queue.submit(intent_id, call, self._clock.now())
        found = self._queue.get(intent_id)
        assert found is not None
        return found

    def build(self, intent_id: str, call: Call) -> None:
        """Gives a waiting intent its call, from when on it is queued. Needs no RPC."""
        self._queue.build(intent_id, call, self._clock.now())

    def retry(self, intent_id: str) -> None:
        """Queues a failed intent again (its cause has been removed)."""
        found = self._queue.get(intent_id)
        if found is not None and found.status == "failed":
            self._queue.retry(intent_id, self._clock.now())

    def remember(self, key: str, value: str) -> str:
        """Keeps a fact next to the intents: the value of the first call, forever."""
        return self._queue.remember(f"fact/{key}", value)

    def status(self, intent_id: str) -> Intent | None:
        """The intent as recorded, or None if it was never submitted."""
        return self._queue.get(intent_id)

    def open_intents(self) -> list[Intent]:
        """What is not finished, in order."""
        return self._queue.with_status("queued", "sent")

    def wait(self, intent_id: str, timeout: float) -> Intent:
        """Ticks until the intent is confirmed or failed, and returns it.

        Raises UnavailableError, with what it waits for, after `timeout` seconds of the clock;
        the intent stays in the queue.
        """
        deadline = self._clock.now() + timeout
        pause = 0.02  # a chain may mine at once; if not, ask less and less often
        while True:
            self.tick()
            found = self._queue.get(intent_id)
            if found is None:
                raise UnavailableError(f"no intent {intent_id!r} was submitted")
            if found.done:
                return found
            if self._clock.now() >= deadline:
                reason = found.note or self.trouble or f"it is {found.status}"
                raise UnavailableError(
                    f"not confirmed within {timeout:g} s: {found.call.description or intent_id} "
                    f"({reason}); it stays in the queue and is taken up again"
                )
            self._clock.sleep(pause)
            pause = min(2 * pause, self.client.poll_seconds)

    def send_and_wait(self, intent_id: str, call: Call, timeout: float = 120.0) -> Intent:
        """For command lines: submits and waits. Raises ChainRevertedError if it fails; an earlier
        failure under the same id is tried again."""
        if self.submit(intent_id, call).status == "failed":
            self.retry(intent_id)
        found = self.wait(intent_id, timeout)
        if found.error is not None:
            raise found.error
        return found

    @contextmanager
    def acting(self, command: str) -> Iterator[str]:
        """For command lines: an act, whose intents' ids begin with what is yielded and a colon. If
        the block ends by an exception, `finish_open` of the same command (with its arguments)
        returns for ACT_SECONDS what was confirmed; but not after a contract's refusal: typed
        again, the command starts from the chain again."""
        key = _key(command)
        act = f"{key}-{secrets.token_hex(8)}"
        self._queue.begin_act(act)
        try:
            yield act
        except ChainRevertedError:
            self._queue.end_acts(key)
            raise
        self._queue.end_acts(key)

    def finish_open(
        self, tell: Callable[[str], None], command: str, timeout: float = 120.0
    ) -> list[Intent]:
        """For command lines: waits for what interrupted commands left, and returns what was
        confirmed of it, and before, of `command`. `tell` gets a sentence about each. Raises
        UnavailableError as `wait` does."""
        ended = self._queue.done_in_acts(_key(command), self._clock.now() - ACT_SECONDS)
        for done in ended:
            tell(f"done already by what was interrupted: {done.call.description}")
        for left in self.open_intents():
            tell(f"finishing what was interrupted: {left.call.description}")
            ended.append(self.wait(left.id, timeout))
        return [one for one in ended if one.status == "confirmed"]

    def run(self, stop: threading.Event, poll_seconds: float | None = None) -> None:
        """Ticks until `stop` is set. Once everything is mined and old, ticks ask no RPC."""
        pause = poll_seconds or max(0.3, self.client.network.block_time / 2)
        while not stop.is_set():
            self.tick()
            stop.wait(pause)

    def close(self) -> None:
        self._queue.close()

    def tick(self) -> int:
        """Does what is due now. Returns the number of open intents. Never raises for an RPC that
        is down: `trouble` says so, and the next tick tries again."""
        with self._exclusive() as mine:
            if mine and self._has_work():
                before, self._dispatch.trouble = self.trouble, ""
                try:
                    self._dispatch.act()
                except (UnavailableError, MalformedError) as error:
                    self._dispatch.trouble = str(error)
                if self.trouble and self.trouble != before:
                    log.warning("%s cannot send for now: %s", self.address, self.trouble)
                elif before and not self.trouble:
                    log.info("%s sends again", self.address)
        return self._queue.open_count()

    def _has_work(self) -> bool:
        """Something is open, or was mined so recently that a reorg may still take it away."""
        if self._queue.open_count():
            return True
        newest = self._queue.newest_confirmed()
        return newest is not None and (
            self._clock.now() - newest.updated_at < _YOUNG_BLOCKS * self.client.network.block_time
        )

    @contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """True if no other thread or process is ticking this queue."""
        if not self._thread_lock.acquire(blocking=False):
            yield False
            return
        try:
            with self._queue.exclusive() as mine:
                yield mine
        finally:
            self._thread_lock.release()


def _key(command: str) -> str:
    """What the acts of a command begin with."""
    return hashlib.sha256(command.encode()).hexdigest()[:16]


def left_of(calls: Sequence[Call], finished: Sequence[Intent], act: str) -> Sequence[Call]:
    """Returns what a command, in its `act`, still has to send of `calls` after `finish_open`: what
    follows the last call that is among `finished` and was sent by the same command. So a command
    that was interrupted and typed again does not pay twice, and another command leaves nothing
    out."""
    key = act.partition("-")[0] + "-"
    done = [intent.call for intent in finished if intent.id.startswith(key)]
    after = max((n for n, call in enumerate(calls, 1) if call in done), default=0)
    return calls[after:]


# ── one look at the chain ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _View:
    """The chain as one tick sees it."""

    head: Block
    nonce: int


class _Dispatch:
    """One key's transactions between queue and chain. Not thread-safe: the sender's ticks exclude
    one another."""

    def __init__(
        self,
        client: ChainClient,
        signer: LocalSigner,
        queue: TransactionQueue,
        policy: FeePolicy,
        *,
        agree: bool,
        now: Callable[[], float],
    ) -> None:
        self.client = client
        self.address: Address = signer.address
        self.trouble = ""
        """Why the last look could not finish; empty if it could."""
        self._signer = signer
        self._queue = queue
        self._policy = policy
        self._agree = agree and max(client.network.min_agreeing, client.quorum) > 1
        self._now = now
        self._bound = False
        self._first_seen: dict[Digest, int] = {}  # of the lowest waiting one: the head back then

    def act(self) -> None:
        """Does what is due now. Raises UnavailableError, MalformedError where the chain cannot be
        seen; trouble that passes is left in `trouble`."""
        if not self._bound:  # a local chain made again must not meet an old queue
            self._queue.bind("genesis", self.client.block(0).hash)
            self._bound = True
        head = self.client.agreed_block(self.client.block_number())
        nonce = self.client.agree(lambda one: one.nonce(self.address, head.number), at_stake=False)
        view = _View(head, nonce)
        if self._behind(view):
            return
        self._settle(view)
        self._nudge(view)
        self._launch(view)

    def _behind(self, view: _View) -> bool:
        """True if the endpoints have not yet seen what we know to be mined. What a reorganization
        took off the chain is settled again, or reopened."""
        newest = self._queue.newest_confirmed()
        if newest is None or newest.nonce is None or newest.block is None:
            return False
        number = newest.block
        lags = view.head.number < number
        if not lags and self.client.agreed_block(number).hash == newest.block_hash:
            lags = newest.nonce >= view.nonce  # the block is there, and its nonce is not
            if not lags:
                return False  # so are all blocks before it
        if lags:
            self.trouble = "the RPC endpoints lag behind the chain"
            return True
        for intent in self._queue.mined_after(number - _REORG_BLOCKS):
            receipt = self._mined(intent)
            if receipt is None:
                note = "its block left the chain (reorg); it is sent again"
                self._queue.reopen(intent.id, note, self._now())
            elif (receipt.block_hash, receipt.tx_hash) != (intent.block_hash, intent.tx_hash):
                self._finish(intent, receipt, view)
        return False

    def _mined(self, intent: Intent) -> TxReceipt | None:
        """The receipt, as a quorum shows it, of whichever of the intent's transactions was
        mined."""
        for tx_hash in (attempt.hash for attempt in reversed(intent.live)):
            receipt = self.client.agreed_receipt(tx_hash)
            if receipt is not None:
                return receipt
        return None

    def _settle(self, view: _View) -> None:
        for intent in self._queue.with_status("sent"):
            if intent.nonce is None or intent.nonce >= view.nonce:
                continue
            receipt = self._mined(intent)
            if receipt is not None:
                self._finish(intent, receipt, view)
                continue
            self._look_for(intent, intent.nonce, view)

    def _look_for(self, intent: Intent, nonce: int, view: _View) -> None:
        """The nonce is used and no receipt of ours is shown. The intent is sent under another
        nonce only once the transaction that used this one is seen, and is not ours: a receipt may
        be hidden."""
        try:
            user = self.client.user_of_nonce(self.address, nonce, view.head.number)
        except UnavailableError as error:
            self._note(intent, f"nonce {nonce} is used, and no endpoint shows by what: {error}")
            return
        if user is None:
            return
        tx_hash, block = user
        if tx_hash in intent.hashes:
            self._note(intent, f"{tx_hash} is in block {block}; looking for the receipt")
        elif view.head.number - block < self.client.network.confirmations:
            self._note(intent, f"nonce {nonce} is used by {tx_hash}, not yet confirmed")
        else:
            note = f"nonce {nonce} was used by another sender of {self.address}"
            self._queue.requeue(intent.id, note, self._now())

    def _finish(self, intent: Intent, receipt: TxReceipt, view: _View) -> None:
        depth = view.head.number - receipt.block
        if depth < self.client.network.confirmations:
            note = f"in block {receipt.block}, waiting for blocks on top of it"
            self._note(intent, note, logging.DEBUG)
            return
        error = None if receipt.success else self._why(intent, receipt)
        self._queue.record_mined(intent.id, receipt, error, self._now())

    def _why(self, intent: Intent, receipt: TxReceipt) -> ChainRevertedError:
        """The custom error of a mined revert, by running the call again where it failed."""
        for block in (receipt.block - 1, receipt.block):
            try:
                self.client.call(intent.call, block=block, sender=self.address)
            except ChainRevertedError as error:
                return error
            except RpcError:
                continue  # an endpoint that keeps no old state
        if intent.gas is not None and receipt.gas_used >= intent.gas * 63 // 64:
            return ChainRevertedError("OutOfGas", {"gas": intent.gas}, intent.call.description)
        return ChainRevertedError("Unknown", {"tx": receipt.tx_hash}, intent.call.description)

    def _nudge(self, view: _View) -> None:
        """Broadcasts again what may be lost; replaces the lowest waiting one if it is stuck."""
        waiting = sorted(
            (i for i in self._queue.with_status("sent") if (i.nonce or 0) >= view.nonce),
            key=lambda i: i.nonce or 0,
        )
        if not waiting:
            return
        lowest, now = waiting[0], self._now()
        stuck = self._is_stuck(lowest.live[-1], view)
        if stuck and lowest.nonce is not None and lowest.nonce > view.nonce:
            self._fill_gap(view.nonce)
        for intent in waiting:
            last = intent.live[-1]
            if intent is lowest and stuck and self._replace(intent, last):
                continue
            if last.sent_at is None or now - last.sent_at >= self._policy.resend_seconds:
                self._broadcast(intent.id, last.hash, last.raw)

    def _is_stuck(self, attempt: Attempt, view: _View) -> bool:
        """Passed over for long enough, by blocks that did come: in a chain that stands still a
        higher fee buys nothing."""
        if attempt.hash not in self._first_seen:
            self._first_seen = {attempt.hash: view.head.number}
        passed_over = view.head.number > self._first_seen[attempt.hash]
        late = self._now() - attempt.signed_at >= self._policy.stuck_seconds
        return late and passed_over

    def _replace(self, intent: Intent, last: Attempt) -> bool:
        fees = bumped(last, self.client.fees(), self._policy.max_fee)
        if fees is None:
            cap = self._policy.max_fee / 10**9
            note = f"the fee cap of {cap:g} gwei is reached; it waits for fees to fall"
            self._note(intent, note)
            return False
        assert intent.gas is not None
        self._sign_and_send(intent.id, intent.call, last.nonce, intent.gas, *fees)
        return True

    def _fill_gap(self, nonce: int) -> None:
        """An unused nonce blocks all later ones: spend it on a transfer to ourselves."""
        fees = self.client.fees()
        intent_id = f"fill-gap/{nonce}"
        call = Call(self.address, b"", 0, f"use up the unused nonce {nonce}")
        self._queue.submit(intent_id, call, self._now())
        max_fee = min(fees.max_fee, self._policy.max_fee)
        self._sign_and_send(
            intent_id, call, nonce, 21_000, max_fee, min(fees.priority_fee, max_fee)
        )

    def _launch(self, view: _View) -> None:
        """Sends what is queued, in order, and stops at the first that has to wait."""
        queued = self._queue.with_status("queued")
        if not queued:
            return
        sent = self._queue.with_status("sent")
        used = {intent.nonce for intent in sent}
        nonce = view.nonce
        if not sent:  # others may wait in the pool from a queue that was lost
            nonce = max(nonce, self.client.pending_nonce(self.address))
        fees = self.client.fees()
        balance = self.client.balance(self.address)
        for intent in sent:
            balance -= intent.call.value + (intent.gas or 0) * intent.live[-1].max_fee
        for intent in queued:
            if len(used) >= self._policy.in_flight:
                return
            receipt = self._mined(intent) if intent.live else None
            if receipt is not None:  # an earlier attempt got through after all
                self._finish(intent, receipt, view)
                continue
            gas = self._affordable_gas(intent, fees, balance, bool(used))
            if gas is None:
                return
            if gas == 0:
                continue
            while nonce in used:
                nonce += 1
            max_fee = min(fees.max_fee, self._policy.max_fee)
            priority = min(fees.priority_fee, max_fee)
            used.add(nonce)
            balance -= intent.call.value + gas * max_fee
            self._sign_and_send(intent.id, intent.call, nonce, gas, max_fee, priority)

    def _affordable_gas(
        self, intent: Intent, fees: Fees, balance: int, others_in_flight: bool
    ) -> int | None:
        """Gas limit for the intent; None if it has to wait (noted); 0 if it failed (recorded)."""
        if fees.base_fee + fees.priority_fee > self._policy.max_fee:
            note = (
                f"fees of {(fees.base_fee + fees.priority_fee) / 10**9:g} gwei exceed the cap of "
                f"{self._policy.max_fee / 10**9:g} gwei; it waits for them to fall"
            )
            self._note(intent, note)
            return None
        try:
            if self._agree:
                number = self.client.block_number()
                self.client.agree(
                    lambda one: one.call(intent.call, block=number, sender=self.address)
                )
            estimate = self.client.estimate_gas(intent.call, self.address)
        except ChainRevertedError as error:
            if others_in_flight:  # it may depend on them: ask again when they are in
                self._note(intent, "waits for earlier transactions", logging.DEBUG)
                return None
            # one endpoint's word that it fails is not enough
            block = self.client.block_number()
            try:
                self.client.agree(
                    lambda one: one.call(intent.call, block=block, sender=self.address),
                    at_stake=False,
                )
            except ChainRevertedError:
                pass
            else:
                if self.client.quorum > 1:
                    self._note(intent, f"only one endpoint says that it fails: {error.reason}")
                    return None
            self._queue.record_refused(intent.id, error, self._now())
            return 0
        except RpcError as error:
            if "insufficient funds" not in error.message.lower():
                raise
            self._note_funds(intent, balance, intent.call.value)
            return None
        gas = estimate * 5 // 4 + 20_000  # state may change before it is mined
        need = intent.call.value + gas * min(fees.max_fee, self._policy.max_fee)
        if need > balance:
            self._note_funds(intent, balance, need)
            return None
        return gas

    def _note(self, intent: Intent, text: str, level: int = logging.WARNING) -> None:
        """Says why the intent waits: in the queue, and in the log when it is news."""
        if text != intent.note:
            log.log(level, "%s: %s", intent.call.description or intent.id, text)
            self._queue.note(intent.id, text, self._now())

    def _note_funds(self, intent: Intent, balance: int, need: int) -> None:
        note = (
            f"insufficient funds: {self.address} has {max(balance, 0) / 10**18:.6f} ETH free and "
            f"needs {need / 10**18:.6f} ETH; send it some, nothing else is needed"
        )
        self._note(intent, note)

    def _sign_and_send(
        self, intent_id: str, call: Call, nonce: int, gas: int, max_fee: int, priority_fee: int
    ) -> None:
        transaction = {
            "type": 2,
            "chainId": self.client.chain_id,
            "nonce": nonce,
            "gas": gas,
            "maxFeePerGas": max_fee,
            "maxPriorityFeePerGas": priority_fee,
            "value": call.value,
            "data": call.data,
            **({"to": call.to} if call.to is not None else {}),
        }
        signed = self._signer.account.sign_transaction(transaction)
        raw = bytes(signed.raw_transaction)
        tx_hash = ids.digest(bytes(signed.hash))
        attempt = Attempt(tx_hash, nonce, max_fee, priority_fee, raw, self._now(), None)
        self._queue.record_signed(intent_id, gas, attempt, self._now())
        self._broadcast(intent_id, tx_hash, raw)

    def _broadcast(self, intent_id: str, tx_hash: Digest, raw: bytes) -> None:
        intent = self._queue.get(intent_id)
        if intent is None:
            return  # withdrawn meanwhile
        try:
            self.client.send_raw(raw)
        except RpcError as error:
            words = error.message.lower()
            if "nonce too low" in words:
                return  # mined meanwhile, by us or a stranger: the next tick settles it
            why = f"{_REFUSED}: {error.message[:200]}"
            if "insufficient funds" in words:
                why = f"{_REFUSED}: insufficient funds; top up {self.address}, nothing else"
            self._note(intent, why)
            return
        self._queue.record_sent(tx_hash, self._now())
        if intent.note.startswith(_REFUSED):
            self._note(intent, "", logging.DEBUG)


def bumped(old: Attempt, fresh: Fees, cap: int) -> tuple[int, int] | None:
    """(max fee, priority fee) of a replacement: at least an eighth above the old on both, as nodes
    demand a tenth; None if that exceeds the cap."""
    least_max = old.max_fee + old.max_fee // 8 + 1
    least_priority = old.priority_fee + old.priority_fee // 8 + 1
    if least_max > cap:
        return None
    max_fee = min(max(least_max, fresh.max_fee), cap)
    return max_fee, min(max(least_priority, fresh.priority_fee), max_fee)
