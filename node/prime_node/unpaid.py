"""Stops a node from working for more than it can be paid: no new lease while too much is owed.

    owed     this node's files, by prime_core.settlement.is_short, since the last epoch that a
             reward root on chain settles for this node; at the run's price for generated tokens
    limits   the owner's `max_unpaid`, and the pool's bond + free funds on chain

A reward root on chain that gives the node less in all than its own files earned is logged once.

The worker, which the pool's operator chose, does not count the tokens alone: see `tokens_in`.

A thread reads the chain: every CHECK_SECONDS while more than half of a limit is owed, otherwise
every `calm_seconds`. While the chain cannot be read, the limits are unknown and work goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prime_chain.amounts import prime
from prime_chain.claims import fetch_info
from prime_chain.client import BlockId
from prime_chain.contracts import Claim
from prime_core.encoding import merkle_verify, reward_leaf
from prime_core.errors import MalformedError, PrimeError
from prime_core.ids import Address
from prime_core.rollout import SCHEMAS
from prime_core.settlement import is_short, settled_until
from prime_node.api import NodeApi
from prime_node.link import Link
from prime_node.spool import Spool
from prime_node.watched import WatchedThread
from prime_verify.pages import read_footer

log = logging.getLogger("prime.node")
CHECK_SECONDS = 30.0


@dataclass(frozen=True)
class Backing:
    """What the chain shows. `settled_until`: files received before (Unix seconds) are settled by a
    reward root with an amount for this node. `money`: the pool's bond + free funds, in wei.
    `cumulative`: that amount, in wei; it includes every accepted file received before
    `included_until`, one validity before the root's epoch. A file received later may belong to a
    later epoch's root: in an outage, files are put on chain long after their receipt."""

    settled_until: int
    money: int
    cumulative: int = 0
    included_until: int = 0


def objection(owed: int, limit: int | None, money: int) -> str:
    """Returns why no new lease is taken; empty if one may be. All in wei; `limit`: the owner's."""
    if limit is not None and owed > limit:
        over = f"more than --max-unpaid {prime(limit)}"
        then = "work resumes once a reward root settles it; see: prime-node rewards show"
    elif is_short(owed, money):
        over = f"more than the pool's bond and free funds, {prime(money)}"
        then = (
            "work resumes once the manager settles it or adds funds; to give the seat up: "
            "prime-node leave"
        )
    else:
        return ""
    return f"no new lease is taken: {prime(owed)} of this node's work is unpaid, {over}; {then}"


def shortfall(cumulative: int, own: int) -> str:
    """Returns a warning if a reward root gives a node less than its own files earned (`own`), both
    in wei; else an empty text."""
    if cumulative >= own:
        return ""
    return (
        f"the newest reward root gives this node {prime(cumulative)} in all; its own files earned "
        f"{prime(own)}, {prime(own - cumulative)} more: a slash holds or forfeits them, or the "
        "manager pays too little; see: prime-node rewards explain"
    )


def tokens_in(file: Path, claimed: int) -> int:
    """Returns how many tokens the model generated in a rollout file, of which the worker says
    `claimed`. The footer states the number of output tokens; a validator finds the file malformed
    if it is wrong. In a conversation they include the environment's, so the claim counts up to that
    number. A claim about a file that is not readable stands: the file ends without pay."""
    try:
        footer = read_footer(file.read_bytes())
        columns = list(SCHEMAS[footer.pairs["schema_version"]])
        stated = footer.columns[columns.index("output_tokens")].values
    except (MalformedError, LookupError):
        return claimed
    if stated < 0:  # also malformed
        return claimed
    return min(claimed, stated) if "spans" in columns else stated


