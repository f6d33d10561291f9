"""Anyone's check of a reward root: rebuilt from the chain's events and published objects alone.

    events ─► RewardRootPosted of the epoch ─► its settlement ─► the one before ─► … ─► the first
    each, oldest first:
      leaves    from RootPosted of its epochs, each list held to its root, each leaf to its node
      receipts  the manager's signatures; verdicts the validators'; units the tables' token counts
      slashes   those on chain as of its block, and those that it says are being proposed
      settle()  the same pure function again: the same object, to the byte, or it is a mismatch

Nothing of the orchestrator's database is asked, and nothing that it says is believed unsigned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from prime_chain import reward_events
from prime_chain.events import (
    Claimed,
    Event,
    LeafRejected,
    PoolCreated,
    RewardRootPosted,
    RootPosted,
    RunRevised,
    ValidatorSet,
)
from prime_core import encoding
from prime_core.deployment import Deployment
from prime_core.errors import MalformedError, NotFoundError, UntrustedError
from prime_core.ids import ZERO_DIGEST, Address, Digest, Signature
from prime_core.opinions import check_opinions
from prime_core.revisions import RunHistory, read_history
from prime_core.rollout import Receipt, decode_leaves
from prime_core.run import RunDefinition
from prime_core.settlement import (
    JudgedFact,
    LeafFact,
    SettledFile,
    Settlement,
    SlashFact,
    answered_for,
    judged_fact,
    settle,
)
from prime_core.signing import Strict
from prime_core.verdict import Outcome, SignedOpinion, Verdict, VerdictTable

M = TypeVar("M", bound=Strict)
MAX_OBJECT_BYTES = 32 << 20
PARALLEL = 8
"""Objects fetched at once."""


class Objects(Protocol):
    """Published objects by SHA-256 (an orchestrator's HTTP, or a copy). Must be thread-safe."""

    def get_object(self, digest: Digest, limit: int) -> bytes:
        """Bytes that hash to `digest`. Raises NotFoundError, UnavailableError."""
        ...


@dataclass(frozen=True)
class _Leaf:
    """A leaf of a root. `valid_until` (Unix seconds) as its node signed it; None for one that its
    node posted, which the contract refuses once nobody answers for it."""

    node: Address
    digest: Digest
    valid_until: int | None


@dataclass(frozen=True)
class Rebuilt:
    """What the rebuild gives for an epoch, and whether the chain holds the same."""

    epoch: int
    settlement: Settlement
    posted: RewardRootPosted
    problems: tuple[str, ...]

    @property
    def match(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        entries = self.settlement.entries
        return {
            "epoch": self.epoch,
            "match": self.match,
            "root": self.settlement.root() if entries else None,
            "posted_root": self.posted.root,
            "cumulative_total": self.settlement.cumulative_total,
            "entries": [entry.model_dump(mode="json") for entry in entries],
            "problems": list(self.problems),
        }


def rebuild(
    events: Sequence[Event],
    deployment: Deployment,
    pool: int,
    runs: RunHistory,
    objects: Objects,
    epoch: int,
) -> Rebuilt:
    """Rebuilds the reward root of `epoch` from `events` (all of the deployment, in order).

    Raises NotFoundError if the chain holds no such root, UntrustedError or MalformedError if what
    was published does not hold together, UnavailableError if an object cannot be had now.
    """
    return Rebuilder(events, deployment, pool, runs, objects).rebuild(epoch)


class Rebuilder:
    """One pool's events, and the objects behind them; see the module's docstring."""

    def __init__(
        self,
        events: Sequence[Event],
        deployment: Deployment,
        pool: int,
        runs: RunHistory,
        objects: Objects,
    ) -> None:
        self._events = [e for e in events if getattr(e, "pool", pool) == pool]
        self._deployment = deployment
        self._pool = pool
        self._runs = runs
        self._objects = objects
        created = next((e for e in self._events if isinstance(e, PoolCreated)), None)
        if created is None:
            raise NotFoundError(f"the chain has no pool {pool}")
        named = (created.run_digest, [(e.from_step, e.run_digest) for e in _revised(self._events)])
        if named != (runs.first.digest(), [(s, run.digest()) for s, run in runs.revisions]):
            raise UntrustedError("the run definitions are not those that the pool names on chain")
        self._manager = created.manager
        self._leaves: dict[Digest, list[_Leaf]] = {}
        self._validators = {e.validator for e in self._events if isinstance(e, ValidatorSet)}

    def posted(self) -> list[RewardRootPosted]:
        """Reward roots that stand: the newest of each epoch, without disabled ones."""
        return reward_events.standing(self._events)

    def rebuild(self, epoch: int) -> Rebuilt:
        """See `rebuild` above."""
        rebuilt: Settlement | None = None
        problems: list[str] = []
        history = self.published(epoch)
        for event, published in history:
            rebuilt = self._again(published, rebuilt)
            problems += _differences(event, published, rebuilt)
        assert rebuilt is not None
        return Rebuilt(epoch, rebuilt, history[-1][0], tuple(problems))

    def published(self, epoch: int | None = None) -> list[tuple[RewardRootPosted, Settlement]]:
        """The settlements up to `epoch` (the newest if None), oldest first, each posted on chain.

        Raises NotFoundError if no such root stands, UntrustedError if the chain of them breaks.
        """
        standing = self.posted()
        newest = standing[-1] if epoch is None and standing else None
        newest = newest or next((e for e in standing if e.epoch == epoch), None)
        if newest is None:
            known = ", ".join(str(e.epoch) for e in standing[-5:]) or "none"
            which = "yet" if epoch is None else f"of epoch {epoch}"
            raise NotFoundError(f"no reward root {which} stands; the newest are: {known}")
        return self._history(newest)

    def claims(self, node: Address) -> list[Claimed]:
        """What was paid for a node, oldest first."""
        return [e for e in self._events if isinstance(e, Claimed) and e.node == node]

    def verdict(self, name: Digest) -> SignedOpinion:
        """The opinion that decided a published verdict, unchecked: for showing what it says."""
        return _parse(Verdict, self._get(name)).deciding

    def _history(self, newest: RewardRootPosted) -> list[tuple[RewardRootPosted, Settlement]]:
        """The settlements that `newest` builds on, oldest first, each posted on chain."""
        by_object = {event.object: event for event in self.posted()}
        found: list[tuple[RewardRootPosted, Settlement]] = []
        name: Digest = newest.object
        while name != ZERO_DIGEST:
            event = by_object.pop(name, None)
            if event is None:
                raise UntrustedError(f"settlement {name} stands behind no reward root on chain")
            settlement = _parse(Settlement, self._get(name))
            if settlement.epoch != event.epoch or settlement.pool != self._pool:
                raise UntrustedError(f"settlement {name} is of another epoch or pool")
            found.append((event, settlement))
            name = settlement.previous
        return found[::-1]

    def _again(self, published: Settlement, previous: Settlement | None) -> Settlement:
        """The settlement as it must be, from chain and signatures."""
        claims = {file.submission_digest: file for file in published.files}
        after = previous.epoch if previous is not None else -1
        held = (f for f in previous.files if f.state == "held") if previous else ()
        names = {file.submission_digest for file in held}
        leaves = [
            (root, leaf)
            for root in reward_events.roots_until(self._events, published.as_of_block)
            if root.epoch <= published.epoch
            for leaf in self._leaves_of(root, claims)
            if root.epoch > after or leaf.digest in names
        ]
        with ThreadPoolExecutor(PARALLEL) as pool:
            facts = list(
                pool.map(
                    lambda item: self._fact(*item, claims=claims, block=published.as_of_block),
                    leaves,
                )
            )
        return settle(
            chain_id=self._deployment.chain_id,
            pool=self._pool,
            epoch=published.epoch,
            as_of_block=published.as_of_block,
            previous=previous,
            leaves=facts,
            slashes=self._slashes(published),
        )

    def _leaves_of(self, root: RootPosted, claims: dict[Digest, SettledFile]) -> list[_Leaf]:
        """The leaves of a root; held to the root, and each to its node, once.

        A root without leaves object was posted by a node for its own leaf, which is the root: it
        counts if the settlement settles the leaf by it, and is passed over if by another or not.
        """
        if root.leaves_object == ZERO_DIGEST and root.count == 1:
            claim = claims.get(root.root)
            if claim is None or claim.root_seq != root.seq:
                return []
            return [_Leaf(reward_events.poster(self._events, root), root.root, None)]
        if root.root not in self._leaves:
            leaves = decode_leaves(self._get(root.leaves_object))
            digests = []
            for leaf in leaves:
                domain = self._deployment.domain_of(leaf.submission)
                digests.append(leaf.submission.digest(domain))
                if leaf.submission.recover(domain, leaf.signature) != leaf.node:
                    raise UntrustedError(f"submission {digests[-1]} is not signed by its node")
            if len(leaves) != root.count or encoding.merkle_root(digests) != root.root:
                raise UntrustedError(f"the list of leaves of root {root.seq} is not that root's")
            self._leaves[root.root] = [
                _Leaf(leaf.node, digest, leaf.submission.valid_until)
                for leaf, digest in zip(leaves, digests, strict=True)
            ]
        return self._leaves[root.root]

    def _fact(
        self,
        root: RootPosted,
        leaf: _Leaf,
        *,
        claims: dict[Digest, SettledFile],
        block: int,
    ) -> LeafFact:
        digest = leaf.digest
        claim = claims.get(digest)
        if claim is None:
            raise UntrustedError(f"the settlement leaves out submission {digest}")
        self._check_receipt(digest, claim.received_at, claim.receipt)
        judged, run = None, None
        if claim.verdict != ZERO_DIGEST:
            judged, run = self._judged(digest, claim)
        return LeafFact(
            submission_digest=digest,
            node=leaf.node,
            root_seq=root.seq,
            expires=root.block_time + self._deployment.periods.validity,
            received_at=claim.received_at,
            receipt=Signature(claim.receipt),
            judged=judged,
            price=run.price_per_unit if run else 0,
            judge_price=run.price_per_judged_file if run else 0,
            prompt_price=run.price_per_prompt_token if run else 0,
            refused=any(
                isinstance(e, LeafRejected) and e.leaf == digest and e.block <= block
                for e in self._events
            ),
            answered=leaf.valid_until is None
            or answered_for(
                rooted_at=root.block_time,
                valid_until=leaf.valid_until,
                accountable=self._deployment.periods.accountable,
            ),
        )

    def _check_receipt(self, digest: Digest, received_at: int, signature: Signature) -> None:
        receipt = Receipt(submission_digest=digest, received_at=received_at)
        if receipt.recover(self._deployment.domain_of(receipt), signature) != self._manager:
            raise UntrustedError(f"the receipt of {digest} is not signed by the manager")

    def _judged(self, digest: Digest, claim: SettledFile) -> tuple[JudgedFact, RunDefinition]:
        """What was found in a submission, and the run of its step, which says what it pays. The
        step is in the table that the verdict names."""
        verdict = _parse(Verdict, self._get(claim.verdict))
        check_opinions(verdict, digest, self._deployment, self._validators)
        deciding = verdict.deciding
        table = _parse(VerdictTable, self._get(deciding.opinion.table))
        if table.submission_digest != digest:
            raise UntrustedError(f"verdict {claim.verdict} names the table of another file")
        accepted = deciding.outcome is Outcome.ACCEPTED
        units = (table.units, table.prompt_units) if accepted else (0, 0)
        return judged_fact(claim.verdict, verdict, *units), self._runs.at(table.step)

    def _slashes(self, published: Settlement) -> list[SlashFact]:
        """Slashes of the nodes concerned as of the settlement's block.

        Those on chain must all be listed, in the state that the chain shows; one that is listed and
        not on chain can only hold money back, never take it.
        """
        on_chain = reward_events.slashes_until(self._events, published.as_of_block)
        nodes = {file.node for file in published.files}
        facts = []
        for slash in published.slashes:
            self._check_receipt(slash.submission_digest, slash.received_at, slash.receipt)
            _, state = on_chain.pop(slash.submission_digest, (slash.node, "open"))
            facts.append(
                SlashFact(
                    slash.submission_digest,
                    slash.node,
                    slash.received_at,
                    Signature(slash.receipt),
                    state,
                )
            )
        for leaf, (node, state) in on_chain.items():
            if state != "cancelled" and node in nodes:
                raise UntrustedError(f"the settlement passes over the slash for {leaf}")
        return facts

    def _get(self, digest: Digest) -> bytes:
        data = self._objects.get_object(digest, MAX_OBJECT_BYTES)
        if encoding.sha256(data) != digest:
            raise UntrustedError(f"object {digest} does not hash to its name")
        return data


def history_of(events: Sequence[Event], pool: int, fetch: Callable[[Digest], bytes]) -> RunHistory:
    """The pool's run and its revisions as the chain names them; `fetch` gives a definition's bytes.
    Raises NotFoundError if the chain has no such pool, and as `read_history` does."""
    mine = [e for e in events if getattr(e, "pool", None) == pool]
    created = next((e for e in mine if isinstance(e, PoolCreated)), None)
    if created is None:
        raise NotFoundError(f"the chain has no pool {pool}")
    revisions = [(e.from_step, e.run_digest) for e in _revised(mine)]
    return read_history(created.run_digest, revisions, fetch)


def _revised(events: Sequence[Event]) -> list[RunRevised]:
    return [e for e in events if isinstance(e, RunRevised)]


def _differences(event: RewardRootPosted, published: Settlement, rebuilt: Settlement) -> list[str]:
    """How chain, published settlement and rebuild differ; empty if they do not."""
    problems = []
    where = f"epoch {event.epoch}"
    if published.digest() != rebuilt.digest():
        mine = {f.submission_digest: f for f in rebuilt.files}
        theirs = {f.submission_digest: f for f in published.files}
        wrong = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
        about = f" about {', '.join(wrong[:3])}" if wrong else ""
        problems.append(f"{where}: the published settlement is not what the facts give{about}")
    if not rebuilt.entries or rebuilt.root() != event.root:
        problems.append(f"{where}: the root on chain is not what the facts give")
    if int(rebuilt.cumulative_total) != event.cumulative_total:
        problems.append(
            f"{where}: the chain promises {event.cumulative_total} wei, the facts give "
            f"{rebuilt.cumulative_total}"
        )
    return problems


def _parse(kind: type[M], data: bytes) -> M:
    try:
        return kind.model_validate_json(data)
    except ValueError as error:
        raise MalformedError(f"an object is no {kind.__name__}") from error
