"""Runs `trainer local` as its command does and notes the clocks at the end of each step
(`bench researcher`).

    python -m bench.researcher_worker RUN.toml MODEL OUT STEPS  → as its last line, one JSON object:
        steps    one object a step: wall and cpu (clocks at its end, seconds)
        peak     the largest resident set, bytes
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from pathlib import Path

from prime_trainer.config import load
from prime_trainer.local import Options, run_local


def main() -> None:
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