class UnpaidWork:
    """Thread-safe. `read` reads the chain; it raises PrimeError if it cannot. `limit` in wei.
    `calm_seconds`: between two reads while at most half of a limit is owed."""

    def __init__(
        self,
        spool: Spool,
        node: Address,
        limit: int | None,
        read: Callable[[], Backing],
        *,
        calm_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._spool = spool
        self._node = node
        self._short = ""
        self._limit = limit
        self._read = read
        self._backing: Backing | None = None
        self._paused = False
        self._lock = threading.Lock()
        self._calm_seconds = max(calm_seconds, CHECK_SECONDS)
        self._read_soon = threading.Event()
        """Set while the limits are unknown or more than half of one is owed, and by `stop`."""
        self._stop = threading.Event()
        self.thread = WatchedThread("unpaid", self._work)

    def stop(self, timeout: float) -> None:
        """Stops the thread after the current read, waiting at most `timeout` seconds."""
        self._stop.set()
        self._read_soon.set()
        if self.thread.is_alive():
            self.thread.join(timeout)

    def owed(self) -> int | None:
        """Returns the unpaid work in wei; None while the chain cannot be read. Raises
        UnavailableError if the journal cannot be read."""
        backing = self._backing
        return None if backing is None else self._spool.worth_since(backing.settled_until)

    def why_not(self) -> str:
        """Returns why no new lease is taken; empty if one may be. Logs each change. Raises
        UnavailableError if the journal cannot be read."""
        backing = self._backing
        why = ""
        if backing is not None:
            owed = self._spool.worth_since(backing.settled_until)
            why = objection(owed, self._limit, backing.money)
            if objection(2 * owed, self._limit, backing.money):
                self._read_soon.set()
        with self._lock:
            changed, self._paused = self._paused != bool(why), bool(why)
        if changed:
            log.warning("%s", why or "leases are taken again: unpaid work is within the limits")
        return why

    def check(self) -> None:
        """Reads the chain once."""
        try:
            backing = self._backing = self._read()
            self._read_soon.clear()
            why = shortfall(
                backing.cumulative, self._spool.worth_before(backing.included_until, self._node)
            )
        except PrimeError as error:
            if self._backing is not None:
                log.warning("unpaid work is not compared with the chain: %s; work goes on", error)
            self._backing = None
            self._read_soon.set()
            return
        if why and why != self._short:
            log.warning("%s", why)
        self._short = why

    def _work(self) -> None:
        while not self._stop.is_set():
            self.check()
            if not self._stop.wait(CHECK_SECONDS):
                self._read_soon.wait(self._calm_seconds - CHECK_SECONDS)


class BackingReader:
    """Reads the pool's money and this node's newest settled epoch, as a quorum of the RPC endpoints
    gives them. For one thread.

    The orchestrator's proof counts only if it leads to a reward root on chain that is not disabled.
    The newest such proof is kept, so an orchestrator that withholds it changes nothing.
    """

    def __init__(self, link: Link, make_api: Callable[[], NodeApi], node: Address) -> None:
        self._link = link
        self._make_api = make_api
        self._node = node
        self._kept: Claim | None = None

    def __call__(self) -> Backing:
        """Raises UnavailableError if the chain cannot be read."""
        rewards, pool = self._link.contracts.rewards, self._link.pool
        claims = self._claims()
        block = rewards.client.numbered("latest")  # not older than what the orchestrator states
        self._kept = next((one for one in claims if self._settled(one, block)), None)
        periods = self._link.deployment.periods
        money = rewards.funds(pool, block).free + rewards.bond_of(pool, block)
        if self._kept is None:
            return Backing(0, money)
        start = self._kept.epoch * periods.epoch_length
        return Backing(
            settled_until(self._kept.epoch, periods.epoch_length),
            money,
            self._kept.cumulative,
            max(0, start - periods.validity),
        )

    def _claims(self) -> list[Claim]:
        known = [one for one in (self._stated(), self._kept) if one is not None]
        return sorted(known, key=lambda claim: claim.epoch, reverse=True)

    def _stated(self) -> Claim | None:
        """Returns the claim that the orchestrator states; None if there is none."""
        api = self._make_api()
        try:
            info = fetch_info(api.client, self._node)
        except PrimeError as error:
            log.info("the orchestrator states no rewards: %s", error)
            return None
        finally:
            api.close()
        amount = info.cumulative
        if info.epoch is None or not 0 <= info.epoch < 2**64:
            return None
        if not (amount.isascii() and amount.isdigit() and len(amount) <= 77) or int(amount) == 0:
            return None
        return Claim(self._link.pool, info.epoch, self._node, int(amount), info.proof)

    def _settled(self, claim: Claim, block: BlockId) -> bool:
        root = self._link.contracts.rewards.reward_root(claim.pool, claim.epoch, block)
        if root is None or root.disabled:
            return False
        return merkle_verify(root.root, reward_leaf(claim.node, claim.cumulative), claim.proof)
