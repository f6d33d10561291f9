"""One batch's gradient on as many ranks as torchrun starts: MODEL OUT [fp64]. Run by
`bench trainer` on one, two and four."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench.trainer_parts import (
    bench_run,
    bench_settings,
    double_policy,
    published_lengths,
    random_rows,
)
from prime_trainer.learner import backward, make_learner
from prime_trainer.parallel import joined_world

GROUPS, SAMPLES = 6, 4


def main() -> None:
    model, out, double = Path(sys.argv[1]), Path(sys.argv[2]), "fp64" in sys.argv[3:]
    run = bench_run(groups=GROUPS, samples=SAMPLES)
    lengths = published_lengths(GROUPS * SAMPLES, 3, 1 / 100)
    with joined_world() as world:
        settings = bench_settings(model, out.parent, row_tokens=256, micro_tokens=256)
        learner = make_learner(run, settings, world)
        if double:
            learner = replace(learner, policy=double_policy(model, world))
        rows = random_rows(lengths, SAMPLES, 64, 5)
        backward(learner, rows)
        found = {}
        for name, parameter in learner.policy.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[name] = whole.detach().clone()
        if world.leads:
            torch.save(found, out)


if __name__ == "__main__":
    main()
