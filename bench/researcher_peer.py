"""Runs a user's TRL script with a clock around the parts of its steps (`bench researcher`).

    python researcher_peer.py SCRIPT ARGUMENT…  → as its last line, one JSON object:
        steps    one object a step: wall and cpu (clocks at its end, seconds), the seconds of its
                 parts, and its rows and tokens
        peak     the largest resident set, bytes

The interpreter is that of TRL's own environment. The script itself is not changed.
"""

from __future__ import annotations

import json
import resource
import runpy
import sys
import time
from typing import Any

from transformers import TrainerCallback
from trl import GRPOTrainer

steps: list[dict[str, float]] = []
current: dict[str, float] = {"generate": 0.0, "loss": 0.0}


class Clock(TrainerCallback):
    """Notes the end of each step. All after the last backward pass is the optimizer's part."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The step is done."""
        now = time.perf_counter()
        current["optimizer"] = now - current["backward_end"]
        steps.append({**current, "wall": now, "cpu": time.process_time()})
        current["generate"] = current["loss"] = 0.0


class Timed(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with a clock."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.add_callback(Clock())

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        current["generate"] += time.perf_counter() - start
        current["rows"] = len(made["completion_ids"])
        current["tokens"] = int(made["completion_mask"].sum())
        current["prompt_tokens"] = int(made["prompt_mask"].sum())
        return made

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Loss and backward; the generation that it may begin with counts apart."""
        before, start = current["generate"], time.perf_counter()
        loss = super().training_step(*arguments, **named)
        current["backward_end"] = time.perf_counter()
        current["loss"] += current["backward_end"] - start - (current["generate"] - before)
        return loss


def main() -> None:
    import trl

    trl.GRPOTrainer = Timed
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"steps": steps, "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
