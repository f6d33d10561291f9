"""Proofs made without the states: each known way to pass TOPLOC's published thresholds.

A forger here is given more than one could know: the typical magnitudes of the very windows to be
proven, and beside the forged proof the honest sketch, tokens and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.honest import Bench
from prime_core.errors import MalformedError
from prime_core.verdict import Outcome
from prime_verify import build
from prime_verify.build import PlannedRow
from prime_verify.canaries.forgeries import FORGERIES, Forge, forged_rows
from prime_verify.proofs import activations
from prime_verify.proofs.thresholds import FLOORS
from prime_verify.rollout_file import FileRow


def passes(proof: bytes, window: NDArray[np.uint16]) -> bool:
    """Whether a proof passes as one of float32 states, by its window alone."""
    try:
        decoded = activations.decode(proof, len(window))
    except MalformedError:
        return False
    match = activations.verify([decoded], [window])
    return bool(
        match.exponent[0] <= FLOORS["exponent"]
        and match.sign[0] <= FLOORS["sign"]
        and match.mantissa[0] <= FLOORS["mantissa"]
    )


def accepted_on_model(files: int) -> tuple[int, int]:
    """(accepted, tried): whole files of the trained model with outlier dimensions, honest but for
    their proofs, through every check."""
    bench = Bench(max_output_tokens=96)
    accepted = 0
    for number in range(files):
        lease, plan = bench.lease(number)
        generations = build.generate_rows(plan, bench.run, bench.engine())
        states = [generation.states for generation in generations]
        for forge in FORGERIES.values():

            def change(
                rows: list[FileRow],
                plan: Sequence[PlannedRow],
                states: Sequence[NDArray[np.uint16]] = states,
                forge: Forge = forge,
            ) -> list[FileRow]:
                return forged_rows(rows, states, forge)

            made = bench.assemble(lease, plan, generations, bench.engine(), change)
            accepted += bench.judge(made).outcome is Outcome.ACCEPTED
    return accepted, files * len(FORGERIES)
