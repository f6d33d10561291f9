"""What test_vllm_engine.py runs under vLLM's own interpreter: one JSON object on stdout.

python vllm_checks.py TRAINED SCRATCH        TRAINED a policy folder, SCRATCH an empty one
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from prime_core import encoding
from prime_core.draws import SaltOpening
from prime_core.errors import PrimeError
from prime_core.ids import ZERO_DIGEST
from prime_core.proof_form import PROOF_WINDOW
from prime_core.run import RunDefinition
from prime_engine.base import GenerationRequest, ReplayRequest
from prime_engine.batch import finish
from prime_engine.exact import NumericClass
from prime_engine.variants import fake_quantize
from prime_engine.vllm import _prepare_environment
from prime_envs.definition import read_toml, run_from
from prime_envs.registry import environment_for
from prime_trainer.difficulty import Range, filter_tasks
from prime_trainer.evaluate import evaluate
from prime_trainer.sampling import Sampling
from prime_verify import build
from prime_verify.case import Case
from prime_verify.cli import OneEngine
from prime_verify.engines import load_engine
from prime_verify.proofs import exact
from prime_verify.provers import Provers
from prime_verify.setups import HonestFile, synthetic_lease, synthetic_run
from prime_verify.verify import verify_file

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


RUN = synthetic_run(24, groups=2, samples=8)


def exact_lease(number: int, digest: str) -> HonestFile:
    """A lease in this exact class."""
    lease = synthetic_lease(RUN, number)
    opening = SaltOpening(random=ZERO_DIGEST, draws=ZERO_DIGEST, numeric_class=digest)
    return replace(lease, signed=lease.signed.model_copy(update={"opening": opening}))


def in_8_bits(folder: Path, scratch: Path) -> Path:
    """A copy of `folder` whose matrices are rounded to 8 bits."""
    shutil.copytree(folder, scratch)
    weights = load_file(scratch / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            weights[name] = fake_quantize(weight, 8, 32)
    save_file(weights, scratch / "model.safetensors", {"format": "pt"})
    return scratch


def another_process(trained: Path, scratch: Path) -> None:
    """A node: its exact class, and a file of it."""
    engine = load_engine(trained, engine="vllm")
    own = engine.numeric_class()
    lease, environment = exact_lease(1, own.digest()), environment_for(RUN)
    made = build.build_rollout_file(lease.signed, lease.lease_digest, RUN, engine, environment)
    (scratch / "file").write_bytes(made)
    (scratch / "class").write_text(json.dumps([dict(own.facts), own.fingerprint]))


def judged(scratch: Path, plain: Any, engine: Any) -> dict[str, Any]:
    """What a validator with these two engines finds of the other process's file."""
    facts, fingerprint = json.loads((scratch / "class").read_text())
    theirs, own = NumericClass(facts, fingerprint), engine.numeric_class()
    lease, provers = exact_lease(1, theirs.digest()), OneProver(scratch, load=load_engine)
    provers.loaded = engine
    finding = verify_file(
        Case(
            (scratch / "file").read_bytes(),
            lease.signed,
            lease.lease_digest,
            RUN,
            environment_for(RUN),
            OneEngine(plain),
            draw_secret=ZERO_DIGEST,
            submission_digest=lease.lease_digest,
            provers=provers,
        )
    )
    return {
        "facts": facts,
        "same_class": [theirs == own, theirs.digest() == own.digest()],
        "reason": finding.reason.name,
        "statistics": finding.statistics,
    }


def row_digests(engine: Any, made: Any) -> list[bytes]:
    """What files of an exact class commit to for these rows."""
    found = []
    for request, generation in zip(REQUESTS, made, strict=True):
        row = generation.output_tokens
        parts = engine.proof_pass(request.prompt_tokens, row, 0.9)
        keys = [bytes([n + 1]) for n in range(-(-len(row) // PROOF_WINDOW))]
        found.append(exact.commit(parts, np.arange(len(row)), keys).digests)
    return found


class OneProver(Provers):
    """An engine that is loaded already."""

    loaded: Any

    def _engine(self, version: int, policy_digest: str, dtype: str) -> Any:
        return self.loaded


def main() -> None:
    trained, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    found["other_runner"] = refusal(lambda: load_engine(trained, engine="vllm"))
    del os.environ["VLLM_USE_V2_MODEL_RUNNER"]

    _prepare_environment()
    import vllm  # noqa: F401  # once for both processes

    node = mp.get_context("fork").Process(target=another_process, args=(trained, scratch))
    node.start()
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
    # while rows are in progress, which go on as if nothing had happened
    rows = engine.add(REQUESTS, 0.9)
    for _ in range(3):
        engine.step()
    row = (*REQUESTS[0].prompt_tokens, *made[0].output_tokens)
    parts = [list(prover.proof_pass(row[:5], row[5:], 0.9)) for prover in (engine, plain, engine)]
    logprobs, states = zip(*(one for (one,) in parts), strict=True)
    found["proof_again"] = [(a[0] == a[2]).all().item() for a in (logprobs, states)]
    found["proof_gap"] = float(abs(logprobs[0] - logprobs[1]).max())
    found["rows_go_on"] = [
        a.output_tokens == b.output_tokens and bool((a.states == b.states).all())
        for a, b in zip(finish(engine, rows), made, strict=True)
    ]
    # with a full cache, until one of the rows in progress has ended
    rows = engine.add(REQUESTS[:2], 0.9)
    engine.step()
    blocks = engine._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    taken = blocks.get_new_blocks(blocks.get_num_free_blocks())
    ((waited, _),) = engine.proof_pass(row[:5], row[5:], 0.9)
    found["proof_waits"] = [rows.left < 2, bool((waited == logprobs[0]).all())]
    found["proof_waits"] += [
        a.output_tokens == b.output_tokens for a, b in zip(finish(engine, rows), made, strict=False)
    ]
    blocks.free_blocks(taken)
    found["too_long_a_row"] = refusal(lambda: list(engine.proof_pass(row[:5], [5] * 9999, 0.9)))
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
    node.join()
    found["exit"] = node.exitcode
    with ThreadPoolExecutor(1) as thread:  # as where a validator judges several files
        found["exact"] = thread.submit(judged, scratch, plain, engine).result()
    own, digests = engine.numeric_class(), row_digests(engine, made)
    engine.close()
    # the next policy, in the same process, which has a process group as a trainer does
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    trainers = dist.new_group(backend="gloo")
    folder = in_8_bits(trained, scratch / "int8")
    newer: Any = load_engine(folder, engine="vllm")
    newer_plain = load_engine(folder)
    found["newer"] = [
        a.output_tokens == b.output_tokens
        for a, b in zip(
            newer.generate(REQUESTS, 0.9), newer_plain.generate(REQUESTS, 0.9), strict=True
        )
    ]
    other_class = newer.numeric_class()
    found["8_bits"] = [other_class.key == own.key, other_class.fingerprint != own.fingerprint]
    pairs = zip(row_digests(newer, made), digests, strict=True)
    found["8_bits"] += [one != other for one, other in pairs]
    newer.close()
    found["group"] = dist.is_initialized() and dist.get_backend(trainers)
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
