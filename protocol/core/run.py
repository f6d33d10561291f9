"""The run definition: the one canonical file that says what a pool trains and how it pays.

Its SHA-256 over canonical JSON is the pool's run digest. Fractions are whole millionths (`_micro`),
so that the file has one encoding; times are whole seconds unless named otherwise.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from protocol.core import encoding
from protocol.core.ids import ZERO_DIGEST, Digest
from protocol.core.node import Requirements
from protocol.core.signing import DigestField, Strict
from protocol.core.task import Task

MICRO = 1_000_000
MAX_SOLUTION_BYTES = 64 << 20
"""Largest solution of a hardware challenge."""


class EnvironmentRef(Strict):
    """A registered environment with its arguments; `digest` pins its code version and dataset."""

    name: str = Field(max_length=64)
    arguments: dict[str, int | str] = Field(default_factory=dict)
    digest: DigestField
    train_size: int = Field(ge=1)
    """Number of training problems; prompt indices are drawn below this."""
    heldout_size: int = Field(ge=0)
    """Held-out problems follow the training ones: train_size … train_size + heldout_size − 1."""


class Objective(Strict):
    """The loss. `clip` is ε, `delta` the two-sided bound δ, `kl` β, `entropy` η, in millionths."""

    name: str = Field(default="grpo", pattern=r"^[a-z][a-z0-9_]{0,31}$")
    """An entry of the trainer's registry (trainer/objectives): how tokens weigh and are clipped."""
    clip_micro: int = Field(default=200_000, ge=1, le=MICRO)
    delta_micro: int = Field(default=4 * MICRO, ge=MICRO)
    kl_micro: int = Field(default=0, ge=0)
    kl_form: Literal["k1", "k2", "k3"] = "k3"
    entropy_micro: int = 0
    advantage: Literal["mean_std", "mean", "leave_one_out"] = "mean_std"
    ratio: Literal["behaviour", "proximal"] = "behaviour"
    """What π_θ is compared with: the policy that generated (its log-probabilities are in the file),
    or the trainer's own at the start of the batch (decoupled PPO), the rest of the way corrected by
    an importance weight truncated at `importance_cap`."""
    importance_cap_micro: int = Field(default=2 * MICRO, ge=MICRO)
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """What becomes of a sample cut at the length limit: trained as it is, without weight in the
    loss (its reward still in its group's baseline), or its reward lowered by the penalty."""
    overlong_penalty_micro: int = Field(default=0, ge=0)


LengthForm = Literal["exact", "max", "clip"]


class LengthBudgets(Strict):
    """Target lengths a speed class may be asked for, and the reward's penalty per token off.

    `form`: how length enters the reward (protocol/environments/lengths.py)."""

    by_class: dict[str, tuple[int, ...]]
    """Class number as text ("1", "2", …) to its allowed targets, in generated tokens."""
    penalty_micro: int = Field(ge=0)
    form: LengthForm = "exact"

    def allowed(self, speed_class: int) -> tuple[int, ...]:
        """Targets of the highest listed class not above `speed_class`."""
        known = [int(name) for name in self.by_class if int(name) <= speed_class]
        return self.by_class[str(max(known))] if known else self.by_class[min(self.by_class)]


class SpeedClasses(Strict):
    """Class = 1 + number of thresholds (in million multiply-adds per second) reached."""

    thresholds: tuple[int, ...] = ()
    challenge_size: int = Field(default=512, ge=16, le=8192)
    challenge_rounds: int = Field(default=2, ge=1, le=64)

    @model_validator(mode="after")
    def _solution_fits(self) -> SpeedClasses:
        if self.challenge_size**2 * self.challenge_rounds * 8 > MAX_SOLUTION_BYTES:
            raise ValueError(
                "challenge_size² · challenge_rounds · 8 bytes must be at most "
                f"{MAX_SOLUTION_BYTES >> 20} MiB: the server takes a solution in whole"
            )
        return self


class RunDefinition(Strict):
    """See the module's docstring. `price_per_unit` in wei of the pool's token."""

    schema_version: int = 1
    name: str = Field(max_length=64)
    base_model: DigestField
    """`result_digest` of the version-0 policy folder (protocol.core.checkpoint)."""
    environment: EnvironmentRef
    objective: Objective = Objective()
    temperature_micro: int = Field(default=MICRO, ge=1)
    max_output_tokens: int = Field(ge=1, le=65_536)
    samples_per_group: int = Field(ge=2, le=1024)
    groups_per_lease: int = Field(ge=1, le=1024)
    groups_per_batch: int = Field(ge=1, le=65_536)
    max_staleness: int = Field(default=2, ge=0, le=4)
    oversample_micro: int = Field(default=0, ge=0, le=8 * MICRO)
    """Groups with some difference in their rewards that must lie ready before a batch is sealed,
    beyond those it takes, as a share of `groups_per_batch`; the surplus waits for a later batch
    while it is fresh, and is paid like the rest."""
    selection: Literal["arrival", "difficulty"] = "arrival"
    """Which groups a batch takes of those: the oldest policy's first, or those whose mean reward is
    nearest to one half. Groups without any difference are never taken."""
    budgets: LengthBudgets
    speed: SpeedClasses = SpeedClasses()
    requirements: Requirements = Requirements()
    task: Task
    replay_rows_micro: int = Field(default=250_000, ge=0, le=MICRO)
    """Share of a file's rows drawn for replay (at least one)."""
    calibration: DigestField = ZERO_DIGEST
    """SHA-256 of a calibration object; zero means the numbers shipped in proofs/thresholds.py."""
    price_per_unit: int = Field(ge=0)
    stake_per_class: int = Field(ge=0)
    slash_amount: int = Field(ge=0)
    epoch_seconds: int = Field(default=3600, ge=5)
    validity_seconds: int = Field(default=86_400, ge=5)
    lease_seconds: int = Field(default=1800, ge=5)
    heartbeat_seconds: int = Field(default=10, ge=1)
    death_seconds: int = Field(default=55, ge=2)
    """Silence after which a node is dead. The default leaves room for the tick that notices it: its
    leases are another's within a minute of its last heartbeat."""
    root_seconds: int = Field(default=10, ge=1)
    root_submissions: int = Field(default=64, ge=1, le=4096)

    @model_validator(mode="after")
    def _rows_fit(self) -> RunDefinition:
        if self.death_seconds <= self.heartbeat_seconds:
            raise ValueError("death_seconds must exceed heartbeat_seconds")
        return self

    @property
    def temperature(self) -> float:
        return self.temperature_micro / MICRO

    def fresh(self, step: int, policy_version: int) -> bool:
        """Whether the policy is not too old for batch `step`."""
        return step <= policy_version + self.max_staleness

    @property
    def surplus_groups(self) -> int:
        """Groups that must lie ready beyond those that a batch takes."""
        return self.groups_per_batch * self.oversample_micro // MICRO

    @property
    def rows_per_lease(self) -> int:
        return self.groups_per_lease * self.samples_per_group

    def least_drawn(self, rows: int) -> int:
        """How many of a file's rows are replayed at least."""
        return max(1, -(-self.replay_rows_micro * rows // MICRO))

    def canonical(self) -> bytes:
        return encoding.canonical_json(self.model_dump(mode="json"))

    def digest(self) -> Digest:
        """The pool's run digest."""
        return encoding.sha256(self.canonical())
