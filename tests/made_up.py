"""A fabricated rollout row, for files that are read but not verified."""

from __future__ import annotations

import numpy as np

from prime_verify.rollout_file import FileRow


def made_up_row(number: int, tokens: int = 5) -> FileRow:
    """Row `number` in groups of four, well formed, with `tokens` output tokens."""
    return FileRow(
        problem_id=f"problem-{number}",
        group=number // 4,
        sample=number % 4,
        prompt_tokens=(1, 2, 3),
        output_tokens=tuple(range(tokens)),
        logprobs=np.linspace(-3, -0.1, tokens, dtype=np.float32),
        target_length=6,
        finish_reason="end",
        policy_version=3,
        reward=0.25,
        proofs=b"\x01\x02" * 130,
        sketch=bytes(range(128)),
    )
