"""A pool with validators that judge for real: the demo's model and environment, real files."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from judges import Bench, arm, bench
from money_kit import (
    FAKE_DEPLOYMENT,
    MANAGER,
    RUN,
    TRAINER,
    VALIDATOR,
    ManagerSide,
    key,
    open_manager,
)

from prime_broadcast.manifest import build_manifest, signed_bytes
from prime_chain.history import Slash
from prime_core.checkpoint import SignedManifest
from prime_core.deployment import Deployment
from prime_core.errors import NotFoundError
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.messages import SubmissionInfo
from prime_core.revisions import RunHistory
from prime_core.run import LengthBudgets, RunDefinition
from prime_core.signing import LocalSigner
from prime_core.storage.base import digest_key
from prime_core.task import SignedLease
from prime_core.verdict import Evidence
from prime_envs.base import Environment
from prime_envs.chat import TEMPLATE_FILE
from prime_envs.registry import environment_for, environment_ref
from prime_orchestrator.store import leases
from prime_orchestrator.store.submissions import SubmissionRow
from prime_verify import build
from prime_verify.audit import Setting, audit_slash
from prime_verify.audit_compare import Audit
from prime_verify.engines import FolderEngines, load_engine
from prime_verify.rollout_file import write_rollout_file

MODEL = Path(__file__).parents[2] / "devnet" / "model"
HONEST, LIAR = key(10), key(11)
Make = Callable[[SignedLease, Digest], bytes]


def small_run() -> RunDefinition:
    """The demo's task in a file of eight rows."""
    budgets = LengthBudgets(targets=(2, 6), penalty_micro=150_000)
    return RUN.model_copy(
        update={
            "environment": environment_ref("reverse", {}, budgets, train_size=100, heldout_size=10),
            "budgets": budgets,
            "max_output_tokens": 24,
            "samples_per_group": 4,
            "groups_per_lease": 2,
            "replay_rows_micro": 500_000,
        }
    )


@dataclass
class JudgedPool:
    """A pool with a validator that judges for real."""

    mgr: ManagerSide
    environment: Environment
    engines: FolderEngines
    validator: Bench
    policies: Path

    def another(self, signer: LocalSigner) -> Bench:
        """One more validator, with a key and draws of its own: from now on, leases name both."""
        made = bench(self.mgr.backend, signer, self.mgr.folder, seed=int(signer.address[:10], 16))
        return arm(made, self.policies, self.engines)

    def honest(self, signed: SignedLease, lease_digest: Digest) -> bytes:
        engine = self.engines.engine(0, signed.lease.policy_digest)
        return build.build_rollout_file(
            signed, lease_digest, self.mgr.context.run, engine, self.environment
        )

    def tampered(self, signed: SignedLease, lease_digest: Digest) -> bytes:
        """Every reward raised to one."""
        run, engine = self.mgr.context.run, self.engines.engine(0, signed.lease.policy_digest)
        plan = build.plan_rows(signed.lease, lease_digest, run, self.environment, engine.tokenizer)
        rows = build.generate_rows(plan, run, engine)
        proofs = build.prove_rows(lease_digest, plan, rows)
        made = build.assemble_rows(signed, plan, rows, [1.0] * len(plan), proofs)
        return write_rollout_file(made, build.metadata_of(lease_digest, engine))

    def forged(self, signed: SignedLease, lease_digest: Digest) -> bytes:
        """Honest text with another policy's arithmetic: log-probabilities moved by a tenth."""
        run, engine = self.mgr.context.run, self.engines.engine(0, signed.lease.policy_digest)
        plan = build.plan_rows(signed.lease, lease_digest, run, self.environment, engine.tokenizer)
        rows = [
            dataclasses.replace(row, logprobs=row.logprobs - 0.3)
            for row in build.generate_rows(plan, run, engine)
        ]
        rewards = build.grade_rows(plan, rows, self.environment, engine.tokenizer)
        proofs = build.prove_rows(lease_digest, plan, rows)
        made = build.assemble_rows(signed, plan, rows, rewards, proofs)
        return write_rollout_file(made, build.metadata_of(lease_digest, engine))

    def judged(self, make: Make, node: object = HONEST) -> SubmissionRow:
        row = self.mgr.submit(node, make=make)  # type: ignore[arg-type]
        assert self.validator.judge_next() == row.digest
        return self.mgr.row(row.digest)

    def file(self, row: SubmissionRow) -> bytes:
        return self.mgr.objects.get(digest_key(row.sha256), 1 << 20)

    def evidence(self, row: SubmissionRow) -> Evidence:
        assert row.evidence is not None
        raw = self.mgr.objects.get(digest_key(row.evidence), 1 << 20)
        return Evidence.model_validate_json(raw)

    def slash(self, row: SubmissionRow, evidence: Digest | None = None) -> Slash:
        """The proposal as it would stand on chain."""
        return Slash(
            pool=1,
            node=row.node,
            provider=row.node,
            leaf=row.digest,
            evidence=evidence or row.evidence or ZERO_DIGEST,
            reason=row.reason,
            amount=1,
            executable_at=0,
            status="executed",
            proposed_at=0,
            proposed_tx=ZERO_DIGEST,
        )

    def audit(self, slash: Slash) -> Audit:
        return audit_slash(slash, self.setting(), StoreReader(self.mgr))

    def setting(self) -> Setting:
        context = self.mgr.context
        return Setting(
            deployment=context.deployment,
            pool=1,
            manager=MANAGER.address,
            validators=frozenset({VALIDATOR.address}),
            runs=RunHistory(context.run),
            environments=lambda _: self.environment,
            engines=self.engines,
            now=self.mgr.now(),
        )


