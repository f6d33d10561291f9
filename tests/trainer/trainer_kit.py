"""Small models, rows and sealed batches for the trainer's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.trainer_parts import DoubleNorm, bench_run
from prime_core import encoding
from prime_core.batch import BatchFile, BatchManifest, SignedBatch
from prime_core.errors import UnavailableError
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.rollout import Rollout
from prime_core.run import RunDefinition
from prime_core.signing import Domain, LocalSigner
from prime_core.verdict import VerdictRow, VerdictTable
from prime_engine.tiny import write_tiny_model
from prime_trainer.config import Settings
from prime_trainer.data import BatchRules
from prime_trainer.learner import Learner, as_published, make_learner, proximal_logprobs
from prime_trainer.loading import load_policy
from prime_trainer.model import PAD, Policy
from prime_trainer.parallel import World, shard
from prime_verify.rollout_file import FileMetadata, FileRow, write_rollout_file

MANAGER = LocalSigner(b"\x11" * 32)
TRAINER = LocalSigner(b"\x22" * 32)
STRANGER = LocalSigner(b"\x33" * 32)
CONTRACT = Address("0x" + "00" * 19 + "01")
DOMAIN = Domain(chain_id=31337, contract=CONTRACT)
POOL = 7


def tiny_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 folder of hidden size 32 and 2 layers."""
    return write_tiny_model(folder, seed=seed, hidden=32, layers=2)


def run_definition(
    *,
    samples: int = 4,
    groups: int = 3,
    base_model: Digest = ZERO_DIGEST,
) -> RunDefinition:
    """A run of the reverse task with small batches."""
    return bench_run(
        groups=groups, samples=samples, penalty_micro=150_000, name="test",
        base_model=base_model, max_output_tokens=40, groups_per_lease=2,
    )  # fmt: skip


def settings(model: Path, data: Path, **changes: object) -> Settings:
    """The trainer's settings, never from the environment."""
    values: dict[str, object] = {
        "model": model,
        "data": data,
        "learning_rate": 1e-3,
        "warmup_steps": 1,
        "gradient_clip": 1.0,
        "row_tokens": 64,
        "micro_tokens": 256,
        **changes,
    }
    return Settings(**values)  # type: ignore[arg-type]


def learner(
    model: Path, data: Path, world: World, run: RunDefinition | None = None, **changes: object
) -> Learner:
    """A learner over a tiny model."""
    return make_learner(run or run_definition(), settings(model, data, **changes), world)


def double_learner(learner_: Learner, world: World) -> Learner:
    """The same learner with a policy in float64 throughout, unsharded weights from disk."""
    policy = double_policy(learner_.settings.need("model"), learner_.run.temperature)
    sharded = shard(policy, world)
    reference = None
    if learner_.objective.kl:
        reference = double_policy(learner_.settings.need("model"), learner_.run.temperature)
        shard(reference.requires_grad_(False), world)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    return replace(learner_, policy=sharded, reference=reference, optimizer=optimizer)


