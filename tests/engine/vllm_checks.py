"""What test_vllm_engine.py runs under vLLM's own interpreter: one JSON object on stdout.

python vllm_checks.py TRAINED SCRATCH        TRAINED a policy folder, SCRATCH an empty one
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file

from prime_core import encoding
from prime_core.errors import PrimeError
from prime_core.ids import ZERO_DIGEST
from prime_core.run import RunDefinition
from prime_engine.base import GenerationRequest, ReplayRequest
from prime_envs.definition import read_toml, run_from
from prime_trainer.difficulty import Range, filter_tasks
from prime_trainer.evaluate import evaluate
from prime_trainer.sampling import Sampling
from prime_verify.engines import load_engine

REQUESTS = [GenerationRequest(tuple(range(5, 12 + i % 5)), 40, 7 * i - 50) for i in range(24)]


def altered(folder: Path, scratch: Path, tensor: str) -> Path:
    """A copy of `folder` in which one number of `tensor` is another."""
    shutil.copytree(folder, scratch)
    weights = load_file(scratch / "model.safetensors")
    weights[tensor].view(-1)[7] += 0.25
    save_file(weights, scratch / "model.safetensors", {"format": "pt"})
    return scratch


def refusal(act: Any) -> str:
    try:
        act()
    except PrimeError as error:
        return str(error)
    return ""


EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SUMS = EXAMPLES / "sums-tasks.jsonl"


def example(model: Path, **environment: Any) -> RunDefinition:
    """The devnet's run, with this environment."""
    file = EXAMPLES / "run-devnet.toml"
    return run_from(read_toml(file) | {"environment": environment}, file, model, ZERO_DIGEST)


class Loaded(Sampling):
    """Samples with an engine that is loaded already, and stays so."""

    engines: ClassVar[dict[str, Any]] = {}

    def load(self, model: Path) -> Any:
        engine = self.engines[self.engine]
        engine.close = lambda: None
        return engine


def evaluated_and_filtered(trained: Path, scratch: Path, engine: str) -> list[Any]:
    """What `trainer evaluate` and `trainer filter` find with this engine."""
    sampling = Loaded(engine, answers=scratch / f"answers-{engine}")
    run = example(trained, name="reverse", train_size=100, heldout_size=50)
    found = evaluate(trained, run, problems=12, seed=3, samples=3, sampling=sampling)
    data = {"sha256": encoding.sha256(SUMS.read_bytes()), "path": str(SUMS)}
    sums = example(trained, name="tasks", arguments=data, train_size=8, heldout_size=0)
    out = scratch / f"{engine}.jsonl"
    for _ in filter_tasks(trained, sums, Range(0, 1, 3), out, sampling=sampling):
        pass
    kept = [path.read_text().splitlines()[1:] for path in sorted(sampling.answers.iterdir())]
    return [found.as_json(), kept, out.read_text()]


def main() -> None:
    trained, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    found["other_runner"] = refusal(lambda: load_engine(trained, engine="vllm"))
    del os.environ["VLLM_USE_V2_MODEL_RUNNER"]

    engine: Any = load_engine(trained, engine="vllm")
    plain = load_engine(trained)
    made = engine.generate(REQUESTS, 0.9)
    again = engine.generate(REQUESTS[:3], 0.9)
    own = plain.generate(REQUESTS, 0.9)
    greedy = [GenerationRequest(r.prompt_tokens, 20, None) for r in REQUESTS[:4]]
    replays = plain.replay(
        [
            ReplayRequest(r.prompt_tokens, g.output_tokens, r.noise_seed)
            for r, g in zip(REQUESTS, made, strict=True)
        ],
        0.9,
    )
    found["name"] = [engine.name, engine.dtype, engine.device]
    found["same_rows"] = [
        a.output_tokens == b.output_tokens for a, b in zip(made, own, strict=True)
    ]
    found["same_ends"] = [
        a.finish_reason == b.finish_reason for a, b in zip(made, own, strict=True)
    ]
    found["same_again"] = [
        a.output_tokens == b.output_tokens and bool((a.states == b.states).all())
        for a, b in zip(made, again, strict=False)
    ]
    found["same_greedy"] = [
        a.output_tokens == b.output_tokens
        for a, b in zip(engine.generate(greedy, 1.0), plain.generate(greedy, 1.0), strict=True)
    ]
    found["margin"] = max(float(r.margins.max()) for r in replays)
    found["logprob_gap"] = max(
        float(abs(g.logprobs - r.logprobs).max()) for g, r in zip(made, replays, strict=True)
    )
    found["states_equal"] = min(
        float((g.states == r.states).mean()) for g, r in zip(made, replays, strict=True)
    )
    Loaded.engines = {"vllm": engine, "plain": plain}
    of_vllm, of_plain = (
        evaluated_and_filtered(trained, scratch, name) for name in ("vllm", "plain")
    )
    found["evaluated"] = [a == b for a, b in zip(of_vllm, of_plain, strict=True)]
    found["mean_reward"] = of_vllm[0]["mean_reward"]
    for one in (engine, plain):
        del one.close
    found["bad_prompt"] = refusal(lambda: engine.generate([GenerationRequest((), 3, None)], 1.0))
    found["too_long"] = refusal(lambda: engine.generate([GenerationRequest((3,), 9999, None)], 1.0))
    found["replay"] = refusal(lambda: engine.replay([], 1.0))

    from prime_engine.policy_weights import require_policy

    for tensor in ("mlp.down_proj", "self_attn.k_proj", "input_layernorm"):
        other = altered(trained, scratch / tensor, f"model.layers.2.{tensor}.weight")
        found[tensor] = refusal(
            lambda other=other: engine._llm.apply_model(
                lambda model: require_policy(model, other, plain.model.config, "float32")
            )
        )
    engine.close()
    # the next policy, in the same process, which has a process group as a trainer does
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    trainers = dist.new_group(backend="gloo")
    newer: Any = load_engine(scratch / "mlp.down_proj", engine="vllm")
    newer_plain = load_engine(scratch / "mlp.down_proj")
    found["newer"] = [
        a.output_tokens == b.output_tokens
        for a, b in zip(
            newer.generate(REQUESTS, 0.9), newer_plain.generate(REQUESTS, 0.9), strict=True
        )
    ]
    newer.close()
    found["group"] = dist.is_initialized() and dist.get_backend(trainers)
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
