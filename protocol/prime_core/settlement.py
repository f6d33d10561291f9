"""Settlement: rewards as a pure function of confirmed roots, verdicts and slashes.

A settlement covers every leaf of the roots of its epochs, so that an omission is visible:

    paid       accepted, judged within its root's validity, and not covered by a slash
    held       as paid, but a slash of its node is open; decided by a later settlement
    forfeited  as paid, but its node was slashed for a file submitted up to 24 h later; burned:
               its pay is an entry that no one can claim (`BURN_ADDRESS`)
    rejected   rejected by the verdict or by the contract
    void       the verdict found neither fault nor usable work (late, malformed, unreachable), or
               the file was rooted too late for a slash to be possible (`answered_for`)
    unjudged   no verdict within the validity: the pool's fault; no pay, no penalty

The arbiter can have a rejected, void or unjudged file paid after an appeal (`Restored`).
Validators are paid for judged files, less what planted files cost them (fees.py). Amounts are
cumulative per node or validator and never decrease.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter, model_validator

from prime_core import encoding
from prime_core.errors import MalformedError, UserError
from prime_core.fees import MAX_FAULTS, Fault, FeeRecord, withhold
from prime_core.given import read_given
from prime_core.ids import ZERO_DIGEST, Address, Digest, Signature
from prime_core.signing import (
    U64,
    U256,
    AddressField,
    ContractName,
    DigestField,
    SignatureField,
    Statement,
    Strict,
)
from prime_core.verdict import Outcome, Verdict

FORFEIT_SECONDS = 86_400
"""A final rejection forfeits credits submitted up to this long before the bad file, or together
with it."""
BURN_ADDRESS = Address("0x000000000000000000000000000000000000dEaD")
"""The account of forfeited pay in reward roots. No one has its key, so it is no node and no
validator unless a manager appoints it: the contract pays it nothing, or moves tokens to where they
are lost."""

FileState = Literal["paid", "held", "forfeited", "rejected", "void", "unjudged"]
FINAL_FOR_ARBITER: frozenset[FileState] = frozenset({"paid", "held", "forfeited"})
"""States of files that an appeal cannot change: they earn, or a slash decides."""
SlashState = Literal["open", "executed", "cancelled"]


class SettledFile(Strict):
    """One leaf: its place on chain, its verdict and its settled state.

    `receipt` is the manager's signature over Receipt(submission_digest, received_at). `verdict` and
    `table` are SHA-256s of objects, zero if there is none. `because` is the bad submission for held
    and forfeited, else zero. `price_per_unit` is what the lease's run pays per unit, in wei.

    The fields are in alphabetical order, so that pydantic writes canonical JSON.
    """

    because: DigestField
    judges: tuple[AddressField, ...] = ()
    """Validators that this settlement pays for judging the file, sorted by address."""
    node: AddressField
    price_per_judged_file: str = Field(default="0", pattern=r"^(0|[1-9][0-9]*)$", max_length=78)
    """What each of `judges` is paid, in wei."""
    price_per_prompt_token: str = Field(
        default="0", pattern=r"^(0|[1-9][0-9]*)$", max_length=78,
        exclude_if=lambda price: price == "0",
    )  # fmt: skip
    """What the run pays for each of `prompt_units`, in wei."""
    price_per_unit: str = Field(pattern=r"^(0|[1-9][0-9]*)$", max_length=78)
    prompt_units: int = Field(default=0, ge=0, exclude_if=lambda count: count == 0)
    """Tokens that the node only read (VerdictTable.prompt_units), if its run pays for them."""
    receipt: SignatureField
    received_at: int = Field(ge=0)
    root_seq: int = Field(ge=0)
    state: FileState
    submission_digest: DigestField
    table: DigestField
    units: int = Field(ge=0)
    verdict: DigestField

    @property
    def earns(self) -> int:
        """What the node earns if the file is paid, in wei."""
        return self.units * int(self.price_per_unit) + self.prompt_units * int(
            self.price_per_prompt_token
        )


_ALL_FIELDS = {*SettledFile.model_fields}
"""Shared by the files that `_file_of` makes: a set of its own for each takes more memory than its
values."""


def _file_of(values: dict[str, Any]) -> SettledFile:
    """Returns a file of values for all its fields, in their order, which were validated before.
    `model_construct` takes five times as long."""
    file = SettledFile.__new__(SettledFile)
    file.__setstate__(
        {
            "__dict__": values,
            "__pydantic_fields_set__": _ALL_FIELDS,
            "__pydantic_extra__": None,
            "__pydantic_private__": None,
        }
    )
    return file


class SettledSlash(Strict):
    """A slash against a node of this settlement. `receipt` proves when its bad file arrived.

    `open` includes slashes that a verdict calls for but that are not proposed on chain yet.
    """

    submission_digest: DigestField
    node: AddressField
    received_at: int = Field(ge=0)
    receipt: SignatureField
    state: Literal["open", "executed"]


class Restored(Strict):
    """A file that the arbiter had paid (the event FileRestored).

    `amount` is what the node earns, in wei: at most what the largest file of its step earns
    (RunHistory.most_worth). `received_at` is that of the settled file. If no settlement has the
    file, it is the earliest time that the root of its node allows, and the latest is
    `received_within` seconds later. `state` and `because` mean the same as for an accepted file.
    The next settlement decides on a held one again.
    """

    submission_digest: DigestField
    node: AddressField
    received_at: int = Field(ge=0)
    amount: str = Field(pattern=r"^(0|[1-9][0-9]*)$", max_length=78)
    state: Literal["paid", "held", "forfeited"]
    because: DigestField
    received_within: int = Field(default=0, ge=0, exclude_if=lambda seconds: seconds == 0)


class RewardTable(Statement):
    """What a pool owes up to an epoch. Validators sign it when the manager does not post the root.
    Fields are the arguments of `Rewards.postRewardRoot`; `object` is the settlement's digest."""

    CONTRACT: ClassVar[ContractName] = "rewards"
    pool: U256
    epoch: U64
    root: DigestField
    cumulative_total: U256
    object: DigestField


