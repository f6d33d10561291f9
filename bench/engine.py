"""What proofs, lease slots and new policies cost an engine: `python -m bench engine [--json]
[--quick]`.

With vLLM on a CPU (scripts/setup_vllm.sh) and SmolLM2-135M-Instruct, or with the devnet's model if
that is not installed; one thread. A GPU's shares differ: `make gpu` measures them.

Each part runs in a process of its own, under vLLM's interpreter or ours:

    python -m bench.engine PART ENGINE MODEL QUICK      → one JSON object on stdout

    proofs   CPU seconds of generation without states, with proofs, and of the proof pass
    slots    how full the batch is with one lease at a time, and with four
    swap     seconds from one policy to the next
    states   PART is "states:TOKENS": peak memory of the proofs of one row (ENGINE, MODEL unused)
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.form import ROOT, Row
from bench.honest_files import VLLM_PYTHON
from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_engine.base import Discard, GenerationRequest
from prime_engine.shared import EngineThread
from prime_verify.engines import load_engine
from prime_verify.proofs.windows import WindowReducer

PACKAGES = ("torch", "transformers", "numpy")
DEVNET = ROOT / "devnet" / "model"
LENGTHS = (4_096, 16_384, 32_768)
HIDDEN = 5120
"""The hidden size of a 32B model (QwQ-32B)."""
ROWS = 16
"""Rows of a lease, and of the batch."""
SLOTS = 4
POLICY = Digest("0x" + "00" * 32)


def a_key(row: int, window: int, tokens: Sequence[int]) -> bytes:
    """Any sketch key: its value costs nothing."""
    return bytes(32)


def requests(count: int, tokens: int, first: int = 0) -> list[GenerationRequest]:
    """Rows of exactly `tokens` tokens, if the engine has no end tokens."""
    return [GenerationRequest(tuple(range(5, 21)), tokens, first + n) for n in range(count)]


def endless(engine: Any) -> Any:
    """The engine without end tokens, so that every row has the length that is asked."""
    engine.end_tokens = frozenset()
    return engine


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def proofs(load: Callable[[], Any], quick: bool) -> dict[str, float]:
    """Medians over rounds that alternate."""
    engine = endless(load())
    asked = requests(ROWS, 33 if quick else 128)
    without, proved, passes = [], [], []
    for turn in range(3 if quick else 4):
        bare = cpu(lambda: engine.generate(asked, 1.0, Discard()))
        made: list[Any] = []
        full = cpu(lambda: made.extend(engine.generate(asked, 1.0, WindowReducer(a_key))))  # noqa: B023
        if turn:  # the first warms up
            without.append(bare)
            proved.append(full)
        if turn and engine.name.startswith("plain"):
            parts = [(r.prompt_tokens, g.output_tokens) for r, g in zip(asked, made, strict=True)]
            passes.append(
                cpu(lambda: [list(engine.proof_pass(*part, 1.0)) for part in parts])  # noqa: B023
            )
    shares = [1 - bare / full for bare, full in zip(without, proved, strict=True)]
    found = {
        "seconds": statistics.median(proved),
        "proof_share": statistics.median(shares),
        "tokens": float(sum(request.max_output_tokens for request in asked)),
    }
    if passes:
        each = [one / (one + full) for one, full in zip(passes, proved, strict=True)]
        found["prefill_share"] = statistics.median(each)
    return found


class Counted:
    """The rows of each step of a vLLM engine's batch."""

    def __init__(self, engine: Any) -> None:
        self.rows: list[int] = []
        recorder = engine._recorder
        step = recorder.step

        def counted(logits: torch.Tensor) -> torch.Tensor:
            if recorder._batch:
                self.rows.append(len(logits))
            made: torch.Tensor = step(logits)
            return made

        recorder.step = counted

    def full_share(self) -> float:
        """Share of the token-steps that were made with a full batch."""
        return sum(n for n in self.rows if n == ROWS) / sum(self.rows)

    def filled(self) -> float:
        """Rows of the mean step over those of a full batch."""
        return sum(self.rows) / (ROWS * len(self.rows))


def long_tailed(leases: int) -> list[list[int]]:
    """Tokens of each row of each lease: log-normal, most rows short and a few long."""
    rng = random.Random(7)
    return [
        [min(100, max(2, round(16 * math.exp(rng.gauss(0.0, 0.8))))) for _ in range(ROWS)]
        for _ in range(leases)
    ]


def slots(load: Callable[[], Any], quick: bool) -> dict[str, float]:
    """Leases of 16 rows over a batch of 16: one after another, then up to four at once, each asked
    for when the batch has room (worker.loop)."""
    lengths = long_tailed(6 if quick else 24)
    found: dict[str, float] = {}
    for most in (1, SLOTS):
        engine = endless(load())
        counted = Counted(engine)
        thread = EngineThread(lambda version, digest, engine=engine: engine)  # type: ignore[misc]
        held: set[int] = set()

        def job(number: int) -> None:
            with thread.using(0, POLICY) as shared:  # noqa: B023
                rows = [
                    GenerationRequest(tuple(range(5, 13)), tokens, 100 * number + n)
                    for n, tokens in enumerate(lengths[number])
                ]
                shared.generate(rows, 1.0, WindowReducer(a_key))
            held.discard(number)  # noqa: B023
            thread.nudge()  # noqa: B023

        def room(most: int = most) -> bool:
            return not held or (len(held) < most and thread.has_room())  # noqa: B023

        jobs = []
        for number in range(len(lengths)):
            if not thread.wait_for(room, 600):
                raise RuntimeError("no lease ended within ten minutes")
            held.add(number)
            jobs.append(threading.Thread(target=job, args=(number,)))
            jobs[-1].start()
        for one in jobs:
            one.join()
        thread.stop()
        engine.close()
        found |= {
            f"full_{most}": counted.full_share(),
            f"filled_{most}": counted.filled(),
            f"steps_{most}": float(len(counted.rows)),
        }
    return found


