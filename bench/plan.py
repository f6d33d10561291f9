"""Memory of a training step as `trainer plan` has it, over what a real one takes.

Each case writes a model of a known shape with random weights, lets `trainer plan` simulate a step,
and takes the same step with 1 and 2 ranks on the CPU. A rank's peak is that of its anonymous
memory (RssAnon, read every 2 ms) above what it held before the model was loaded; glibc returns
every freed block at once (MALLOC_MMAP_THRESHOLD_), or free memory would be counted too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.form import ROOT, Row
from bench.trainer_parts import bench_run, bench_settings
from prime_core.errors import UnavailableError
from prime_engine.tiny import character_tokenizer
from prime_trainer.learner import make_learner
from prime_trainer.parallel import joined_world
from prime_trainer.planning import MICRO_BATCHES, plan_step, run_step

PACKAGES = ("torch", "transformers")
SAMPLE_TOKENS, PROMPT_TOKENS, ROW_TOKENS = 512, 64, 1024
LLAMA = {"model_type": "llama", "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2_135m": {
        **LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152,
    },
    "llama32_1b_lora": {
        **LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128_256,
    },
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {"smollm2_135m": {}, "llama32_1b_lora": {"lora_rank": 16}}


def run(quick: bool) -> list[Row]:
    """Rows `NAME_RANKS_ranks`: planned over measured peak. `quick`: the small model alone."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as folder:
        for name in list(SHAPES)[: 1 if quick else None]:
            model = write_model(Path(folder) / name, SHAPES[name])
            for ranks in (1, 2):
                planned = plan_step(
                    bench_run(groups=2, samples=4), _settings(name, model), ranks=ranks,
                    sample_tokens=SAMPLE_TOKENS, prompt_tokens=PROMPT_TOKENS,
                ).peak  # fmt: skip
                measured = _measured(name, model, ranks)
                ratio = planned / measured
                error = abs(ratio - 1)
                rows += [
                    Row(f"{name}_{ranks}_measured", measured / 2**20, "MiB a rank"),
                    Row(f"{name}_{ranks}_planned", planned / 2**20, "MiB a rank"),
                    Row(f"{name}_{ranks}_error", error, "of the measured peak", 0.1),
                ]
            shutil.rmtree(model)
    return rows


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A model folder of that configuration with random bf16 weights; returns `folder`."""
    from prime_trainer.loading import empty_policy

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    character_tokenizer().save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            name: torch.randn(parameter.shape, generator=generator).mul_(0.02).bfloat16()
            for name, parameter in empty_policy(folder, 1.0).lm.named_parameters()
        },
        folder / "model.safetensors",
    )
    return folder


def _settings(name: str, model: Path) -> Any:
    return bench_settings(
        model, model / "data", row_tokens=ROW_TOKENS, micro_tokens=ROW_TOKENS, **SETTINGS[name]
    )


def _measured(name: str, model: Path, ranks: int) -> int:
    """The largest peak of a rank in bytes. Raises UnavailableError if the step fails."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), "-m", "bench.plan", name, str(model)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise UnavailableError(f"a step on {ranks} ranks failed: {done.stderr[-800:]}")
    return max(int(line.split()[1]) for line in done.stdout.splitlines() if line[:5] == "peak ")


def _anonymous() -> int:
    """Bytes of this process's anonymous memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise UnavailableError("this system does not say how much memory a process has")


def measure(name: str, model: Path) -> None:
    """One rank's part: prints the peak of its second step."""
    with joined_world() as world:
        one = torch.ones(64, 64, requires_grad=True)
        (one @ one).sum().backward()
        import peft  # noqa: F401  # imported before the baseline is taken
        from transformers import AutoModelForCausalLM  # noqa: F401

        before, peak, ended = _anonymous(), 0, threading.Event()
        learner = make_learner(bench_run(groups=2, samples=4), _settings(name, model), world)

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.002):
                peak = max(peak, _anonymous())

        for number in range(2):
            watcher = threading.Thread(target=watch)
            if number:
                watcher.start()
            run_step(learner, MICRO_BATCHES, SAMPLE_TOKENS, PROMPT_TOKENS)
        ended.set()
        watcher.join()
        print(f"peak {peak - before}", flush=True)


if __name__ == "__main__":
    measure(sys.argv[1], Path(sys.argv[2]))
