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
from pathlib import Path

from prime_chain.client import Call, ChainClient
from prime_chain.dispatch import Dispatch
from prime_chain.errors import ChainRevertedError
from prime_chain.fees import FeePolicy, default_policy
from prime_chain.transaction_queue import Intent, TransactionQueue
from prime_core.clock import Clock
from prime_core.errors import MalformedError, UnavailableError
from prime_core.ids import Address
from prime_core.signing import LocalSigner

log = logging.getLogger(__name__)

ACT_SECONDS = 3600
"""For so long a command that is typed again does not repeat what an interrupted one did."""
_YOUNG_BLOCKS = 32
"""For so many blocks' time after the last receipt, its block is looked at again."""


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
        self._dispatch = Dispatch(
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
        """Queues a failed intent again (its cause has been mended)."""
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

    # ── one look at the chain ────────────────────────────────────────────────────────────────

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
        """Something is open, or was mined so lately that a reorg may still take it away."""
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
