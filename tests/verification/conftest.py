from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from prime_core.errors import UnavailableError
from prime_core.ids import Digest, digest
from prime_core.run import RunDefinition
from prime_core.verdict import Reason
from prime_engine.base import Engine, Generation
from prime_engine.exact import NumericClass
from prime_envs.base import Environment
from prime_envs.registry import environment_for
from prime_verify import build
from prime_verify.build import PlannedRow
from prime_verify.calibrate import HonestFile, synthetic_lease, synthetic_run
from prime_verify.case import Case
from prime_verify.checks import CHECKS
from prime_verify.engines import load_engine
from prime_verify.finding import Finding
from prime_verify.proofs.thresholds import Calibration
from prime_verify.provers import Provers
from prime_verify.rollout_file import FileRow, write_rollout_file
from prime_verify.verify import verify_file

TRAINED = Path(__file__).parents[2] / "devnet" / "model"


@dataclass
class Policies:
    """An EngineProvider over engines in memory, by version."""

    engines: dict[int, Engine]

    def engine(self, version: int, policy_digest: Digest) -> Engine:
        if version not in self.engines:
            raise UnavailableError(f"policy {version} is not here")
        return self.engines[version]

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        for number in sorted((v for v in self.engines if v < version), reverse=True):
            yield number, self.engines[number]


Change = Callable[[list[FileRow], list[PlannedRow], list[Generation]], list[FileRow]]


@dataclass
class World:
    """A run of the reverse task, its environment and the honest engine of policy 1."""

    run: RunDefinition
    environment: Environment
    engine: Engine
    policies: Policies = field(init=False)

    def __post_init__(self) -> None:
        self.policies = Policies({1: self.engine})

    def lease(self, number: int) -> HonestFile:
        return synthetic_lease(self.run, number, policy_version=1)

    def plan(self, lease: HonestFile) -> list[PlannedRow]:
        return build.plan_rows(
            lease.signed.lease, lease.lease_digest, self.run, self.environment,
            self.engine.tokenizer,
        )  # fmt: skip

    def honest(self, number: int, engine: Engine | None = None) -> HonestFile:
        lease = self.lease(number)
        data = build.build_rollout_file(
            lease.signed, lease.lease_digest, self.run, engine or self.engine, self.environment
        )
        return replace(lease, data=data)

    def made(
        self,
        number: int,
        *,
        engine: Engine | None = None,
        generate: Callable[[list[PlannedRow], Engine], list[Generation]] | None = None,
        change: Change | None = None,
        metadata: dict[str, str] | None = None,
    ) -> HonestFile:
        """A file like the honest one but for the steps given."""
        engine = engine or self.engine
        lease = self.lease(number)
        plan = self.plan(lease)
        rows = generate(plan, engine) if generate else build.generate_rows(plan, self.run, engine)
        rewards = build.grade_rows(plan, rows, self.environment, engine.tokenizer)
        proofs = build.prove_rows(lease.lease_digest, plan, rows)
        file_rows = build.assemble_rows(lease.signed, plan, rows, rewards, proofs)
        if change:
            file_rows = change(file_rows, plan, rows)
        described = replace(build.metadata_of(lease.lease_digest, engine), **(metadata or {}))
        return replace(lease, data=write_rollout_file(file_rows, described))

    def judge(
        self,
        file: HonestFile,
        secret: int = 0,
        run: RunDefinition | None = None,
        calibration: Calibration | None = None,
        on_any_card: bool = False,
        provers: Provers | None = None,
        as_listed: bool = False,
        known_class: Callable[[Digest], NumericClass | None] = lambda digest: None,
    ) -> Finding:
        found = verify_file(
            Case(
                file.data,
                file.signed,
                file.lease_digest,
                run or self.run,
                self.environment,
                self.policies,
                draw_secret=digest(secret.to_bytes(32, "big")),
                submission_digest=file.lease_digest,
                calibration=calibration,
                on_any_card=on_any_card,
                provers=provers,
                as_listed=as_listed,
                known_class=known_class,
            )
        )
        assert_its_check_gives_its_reason(found)
        return found


def assert_its_check_gives_its_reason(found: Finding) -> None:
    """The finding's reason is one that CHECKS lists for the check that it names."""
    if found.reason is Reason.NONE:
        assert found.check == ""
        return
    (check,) = (check for check in CHECKS if check.name == found.check)
    assert found.reason in (*check.reasons, Reason.OUT_OF_RESOURCES), found


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world() -> World:
    """The demo's warm-started model, as committed."""
    run = synthetic_run(24)
    return World(run, environment_for(run), load_engine(TRAINED))
