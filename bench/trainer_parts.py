"""What `bench trainer` and `bench learning` work on: lengths, a model, rows, and a loop without a
pool around it."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from prime_broadcast.sharded import Part, publish_part
from prime_core.ids import ZERO_DIGEST, Address, Digest, Step
from prime_core.rollout import Rollout
from prime_core.run import LengthBudgets, RunDefinition
from prime_core.task import Task
from prime_envs.registry import environment_ref
from prime_trainer.checkpoint import TrainerState
from prime_trainer.config import Settings
from prime_trainer.data import TrainingBatch
from prime_trainer.feed import PoolFacts
from prime_trainer.learner import Learner
from prime_trainer.loading import load_policy
from prime_trainer.metrics import Stopwatch
from prime_trainer.model import Policy
from prime_trainer.parallel import World, shard
from prime_trainer.publish import ORIGIN, other_files
from prime_trainer.train import Trainer

TARGETS = (2000, 4000, 6000, 8000, 10000)
"""INTELLECT-2's TARGET-LONG lengths (arXiv 2505.07291), drawn alike."""
SPREAD = 0.25
"""Standard deviation of log(actual/target): how far off its models stayed from what was asked."""


def published_lengths(samples: int, seed: int, scale: float = 1.0) -> list[tuple[int, int]]:
    """(prompt, output) tokens: targets as published, actual lengths log-normal around them, prompts
    of 60 to 600; everything times `scale`."""
    rng = random.Random(seed)
    found = []
    for _ in range(samples):
        output = rng.choice(TARGETS) * math.exp(rng.gauss(0.0, SPREAD))
        prompt = 60 * 10 ** rng.random()
        found.append((max(2, round(prompt * scale)), max(2, round(output * scale))))
    return found


def bench_model(folder: Path, *, hidden: int, layers: int, vocabulary: int, positions: int) -> Path:
    """A Qwen3-shaped folder of random weights from a fixed seed."""
    from transformers import Qwen3ForCausalLM

    from prime_engine.tiny import character_tokenizer, qwen3_shape

    tokenizer = character_tokenizer()
    config = qwen3_shape(
        tokenizer, hidden=hidden, layers=layers, positions=positions, vocab_size=vocabulary,
        intermediate_size=3 * hidden, num_attention_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bench_run(
    *,
    groups: int,
    samples: int,
    penalty_micro: int = 0,
    **changes: Any,
) -> RunDefinition:
    """A run definition of the reverse task; `changes` are further fields."""
    budgets = LengthBudgets(targets=(2, 6), penalty_micro=penalty_micro, form="clip")
    values: dict[str, Any] = {
        "name": "bench",
        "base_model": ZERO_DIGEST,
        "environment": environment_ref("reverse", {}, budgets, train_size=1000, heldout_size=64),
        "max_output_tokens": 16_384,
        "samples_per_group": samples,
        "groups_per_lease": 1,
        "groups_per_batch": groups,
        "budgets": budgets,
        "task": Task(image="process"),
        "price_per_unit": 1,
        "stake_per_seat": 1,
        "slash_amount": 1,
    }
    return RunDefinition(**(values | changes))


def random_rows(
    lengths: Sequence[tuple[int, int]], samples: int, vocabulary: int, seed: int
) -> list[Rollout]:
    """Rows of random tokens, `samples` a group; a group's rows share the first one's prompt."""
    rng = random.Random(seed)
    found: list[Rollout] = []
    for number, (prompt, output) in enumerate(lengths):
        group, sample = divmod(number, samples)
        shared = tuple(rng.randrange(1, vocabulary) for _ in range(prompt))
        found.append(
            Rollout(
                problem_id=str(group),
                group=group,
                sample=sample,
                prompt_tokens=found[group * samples].prompt_tokens if sample else shared,
                output_tokens=tuple(rng.randrange(1, vocabulary) for _ in range(output)),
                logprobs=tuple(-math.log(vocabulary) for _ in range(output)),
                target_length=2,
                finish_reason="end",
                policy_version=0,
                reward=float(sample % 2),
            )
        )
    return found


def batch_of(rows: Sequence[Rollout], samples: int, step: int) -> TrainingBatch:
    """A batch as `assemble` would give it."""
    groups = tuple(tuple(rows[i : i + samples]) for i in range(0, len(rows), samples))
    keys = tuple((Digest(f"0x{step:064x}"), number) for number in range(len(groups)))
    return TrainingBatch(Step(step), Digest(f"0x{step + 1:064x}"), groups, keys)


class LocalTrainer(Trainer):
    """The real loop with batches at hand: no pool to wait for, no orchestrator to tell. Everything
    else is as in a run: checkpoints, metrics, the export that would be published."""

    def __init__(self, learner: Learner, rows: Sequence[Rollout]) -> None:
        zero = Address("0x" + "00" * 20)
        info = SimpleNamespace(
            chain_id=1, pool=0, manager=zero, contracts=SimpleNamespace(work=zero)
        )
        facts = PoolFacts(cast(Any, info), learner.run)
        super().__init__(learner, facts, cast(Any, None), None, threading.Event())
        self.rows = rows
        self.lines: list[dict[str, Any]] = []

    def verified_batch(self, step: int, watch: Stopwatch) -> TrainingBatch:
        return batch_of(self.rows, self.learner.run.samples_per_group, step)

    def publish(self, part: Part | None, state: TrainerState, watch: Stopwatch) -> None:
        with watch.timed("publish"):
            base = self.learner.settings.need("model")
            if part is not None:
                publish_part(
                    part, other_files(base, state.training), self.data / ORIGIN,
                    self.world.exchange, pool=0, version=state.step, step=state.step, delta_from=0,
                )  # fmt: skip

    def train(self, found: Any, state: Any, watch: Stopwatch) -> dict[str, Any]:
        line = super().train(found, state, watch)
        self.lines.append(line)
        return line


class DoubleNorm(nn.Module):
    """RMSNorm wholly in the width of its input; Hugging Face's rounds to fp32 inside."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def double_policy(model: Path, world: World) -> Policy:
    """The policy in float64, its norms too, sharded."""
    policy = load_policy(model, 1.0, dtype=torch.float64)
    for parent in list(policy.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                eps = float(cast(Any, child).variance_epsilon)
                setattr(parent, name, DoubleNorm(cast(Tensor, child.weight), eps))
    return shard(policy, world)


def bench_settings(model: Path, data: Path, **changes: object) -> Settings:
    """The trainer's settings for a bench."""
    values: dict[str, object] = {
        "model": model, "data": data, "learning_rate": 1e-5, "warmup_steps": 1,
        "gradient_clip": 0.1, "progress": False, **changes,
    }  # fmt: skip
    return Settings(**values)  # type: ignore[arg-type]
