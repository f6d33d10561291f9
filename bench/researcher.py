"""What one researcher gets from `trainer local` next to TRL: step time, memory, lines to write.

Both run whole GRPO steps on the same task, model and sizes: prompts, generation, rewards,
advantages, loss, backward, AdamW. Each round starts both programs once, in turn, with one thread.
Ours is the command of docs/examples/run-local.toml with its trainer settings, TRL's the script
bench/researcher_trl.py, with the settings that were fastest on a CPU: float32, key-value cache, one
micro-batch for all rows, no gradient checkpointing. Evaluations are off in both; checkpoints, logs
and sample files are each program's defaults.

Answers end where the model ends them, up to the limit, so the two programs do not generate exactly
the same number of tokens. `tokens_step` states both, `token_ratio_vs_trl` divides by them.

    step_s              seconds from the end of one step to the end of the next, mean of a round
    generate_s          prompts, generation, rewards and advantages
    loss_s              forward and backward (ours: packing and advantages too)
    optimizer_s         clipping, AdamW and zeroing gradients
    publish_s           ours only: the policy's folder written in bf16 and loaded by the engine
    peak_mb             largest resident set of the process
    user_lines          lines of the files above, without blank lines, comments and docstrings
"""

from __future__ import annotations

import ast
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.form import ROOT, Row
from bench.trainer import TRL, peer_python
from prime_core.errors import FatalError, UnavailableError
from prime_envs.registry import environment_for
from prime_trainer.config import load
from prime_trainer.local import Options, local_run, run_local
from prime_trainer.metrics import read_lines

PACKAGES = ("torch", "transformers")
MODEL = ROOT / "devnet" / "model"
SOURCE = ROOT / "docs" / "examples" / "run-local.toml"
SCRIPT = ROOT / "bench" / "researcher_trl.py"
PROBLEMS = 2048
WARM_UP = 2
"""First steps of a round that are not counted."""
ROUND_SECONDS = 900.0
PARTS = {
    "generate": ("generate",),
    "loss": ("plan", "collate", "forward_backward", "statistics"),
    "optimizer": ("optimizer",),
    "publish": ("snapshot",),
}
"""Our parts of a step, and the timings of metrics.jsonl that each consists of."""


@dataclass(frozen=True)
class Round:
    """One run of one program. Means over its counted steps: seconds of wall clock and CPU, seconds
    of each part, rows and tokens generated; `peak`: largest resident set in bytes."""

    wall: float
    cpu: float
    parts: dict[str, float]
    rows: float
    tokens: float
    peak: int


def run(quick: bool) -> list[Row]:
    """Every row of the table. Raises UnavailableError if TRL cannot be had or a program fails."""
    rounds, steps = (1, 4) if quick else (5, 12)
    python = peer_python()
    ours: list[Round] = []
    theirs: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="bench-researcher-") as name:
        root = Path(name)
        problems = write_problems(root / "problems.jsonl")
        for number in range(rounds):
            out = root / f"local-{number}"
            if number % 2 == 0:
                ours.append(our_round(out, steps))
            theirs.append(trl_round(python, root, problems, steps))
            if number % 2:
                ours.append(our_round(out, steps))
    return table(ours, theirs)


def write_problems(path: Path) -> Path:
    """Writes the run's problems for TRL, one JSON object a line, with its targets in turn. Raises
    FatalError if TRL would read other tokens than our prompts are."""
    from transformers import AutoTokenizer

    definition = local_run(SOURCE, MODEL)
    environment = environment_for(definition)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    assert definition.budgets is not None
    targets = definition.budgets.targets
    lines = []
    for index in range(PROBLEMS):
        problem, target = environment.problem(index), targets[index % len(targets)]
        prompt = environment.prompt_text(problem, target)
        if tokenizer(prompt)["input_ids"] != list(
            environment.prompt_tokens(problem, target, tokenizer)
        ):
            raise FatalError(f"TRL reads other tokens of the prompt {prompt!r} than the engine")
        lines.append(json.dumps({"prompt": prompt, "answer": problem.answer, "target": target}))
    path.write_text("\n".join(lines) + "\n")
    return path


def our_round(out: Path, steps: int) -> Round:
    """Runs `trainer local` for `steps` steps into the folder `out`."""
    words = [sys.executable, "-m", "bench.researcher", SOURCE, MODEL, out, steps]
    found = _last_line("trainer local", words, {})
    for step, line in zip(found["steps"], read_lines(out / "metrics.jsonl"), strict=True):
        seconds = line["seconds"]
        for part, names in PARTS.items():
            step[part] = sum(seconds[name] for name in names)
        step |= {"rows": line["generated_rows"], "tokens": line["output_tokens"]}
    return _round(found, tuple(PARTS))


def trl_round(python: Path, root: Path, problems: Path, steps: int) -> Round:
    """Runs TRL's script for `steps` steps; `root`: folder for its caches."""
    words = [python, ROOT / "bench" / "researcher_peer.py", SCRIPT, MODEL, problems, steps]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "hf"), "TMPDIR": str(root)}
    return _round(_last_line("TRL's script", words, quiet), ("generate", "loss", "optimizer"))


