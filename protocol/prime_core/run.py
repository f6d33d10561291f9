"""The run definition: the file that specifies a pool's work, and how it is judged and paid.

The run digest is the SHA-256 of the file's bytes, including fields this program does not know, so a
later release may add optional fields without changing the digest of any run. Settings that only the
trainer uses are in its configuration (prime_trainer/config.py). Fractions are whole millionths
(`_micro`); times are whole seconds unless named otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from prime_core import encoding
from prime_core.errors import MalformedError
from prime_core.gateway import Gateway
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.node import Requirements
from prime_core.rollout import (
    CONVERSATION_SCHEMA,
    GATEWAY_SCHEMA,
    MAX_PROMPT_TOKENS,
    SCHEMA_VERSION,
)
from prime_core.signing import DigestField, Strict
from prime_core.task import Task
from prime_core.version import UPGRADE

MICRO = 1_000_000
MAX_RUN_BYTES = 1 << 20
MAX_SOLUTION_BYTES = 64 << 20
"""Maximum size of a hardware challenge's solution."""


MIXTURE = "mixture"


class EnvironmentPart(Strict):
    """One environment of a mixture (prime_envs/mixture.py)."""

    name: str = Field(max_length=64)
    arguments: dict[str, int | str] = Field(default_factory=dict)
    weight: int = Field(default=1, ge=1, le=1000)
    """Its share of the problems is its weight over the sum of all weights."""
    label: str = Field(default="", pattern=r"^[a-z0-9_.-]{0,32}$")
    """What metrics call it, and the prefix of its problems' ids. Empty: its name."""

    @property
    def title(self) -> str:
        """The label, or else the name."""
        return self.label or self.name


class EnvironmentRef(Strict):
    """A registered environment and its arguments; `digest` pins its code version and dataset."""

    name: str = Field(max_length=64)
    arguments: dict[str, int | str] = Field(default_factory=dict)
    parts: tuple[EnvironmentPart, ...] = Field(
        default=(), max_length=32, exclude_if=lambda parts: parts == ()
    )
    """The environments of a mixture, whose name is MIXTURE; otherwise empty."""
    digest: DigestField
    train_size: int = Field(ge=1)
    """Number of training problems; prompt indices are drawn below this."""
    heldout_size: int = Field(ge=0)
    """Held-out problems follow the training ones: train_size … train_size + heldout_size − 1."""

    @model_validator(mode="after")
    def _parts_of_a_mixture(self) -> EnvironmentRef:
        if (self.name == MIXTURE) != bool(self.parts):
            raise ValueError(f"the environment {MIXTURE!r}, and no other, has parts")
        if not self.parts:
            return self
        if self.arguments:
            raise ValueError("the arguments of a mixture belong to its parts")
        titles = [part.title for part in self.parts]
        twice = sorted({title for title in titles if titles.count(title) > 1})
        if twice:
            raise ValueError(f"two parts are called {twice[0]!r}: give each a `label`")
        if "/" in "".join(titles):
            raise ValueError("a part whose name has a slash needs a `label`")
        return self

    def all_arguments(self) -> list[dict[str, int | str]]:
        """The arguments of the environment, or of each part of a mixture."""
        return [part.arguments for part in self.parts] or [self.arguments]

    def source_of(self, problem_id: str) -> str:
        """The name of the environment that a problem is from; in a mixture, its part's title."""
        return problem_id.partition("/")[0] if self.parts else self.name


LEAST_SHARE = 10_000
"""Smallest nonzero `min_share_micro`: a smaller share cannot be maintained over a few hundred
leases."""
LengthForm = Literal["exact", "max", "clip"]


