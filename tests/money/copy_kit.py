"""Files whose rows differ, and copies of them: for tests of rows that come again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from judging_kit import JudgedPool, small_run

from prime_core.ids import Digest
from prime_core.run import LengthBudgets, RunDefinition
from prime_core.task import SignedLease
from prime_engine.base import Generation
from prime_envs.registry import environment_ref
from prime_verify import build
from prime_verify.build import PlannedRow
from prime_verify.rollout_file import write_rollout_file


def one_problem() -> RunDefinition:
    """Every row has the same prompt, answers are improbable, one row in eight is drawn (two of a
    newcomer's)."""
    budgets = LengthBudgets(targets=(6,), penalty_micro=150_000)
    return small_run().model_copy(
        update={
            "environment": environment_ref("reverse", {}, budgets, train_size=1, heldout_size=1),
            "budgets": budgets,
            "temperature_micro": 3_000_000,
            "replay_rows_micro": 125_000,
        }
    )


def made(
    panel: JudgedPool,
    signed: SignedLease,
    lease_digest: Digest,
    change: Callable[[list[PlannedRow], list[Generation]], list[Generation]],
) -> bytes:
    """A file whose generations went through `change`; all else is honest."""
    run, engine = panel.mgr.context.run, panel.engines.engine(0, signed.lease.policy_digest)
    plan = build.plan_rows(signed.lease, lease_digest, run, panel.environment, engine.tokenizer)
    rows = change(plan, build.generate_rows(plan, run, engine))
    rewards = build.grade_rows(plan, rows, panel.environment, engine.tokenizer)
    proofs = build.prove_rows(lease_digest, plan, rows)
    whole = build.assemble_rows(signed, plan, rows, rewards, proofs)
    return write_rollout_file(whole, build.metadata_of(lease_digest, engine))


@dataclass
class Copyist:
    """Makes an honest file, then others that have its least probable row in place of row 3."""

    panel: JudgedPool
    kept: list[Generation] = field(default_factory=list)

    def original(self, signed: SignedLease, lease_digest: Digest) -> bytes:
        def keep(_: list[PlannedRow], rows: list[Generation]) -> list[Generation]:
            self.kept.extend(rows)
            return rows

        return made(self.panel, signed, lease_digest, keep)

    def copy(self, claimed: float = 1.0) -> Callable[[SignedLease, Digest], bytes]:
        """`claimed` times the log-probabilities that the row has: below 1 it is said to be more
        probable than it is."""

        def copy_one(_: list[PlannedRow], rows: list[Generation]) -> list[Generation]:
            best = min(self.kept, key=lambda row: float(row.logprobs.sum()))
            return [*rows[:3], replace(best, logprobs=best.logprobs * claimed), *rows[4:]]

        return lambda *lease: made(self.panel, *lease, copy_one)
