"""Encoding of rank 0's messages to the other ranks: a batch, why one is skipped, or a stop.

The format cannot contain code, and data that does not match its header is an error.

    header's length (8 bytes) │ header (JSON) │ tokens (int32) │ log-probabilities (float32)

The header has each row's fields and its numbers of prompt and output tokens.
"""

from __future__ import annotations

import json
from array import array
from typing import Any, cast

from prime_core.errors import FatalError
from prime_core.ids import Digest, Step
from prime_core.proof_form import FinishReason
from prime_core.rollout import Rollout
from prime_trainer.data import BadBatch, TrainingBatch

Message = TrainingBatch | BadBatch | None
"""A message; None means that the run stops."""


def encode(message: Message) -> bytes:
    """Encodes a message; `decode` restores it exactly."""
    if message is None:
        return _framed({"kind": "stop"}, b"")
    if isinstance(message, BadBatch):
        return _framed({"kind": "bad", "step": message.step, "why": message.why}, b"")
    rows = message.rollouts
    header = {
        "kind": "batch",
        "step": message.step,
        "digest": message.digest,
        "groups": [len(group) for group in message.groups],
        "keys": message.keys,
        "seen": message.seen,
        "alike": message.alike,
        "rows": [
            [row.problem_id, row.group, row.sample, row.target_length, row.finish_reason,
             row.policy_version, row.reward, len(row.prompt_tokens), len(row.output_tokens),
             row.spans]
            for row in rows
        ],
    }  # fmt: skip
    body = [
        array("i", part).tobytes()
        for row in rows
        for part in (row.prompt_tokens, row.output_tokens)
    ]
    body += [array("f", row.logprobs).tobytes() for row in rows]
    return _framed(header, b"".join(body))


def decode(data: bytes) -> Message:
    """Decodes a message of rank 0. Raises FatalError if it is malformed."""
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        kind = header["kind"]
        if kind == "stop":
            return None
        if kind == "bad":
            return BadBatch(Step(int(header["step"])), str(header["why"]))
        if kind != "batch":
            raise ValueError(f"{kind!r} is no kind of message")
        return _batch(header, data[8 + size :])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FatalError(f"rank 0 sent a batch that cannot be read: {error}") from error


def _framed(header: dict[str, Any], body: bytes) -> bytes:
    words = json.dumps(header, allow_nan=False).encode()
    return len(words).to_bytes(8, "little") + words + body


def _batch(header: dict[str, Any], body: bytes) -> TrainingBatch:
    prompts = sum(int(row[7]) for row in header["rows"])
    outputs = sum(int(row[8]) for row in header["rows"])
    middle = 4 * (prompts + outputs)
    if len(body) != middle + 4 * outputs:
        raise ValueError(f"{len(body)} bytes of tokens for {prompts} + {outputs}")
    rows: list[Rollout] = []
    at, end = 0, middle
    for (
        name, group, sample, target, reason, version, reward, prompt, output, spans
    ) in header["rows"]:  # fmt: skip
        cut, stop = at + 4 * prompt, at + 4 * (prompt + output)
        rows.append(
            Rollout(
                problem_id=name,
                group=group,
                sample=sample,
                prompt_tokens=array("i", body[at:cut]),
                output_tokens=array("i", body[cut:stop]),
                logprobs=array("f", body[end : end + 4 * output]),
                target_length=target,
                finish_reason=cast(FinishReason, reason),
                policy_version=version,
                reward=reward,
                spans=tuple(spans),
            )
        )
        at, end = stop, end + 4 * output
    if sum(header["groups"]) != len(rows):
        raise ValueError(f"groups of {sum(header['groups'])} rows, but {len(rows)} came")
    each = iter(rows)
    groups = tuple(tuple(next(each) for _ in range(size)) for size in header["groups"])
    keys = tuple((Digest(sha256), int(number)) for sha256, number in header["keys"])
    return TrainingBatch(
        Step(header["step"]), Digest(header["digest"]), groups, keys,
        int(header["seen"]), int(header["alike"]),
    )  # fmt: skip