class LengthBudgets(Strict):
    """The target lengths of a run, and the reward's penalty per token off the target.

    `form` selects how length enters the reward (prime_envs/lengths.py).
    """

    targets: tuple[int, ...] = Field(min_length=1, max_length=32)
    """All target lengths of the run, in generated tokens, ascending. A lease names one."""
    min_share_micro: int | None = Field(default=None, ge=0, le=MICRO)
    """Minimum share of the groups for each target: 0, or at least LEAST_SHARE. None: half of an
    equal share."""
    by_class: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Preferred targets per speed class: class number as text ("1", "2", …) to a subset of
    `targets`. Only a preference: `min_share` takes precedence."""
    penalty_micro: int = Field(ge=0)
    form: LengthForm = "exact"

    @model_validator(mode="after")
    def _consistent(self) -> LengthBudgets:
        if list(self.targets) != sorted(set(self.targets)) or not 0 <= self.targets[0] < 1 << 32:
            raise ValueError("targets must be different lengths in ascending order")
        for name, preferred in self.by_class.items():
            if not name.isdecimal() or not preferred or not set(preferred) <= set(self.targets):
                raise ValueError("by_class gives class numbers some of the targets each")
        if 0 < self.min_share < LEAST_SHARE:
            raise ValueError(f"a least share is 0, or at least {LEAST_SHARE} millionths")
        if self.min_share * len(self.targets) > MICRO:
            raise ValueError("the least shares of all targets add up to more than the whole")
        return self

    @property
    def min_share(self) -> int:
        """Minimum share of the groups for each target, in millionths."""
        if self.min_share_micro is not None:
            return self.min_share_micro
        return MICRO // (2 * len(self.targets))

    def preferred(self, speed_class: int) -> tuple[int, ...]:
        """Targets of the highest listed class not above `speed_class`; all if none is listed."""
        known = [int(name) for name in self.by_class if int(name) <= speed_class]
        return self.by_class[str(max(known))] if known else self.targets


BUDGET_WORDING = "Think for {tokens} tokens before giving a response."
"""Default sentence by which a prompt asks for a length (INTELLECT-2's wording)."""


class Chat(Strict):
    """How a problem becomes the prompt of a chat model (prime_envs/chat.py)."""

    template: DigestField
    """SHA-256 of the text of the model folder's chat template."""
    system: str = Field(default="", max_length=65_536)
    """The system prompt. If empty, the run adds none."""
    budget: str = Field(default=BUDGET_WORDING, max_length=4096)
    """The sentence that asks for the target length; contains `{tokens}`. Empty: none."""
    budget_in: Literal["system", "user"] = "system"
    """The message to which the sentence is appended as its last paragraph."""
    length: Literal["output", "thinking"] = "output"
    """What the length reward counts: all generated tokens (or what the environment counts), or only
    those up to the end of `</think>`."""

    @model_validator(mode="after")
    def _names_the_target(self) -> Chat:
        if self.budget and "{tokens}" not in self.budget:
            raise ValueError("the budget's sentence has no {tokens} in it")
        return self


class Corpus(Strict):
    """The documents that the tool search-1 searches (prime_envs/search.py): a .jsonl or .parquet
    file, and where it is found if a machine does not have it yet."""

    sha256: DigestField
    url: str = Field(default="", max_length=2048)
    path: str = Field(default="", max_length=4096)


class Conversation(Strict):
    """Multi-turn rows: after each turn of the model, the environment may add tokens
    (prime_envs/base.py, `reply`). `max_output_tokens` limits both together."""

    turns: int = Field(ge=2, le=64)
    """Maximum number of model turns per row."""
    tools: tuple[str, ...] = Field(default=(), max_length=16)
    """Tools that the model may call, by name and version ("calculator-1", prime_envs/tools.py).
    Empty: the environment itself answers turns."""
    calls: Literal["tag-1", "hermes-1", "fence-1"] = "tag-1"
    """Syntax of a call: "tag-1" is `<calculator>2*3</calculator>`, "hermes-1" is JSON in
    `<tool_call>` tags, "fence-1" is the first fenced code block, for the first of `tools`."""
    role: Literal["tool", "user"] = "tool"
    """The chat template's role for the environment's messages."""
    observation_bytes: int = Field(default=4096, ge=64, le=65_536)
    """Maximum UTF-8 length of an environment message; longer ones are truncated."""
    corpus: Corpus | None = Field(default=None, exclude_if=lambda value: value is None)
    """Required by the tool search-1."""
    gateway: Gateway | None = Field(default=None, exclude_if=lambda value: value is None)
    """The pool's gateway, for tools that reach the network."""


class SpeedClasses(Strict):
    """How nodes are classified by relative speed (prime_orchestrator/manager/speed.py).

    Class = 1 + the number of ratios that (node's rate / pool's median rate) reaches.
    """

    ratios_micro: tuple[int, ...] = ()
    """Ascending, in millionths. Empty: every node is in class 1."""
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


class Cards(Strict):
    """The cards that each node proves at admission (prime_orchestrator/api/cards.py)."""

    kinds: tuple[str, ...] = Field(min_length=1, max_length=64)
    """Names in prime_core/known_cards.py. A node's cards are all of one of them."""
    counts: tuple[int, ...] = Field(min_length=1, max_length=64)
    """Numbers of cards that a node may have."""
    least_share_micro: int = Field(default=400_000, ge=0, le=MICRO)
    """Least measured rate as a share of the vendor's. An H100 reaches 520,000. From 640,000 on, no
    card can pass for two, from 430,000 on for three: one may run at 1.15 of the vendor's rate, and
    have a tenth of the time subtracted."""
    work_ms: int = Field(default=2000, ge=1, le=10_000)
    """Time that the work takes at the vendor's rate."""
    prove_memory: bool = Field(default=False, exclude_if=lambda needed: not needed)
    """Whether nodes that cannot prove their cards' memory are refused. Others always prove it."""

    @model_validator(mode="after")
    def _counts_fit(self) -> Cards:
        if not all(1 <= count <= 64 for count in self.counts):
            raise ValueError("counts are numbers of cards from 1 to 64")
        return self


class RunDefinition(Strict):
    """See the module's docstring. `price_per_unit` is in wei of the pool's token.

    Read a file with `parse`, which keeps the file's bytes. An instance built from values uses its
    canonical JSON as its bytes.
    """

    schema_version: Literal[1, 2, 3, 4, 5, 6] = 1
    """6 for a run with `detailed_tables`, else 5 with `environment.parts`, else 4 with
    `conversation.gateway`, else 3 with `conversation`, else 2 with `chat`; older programs would
    ignore them."""
    name: str = Field(max_length=64)
    base_model: DigestField
    """`result_digest` of the version-0 policy folder (prime_core.checkpoint)."""
    environment: EnvironmentRef
    temperature_micro: int = Field(default=MICRO, ge=1)
    noise: Literal["murmur3-gumbel-1"] = "murmur3-gumbel-1"
    """The function that draws tokens from a row's seed (prime_verify/proofs/sampling.py). Sampling
    uses temperature only; there are no fields for top-k, top-p, penalties or other processors."""
    max_output_tokens: int = Field(ge=1, le=65_536)
    samples_per_group: int = Field(ge=2, le=1024)
    groups_per_lease: int = Field(ge=1, le=1024)
    groups_per_batch: int = Field(ge=1, le=65_536)
    max_staleness: int = Field(default=2, ge=0, le=4)
    oversample_micro: int = Field(default=0, ge=0, le=8 * MICRO)
    """Surplus of groups with differing rewards that must be available before a batch is sealed, as
    a share of `groups_per_batch`. Surplus groups are paid, and remain available to later batches
    while they are fresh."""
    selection: Literal["arrival", "difficulty"] = "arrival"
    """Order in which a batch takes groups: oldest policy first, or mean reward nearest to one half
    first. Groups whose rewards are all equal are never taken."""
    budgets: LengthBudgets
    chat: Chat | None = Field(default=None, exclude_if=lambda chat: chat is None)
    """None: prompts are the environment's plain text, for a base model to continue."""
    conversation: Conversation | None = Field(default=None, exclude_if=lambda value: value is None)
    """None: rows are single-turn."""
    speed: SpeedClasses = SpeedClasses()
    requirements: Requirements = Requirements()
    cards: Cards | None = Field(default=None, exclude_if=lambda cards: cards is None)
    """None: cards are not proven; a node answers the older challenge of `speed`."""
    detailed_tables: bool = Field(default=False, exclude_if=lambda detailed: not detailed)
    """Verdict tables also hold the components of each row's reward, and whether a call's limit
    ended the row (prime_core.verdict.VerdictRow)."""
    task: Task
    replay_rows_micro: int = Field(default=250_000, ge=0, le=MICRO)
    """Fraction of a file's rows drawn for replay (at least one row)."""
    calibration: DigestField = ZERO_DIGEST
    """SHA-256 of a calibration object; zero selects the values shipped in proofs/thresholds.py."""
    price_per_unit: int = Field(ge=0)
    price_per_prompt_token: int = Field(default=0, ge=0, exclude_if=lambda price: price == 0)
    """Price in wei of a token that a node only reads: each distinct prompt of an accepted file
    once, and each environment message in a conversation once. About 1/20 of `price_per_unit` pays
    for a prefill."""
    price_per_judged_file: int = Field(default=0, ge=0)
    """What a validator is paid for each file it gave an opinion on, independent of the verdict, in
    wei of the pool's token."""
    stake_per_seat: int = Field(ge=0)
    slash_amount: int = Field(ge=0)
    risk_factor_micro: int = Field(default=0, ge=0, exclude_if=lambda factor: factor == 0)
    """Limits a provider's work at risk to its stake times this factor (in millionths). Work at risk
    is open leases, files without a verdict, and accepted files within their validity, at the run's
    prices. The factor should be about the share of cheating that is detected. 0: no limit."""
    epoch_seconds: int = Field(default=3600, ge=5)
    validity_seconds: int = Field(default=86_400, ge=5)
    lease_seconds: int = Field(default=1800, ge=5)
    heartbeat_seconds: int = Field(default=10, ge=1)
    death_seconds: int = Field(default=55, ge=2)
    """Silence after which a node is considered dead. The tick that detects it comes a second or two
    later, and the node's leases go to others. `run new` writes a shorter time
    (prime_envs.definition.DEATH_SECONDS); programs disagree on a run whose default changes."""
    root_seconds: int = Field(default=10, ge=1)
    root_submissions: int = Field(default=64, ge=1, le=4096)

    _raw: bytes = PrivateAttr(default=b"")

    def model_post_init(self, context: Any) -> None:
        raw = context["raw"] if isinstance(context, dict) else None
        self._raw = encoding.canonical_json(self.model_dump(mode="json")) if raw is None else raw

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> RunDefinition:
        """Returns a copy. With `update`, the copy's raw bytes are rebuilt from its values."""
        copied = super().model_copy(update=update, deep=deep)
        if update:
            copied.model_post_init(None)
        return copied

    @classmethod
    def parse(cls, raw: bytes, *, exact: bool = False) -> RunDefinition:
        """Parses a run definition from a file's bytes.

        `exact` rejects unknown fields; without it they are ignored, as a peer of an earlier release
        does. Raises MalformedError if the bytes are not a run definition of a known schema.
        """
        if len(raw) > MAX_RUN_BYTES:
            raise MalformedError(f"a run definition has at most {MAX_RUN_BYTES} bytes")
        extra: Literal["forbid", "ignore"] = "forbid" if exact else "ignore"
        try:
            return cls.model_validate_json(raw, extra=extra, context={"raw": raw})
        except ValidationError as error:
            first = error.errors()[0]
            if first["loc"] == ("schema_version",):
                raise MalformedError(
                    "the run definition is of a later schema than this program knows; upgrade "
                    f"it: {UPGRADE}"
                ) from error
            where = ".".join(str(part) for part in first["loc"])
            said = f"{where}: {first['msg']}" if where else first["msg"]
            raise MalformedError(f"it is not a run definition: {said}") from error

    @model_validator(mode="after")
    def _rows_fit(self) -> RunDefinition:
        if self.schema_version != self.least_schema:
            raise ValueError(
                "schema_version is 6 with detailed_tables, else 5 with environment.parts, else 4 "
                "with conversation.gateway, else 3 with conversation, else 2 with chat, else 1"
            )
        if self.death_seconds <= self.heartbeat_seconds:
            raise ValueError("death_seconds must exceed heartbeat_seconds")
        if self.risk_factor_micro and self.most_worth > self.covered(self.stake_per_seat):
            raise ValueError(
                "stake_per_seat times risk_factor_micro covers no lease: raise the stake, make "
                "leases smaller, or set risk_factor_micro = 0 (no limit)"
            )
        return self

    @property
    def least_schema(self) -> int:
        """The `schema_version` that the definition's fields require."""
        if self.detailed_tables:
            return 6
        if self.environment.parts:
            return 5
        if self.conversation is not None:
            return 3 if self.conversation.gateway is None else 4
        return 1 if self.chat is None else 2

    @property
    def file_schema(self) -> str:
        """Schema version of the run's rollout files."""
        if self.conversation is None:
            return SCHEMA_VERSION
        return CONVERSATION_SCHEMA if self.conversation.gateway is None else GATEWAY_SCHEMA

    @property
    def temperature(self) -> float:
        return self.temperature_micro / MICRO

    def fresh(self, step: int, policy_version: int) -> bool:
        """Whether the policy is recent enough for batch `step`."""
        return step <= policy_version + self.max_staleness

    @property
    def surplus_groups(self) -> int:
        """Number of groups that must be available beyond those that a batch takes."""
        return self.groups_per_batch * self.oversample_micro // MICRO

    @property
    def rows_per_lease(self) -> int:
        return self.groups_per_lease * self.samples_per_group

    @property
    def most_worth(self) -> int:
        """Maximum earnings of one lease's file, in wei."""
        return self.worth(
            self.rows_per_lease * self.max_output_tokens, self.groups_per_lease * MAX_PROMPT_TOKENS
        )

    def worth(self, units: int, prompt_units: int) -> int:
        """Earnings for the given numbers of tokens, in wei."""
        return units * self.price_per_unit + prompt_units * self.price_per_prompt_token

    def unjudged_worth(self, tokens: int) -> int:
        """What is owed for a file with `tokens` generated tokens and no verdict yet, in wei."""
        return max(0, min(self.worth(tokens, 0), self.most_worth))

    def covered(self, stake: int) -> int:
        """The work at risk that `stake` covers; both in wei."""
        return stake * self.risk_factor_micro // MICRO

    def least_drawn(self, rows: int) -> int:
        """Minimum number of a file's `rows` to replay."""
        return max(1, -(-self.replay_rows_micro * rows // MICRO))

    def raw(self) -> bytes:
        """The exact bytes of the run's file."""
        return self._raw

    def digest(self) -> Digest:
        """The run digest: SHA-256 of `raw`."""
        return encoding.sha256(self._raw)
