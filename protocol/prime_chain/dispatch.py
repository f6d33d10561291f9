"""One pass of a transaction sender over the chain: settle, send again, replace, send.

    act ── settle mined ones ── broadcast or replace waiting ones ── sign and send queued ones

Every step is recorded before it is taken. Overview: prime_chain/sender.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prime_chain.client import Block, Call, ChainClient, Fees, TxReceipt
from prime_chain.errors import ChainRevertedError, RpcError
from prime_chain.fees import FeePolicy, bumped
from prime_chain.transaction_queue import Attempt, Intent, TransactionQueue
from prime_core import ids
from prime_core.errors import UnavailableError
from prime_core.ids import Address, Digest
from prime_core.signing import LocalSigner

log = logging.getLogger(__name__)

_REFUSED = "the endpoint refuses it"
_REORG_BLOCKS = 256
"""How far below the newest mined intent others are looked at again after a reorganization."""


@dataclass(frozen=True)
class _View:
    """The chain as one tick sees it."""

    head: Block
    nonce: int


class Dispatch:
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
