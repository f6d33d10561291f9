"""Rows that repeat earlier ones: the same prompt and the very same answer, under other noise.

A row is known by its *mark*, a digest of its prompt and output tokens. Of an accepted file those
rows are remembered whose answer had, by its own log-probabilities, a chance below COINCIDENCE:
short or foreseeable answers honestly come again, and are never looked for. A file with a row that
was seen before is replayed whole. That is all: the repetition accuses nobody, the replay does. Each
lease has noise of its own, so a copied answer is not what its seed gives, and anybody can see so
without our records; an honest coincidence replays without fault and costs a prefill.

Not found: answers whose chance their first author overstated (if nobody replayed that row), those
changed by a token, and a copy that was accepted before its original (if nobody replayed that row).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from protocol.verification.rollout_file import FileRow

COINCIDENCE = 1e-9
"""An answer less probable than this does not come a second time by chance."""
Seen = Callable[[Sequence[str]], Collection[str]]
"""Which of these marks belong to other files."""


def mark(row: FileRow) -> str:
    """32 hex digits that two rows share if prompt and output tokens are the same."""
    digest = hashlib.sha256(b"prime/row-mark/v1")
    for tokens in (row.prompt_tokens, row.output_tokens):
        digest.update(len(tokens).to_bytes(4, "big") + np.array(tokens, dtype=">u4").tobytes())
    return digest.hexdigest()[:32]


def improbable(row: FileRow) -> bool:
    """Whether the row claims an answer that nobody draws twice."""
    return float(row.logprobs.astype(np.float64).sum()) < math.log(COINCIDENCE)


def memorable(rows: Sequence[FileRow]) -> tuple[str, ...]:
    """The marks to remember of a file, each once, in order."""
    return tuple(dict.fromkeys(mark(row) for row in rows if improbable(row)))


def repeated(rows: Sequence[FileRow], seen: Seen) -> tuple[int, ...]:
    """Numbers of the rows that were seen in another file, or occur twice in this one although one
    of them claims an improbable answer."""
    marks = [mark(row) for row in rows]
    elsewhere = frozenset(seen(marks))
    often = {name for name, times in Counter(marks).items() if times > 1}
    twice = often.intersection(memorable(rows))
    return tuple(n for n, name in enumerate(marks) if name in elsewhere or name in twice)