def double_policy(model: Path, temperature: float) -> Policy:
    """The policy in float64, its norms too."""
    policy = load_policy(model, temperature, dtype=torch.float64)
    for parent in list(policy.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                eps = float(child.variance_epsilon)
                setattr(parent, name, DoubleNorm(child.weight, eps))
    return policy


def gradients(policy: nn.Module) -> dict[str, Tensor]:
    """Every whole gradient by name."""
    found = {}
    for name, parameter in policy.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[name] = whole.detach().clone()
    return found


def relative_difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all gradients together."""
    assert one.keys() == two.keys()
    difference = sum(float((one[k].double() - two[k].double()).square().sum()) for k in one)
    norm = sum(float(two[k].double().square().sum()) for k in two)
    return float((difference / norm) ** 0.5)


def rows(
    groups: int = 3,
    samples: int = 4,
    *,
    seed: int = 0,
    longest: int = 24,
    vocabulary: int = 40,
    version: int = 0,
) -> list[Rollout]:
    """Random rollouts, whole groups of one prompt each, rewards never all equal."""
    rng = random.Random(seed)
    found = []
    for group in range(groups):
        prompt = tuple(rng.randrange(1, vocabulary) for _ in range(rng.randint(2, 7)))
        rewards = [rng.randrange(0, 1_000_001) / 1e6 for _ in range(samples)]
        for sample in range(samples):
            length = rng.randint(1, longest)
            found.append(
                Rollout(
                    problem_id=f"problem-{group}",
                    group=group,
                    sample=sample,
                    prompt_tokens=prompt,
                    output_tokens=tuple(rng.randrange(1, vocabulary) for _ in range(length)),
                    logprobs=tuple(
                        float(np.float32(-rng.uniform(0.05, 4.0))) for _ in range(length)
                    ),
                    target_length=rng.choice((2, 6)),
                    finish_reason="end" if length < longest else "length",
                    policy_version=version,
                    reward=rewards[sample],
                )
            )
    return found


def answered(learner_: Learner, version: int, seed: int = 0) -> list[Rollout]:
    """Rows of policy `version`, which the learner's present weights are, with the log-probabilities
    that an exact engine gives."""
    found = rows(seed=seed, version=version)
    with as_published(learner_):
        scored = proximal_logprobs(learner_, found)
    return [
        replace(row, logprobs=tuple(part.tolist())) for row, part in zip(found, scored, strict=True)
    ]


def conversations(found: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts, of which those of three tokens and more have an environment's words within."""
    changed = []
    for row in found:
        size = len(row.output_tokens)
        if size < 3:
            changed.append(row)
            continue
        first, other = 1 + size // 4, 1 + size // 3
        spans = (first, other, size - first - other)
        logprobs = list(row.logprobs)
        logprobs[first : first + other] = [0.0] * other
        changed.append(replace(row, spans=spans, logprobs=logprobs))
    return changed


@dataclass
class Objects:
    """An object store by digest, whose contents a test may spoil."""

    by_digest: dict[str, bytes] = field(default_factory=dict)

    def put(self, data: bytes) -> Digest:
        name = encoding.sha256(data)
        self.by_digest[name] = data
        return name

    def fetch(self, sha256: Digest, limit: int) -> bytes:
        if sha256 not in self.by_digest:
            raise UnavailableError(f"{sha256} is not here")
        return self.by_digest[sha256]


def file_of(
    rollouts: Sequence[Rollout], *, advisory: float = 0.123, schema_version: str = "1"
) -> bytes:
    """A rollout file as a node writes it; its own rewards are `advisory` and believed by no one."""
    written = [
        FileRow(
            problem_id=r.problem_id,
            group=r.group,
            sample=r.sample,
            prompt_tokens=r.prompt_tokens,
            output_tokens=r.output_tokens,
            logprobs=np.asarray(r.logprobs, dtype=np.float32),
            target_length=r.target_length,
            finish_reason="end" if r.finish_reason == "ungraded" else r.finish_reason,
            policy_version=r.policy_version,
            reward=advisory,
            proofs=b"",
            sketch=b"",
            spans=r.spans,
        )
        for r in rollouts
    ]
    metadata = FileMetadata("0x" + "ab" * 32, "plain/1", "float32", "cpu", schema_version)
    return write_rollout_file(written, metadata)


def seal_file(
    objects: Objects,
    rollouts: Sequence[Rollout],
    groups: Sequence[int],
    step: int,
    schema_version: str = "1",
) -> BatchFile:
    """Puts a file and its verdict table into `objects`."""
    data = file_of(rollouts, schema_version=schema_version)
    sha256 = objects.put(data)
    submission = encoding.sha256(b"submission" + data)
    table = VerdictTable(
        submission_digest=submission,
        sha256=sha256,
        policy_version=rollouts[0].policy_version,
        step=step,
        rows=tuple(
            VerdictRow(
                problem_id=r.problem_id,
                group=r.group,
                sample=r.sample,
                reward_micro=round(r.reward * 1e6),
                prompt_tokens=len(r.prompt_tokens),
                output_tokens=r.generated,
                ungraded=r.finish_reason == "ungraded",
            )
            for r in rollouts
        ),
    )
    return BatchFile(
        sha256=sha256,
        size=len(data),
        table=objects.put(table.model_dump_json().encode()),
        submission_digest=submission,
        policy_version=rollouts[0].policy_version,
        groups=tuple(groups),
    )


def seal(
    files: Sequence[BatchFile],
    step: int,
    run: RunDefinition,
    *,
    signer: LocalSigner = MANAGER,
    domain: Domain = DOMAIN,
    **changes: object,
) -> SignedBatch:
    """A signed manifest over `files`."""
    manifest = BatchManifest(
        pool=POOL,
        step=step,
        run_digest=run.digest(),
        files=tuple(sorted(files, key=lambda file: file.sha256)),
        rows=sum(len(file.groups) for file in files) * run.samples_per_group,
        policy_versions=tuple(sorted({file.policy_version for file in files})),
        seed=Digest("0x" + "5e" * 32),
    ).model_copy(update=changes)
    return SignedBatch(manifest=manifest, signature=signer.sign(manifest.statement(), domain))


def rules(run: RunDefinition, vocabulary: int = 64) -> BatchRules:
    """What the trainer holds batches against here."""
    return BatchRules(
        run=run, pool=POOL, manager=MANAGER.address, domain=DOMAIN, vocabulary=vocabulary
    )


def block_causal_mask(sequences: Tensor) -> Tensor:
    """(R, 1, L, L) bool: a token attends to itself and to earlier tokens of its own sample; padding
    attends to itself (an all-masked softmax row would be NaN). Slow reference for
    `attention.packed_attention`."""
    length = sequences.shape[1]
    same = sequences[:, :, None] == sequences[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=sequences.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=sequences.device)
    return ((same & causal & (sequences != PAD)[:, None, :]) | itself)[:, None]


def full_state(policy: Policy) -> dict[str, Tensor]:
    """The language model's complete state on every rank, on CPU, under its own names."""
    state: dict[str, Tensor] = {}
    for name, tensor in policy.lm.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        state[name] = whole.detach().to("cpu", copy=True)  # never a view of live weights
    return state
