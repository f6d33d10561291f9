"""Explains a node's rewards: lists its files in the settlements behind the reward roots.

    roots on chain ─► settlements (each named by its root's event, its digest checked)
                   ─► this node's files: paid, held, forfeited, rejected, void, unjudged, and why
                   ─► their sum, compared with the amount under the root

The settlements are taken as published; `orchestrator rewards rebuild` computes them again from
signatures and verdict tables.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from prime_chain.amounts import prime
from prime_chain.rewards import OmittedFile, Rebuilder
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.settlement import BURN_ADDRESS, Restored, SettledFile, payee_of, withheld_by
from prime_core.verdict import Outcome


@dataclass(frozen=True)
class ExplainedFile:
    """One file of the node. `epoch` of the settlement that says so last; `received_at` in Unix
    seconds; `amount` in wei, what it earned."""

    epoch: int
    submission_digest: Digest
    received_at: int
    state: str
    units: int
    price_per_unit: int
    amount: int
    why: str


@dataclass(frozen=True)
class Explanation:
    """Amounts in wei. `problems`: what does not add up, empty if all does."""

    node: Address
    epoch: int
    cumulative: int
    claimed: int
    claimable_at: int
    root: Digest
    files: tuple[ExplainedFile, ...]
    problems: tuple[str, ...]
    withheld: int = 0
    """Of a validator's fees, for planted files that it judged wrongly."""
    omitted_files: tuple[OmittedFile, ...] = ()

    def as_json(self) -> dict[str, Any]:
        texts = {name: str(getattr(self, name)) for name in ("cumulative", "claimed", "withheld")}
        files = [
            asdict(file) | {"amount": str(file.amount), "price_per_unit": str(file.price_per_unit)}
            for file in self.files
        ]
        lists = {
            "problems": list(self.problems),
            "omitted_files": list(map(asdict, self.omitted_files)),
        }
        return asdict(self) | texts | lists | {"files": files}

    def _prices(self) -> str:
        """What a token was paid, each price once."""
        prices = sorted({file.price_per_unit for file in self.files if file.state == "paid"})
        return f" at {', '.join(prime(price) for price in prices)} each" if prices else ""

    def lines(self) -> list[str]:
        """The same for people."""
        counts = Counter(file.state for file in self.files)
        states = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
        units = sum(file.units for file in self.files if file.state == "paid")
        earned = "burned" if self.node == BURN_ADDRESS else "earned"
        said = [
            f"node {self.node}, up to epoch {self.epoch}: {prime(self.cumulative)} {earned}, "
            f"{prime(self.claimed)} of it claimed",
            f"{len(self.files)} files: {states or 'none'}; {units} paid tokens{self._prices()}",
        ]
        for file in self.files:
            amount = f"  {prime(file.amount)}" if file.amount else ""
            said.append(f"  {file.submission_digest}  {file.state}{amount}: {file.why}")
        if self.withheld:
            said.append(f"{prime(self.withheld)} withheld for planted files judged wrongly")
        said += [f"  {one.line()}" for one in self.omitted_files]
        if not self.problems:
            said.append(f"adds up to root {self.root} of epoch {self.epoch}: match")
        return [*said, *(f"  ✗ {problem}" for problem in self.problems)]


ROOTED_LATE = "rooted so late that no stake is liable for it on chain: unpaid and unpunished"

GRANTED_BEFORE = "the arbiter had it paid before a settlement had it"


