"""Rebuilds a reward root from the chain's events and published objects alone. Anyone can do it.

    events ─► RewardRootPosted of the epoch ─► its settlement ─► the one before ─► … ─► the first
    each, oldest first:
      leaves    from RootPosted of its epochs; each list must give its root, each leaf its node
      receipts  signed by the manager; verdicts by the validators; units are the tables' tokens
      fees      less what wrong opinions on planted files cost, each signed by its validator
      slashes   those on chain as of its block, and those that it lists as being proposed
      restored  files that the arbiter had paid after an appeal
      settle()  the same pure function: the same object, to the byte, or it is a mismatch. One that
                differs only in keeping forfeited pay in the pool is named as such

The orchestrator's database is not used, and no unsigned claim of the orchestrator is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

from prime_chain.amounts import prime
from prime_chain.events import (
    Claimed,
    Event,
    FileRestored,
    LeafPosted,
    LeafRejected,
    PoolCreated,
    RewardRootDisabled,
    RewardRootPosted,
    RootPosted,
    RunRevised,
    SlashCancelled,
    SlashExecuted,
    SlashProposed,
    ValidatorSet,
)
from prime_core import encoding
from prime_core.deployment import Deployment
from prime_core.errors import MalformedError, NotFoundError, UntrustedError
from prime_core.fees import Fault
from prime_core.ids import ZERO_DIGEST, Address, Digest, Signature
from prime_core.messages import SubmissionInfo
from prime_core.opinions import check_opinions
from prime_core.revisions import RunHistory, read_history
from prime_core.rollout import Receipt, decode_leaves
from prime_core.run import RunDefinition
from prime_core.settlement import (
    BURN_ADDRESS,
    JudgedFact,
    LeafFact,
    RestoredFact,
    SettledFile,
    Settlement,
    SlashFact,
    SlashState,
    answered_for,
    entries_of,
    judged_fact,
    load_settlement,
    own_root,
    settle,
)
from prime_core.signing import Strict
from prime_core.verdict import Opinion, Outcome, SignedOpinion, Verdict, VerdictTable

M = TypeVar("M", bound=Strict)
MAX_OBJECT_BYTES = 32 << 20
PARALLEL = 8
"""Objects fetched at once."""
QUEUED = 4096
"""Files that wait for their turn at once: each costs a kilobyte while it waits."""


class Objects(Protocol):
    """Published objects by SHA-256 (an orchestrator's HTTP, or a copy). Must be thread-safe."""

    def get_object(self, digest: Digest, limit: int) -> bytes:
        """Bytes that hash to `digest`. Raises NotFoundError, UnavailableError."""
        ...


@dataclass(frozen=True)
class _Claim:
    """When a leaf arrived, by the manager's receipt, and the verdict claimed for it (zero: none).
    `root_seq`: the root by which it is settled; None if any root may settle it."""

    received_at: int
    receipt: Signature
    verdict: Digest
    root_seq: int | None = None


@dataclass(frozen=True)
class _Leaf:
    """A leaf of a root. `valid_until` (Unix seconds) is what its node signed. It is None for a leaf
    that its node posted: the contract refuses such a leaf once no stake answers for it."""

    node: Address
    digest: Digest
    valid_until: int | None


@dataclass(frozen=True)
class OmittedFile:
    """A file that its node posted as a root of its own (number `root_seq`, in `epoch`) and that no
    settlement contains, so it is not paid."""

    submission_digest: Digest
    node: Address
    root_seq: int
    epoch: int

    def line(self) -> str:
        """The same for people."""
        return (
            f"warning: no settlement has file {self.submission_digest}, which node {self.node} "
            f"posted itself (root {self.root_seq}, epoch {self.epoch})"
        )


@dataclass(frozen=True)
class Rebuilt:
    """What the rebuild gives for an epoch, and whether the chain holds the same. `omitted_files` is
    no mismatch: the file may be planted, or of a node without a seat."""

    epoch: int
    settlement: Settlement
    posted: RewardRootPosted
    problems: tuple[str, ...]
    omitted_files: tuple[OmittedFile, ...] = ()

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
            "burned": str(self.settlement.burned),
            "problems": list(self.problems),
            "omitted_files": [asdict(one) for one in self.omitted_files],
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


def standing_roots(events: Sequence[Event]) -> list[RewardRootPosted]:
    """Returns the newest reward root of each epoch, without disabled ones, from one pool's
    events."""
    live: dict[int, RewardRootPosted] = {}
    for event in events:
        if isinstance(event, RewardRootPosted):
            live[event.epoch] = event
        elif isinstance(event, RewardRootDisabled):
            live = {n: e for n, e in live.items() if not event.epoch <= n <= event.last}
    return [live[number] for number in sorted(live)]


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
        self._revised = _revised(self._events)
        named = (created.run_digest, [(e.from_step, e.run_digest) for e in self._revised])
        if named != (runs.first.digest(), [(s, run.digest()) for s, run in runs.revisions]):
            raise UntrustedError("the run definitions are not those that the pool names on chain")
        self._manager = created.manager
        self._leaves: dict[Digest, list[_Leaf]] = {}
        self._charged: set[tuple[str, str]] = set()
        """Submission and validator of each fault in the settlements rebuilt so far."""
        self._settled_files: dict[Digest, SettledFile] = {}
        """Files of the settlements rebuilt so far, as the newest of them has each."""
        self._validators = {e.validator for e in self._events if isinstance(e, ValidatorSet)}
        self._refused: dict[Digest, int] = {}
        """Leaves that the contract refuses, and the first block since which it does."""
        for event in self._events:
            if isinstance(event, LeafRejected):
                first = self._refused.get(event.leaf, event.block)
                self._refused[event.leaf] = min(first, event.block)

    def posted(self) -> list[RewardRootPosted]:
        """Reward roots that stand: the newest of each epoch, without disabled ones."""
        return standing_roots(self._events)

    def rebuild(self, epoch: int) -> Rebuilt:
        """See `rebuild` above."""
        rebuilt: Settlement | None = None
        problems: list[str] = []
        self._charged.clear()
        self._settled_files.clear()
        history = self.published(epoch)
        for event, published in history:
            previous, rebuilt = rebuilt, self._again(published, rebuilt, event.block)
            kept = _without_burning(rebuilt, previous)
            if kept.burned < rebuilt.burned and kept.is_named(event.object):
                problems.append(
                    f"epoch {event.epoch}: {prime(rebuilt.burned - kept.burned)} of forfeited pay "
                    "stayed in the pool's free funds instead of being burned; the manager's "
                    "program is too old, or changed"
                )
                rebuilt = kept
            self._settled_files |= _files_of(rebuilt)
            problems += _differences(event, published, rebuilt)
        assert rebuilt is not None
        omitted_files = self.omitted_files([published for _, published in history])
        return Rebuilt(epoch, rebuilt, history[-1][0], tuple(problems), omitted_files)

    def omitted_files(self, settlements: Sequence[Settlement]) -> tuple[OmittedFile, ...]:
        """The files in roots of their nodes that `settlements`, the last and all before it, neither
        settle nor restore."""
        newest = settlements[-1]
        known = {file.submission_digest for one in settlements for file in one.files}
        known |= {file.submission_digest for one in settlements for file in one.restored}
        return tuple(
            OmittedFile(root.root, poster(self._events, root), root.seq, root.epoch)
            for root in roots_until(self._events, newest.as_of_block)
            if is_own(root) and root.epoch <= newest.epoch and root.root not in known
        )

    def settle(
        self,
        epoch: int,
        submission: Callable[[Digest], SubmissionInfo],
        as_of_block: int | None = None,
    ) -> Settlement:
        """The settlement of `epoch` that a silent manager did not publish, as of a block (by
        default that of the pool's newest event).

        It follows the newest reward root that stands. Slashes are those on chain. `submission`
        gives the record of a leaf. Raises NotFoundError if there is none or it has no receipt, and
        as `rebuild` does.
        """
        as_of_block = self._events[-1].block if as_of_block is None else as_of_block
        standing = self.posted()
        history = self._history(standing[-1]) if standing else []
        previous = history[-1][1] if history else None
        if previous is not None and epoch <= previous.epoch:
            raise NotFoundError(
                f"epoch {epoch} is settled: the newest reward root is of epoch {previous.epoch}"
            )
        self._check_block(epoch, as_of_block, previous, as_of_block)
        settled: dict[Digest, SettledFile] = {}
        charged: set[Digest] = set()
        for _, one in history:
            settled |= _files_of(one)
            charged |= {Digest(fault.opinion.opinion.submission) for fault in one.faults}
        claims: dict[Digest, _Claim] = {}
        found: dict[Digest, tuple[RootPosted, _Leaf]] = {}
        for root, leaf in self._open_leaves(epoch, as_of_block, previous, settled, claims=None):
            if not (is_own(root) and leaf.digest in charged):  # anyone can post a planted file
                found[leaf.digest] = (root, leaf)
        for digest in found:
            claims[digest] = _claim_of(submission(digest))
        restored = self._restored(settled)
        nodes = {leaf.node for _, leaf in found.values()}
        nodes |= {one.node for one in restored if one.is_due(found, epoch, as_of_block, previous)}
        nodes |= {Address(one.node) for one in previous.restored} if previous else set()
        slashes = []
        for digest, (node, state) in slashes_until(self._events, as_of_block).items():
            if state != "cancelled" and node in nodes:
                claim = _claim_of(submission(digest))
                self._check_receipt(digest, claim.received_at, claim.receipt)
                slashes.append(SlashFact(digest, node, claim.received_at, claim.receipt, state))
        return self._settled(
            epoch,
            as_of_block,
            previous,
            standing[-1].object if standing else ZERO_DIGEST,
            list(found.values()),
            claims,
            slashes,
            restored=restored,
        )

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
            settlement = load_settlement(name, self._get, most_files=self._leaf_count(event.epoch))
            if settlement.epoch != event.epoch or settlement.pool != self._pool:
                raise UntrustedError(f"settlement {name} is of another epoch or pool")
            found.append((event, settlement))
            name = settlement.previous
        return found[::-1]

    def _leaf_count(self, epoch: int) -> int:
        """How many leaves the chain's roots say there are up to `epoch`."""
        roots = (e for e in self._events if isinstance(e, RootPosted) and e.epoch <= epoch)
        return sum(root.count for root in roots)

    def _again(
        self, published: Settlement, previous: Settlement | None, posted_in: int
    ) -> Settlement:
        """The settlement as it must be, from chain and signatures."""
        self._check_block(published.epoch, published.as_of_block, previous, posted_in)
        claims = {
            file.submission_digest: _Claim(
                file.received_at, file.receipt, file.verdict, file.root_seq
            )
            for file in published.files
        }
        block = published.as_of_block
        leaves = self._open_leaves(
            published.epoch, block, previous, self._settled_files, claims=claims
        )
        settled = self._settled_files.keys() | {leaf.digest for _, leaf in leaves}
        slashes = self._slashes(published)
        return self._settled(
            published.epoch,
            block,
            previous,
            Digest(published.previous),
            leaves,
            claims,
            slashes,
            self._lies(published, previous),
            self._faults(published, settled),
            restored=self._restored(self._settled_files),
        )

    def _check_block(self, epoch: int, block: int, previous: Settlement | None, last: int) -> None:
        """Checks the block as of which a settlement reads the chain: not before the roots that it
        settles, nor before the previous settlement's, nor after `last`. Raises UntrustedError."""
        first = previous.as_of_block if previous is not None else 0
        for root in self._events:
            if isinstance(root, RootPosted) and root.epoch <= epoch:
                first = max(first, root.block)
        if not first <= block <= last:
            raise UntrustedError(
                f"the settlement of epoch {epoch} is as of block {block}, which is not between "
                f"{first} and {last}"
            )

    def _lies(self, published: Settlement, previous: Settlement | None) -> dict[Address, int]:
        """How many planted lies each validator judged since `previous`, which only the manager
        knows."""
        before = {r.validator: r.lies for r in previous.fee_records} if previous else {}
        found = {
            Address(r.validator): r.lies - before.get(r.validator, 0) for r in published.fee_records
        }
        if any(number < 0 for number in found.values()):
            raise UntrustedError(f"epoch {published.epoch} forgets planted files of a validator")
        return found

    def _restored(self, settled: Mapping[Digest, SettledFile]) -> list[RestoredFact]:
        """The files that the arbiter had paid. `settled`: files of the settlements before."""
        periods = self._deployment.periods
        own = {e.root: e for e in self._events if isinstance(e, RootPosted) and is_own(e)}
        facts = []
        for e in self._events:
            if not isinstance(e, FileRestored):
                continue
            amount = min(e.amount, self._runs.most_worth(e.step))
            fact = RestoredFact(e.leaf, e.node, e.block, amount)
            if root := own.get(e.leaf):
                received, within = own_root(
                    root.block_time, epoch_seconds=periods.epoch_length, validity=periods.validity
                )
                fact = replace(
                    fact, own_epoch=root.epoch, received_at=received, received_within=within
                )
            if file := settled.get(e.leaf):
                fact = replace(fact, received_at=file.received_at, settled_as=file.state)
            facts.append(fact)
        return facts

    def _faults(self, published: Settlement, settled: Set[Digest]) -> Sequence[Fault]:
        """The wrong opinions on planted files: each signed by a validator and charged once at its
        run's price. No file charged so far may be settled, or be in the list of a root up to the
        settlement's block. That the file was planted, and whether it lies, is the manager's
        word."""
        domain = self._deployment.domain_of(Opinion)
        runs = [self._runs.first, *(run for _, run in self._runs.revisions)]
        prices = {str(run.digest()): str(run.price_per_judged_file) for run in runs}
        for fault in published.faults:
            signed = fault.opinion
            signed.check(domain)
            said = signed.opinion
            if signed.validator not in self._validators or said.pool != self._pool:
                raise UntrustedError("a fault is not a validator's opinion in this pool")
            if (said.submission, signed.validator) in self._charged:
                raise UntrustedError(f"{said.submission} was charged before")
            if prices.get(signed.law.run) != fault.fee:
                raise UntrustedError(f"the fault on {said.submission} has another price")
            self._charged.add((said.submission, signed.validator))
        charged = {submission for submission, _ in self._charged}
        if charged and (rooted := charged & self._rooted(published.as_of_block, settled)):
            raise UntrustedError(f"{min(rooted)} is rooted: it is not a planted file's fault")
        return published.faults

    def _rooted(self, block: int, settled: Set[Digest]) -> set[Digest]:
        """The files in the lists of all roots up to `block`, and those `settled`. A leaf that
        others posted counts once a settlement takes it up: else a validator could post the planted
        files that it misjudged, and pay nothing for them."""
        lists = (
            self._leaves_of(root, None)
            for root in roots_until(self._events, block)
            if root.leaves_object != ZERO_DIGEST
        )
        return {*settled, *(leaf.digest for leaves in lists for leaf in leaves)}

    def _open_leaves(
        self,
        epoch: int,
        block: int,
        previous: Settlement | None,
        settled: Mapping[Digest, SettledFile],
        *,
        claims: Mapping[Digest, _Claim] | None,
    ) -> list[tuple[RootPosted, _Leaf]]:
        """Leaves that a settlement of `epoch` must settle: of roots since `previous`, and those
        that it held. Each once: a file in several roots is settled by the first, and one that
        `settled`, the files of the settlements before, decided on is not open again."""
        after = previous.epoch if previous is not None else -1
        held = (f for f in previous.files if f.state == "held") if previous else ()
        names = {file.submission_digest for file in held}
        decided = {name for name, file in settled.items() if file.state != "held"}
        found: dict[Digest, tuple[RootPosted, _Leaf]] = {}
        for root in roots_until(self._events, block):
            if root.epoch > epoch:
                continue
            for leaf in self._leaves_of(root, claims, names):
                if leaf.digest not in decided and (root.epoch > after or leaf.digest in names):
                    found.setdefault(leaf.digest, (root, leaf))
        return list(found.values())

    def _settled(
        self,
        epoch: int,
        block: int,
        previous: Settlement | None,
        previous_name: Digest,
        leaves: Sequence[tuple[RootPosted, _Leaf]],
        claims: Mapping[Digest, _Claim],
        slashes: Sequence[SlashFact],
        lies: Mapping[Address, int] | None = None,
        faults: Sequence[Fault] = (),
        *,
        restored: Sequence[RestoredFact],
    ) -> Settlement:
        facts: list[LeafFact] = []
        with ThreadPoolExecutor(PARALLEL) as pool:
            for start in range(0, len(leaves), QUEUED):
                some = leaves[start : start + QUEUED]
                facts += pool.map(lambda one: self._fact(*one, claims=claims, block=block), some)
        return settle(
            chain_id=self._deployment.chain_id,
            pool=self._pool,
            epoch=epoch,
            as_of_block=block,
            previous=previous,
            previous_name=previous_name,
            leaves=facts,
            slashes=slashes,
            lies=lies,
            faults=faults,
            restored=restored,
        )

    def _leaves_of(
        self,
        root: RootPosted,
        claims: Mapping[Digest, _Claim] | None,
        held: Set[Digest] = frozenset(),
    ) -> list[_Leaf]:
        """The leaves of a root. Each list is checked against its root, each leaf against its node,
        once.

        A root without leaves object was posted by a node for its own leaf, which is the root. It
        counts if `claims` settle the leaf by it, or leave a `held` one out. Without `claims` every
        root counts.
        """
        if is_own(root):
            claim = None if claims is None else claims.get(root.root)
            left_out = claim is None and root.root not in held
            if claims is not None and (left_out or (claim and claim.root_seq != root.seq)):
                return []
            return [_Leaf(poster(self._events, root), root.root, None)]
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
        claims: Mapping[Digest, _Claim],
        block: int,
    ) -> LeafFact:
        digest = leaf.digest
        claim = claims.get(digest)
        if claim is None:
            raise UntrustedError(f"the settlement leaves out submission {digest}")
        self._check_receipt(digest, claim.received_at, claim.receipt)
        judged, run = None, None
        if claim.verdict != ZERO_DIGEST:
            judged, run = self._judged(digest, claim, root.block_time)
        return LeafFact(
            submission_digest=digest,
            node=leaf.node,
            root_seq=root.seq,
            expires=root.block_time + self._deployment.periods.validity,
            received_at=claim.received_at,
            receipt=claim.receipt,
            judged=judged,
            price=run.price_per_unit if run else 0,
            judge_price=run.price_per_judged_file if run else 0,
            prompt_price=run.price_per_prompt_token if run else 0,
            refused=self._refused.get(digest, block + 1) <= block,
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

    def _judged(
        self, digest: Digest, claim: _Claim, rooted_at: int
    ) -> tuple[JudgedFact, RunDefinition]:
        """What was found in a submission, and the run that says what it pays. The step is in the
        table that the verdict names. `rooted_at`: time of the root's block."""
        verdict = _parse(Verdict, self._get(claim.verdict))
        check_opinions(verdict, digest, self._deployment, self._validators)
        deciding = verdict.deciding
        table = _parse(VerdictTable, self._get(deciding.opinion.table))
        if table.submission_digest != digest:
            raise UntrustedError(f"verdict {claim.verdict} names the table of another file")
        accepted = deciding.outcome is Outcome.ACCEPTED
        units = (table.units, table.prompt_units) if accepted else (0, 0)
        made_by = min(claim.received_at, rooted_at, deciding.opinion.judged_at)
        run = self._paying(deciding.law.run, table.step, made_by)
        return judged_fact(claim.verdict, verdict, *units), run

    def _paying(self, named: str, step: int, made_by: int) -> RunDefinition:
        """The run by which a file of `step` is paid: that of the step, or the one `named` by its
        lease, if a revision took its place on chain only after the lease can have been given.

        `made_by`: a time at which the file existed (Unix seconds). The manager signs when it
        received the file, so the root's block and the opinion bound that time.
        """
        given, found = made_by - self._runs.first.lease_seconds, self._runs.first
        for event, (from_step, run) in zip(self._revised, self._runs.revisions, strict=True):
            if from_step > step or (event.block_time > given and found.digest() == named):
                break
            found = run
        return found

    def _slashes(self, published: Settlement) -> list[SlashFact]:
        """Slashes of the nodes concerned as of the settlement's block.

        Those on chain must all be listed, in the state that the chain shows; one that is listed and
        not on chain can only hold money back, never take it.
        """
        on_chain = slashes_until(self._events, published.as_of_block)
        nodes = {file.node for file in published.files} | {one.node for one in published.restored}
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


def _files_of(settlement: Settlement) -> dict[Digest, SettledFile]:
    return {Digest(file.submission_digest): file for file in settlement.files}


def _without_burning(settlement: Settlement, previous: Settlement | None) -> Settlement:
    """Returns the settlement as a program from before burning makes it: what it forfeits stays in
    the pool. The next settlement continues from its entries."""
    amounts = settlement.amounts() | {BURN_ADDRESS: previous.burned if previous else 0}
    total = str(sum(amounts.values()))
    return settlement.model_copy(update={"entries": entries_of(amounts), "cumulative_total": total})


def _claim_of(info: SubmissionInfo) -> _Claim:
    """Raises NotFoundError if the record has no receipt: an older orchestrator served it."""
    if info.receipt is None:
        raise NotFoundError(f"the record of submission {info.submission_digest} has no receipt")
    signed = info.receipt
    return _Claim(signed.receipt.received_at, signed.signature, info.verdict or ZERO_DIGEST)


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
    if not rebuilt.is_named(event.object):
        mine = {f.submission_digest: f for f in rebuilt.files}
        theirs = {f.submission_digest: f for f in published.files}
        wrong = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
        if rebuilt.restored != published.restored:
            unlike = {*rebuilt.restored} ^ {*published.restored}
            wrong += sorted({one.submission_digest for one in unlike})
        about = f" about {', '.join(wrong[:3])}" if wrong else ""
        problems.append(f"{where}: the published settlement is not what the facts give{about}")
    if not rebuilt.entries or rebuilt.root() != event.root:
        problems.append(f"{where}: the root on chain is not what the facts give")
    if int(rebuilt.cumulative_total) != event.cumulative_total:
        problems.append(
            f"{where}: the chain promises {prime(event.cumulative_total)}, the facts give "
            f"{prime(int(rebuilt.cumulative_total))}"
        )
    return problems


def _parse(kind: type[M], data: bytes) -> M:
    try:
        return kind.model_validate_json(data)
    except ValueError as error:
        raise MalformedError(f"an object is not a valid {kind.__name__}") from error


def roots_until(events: Sequence[Event], block: int) -> list[RootPosted]:
    """Work roots up to `block`; a root posted twice counts once."""
    first: dict[Digest, RootPosted] = {}
    for event in events:
        if isinstance(event, RootPosted) and event.block <= block:
            first.setdefault(event.root, event)
    return list(first.values())


def is_own(root: RootPosted) -> bool:
    """Whether a node posted the root for its own file, which is the root (Work.postLeaf)."""
    return root.leaves_object == ZERO_DIGEST and root.count == 1


def poster(events: Sequence[Event], root: RootPosted) -> Address:
    """The node that posted its own leaf as `root`; the contract has checked its signature. Raises
    UntrustedError if none did."""
    for event in events:
        if isinstance(event, LeafPosted) and (event.seq, event.leaf) == (root.seq, root.root):
            return event.node
    raise UntrustedError(f"root {root.seq} has no list of leaves, and no node posted it")


def slashes_until(events: Sequence[Event], block: int) -> dict[Digest, tuple[Address, SlashState]]:
    """Leaf → its node and how its slash stands as of `block`."""
    found: dict[Digest, tuple[Address, SlashState]] = {}
    for event in events:
        if event.block > block:
            continue
        if isinstance(event, SlashProposed):
            found[event.leaf] = (event.node, "open")
        elif isinstance(event, SlashExecuted) and event.leaf in found:
            found[event.leaf] = (event.node, "executed")
        elif isinstance(event, SlashCancelled) and event.leaf in found:
            found[event.leaf] = (event.node, "cancelled")
    return found
