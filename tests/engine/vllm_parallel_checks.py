"""What test_vllm_parallel.py runs under vLLM's own interpreter: one JSON object on stdout.

python vllm_parallel_checks.py TRAINED SCRATCH        TRAINED a policy folder, SCRATCH an empty one
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import queue
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from vllm_checks import altered, refusal

from prime_engine.base import GenerationRequest
from prime_engine.batch import finish
from prime_engine.sizing import Cards
from prime_verify.engines import load_engine

REQUESTS = [GenerationRequest(tuple(range(5, 12 + i % 5)), 24, 7 * i - 50) for i in range(12)]


def forget_shared_memory() -> None:
    """Removes what a killed rank left: vLLM's CPU build names its shared memory alike each time."""
    for left in Path("/dev/shm").glob("-tp:0-*-cpushm_*"):
        left.unlink(missing_ok=True)


def main() -> None:
    forget_shared_memory()
    trained, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    plain = load_engine(trained)
    own = plain.generate(REQUESTS, 0.9)
    found["unsplit"] = refusal(lambda: load_engine(trained, engine="vllm", cards=Cards(3)))

    lost: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    engine: Any = load_engine(trained, engine="vllm", cards=Cards(2), on_lost=lost.put)
    found["children"] = len(mp.active_children())
    made = engine.generate(REQUESTS, 0.9)
    again = engine.generate(REQUESTS[:3], 0.9)
    found["same_rows"] = [
        a.output_tokens == b.output_tokens for a, b in zip(made, own, strict=True)
    ]
    found["same_again"] = [
        a.output_tokens == b.output_tokens for a, b in zip(made, again, strict=False)
    ]
    found["logprob_gap"] = max(
        float(abs(a.logprobs - b.logprobs).max()) for a, b in zip(made, own, strict=True)
    )
    found["states_equal"] = min(
        float((a.states == b.states).mean()) for a, b in zip(made, own, strict=True)
    )
    rows = engine.add(REQUESTS, 0.9)
    engine.step()
    row = REQUESTS[0].prompt_tokens, [(7 * n) % plain.vocabulary for n in range(40)]
    (one,), (two,) = (list(prover.proof_pass(*row, 0.9)) for prover in (engine, plain))
    found["proof_gap"] = float(abs(one[0] - two[0]).max())
    found["rows_go_on"] = [
        a.output_tokens == b.output_tokens for a, b in zip(finish(engine, rows), own, strict=True)
    ]
    found["split"] = engine.facts()["tensor parallel"]
    from prime_engine.policy_weights import require_policy

    for tensor in ("mlp.down_proj", "self_attn.v_proj", "mlp.up_proj"):
        other = altered(trained, scratch / tensor, f"model.layers.2.{tensor}.weight")
        found[tensor] = refusal(
            lambda other=other: engine._llm.apply_model(
                lambda model: require_policy(model, other, plain.model.config, "float32")
            )
        )
    engine.close()
    found["children_left"] = len(mp.active_children())
    found["lost_by_closing"] = not lost.empty()

    engine = load_engine(trained, engine="vllm", cards=Cards(2), on_lost=lost.put)
    rows = engine.add(REQUESTS, 0.9)
    engine.step()
    killed = mp.active_children()[0]
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)

    def go_on() -> None:
        while not rows.done:
            engine.step()

    found["lost"] = refusal(go_on)
    found["said"] = str(lost.get(timeout=60))
    print(json.dumps(found), flush=True)
    forget_shared_memory()
    os._exit(0)  # vLLM's shutdown may wait for the other rank


if __name__ == "__main__":
    main()
