"""What test_kernels.py runs under an interpreter that has Triton: one JSON object on stdout.

The kernels run in Triton's interpreter, on CPU tensors; so do vLLM's own, if vLLM is there.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import importlib.util
import json
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from prime_verify.proofs import kernels, sampling, windows

SEEDS = [0, 1, -2, -(1 << 63), (1 << 63) - 1, 0x0123456789ABCDEF]
PLACES = [0, 2, 5, 32_767, 4095, 100]
VOCABULARY = 3000


def vllm_module() -> Any:
    """vLLM's vllm/v1/worker/gpu/sample/gumbel.py with Triton itself under it, or None."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / "v1/worker/gpu/sample/gumbel.py"
    if not path.exists() or "murmur3" not in path.read_text():
        return None
    stand_in = ModuleType("vllm.triton_utils")
    stand_in.triton, stand_in.tl = triton, tl  # type: ignore[attr-defined]
    sys.modules["vllm"] = ModuleType("vllm")
    sys.modules["vllm.triton_utils"] = stand_in
    spec = importlib.util.spec_from_file_location("vllm_gumbel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    seeds, places = torch.tensor(SEEDS), torch.tensor(PLACES)
    rows = len(SEEDS)
    exact = sampling.gumbel(SEEDS, PLACES, VOCABULARY)
    found: dict[str, Any] = {}
    random = np.random.default_rng(5)
    left, right = (random.integers(-128, 128, (n, 512), np.int8) for n in (256, 512))
    bytes_ = (left.astype(np.int32) @ right.astype(np.int32).T >> 8).astype(np.int8)
    made = kernels.product(torch.from_numpy(left), torch.from_numpy(right)).numpy()
    found["product"] = bool((made == bytes_).all())
    noise = kernels.gumbel(seeds, places, VOCABULARY).numpy()
    found["noise_gap"] = float(np.abs(noise - exact).max())
    logits = torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(4)) * 3
    heat = torch.tensor([0.6, 0.8, 1.0, 1.3, 1.0, 0.7])
    scaled = logits / heat[:, None]
    noisy = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    tokens, logprobs = kernels.sample(logits, heat, seeds, noisy, places)
    wanted = (scaled + torch.from_numpy(exact) * noisy[:, None]).argmax(dim=1)
    found["same_tokens"] = tokens.tolist() == wanted.tolist()
    reference = scaled.log_softmax(1).gather(1, tokens[:, None])[:, 0]
    found["logprob_gap"] = float((logprobs - reference).abs().max())
    states = torch.randn((2, 33 * 40), generator=torch.Generator().manual_seed(5))
    states = states.to(torch.bfloat16)
    keys = [sha256(bytes([i])).digest() for i in range(2)]
    words = torch.tensor(
        [[int.from_bytes(k[:4], "big"), int.from_bytes(k[4:8], "big")] for k in keys]
    )
    sums = kernels.sketch(states, words).numpy().astype(np.float32)
    there = windows.reduce(states, keys).sketches
    found["same_sketches"] = bool((windows.sketch.float_to_bf16(sums) == there).all())
    theirs = vllm_module()
    found["vllm"] = theirs is not None
    if theirs is not None:
        given = theirs.gumbel_sample(
            scaled.clone(), torch.arange(rows), torch.ones(rows), seeds, places,
            apply_temperature=False, is_drafting=False,
        )  # fmt: skip
        drawn = (scaled + torch.from_numpy(exact)).argmax(dim=1)
        found["vllm_tokens"] = given.tolist() == drawn.tolist()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