def swap(load: Callable[[], Any], quick: bool) -> dict[str, float]:
    """Seconds to close an engine and load the next policy, as a worker does on CPUs."""
    engine, seconds = load(), []
    for _ in range(1 if quick else 3):
        start = time.perf_counter()
        engine.close()
        del engine
        engine = load()
        seconds.append(time.perf_counter() - start)
    engine.close()
    return {"seconds": statistics.median(seconds)}


def states(tokens: int) -> dict[str, float]:
    """Peak memory that the proofs of one row of `tokens` synthetic states need, in MiB."""
    generator = torch.Generator().manual_seed(1)
    some = torch.randn((7, 1, HIDDEN), generator=generator).to(torch.bfloat16)
    one = torch.tensor([3])
    for part in (33, tokens):  # the first loads the libraries
        reducer = WindowReducer(a_key)
        if part == tokens:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for place in range(part):
            reducer.step([0], [place], one, some[place % 7])
        reducer.end([0])
    return {"mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def model_folder(quick: bool) -> Path:
    """The model of the timed rows."""
    home = os.environ.get("PRIME_SMOLLM_HOME", "")
    return Path(home) if home and not quick and Path(home).is_dir() else DEVNET


def asked(part: str, engine: str, model: Path, quick: bool) -> dict[str, float]:
    """Runs a part in a process of its own and returns its result. Raises UnavailableError if the
    process fails."""
    python = VLLM_PYTHON if engine == "vllm" else Path(sys.executable)
    ours = os.pathsep.join((str(ROOT), str(ROOT / "protocol")))
    done = subprocess.run(
        [str(python), "-m", "bench.engine", part, engine, str(model), str(int(quick))],
        capture_output=True, text=True, check=False, timeout=3600,
        env={**os.environ, "PYTHONPATH": ours},
    )  # fmt: skip
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnavailableError(f"{part} with {engine}: {last[:300]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run(quick: bool) -> list[Row]:
    """All rows. Raises UnavailableError if vLLM is not installed."""
    if not VLLM_PYTHON.exists():
        raise UnavailableError("vLLM is not installed here: scripts/setup_vllm.sh")
    model = model_folder(quick)
    vllm, plain = (asked("proofs", engine, model, quick) for engine in ("vllm", "plain"))
    slots = asked("slots", "vllm", DEVNET, quick)
    rows = [
        Row("proof_overhead_share", vllm["proof_share"],
            f"of generation, vLLM, {model.name}", 0.05),
        Row("proof_overhead_share_plain", plain["proof_share"], "of generation, plain engine"),
        Row("proof_prefill_share", plain["prefill_share"],
            "of generation and proof pass, exact class, plain engine"),
        Row("generation_us_token", vllm["seconds"] / vllm["tokens"] * 1e6, "CPU µs, vLLM"),
        Row("slots_utilisation", slots["full_4"],
            "of token-steps with a full batch, four leases at once", 0.9, "higher",
            slots["full_1"], "one lease at a time"),
        Row("slots_filled", slots["filled_4"], "rows a step over a full batch's", None, "higher",
            slots["filled_1"], "one lease at a time"),
        Row("slots_steps", slots["steps_4"], "steps for the same leases", None, "lower",
            slots["steps_1"], "one lease at a time"),
        Row("swap_s_cpu", asked("swap", "vllm", model, quick)["seconds"],
            f"s to the next policy, vLLM on a CPU, {model.name}"),
        Row("swap_s_cpu_plain", asked("swap", "plain", model, quick)["seconds"],
            f"s to the next policy, plain engine, {model.name}"),
    ]  # fmt: skip
    for tokens in LENGTHS[: 1 if quick else None]:
        peak = asked(f"states:{tokens}", "plain", DEVNET, quick)["mb"]
        bar = 256.0 if tokens == LENGTHS[-1] else None
        rows.append(
            Row(f"states_peak_mb_{tokens // 1024}k", peak, "MiB, hidden size 5,120, one row", bar)
        )
    return rows


def main() -> None:
    part, engine, model, quick = sys.argv[1:]
    torch.set_num_threads(1)
    if part.startswith("states:"):
        found = states(int(part.partition(":")[2]))
    else:
        load: Callable[[], Any] = partial(
            load_engine, Path(model), engine=engine, batch_rows=ROWS, threads=1
        )
        found = {"proofs": proofs, "slots": slots, "swap": swap}[part](load, quick == "1")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