def _last_line(name: str, words: Sequence[object], more: dict[str, str]) -> dict[str, Any]:
    """The JSON object that a program prints last. Raises UnavailableError if it fails."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [str(word) for word in words], cwd=ROOT, env={**os.environ, **one, **more},
        capture_output=True, text=True, check=False, timeout=ROUND_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise UnavailableError(f"{name} failed: {done.stderr[-800:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _round(found: dict[str, Any], parts: Sequence[str]) -> Round:
    steps = found["steps"]
    counted, last = steps[WARM_UP:], steps[WARM_UP - 1]

    def mean(name: str) -> float:
        return statistics.fmean(step[name] for step in counted)

    return Round(
        wall=(counted[-1]["wall"] - last["wall"]) / len(counted),
        cpu=(counted[-1]["cpu"] - last["cpu"]) / len(counted),
        parts={part: mean(part) for part in parts},
        rows=mean("rows"),
        tokens=mean("tokens"),
        peak=found["peak"],
    )


def table(ours: Sequence[Round], theirs: Sequence[Round]) -> list[Row]:
    """The rows: medians over rounds; ratios are those of each round's pair."""
    name = f"TRL {TRL} GRPOTrainer"

    def middle(of: Callable[[Round], float], unit: str, row: str) -> Row:
        mine, peers = (statistics.median(map(of, some)) for some in (ours, theirs))
        return Row(row, mine, unit, peer=peers, peer_name=name)

    def ratio(of: Callable[[Round], float]) -> float:
        """TRL's value over ours."""
        return statistics.median(of(b) / of(a) for a, b in zip(ours, theirs, strict=True))

    size = f"{ours[0].rows:.0f} rows a step, float32, one thread each, median of {len(ours)} rounds"
    publish = statistics.median(one.parts["publish"] for one in ours)
    return [
        Row("step_ratio_vs_trl", ratio(lambda r: r.wall), "TRL's time over ours", 1.0, "higher"),
        Row("step_cpu_ratio_vs_trl", ratio(lambda r: r.cpu), "TRL's CPU time over ours"),
        Row("token_ratio_vs_trl", ratio(lambda r: r.wall / r.tokens),
            "TRL's time a generated token over ours"),
        middle(lambda r: r.wall, f"s a step; {size}", "step_s"),
        middle(lambda r: r.cpu, f"CPU s a step; {size}", "step_cpu_s"),
        middle(lambda r: r.parts["generate"], f"s a step; {size}", "generate_s"),
        middle(lambda r: r.parts["loss"], f"s a step; {size}", "loss_s"),
        middle(lambda r: r.parts["optimizer"], f"s a step; {size}", "optimizer_s"),
        Row("publish_s", publish, f"s a step; {size}"),
        middle(lambda r: r.tokens, f"generated tokens a step; {size}", "tokens_step"),
        middle(lambda r: r.peak / 1e6, "MB", "peak_mb"),
        Row("memory_ratio_vs_trl", 1 / ratio(lambda r: r.peak), "our peak over TRL's", 1.1),
        Row("user_lines", toml_lines(SOURCE) + toml_lines(SOURCE.with_suffix(".trainer.toml")),
            "lines", 40, peer=python_lines(SCRIPT),
            peer_name=f"{name}, {python_lines(SCRIPT, 'reward')} of them the task's reward"),
    ]  # fmt: skip


def toml_lines(path: Path) -> int:
    """Lines of a TOML file that are neither blank nor a comment."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def python_lines(path: Path, function: str = "") -> int:
    """Lines of a Python file, or of one of its functions, that are neither blank nor a comment nor
    of a docstring."""
    text = path.read_text()
    tree = ast.parse(text)
    nodes = [node for node in tree.body if getattr(node, "name", None) == function or not function]
    inside = {line for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = [line.strip() for line in text.splitlines()]
    return sum(bool(lines[at - 1]) and not lines[at - 1].startswith("#") for at in inside)


def main() -> None:
    """Runs `trainer local` and notes the clocks at the end of each step: `python -m
    bench.researcher RUN.toml MODEL OUT STEPS`.

    The last line is one JSON object: `steps`, with `wall` and `cpu` (seconds) of each, and `peak`,
    the largest resident set in bytes.
    """
    source, model, out, steps = sys.argv[1:]
    marks: list[dict[str, float]] = []

    def say(line: str) -> None:
        print(line, flush=True)
        if line.startswith("step "):
            marks.append({"wall": time.perf_counter(), "cpu": time.process_time()})

    flags = {"model": Path(model), "data": Path(out), "steps": int(steps)}
    settings = load(flags, Path(source).with_suffix(".trainer.toml"))
    run_local(Path(source), settings, Options(threads=1, evaluate_every=0), threading.Event(), say)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"steps": marks, "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