def explain(rebuilder: Rebuilder, node: Address, epoch: int | None = None) -> Explanation:
    """Why a node (or validator) is owed what the reward root of `epoch` (None: newest) gives it.
    BURN_ADDRESS has the forfeited files of all nodes.

    Raises NotFoundError if no root stands, UntrustedError if what is published does not hold
    together, UnavailableError if an object cannot be had now.
    """
    history = rebuilder.published(epoch)
    files: dict[Digest, tuple[int, SettledFile]] = {}
    for event, settlement in history:
        files |= {
            f.submission_digest: (event.epoch, f)
            for f in settlement.files
            if node in (f.node, payee_of(f))
        }
    burning, before = set(), 0
    for event, settlement in history:
        if settlement.burned > before:
            burning.add(event.epoch)
        before = settlement.burned

    def counts(one: SettledFile | Restored, at: int) -> bool:
        """Whether the root of epoch `at` gives the pay of `one` to `node`. A root of an older
        program burns nothing."""
        return payee_of(one) == node and (node != BURN_ADDRESS or at in burning)

    granted = {
        Digest(one.submission_digest): event.epoch
        for event, settlement in history[::-1]
        for one in settlement.restored
    }
    """Restored files, with the first epoch in which each was."""
    found = tuple(
        ExplainedFile(
            epoch=at,
            submission_digest=file.submission_digest,
            received_at=file.received_at,
            state=file.state,
            units=file.units,
            price_per_unit=int(file.price_per_unit),
            amount=file.earns if counts(file, at) else 0,
            why=GRANTED_BEFORE
            if file.state == "void" and granted.get(Digest(file.submission_digest), at) < at
            else _why(rebuilder, file, int(file.price_per_unit)),
        )
        for at, file in sorted(files.values(), key=lambda one: (one[1].received_at, one[0]))
    )
    found += tuple(
        ExplainedFile(
            epoch=root.epoch,
            submission_digest=file.submission_digest,
            received_at=file.received_at,
            state="judged",
            units=0,
            price_per_unit=0,
            amount=int(file.price_per_judged_file),
            why="judged as a validator: paid for any verdict",
        )
        for root, settlement in history
        for file in settlement.files
        if node in file.judges
    )
    found += tuple(
        ExplainedFile(
            epoch=root.epoch,
            submission_digest=one.submission_digest,
            received_at=one.received_at,
            state="restored" if one.state == "paid" else one.state,
            units=0,
            price_per_unit=0,
            amount=int(one.amount) if counts(one, root.epoch) else 0,
            why="paid by the arbiter after an appeal"
            if one.state == "paid"
            else f"granted by the arbiter, but the slash for {one.because} holds or forfeits it",
        )
        for root, settlement in history
        for one in settlement.restored
        if node in (one.node, payee_of(one))
    )
    event, newest = history[-1]
    cumulative = newest.amounts().get(node, 0)
    withheld = withheld_by(newest.fee_records).get(node, 0)
    problems = []
    if (total := sum(file.amount for file in found) - withheld) != cumulative:
        problems.append(
            f"its files add up to {prime(total)}, the reward root gives it {prime(cumulative)}"
        )
    if not newest.entries or newest.root() != event.root:
        problems.append("the settlement is not the one under the root on chain")
    return Explanation(
        node=node,
        epoch=event.epoch,
        cumulative=cumulative,
        claimed=sum(claim.amount for claim in rebuilder.claims(node)),
        claimable_at=event.claimable_at,
        root=event.root,
        files=found,
        problems=tuple(problems),
        withheld=withheld,
        omitted_files=tuple(
            one
            for one in rebuilder.omitted_files([settlement for _, settlement in history])
            if one.node == node
        ),
    )


def _why(rebuilder: Rebuilder, file: SettledFile, price: int) -> str:
    match file.state:
        case "paid":
            said = f"{file.units} tokens counted, {prime(price)} each"
            if file.prompt_units:
                each = prime(int(file.price_per_prompt_token))
                said += f"; {file.prompt_units} tokens of prompts, {each} each"
            return said
        case "held":
            return f"{file.units} tokens wait: a slash for {file.because} is open"
        case "forfeited":
            return (
                f"{file.units} tokens lost, their pay is burned: the node was slashed for "
                f"{file.because} within a day"
            )
        case "unjudged":
            return "no verdict within its validity: the pool's fault, unpaid and unpunished"
        case "rejected" if file.verdict == ZERO_DIGEST:
            return "it was rejected on chain"
        case "void" if file.verdict == ZERO_DIGEST:
            return ROOTED_LATE
        case _:
            verdict = rebuilder.verdict(file.verdict)
            if file.state == "void" and verdict.outcome is not Outcome.VOID:
                return ROOTED_LATE
            return f"{verdict.reason.name}: {verdict.reason.sentence}"
