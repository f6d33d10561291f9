"""Sealed batches: the immutable list of groups that one optimizer step trains on, and its
selection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field

from prime_core import encoding
from prime_core.ids import Digest
from prime_core.run import MICRO
from prime_core.signing import (
    U64,
    U256,
    ContractName,
    DigestField,
    SignatureField,
    Statement,
    Strict,
)


class BatchFile(Strict):
    """One accepted file of a batch: its SHA-256, its verdict table's SHA-256, and the groups
    used."""

    sha256: DigestField
    size: int = Field(ge=0)
    table: DigestField
    submission_digest: DigestField
    policy_version: int = Field(ge=0)
    groups: tuple[int, ...]


class BatchManifest(Strict):
    """Immutable; files sorted by sha256. Step s trains policy s into policy s + 1. `rows` =
    samples."""

    schema_version: Literal[1] = 1
    pool: int
    step: int = Field(ge=0)
    run_digest: DigestField
    files: tuple[BatchFile, ...]
    rows: int = Field(ge=1)
    policy_versions: tuple[int, ...]
    seed: DigestField

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    def digest(self) -> Digest:
        """SHA-256 of the canonical bytes."""
        return encoding.sha256(self.canonical())

    def statement(self) -> BatchStatement:
        return BatchStatement(pool=self.pool, step=self.step, manifest_digest=self.digest())


class BatchStatement(Statement):
    """The manager's signed statement over a sealed batch."""

    CONTRACT: ClassVar[ContractName] = "work"
    pool: U256
    step: U64
    manifest_digest: DigestField


class SignedBatch(Strict):
    manifest: BatchManifest
    signature: SignatureField


@dataclass(frozen=True)
class FreeGroup:
    """An accepted group that is in no batch yet. `reward_micro_sum` is in millionths, `accepted_at`
    in Unix seconds; `sha256`, `size` (bytes) and `table` are its file's; `ungraded` of its `rows`
    have no reward."""

    submission_digest: Digest
    group_no: int
    policy_version: int
    rows: int
    informative: bool
    reward_micro_sum: int
    accepted_at: float
    sha256: Digest
    size: int
    table: Digest
    ungraded: int = 0


def choose(
    free: Iterable[FreeGroup],
    *,
    step: int,
    groups_per_batch: int,
    max_staleness: int,
    surplus: int = 0,
    selection: Literal["arrival", "difficulty"] = "arrival",
) -> tuple[FreeGroup, ...] | None:
    """Selects the groups of batch `step`. Returns None while there are too few.

    Candidates are informative and fresh (0 ≤ step − policy version ≤ max_staleness); there must be
    `surplus` more of them than the batch takes. "arrival" orders by policy version, then acceptance
    time. "difficulty" orders by distance of the mean reward from one half, then as "arrival". Ties
    are broken by name, so the result does not depend on the input's order.
    """
    fit = [g for g in free if g.informative and 0 <= step - g.policy_version <= max_staleness]
    if len(fit) < groups_per_batch + surplus:
        return None

    def rank(group: FreeGroup) -> tuple[Fraction, int, float, str, int]:
        off = Fraction(0)
        if selection == "difficulty":
            off = abs(Fraction(group.reward_micro_sum, group.rows - group.ungraded) - MICRO // 2)
        return (off, group.policy_version, group.accepted_at, *_name(group))

    fit.sort(key=rank)
    return tuple(fit[:groups_per_batch])


def _name(group: FreeGroup) -> tuple[str, int]:
    return group.submission_digest, group.group_no
