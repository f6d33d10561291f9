"""The trainer compared with its peers: packing, overhead, tokens a second against TRL, ranks.

packing   INTELLECT-2's TARGET-LONG lengths, 4,096 samples, rows of 32K, 8 ranks
overhead  the whole loop (checkpoint, export, loading it once): what is left of a step without
          forward, backward and optimizer; waiting for data left out, steps of a second or more
tokens/s  loss, backward and optimizer on identical completions, ours and TRL's in turn, one
          thread each, medians
ranks     the gradient of one batch on 1, 2 and 4 ranks (FSDP2, gloo)
publish   1 GB of bf16 weights on 2 ranks, from the sharded fp32 weights to the policy's files and
          its delta, against one memcpy of the same bytes
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.form import ROOT, Row
from bench.trainer_parts import (
    LocalTrainer,
    batch_of,
    bench_model,
    bench_run,
    bench_settings,
    published_lengths,
    random_rows,
)
from prime_core.errors import UnavailableError
from prime_trainer.advantages import judge
from prime_trainer.learner import Learner, groups_of, make_learner, train_step
from prime_trainer.metrics import Stopwatch
from prime_trainer.observe import COMPUTE
from prime_trainer.packing import plan, quality
from prime_trainer.parallel import World, joined_world

PACKAGES = ("torch", "transformers")
PEER = ROOT / "var" / "bench" / "trl"
TRL = "1.16.0"
GROUPS, SAMPLES, SCALE, VOCABULARY = 4, 8, 1 / 32, 2048
MICRO_ROWS = 4
DATA_WAITS = ("wait_batch", "share")


def run(quick: bool) -> list[Row]:
    """Every row of the table. Raises UnavailableError if the peer cannot be had."""
    rows = packing(quick)
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as name:
        root = Path(name)
        model = bench_model(
            root / "model", hidden=256, layers=4, vocabulary=VOCABULARY, positions=4096
        )
        with joined_world() as world:
            rows += overhead(model, root, world, 3 if quick else 6)
            rows += against_trl(model, root, world, 3 if quick else 5)
        rows += ranks(root, (2,) if quick else (2, 4))
        rows += publication(root / "publication", 1 << 26 if quick else 10**9)
    return rows


def packing(quick: bool) -> list[Row]:
    """The planner alone."""
    samples, row_tokens, machines = (1024, 32_768, 4) if quick else (4096, 32_768, 8)
    fills, imbalances, locksteps, speeds = [], [], [], []
    for seed in range(5):
        lengths = [p + o for p, o in published_lengths(samples, seed)]
        start = time.perf_counter()
        found = plan(lengths, ranks=machines, row_tokens=row_tokens, micro_tokens=row_tokens)
        speeds.append(sum(lengths) / (time.perf_counter() - start) / 1e6)
        used = quality(found, lengths)
        fills.append(used.fill)
        imbalances.append(used.imbalance)
        locksteps.append(used.lockstep)
    return [
        Row("packing_fill", min(fills), "of row", 0.97, "higher"),
        Row("rank_imbalance", max(imbalances), "over mean", 0.02),
        Row("rank_lockstep", max(locksteps), "over mean"),
        Row("packer_mtok_s", statistics.median(speeds), "Mtok/s", 20, "higher"),
    ]


def overhead(model: Path, root: Path, world: World, steps: int) -> list[Row]:
    """The whole loop over batches at hand."""
    learner = small_learner(model, root / "loop", world, steps=steps)
    lengths = published_lengths(GROUPS * SAMPLES, 1, SCALE)
    trainer = LocalTrainer(learner, random_rows(lengths, SAMPLES, VOCABULARY, 2))
    trainer.run()
    shares, seconds = [], []
    for line in trainer.lines[1:]:  # the first step also warms up
        waited = sum(line["seconds"].get(name, 0.0) for name in DATA_WAITS)
        whole = sum(line["seconds"].values()) - waited
        shares.append(1.0 - sum(line["seconds"].get(name, 0.0) for name in COMPUTE) / whole)
        seconds.append(whole)
    return [
        Row("overhead_share", statistics.median(shares), "of step", 0.05),
        Row("overhead_step_s", statistics.median(seconds), "s", 1.0, "higher"),
    ]


def small_learner(model: Path, data: Path, world: World, **changes: object) -> Learner:
    """A learner whose steps take a second or more on one core."""
    data.mkdir(parents=True, exist_ok=True)
    run_ = bench_run(groups=GROUPS, samples=SAMPLES)
    settings = bench_settings(model, data, row_tokens=1024, micro_tokens=1024, **changes)
    return make_learner(run_, settings, world)


def against_trl(model: Path, root: Path, world: World, rounds: int) -> list[Row]:
    """Ours and TRL's, in turn."""
    lengths = published_lengths(GROUPS * SAMPLES, 7, SCALE)
    rows = random_rows(lengths, SAMPLES, 64, 8)
    learner = small_learner(model, root / "ours", world)
    judged = judge(groups_of(rows, SAMPLES), learner.objective)
    work = {
        "samples": SAMPLES,
        "micro_rows": MICRO_ROWS,
        "max_output_tokens": max(o for _, o in lengths),
        "rows": [
            {
                "prompt": list(row.prompt_tokens),
                "output": list(row.output_tokens),
                "logprobs": list(row.logprobs),
                "advantage": advantage,
            }
            for row, advantage in zip(rows, judged.advantages, strict=True)
        ],
    }
    file = root / "rows.json"
    file.write_text(json.dumps(work))
    tokens = sum(len(r.prompt_tokens) + len(r.output_tokens) for r in rows)
    times: dict[str, list[float]] = {"ours": [], "padded": [], "trimmed": []}
    with subprocess.Popen(
        [str(peer_python()), str(ROOT / "bench" / "trl_worker.py"), str(model), str(file)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as peer:  # fmt: skip
        try:
            _expect(peer)
            for number in range(rounds + 1):
                start = time.perf_counter()
                train_step(learner, batch_of(rows, SAMPLES, number), Stopwatch())
                mine = time.perf_counter() - start
                theirs = {kind: float(_ask(peer, f"step {kind}")) for kind in ("padded", "trimmed")}
                if number:  # the first round warms up
                    times["ours"].append(mine)
                    for kind, value in theirs.items():
                        times[kind].append(value)
        finally:
            peer.kill()
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    name = f"TRL {TRL} GRPOTrainer"
    speed = {kind: tokens / value for kind, value in medians.items()}
    return [
        Row("tokens_s", speed["ours"], "tok/s", peer=speed["padded"], peer_name=name),
        Row("tokens_s_ratio", speed["ours"] / speed["padded"], "times", 1.5, "higher"),
        Row("tokens_s_ratio_trimmed", speed["ours"] / speed["trimmed"], "times",
            peer=speed["trimmed"], peer_name=f"{name}, micro-batches trimmed for it"),
    ]  # fmt: skip


def _expect(peer: subprocess.Popen[str]) -> str:
    assert peer.stdout is not None
    for line in peer.stdout:
        if line.strip() == "ready" or _number(line):
            return line.strip()
    assert peer.stderr is not None
    raise UnavailableError(f"TRL's trainer did not answer: {peer.stderr.read()[-800:]}")


def _number(line: str) -> bool:
    try:
        float(line)
    except ValueError:
        return False
    return True


def _ask(peer: subprocess.Popen[str], words: str) -> str:
    assert peer.stdin is not None
    peer.stdin.write(words + "\n")
    peer.stdin.flush()
    return _expect(peer)


def peer_python() -> Path:
    """TRL's own environment under var/bench, made at the first call; torch and transformers are
    this environment's, so that both sides run the same kernels. Raises UnavailableError."""
    python = PEER / "bin" / "python"
    if not _imports(python):
        PEER.parent.mkdir(parents=True, exist_ok=True)
        ours = next(p for p in sys.path if p.endswith("site-packages"))
        for command in (
            [sys.executable, "-m", "venv", str(PEER)],
            [str(python), "-c", "import sysconfig, pathlib; "
             f"pathlib.Path(sysconfig.get_path('purelib'), 'base.pth').write_text({ours!r})"],
            [str(python), "-m", "pip", "install", "--quiet", f"trl=={TRL}"],
        ):  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UnavailableError(
                    f"TRL {TRL} could not be installed into {PEER}: {done.stderr[-400:]}"
                )
    return python


def _imports(python: Path) -> bool:
    if not python.exists():
        return False
    words = [str(python), "-c", f"import trl; assert trl.__version__ == {TRL!r}"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def ranks(root: Path, sizes: tuple[int, ...]) -> list[Row]:
    """The gradient's relative difference from one rank's."""
    model = bench_model(root / "tiny", hidden=64, layers=2, vocabulary=128, positions=1024)
    found = []
    for width, bar in (("fp32", 1e-4), ("fp64", 1e-9)):
        alone = _gradient(1, model, root, width)
        worst = 0.0
        for size in sizes:
            there = _gradient(size, model, root, width)
            worst = max(worst, _difference(there, alone))
        found.append(Row(f"fsdp2_rel_diff_{width}", worst, "of norm", bar))
    return found


def publication(root: Path, size: int) -> list[Row]:
    """Seconds to publish about `size` bytes from two ranks, and the ratio to a memcpy of them."""
    root.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "bench.trainer_publish", str(root), str(size)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UnavailableError(f"torchrun on 2 ranks failed: {done.stderr[-800:]}")
    found = json.loads((root / "seconds.json").read_text())
    whole = found["take"] + found["publish"]
    return [
        Row("publish_snapshot_s", found["take"], "s"),
        Row("publish_s", whole, "s"),
        Row("publish_over_memcpy", whole / found["memcpy"], "times"),
        Row("publish_delta_share", found["delta_bytes"] / size, "of the weights"),
    ]


def _gradient(size: int, model: Path, root: Path, width: str) -> dict[str, Any]:
    out = root / f"gradient-{size}-{width}.pt"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(size), "-m", "bench.trainer_ranks", str(model), str(out), width],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise UnavailableError(f"torchrun on {size} ranks failed: {done.stderr[-800:]}")
    gradient: dict[str, Any] = torch.load(out, weights_only=True)
    return gradient


def _difference(one: dict[str, Any], two: dict[str, Any]) -> float:
    apart = sum(float((one[k].double() - two[k].double()).square().sum()) for k in two)
    whole = sum(float(two[k].double().square().sum()) for k in two)
    return float((apart / whole) ** 0.5)