class RewardEntry(Strict):
    """One leaf of the reward tree: what a node, a validator or BURN_ADDRESS gets. `cumulative` is
    in wei, as decimal text."""

    node: AddressField
    cumulative: str = Field(pattern=r"^(0|[1-9][0-9]*)$", max_length=78)


PAGE_FILES = 10_000
"""Most files in a settlement's own object; a longer list is published in pages of this size."""
MAX_PAGES = 512
"""Most pages of a settlement: 5.12 million files, which take an auditor 27 GB at 5.3 kB each."""


class SettlementPage(Strict):
    """A part of a settlement's files, an object of its own. All pages but the last are full."""

    files: tuple[SettledFile, ...] = Field(max_length=PAGE_FILES)

    def canonical(self) -> bytes:
        """The page's object."""
        return self.model_dump_json().encode()


class Settlement(Strict):
    """What a reward root promises. `previous` is the digest of the previous settlement (zero for
    the first). `files` are the leaves of the epochs since then plus those it held. `slashes` are
    all slashes of the nodes among them that were not cancelled. Chain data is as of `as_of_block`.

    It is published as one object, or with more than PAGE_FILES files as a head that names its
    `pages` (`published`). A head has the amounts, the root and the digest of the whole, but no
    files; `load_settlement` puts them together again.
    """

    schema_version: Literal[1, 2] = 1
    """2 for a head with pages; older programs cannot read it."""
    chain_id: int
    pool: int
    epoch: int = Field(ge=0)
    previous: DigestField
    as_of_block: int = Field(ge=0)
    files: tuple[SettledFile, ...]
    slashes: tuple[SettledSlash, ...]
    entries: tuple[RewardEntry, ...]
    cumulative_total: str = Field(pattern=r"^(0|[1-9][0-9]*)$", max_length=78)
    pages: tuple[DigestField, ...] = Field(
        default=(), max_length=MAX_PAGES, exclude_if=lambda pages: not pages
    )

    faults: tuple[Fault, ...] = Field(
        default=(), max_length=MAX_FAULTS, exclude_if=lambda faults: not faults
    )
    """Wrong opinions on planted files since the previous settlement, by submission and author."""
    fee_records: tuple[FeeRecord, ...] = Field(default=(), exclude_if=lambda records: not records)
    """Validators that judged planted files, by address."""

    @model_validator(mode="after")
    def _whole_or_head(self) -> Settlement:
        if (self.schema_version == 2) != bool(self.pages) or (self.pages and self.files):
            raise ValueError(
                "schema_version is 2 with pages, else 1; a head with pages has no files"
            )
        if len(set(self.pages)) != len(self.pages):
            raise ValueError("a page is named twice")
        return self

    @property
    def restored(self) -> tuple[Restored, ...]:
        """Files that the arbiter restored since the previous settlement, and those that this one
        held, by submission."""
        return ()

    def publish(self, put: Callable[[bytes], Digest]) -> Digest:
        """Passes the settlement's pages (none for a short one) and then the object that a reward
        root names to `put`, which returns their SHA-256; returns the last one's. Only one page is
        in memory at a time. Raises MalformedError if it needs more than MAX_PAGES."""
        return self._paged(put) if len(self.files) > PAGE_FILES else put(self._single())

    def published(self) -> tuple[bytes, list[bytes]]:
        """The object that a reward root names, and its pages, all in memory. Raises as `publish`
        does."""
        found: list[bytes] = []

        def keep(data: bytes) -> Digest:
            found.append(data)
            return encoding.sha256(data)

        self.publish(keep)
        return found[-1], found[:-1]

    def _single(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    def _paged(self, put: Callable[[bytes], Digest]) -> Digest:
        if len(self.files) > MAX_PAGES * PAGE_FILES:
            raise MalformedError(
                f"{len(self.files)} files are too many for a settlement of {MAX_PAGES} pages"
            )
        names = []
        for start in range(0, len(self.files), PAGE_FILES):
            page = SettlementPage(files=self.files[start : start + PAGE_FILES])
            names.append(put(page.canonical()))
        head = self.model_copy(update={"schema_version": 2, "files": (), "pages": tuple(names)})
        return put(encoding.canonical_json(head.model_dump(mode="json")))

    def canonical(self) -> bytes:
        """The object that a reward root names."""
        return self.published()[0]

    def digest(self) -> Digest:
        """SHA-256 of the canonical bytes: the `object` of RewardRootPosted."""
        return self.publish(encoding.sha256)

    def is_named(self, name: Digest) -> bool:
        """Whether `name` is this settlement's object, either as one object or as a head with
        pages: a reward root posted before settlements had pages names the former."""
        return name == self.digest() or name in (
            encoding.sha256(self._single()), self._paged(encoding.sha256)
        )  # fmt: skip

    def amounts(self) -> dict[Address, int]:
        """Cumulative wei of each node, each validator and BURN_ADDRESS."""
        return {entry.node: int(entry.cumulative) for entry in self.entries}

    @property
    def burned(self) -> int:
        """Cumulative wei of forfeited pay."""
        return self.amounts().get(BURN_ADDRESS, 0)

    def leaves(self) -> list[Digest]:
        """Merkle leaves in the order of `entries`."""
        return [encoding.reward_leaf(e.node, int(e.cumulative)) for e in self.entries]

    def root(self) -> Digest:
        """The reward root. Raises MalformedError if there are no entries."""
        return encoding.merkle_root(self.leaves())

    def table(self) -> RewardTable:
        """The RewardTable that validators sign. Raises MalformedError if there are no entries."""
        return RewardTable(
            pool=self.pool,
            epoch=self.epoch,
            root=self.root(),
            cumulative_total=int(self.cumulative_total),
            object=self.digest(),
        )

    def proof(self, node: Address) -> tuple[int, list[Digest]]:
        """Cumulative wei of `node` and its Merkle proof. Raises MalformedError if it has no
        entry."""
        for index, entry in enumerate(self.entries):
            if entry.node == node:
                return int(entry.cumulative), encoding.merkle_proof(self.leaves(), index)
        raise MalformedError(f"{node} has no entry in the settlement of epoch {self.epoch}")


class SettlementAfterAppeals(Settlement):
    """A settlement with restored files. It has a field more than protocol 1 knows, so programs of
    before appeals refuse to read it."""

    restored_files: tuple[Restored, ...] = Field(min_length=1)

    @property
    def restored(self) -> tuple[Restored, ...]:
        return self.restored_files


_SETTLEMENT: TypeAdapter[Settlement] = TypeAdapter(SettlementAfterAppeals | Settlement)


def parse_settlement(raw: bytes) -> Settlement:
    """Parses a settlement's object; a head with pages has no files. Raises ValueError if it is
    none."""
    return _SETTLEMENT.validate_json(raw)


def load_settlement(
    name: Digest,
    get: Callable[[Digest], bytes],
    *,
    most_files: int = MAX_PAGES * PAGE_FILES,
) -> Settlement:
    """Returns the settlement `name` with all its files; `get` returns an object's bytes, checked
    against its digest. `most_files`: how many files it can have, if the caller knows. Raises
    MalformedError if an object is not what it should be."""
    files: list[SettledFile] = []
    try:
        head = parse_settlement(get(name))
        if len(head.pages) > -(-most_files // PAGE_FILES):
            raise MalformedError(f"settlement {name} has pages for more than {most_files} files")
        for page in head.pages:
            part = SettlementPage.model_validate_json(get(Digest(page)))
            if not is_full(part, page, head):
                raise MalformedError(f"page {page} of settlement {name} is not full")
            files += part.files
    except ValueError as error:
        raise MalformedError(f"object {name} or a page of it is not a settlement") from error
    if not head.pages:
        return head
    return head.model_copy(update={"schema_version": 1, "files": tuple(files), "pages": ()})


def is_full(part: SettlementPage, page: str, head: Settlement) -> bool:
    """Whether `part`, the page of `head` with the name `page`, has as many files as it must."""
    return len(part.files) == PAGE_FILES or (page == head.pages[-1] and bool(part.files))


def read_settlement(path: Path) -> Settlement:
    """Reads a settlement file, without the files of its pages. Raises UserError if it cannot be
    read or does not parse."""
    hint = "make it with: orchestrator rewards settle, or fetch a copy of the posted object"
    raw = read_given(path, "settlement", hint)
    try:
        return parse_settlement(raw)
    except ValueError as error:
        raise UserError(f"{path} holds no settlement", hint=hint) from error


def settled_until(epoch: int | None, epoch_seconds: int) -> int:
    """Returns the time (Unix seconds) before which received files count as settled, if the newest
    reward root is of `epoch` (None: there is none)."""
    return 0 if epoch is None else (epoch + 1) * epoch_seconds


def is_short(owed: int, money: int) -> bool:
    """Whether a pool owes more than its bond and free funds (`money`), so that no lease is given
    or taken. In wei. Owed are the files received since `settled_until` that did not end rejected
    or void; one without a verdict counts as RunDefinition.unjudged_worth."""
    return owed > money


class JudgedFact(NamedTuple):
    """A verdict on a leaf. `judged_at` is in Unix seconds; `verdict` and `table` name objects."""

    verdict: Digest
    table: Digest
    outcome: Outcome
    units: int
    judged_at: int
    judges: tuple[Address, ...] = ()
    """All validators that gave an opinion, sorted by address."""
    prompt_units: int = 0


class _OwnOpinion(BaseModel):
    outcome: int
    judged_at: int
    table: Digest


class _OwnSigned(BaseModel):
    opinion: _OwnOpinion
    validator: Address


class OwnVerdict(BaseModel):
    """The fields of a Verdict that a JudgedFact is made of. The program that wrote the verdict
    parses it as this in a fifth of the time, because no other field is checked again."""

    outcome: int
    opinions: tuple[_OwnSigned, ...]


def judged_fact(
    name: Digest, verdict: Verdict | OwnVerdict, units: int, prompt_units: int
) -> JudgedFact:
    """Builds a JudgedFact from the verdict object `name`. The units are its table's, 0 unless
    accepted. `judged_at` is the time of the last opinion that agrees with the verdict's outcome.
    Raises MalformedError if no opinion does."""
    said = [signed.opinion for signed in verdict.opinions]
    agreeing = [one for one in said if one.outcome == verdict.outcome]
    if not agreeing:
        raise MalformedError("no opinion has the verdict's outcome")
    return JudgedFact(
        verdict=name,
        table=agreeing[0].table,
        outcome=Outcome(verdict.outcome),
        units=units,
        judged_at=max(one.judged_at for one in agreeing),
        judges=tuple(sorted(signed.validator for signed in verdict.opinions)),
        prompt_units=prompt_units,
    )


class LeafFact(NamedTuple):
    """A leaf of a confirmed root. `expires` is the end of its validity (root's block time +
    validity). `refused`: the contract marks it rejected. `answered`: a slash is possible
    (`answered_for`). In wei: `price` is what its run pays per unit, `prompt_price` per prompt
    token, `judge_price` to each validator that judged it."""

    submission_digest: Digest
    node: Address
    root_seq: int
    expires: int
    received_at: int
    receipt: Signature
    judged: JudgedFact | None
    refused: bool = False
    answered: bool = True
    price: int = 0
    judge_price: int = 0
    prompt_price: int = 0


@dataclass(frozen=True)
class SlashFact:
    """A slash against `node` for the file `bad`. `receipt` proves that it arrived at
    `received_at`."""

    bad: Digest
    node: Address
    received_at: int
    receipt: Signature
    state: SlashState


def answered_for(*, rooted_at: int, valid_until: int, accountable: int) -> bool:
    """Whether a lie in a submission rooted at `rooted_at` can still be slashed. If not, the Work
    contract rejects a proposal with `RootedLate`. `accountable` is slash window + dispute window.
    All arguments in (Unix) seconds."""
    return rooted_at <= valid_until + accountable


@dataclass(frozen=True)
class RestoredFact:
    """The arbiter restored a file in block `block`; `amount` in wei.

    `settled_as` and `received_at` are the file's state and time in the settlements so far. If none
    of them has the file, `settled_as` is None, and it was received at `received_at` or up to
    `received_within` seconds later. `own_epoch` is the epoch of the root by which its node posted
    the file; None if the node did not.
    """

    leaf: Digest
    node: Address
    block: int
    amount: int
    received_at: int = 0
    settled_as: FileState | None = None
    own_epoch: int | None = None
    received_within: int = 0

    def is_known_to(self, previous: Settlement | None) -> bool:
        """Whether the settlement `previous` knew of the event, and of the root that its node
        posted, if one did."""
        if previous is None or self.block > previous.as_of_block:
            return False
        return self.own_epoch is None or self.own_epoch <= previous.epoch

    def was_taken(self, previous: Settlement | None) -> bool:
        """Whether `previous`, or a settlement before it, included the file as restored although no
        settlement has it as a leaf."""
        posted = self.settled_as is None and self.own_epoch is not None
        return posted and self.is_known_to(previous)

    def is_due(
        self, leaves: Container[Digest], epoch: int, as_of_block: int, previous: Settlement | None
    ) -> bool:
        """Whether the settlement of `epoch`, with these `leaves`, includes the file as restored,
        unless the file earns anyway.

        It is the first settlement that knows of the event and has the file among its leaves,
        follows a settlement that has it, or is past the root by which its node posted it.
        """
        if self.block > as_of_block or self.was_taken(previous):
            return False
        if self.leaf in leaves:
            return True
        if self.settled_as is None:
            return self.own_epoch is not None and self.own_epoch <= epoch
        if previous is None or self.settled_as in FINAL_FOR_ARBITER:
            return False
        return self.block > previous.as_of_block


def own_root(block_time: int, *, epoch_seconds: int, validity: int) -> tuple[int, int]:
    """Returns when a file was received that its node posted as a root at `block_time`: the earliest
    time (Unix seconds), and the seconds from it to the latest. Work.postLeaf allows it from an
    epoch after the receipt on, for one validity."""
    return max(0, block_time - epoch_seconds - validity), validity


def covers(slash: SlashFact, node: Address, received_at: int, received_within: int = 0) -> bool:
    """Whether a credit of `node` depends on `slash`; it was submitted at `received_at`, or up to
    `received_within` seconds later."""
    later = slash.received_at - received_at
    return slash.node == node and 0 <= later <= FORFEIT_SECONDS + received_within


def standing(
    slashes: Iterable[SlashFact], node: Address, received_at: int, received_within: int = 0
) -> tuple[Literal["free", "held", "forfeited"], Digest]:
    """Returns how `slashes` affect a credit, and the bad submission responsible (zero if free).

    An executed slash takes precedence over an open one. Among equals the smallest digest is named,
    so the result does not depend on the order of `slashes`.
    """
    over = [
        s
        for s in slashes
        if s.state != "cancelled" and covers(s, node, received_at, received_within)
    ]
    executed = [s.bad for s in over if s.state == "executed"]
    if executed:
        return "forfeited", min(executed)
    if over:
        return "held", min(s.bad for s in over)
    return "free", ZERO_DIGEST


def judge_leaf(leaf: LeafFact, slashes: Sequence[SlashFact]) -> tuple[FileState, Digest]:
    """Returns the state of one leaf, and the bad submission for held or forfeited (else zero)."""
    judged = leaf.judged
    if leaf.refused or (judged is not None and judged.outcome is Outcome.REJECTED):
        return "rejected", ZERO_DIGEST
    if not leaf.answered:  # never pay for work that cannot be slashed
        return "void", ZERO_DIGEST
    if judged is None or judged.judged_at > leaf.expires or judged.outcome is Outcome.ABSTAINED:
        return "unjudged", ZERO_DIGEST
    if judged.outcome is Outcome.VOID:
        return "void", ZERO_DIGEST
    state, because = standing(slashes, leaf.node, leaf.received_at)
    return ("paid" if state == "free" else state), because


def settle(
    *,
    chain_id: int,
    pool: int,
    epoch: int,
    as_of_block: int,
    previous: Settlement | None,
    previous_name: Digest,
    leaves: Iterable[LeafFact],
    slashes: Sequence[SlashFact],
    lies: Mapping[Address, int] | None = None,
    faults: Sequence[Fault] = (),
    restored: Sequence[RestoredFact] = (),
) -> Settlement:
    """Computes the settlement of `epoch`. `previous_name` is the object that the previous reward
    root names (ZERO_DIGEST if none). `leaves` are those of the roots since the previous
    settlement plus those it held. A file's validators are paid when it is first settled, if they
    judged it within its validity, independent of the outcome, less what planted files since the
    previous settlement cost them (`lies`, `faults`: see fees.withhold). A file that was restored
    before any settlement had it is void. Forfeited pay is added to the entry of BURN_ADDRESS.

    Pure, and independent of the order of its inputs. Raises MalformedError if a leaf occurs twice,
    was already final in `previous`, or is called a planted file.
    """
    final = (
        {f.submission_digest for f in previous.files if f.state != "held"} if previous else set()
    )
    held = {f.submission_digest for f in previous.files if f.state == "held"} if previous else set()
    granted = {one.leaf for one in restored if one.was_taken(previous)} - held
    amounts = previous.amounts() if previous else {}
    fees: dict[Address, int] = {}
    files: dict[Digest, SettledFile] = {}
    slashes_of: dict[Address, list[SlashFact]] = defaultdict(list)
    for slash in slashes:
        slashes_of[slash.node].append(slash)
    text = cache(str)  # so that files share the texts of their prices
    for leaf in leaves:
        name = leaf.submission_digest
        if name in files or name in final:
            raise MalformedError(f"submission {name} would be settled twice")
        state, because = judge_leaf(leaf, slashes_of.get(leaf.node, ()))
        if name in granted and state != "rejected":
            state, because = "void", ZERO_DIGEST
        judged = leaf.judged
        judges: tuple[Address, ...] = ()
        if judged is not None and judged.judged_at <= leaf.expires:
            judges = () if name in held or not leaf.judge_price else judged.judges
        file = files[name] = _file_of(
            {
                "because": because,
                "judges": judges,
                "node": leaf.node,
                "price_per_judged_file": text(leaf.judge_price if judges else 0),
                "price_per_prompt_token": text(leaf.prompt_price if judged else 0),
                "price_per_unit": text(leaf.price if judged else 0),
                "prompt_units": judged.prompt_units if judged and leaf.prompt_price else 0,
                "receipt": leaf.receipt,
                "received_at": leaf.received_at,
                "root_seq": leaf.root_seq,
                "state": state,
                "submission_digest": name,
                "table": judged.table if judged else ZERO_DIGEST,
                "units": judged.units if judged else 0,
                "verdict": judged.verdict if judged else ZERO_DIGEST,
            }
        )
        for judge in judges:
            fees[judge] = fees.get(judge, 0) + leaf.judge_price
        if payee := payee_of(file):
            amounts[payee] = amounts.get(payee, 0) + file.earns
    if any(fault.opinion.opinion.submission in files.keys() | final for fault in faults):
        raise MalformedError("a file that is settled cannot be a planted one")
    before = previous.fee_records if previous else ()
    records = withhold(before, lies or {}, faults, fees)
    for judge, fee in fees.items():
        amounts[judge] = amounts.get(judge, 0) + fee
    for judge, taken in withheld_by(records).items():
        amounts[judge] = amounts.get(judge, 0) - taken + withheld_by(before).get(judge, 0)
    decided = _decide_restored(restored, epoch, as_of_block, previous, files, slashes)
    for one in decided:
        if payee := payee_of(one):
            amounts[payee] = amounts.get(payee, 0) + int(one.amount)
    nodes = {Address(file.node) for file in files.values()} | {Address(one.node) for one in decided}
    settlement = Settlement(
        chain_id=chain_id,
        pool=pool,
        epoch=epoch,
        previous=previous_name,
        as_of_block=as_of_block,
        files=tuple(files[name] for name in sorted(files)),
        slashes=_standing_slashes(slashes, nodes),
        entries=entries_of(amounts),
        cumulative_total=str(sum(amounts.values())),
        faults=tuple(
            sorted(faults, key=lambda one: (one.opinion.opinion.submission, one.validator))
        ),
        fee_records=records,
    )
    if not decided:
        return settlement
    return SettlementAfterAppeals(**dict(settlement), restored_files=decided)


def payee_of(file: SettledFile | Restored) -> Address | None:
    """Returns the account whose reward entry a file's pay is added to: its node's if the file is
    paid, BURN_ADDRESS if it is forfeited, else None."""
    if file.state == "forfeited":
        return BURN_ADDRESS
    return Address(file.node) if file.state == "paid" else None


def _decide_restored(
    facts: Sequence[RestoredFact],
    epoch: int,
    as_of_block: int,
    previous: Settlement | None,
    files: Mapping[Digest, SettledFile],
    slashes: Sequence[SlashFact],
) -> tuple[Restored, ...]:
    """Returns the restored files that are due or were held, and how each stands now: as an accepted
    file, and the slash for the file itself counts whenever it arrived."""
    due: dict[Digest, Restored] = {}
    for one in facts:
        file = files.get(one.leaf)
        if one.is_due(files, epoch, as_of_block, previous) and (
            file is None or file.state not in FINAL_FOR_ARBITER
        ):
            unsettled = file is None and one.settled_as is None
            due[one.leaf] = Restored(
                submission_digest=one.leaf,
                node=one.node,
                received_at=file.received_at if file is not None else one.received_at,
                received_within=one.received_within if unsettled else 0,
                amount=str(one.amount),
                state="held",
                because=ZERO_DIGEST,
            )
    for old in previous.restored if previous else ():
        if old.state == "held":
            due[Digest(old.submission_digest)] = old
    decided = []
    for name in sorted(due):
        one_due = due[name]
        own = [replace(s, received_at=one_due.received_at) for s in slashes if s.bad == name]
        state, because = standing(
            [*slashes, *own],
            Address(one_due.node),
            one_due.received_at,
            one_due.received_within,
        )
        change = {"state": "paid" if state == "free" else state, "because": because}
        decided.append(one_due.model_copy(update=change))
    return tuple(decided)


def withheld_by(records: Iterable[FeeRecord]) -> dict[Address, int]:
    """Returns what was withheld of each validator's fees so far, in wei."""
    return {Address(record.validator): int(record.withheld) for record in records}


def _standing_slashes(
    slashes: Iterable[SlashFact], nodes: Collection[Address]
) -> tuple[SettledSlash, ...]:
    found = [
        SettledSlash(
            submission_digest=s.bad,
            node=s.node,
            received_at=s.received_at,
            receipt=s.receipt,
            state=s.state,
        )
        for s in slashes
        if s.state != "cancelled" and s.node in nodes
    ]
    return tuple(sorted(found, key=lambda slash: slash.submission_digest))


def entries_of(amounts: Mapping[Address, int]) -> tuple[RewardEntry, ...]:
    """Reward entries of all addresses with a positive amount, sorted by address."""
    return tuple(
        RewardEntry(node=node, cumulative=str(amount))
        for node, amount in sorted(amounts.items(), key=lambda item: item[0].lower())
        if amount > 0
    )