class StoreReader:
    """What the orchestrator publishes, read from its store."""

    def __init__(self, mgr: ManagerSide) -> None:
        self._mgr = mgr

    def object(self, digest: Digest, limit: int) -> bytes:
        return self._mgr.objects.get(digest_key(digest), limit)

    def submission(self, digest: Digest) -> SubmissionInfo:
        raise NotFoundError("not asked here")

    def lease(self, digest: Digest) -> SignedLease:
        with self._mgr.store.read() as connection:
            row = leases.get(connection, digest)
        assert row is not None
        return row.signed()


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model as policy 0 of pool 1, signed."""
    return signed_policy(tmp_path_factory.mktemp("policies"))


def signed_policy(
    policies: Path, template: str | None = None, deployment: Deployment = FAKE_DEPLOYMENT
) -> Path:
    """Writes the demo's model, with a chat template if one is given, into `policies` as policy 0 of
    pool 1, signed; returns `policies`."""
    folder = policies / "0"
    shutil.copytree(MODEL, folder)
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template)
    manifest = build_manifest(folder, pool=1, version=0, step=0)
    signed = manifest.signed(TRAINER, deployment.domain("pools"))
    (folder / "manifest.json").write_bytes(signed_bytes(signed))
    return policies


def read_policy(policies: Path) -> SignedManifest:
    """The manifest that `signed_policy` wrote."""
    return SignedManifest.model_validate_json((policies / "0" / "manifest.json").read_bytes())


@pytest.fixture
def store_url() -> str | None:
    """Where the pool's store lies: in SQLite, unless a module says otherwise."""
    return None


@pytest.fixture
def panel_run() -> RunDefinition:
    """The pool's run, unless a module says otherwise."""
    return small_run()


@pytest.fixture
def panel(
    tmp_path: Path, policy_folder: Path, store_url: str | None, panel_run: RunDefinition
) -> Iterator[JudgedPool]:
    import torch

    torch.set_num_threads(1)
    mgr = open_manager(tmp_path, run=panel_run, url=store_url)
    mgr.add_policy(read_policy(policy_folder))
    mgr.admit(HONEST)
    mgr.admit(LIAR)
    environment = environment_for(mgr.context.run)
    engines = FolderEngines(policy_folder, load_engine)
    validator = arm(mgr.bench, policy_folder, engines)
    yield JudgedPool(mgr, environment, engines, validator, policy_folder)
    mgr.store.close()
