"""Rows that repeat earlier ones: the same prompt and the very same answer, under other noise.

A row is known by its *mark*, a digest of its prompt and output tokens, which is remembered of every
accepted file. Two files have a row in common if the answer had, by the log-probabilities of at
least one of them, a chance below COINCIDENCE: short or foreseeable answers honestly come again, and
are never looked for. A file with a row that another had is replayed whole; if no fault is found,
the other is, too, whatever was said of it (manager/reviews.py): either may be the copy. That
is all: the repetition accuses nobody, the replay does. Each lease has noise of its own, so a copied
answer is not what its seed gives, and anybody can see so without our records; an honest coincidence
replays without fault and costs a prefill.

Not found: answers changed by a token, and those whose chance both files overstate (if nobody
replayed that row).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from prime_verify.rollout_file import FileRow

COINCIDENCE = 1e-9
"""An answer less probable than this does not come a second time by chance."""
Seen = Callable[[Mapping[str, bool]], Collection[str]]
"""Which of these marks (as `marks` gives them) belong to other files."""


def mark(row: FileRow) -> str:
    """32 hex digits that two rows share if prompt and output tokens are the same."""
    digest = hashlib.sha256(b"prime/row-mark/v1")
    for tokens in (row.prompt_tokens, row.output_tokens):
        digest.update(len(tokens).to_bytes(4, "big") + np.array(tokens, dtype=">u4").tobytes())
    return digest.hexdigest()[:32]


def improbable(row: FileRow) -> bool:
    """Whether the row claims an answer that nobody draws twice."""
    return float(row.logprobs.astype(np.float64).sum()) < math.log(COINCIDENCE)


def marks(rows: Sequence[FileRow]) -> dict[str, bool]:
    """What a file is remembered by: the mark of each row → whether a row that has it claims an
    answer that nobody draws twice."""
    found: dict[str, bool] = {}
    for row in rows:
        name = mark(row)
        found[name] = found.get(name, False) or improbable(row)
    return found


def repeated(rows: Sequence[FileRow], seen: Seen) -> tuple[int, ...]:
    """Numbers of the rows that were seen in another file, or occur twice in this one although one
    of them claims an improbable answer."""
    names, claims = [mark(row) for row in rows], marks(rows)
    elsewhere = frozenset(seen(claims))
    twice = {name for name, times in Counter(names).items() if times > 1 and claims[name]}
    return tuple(n for n, name in enumerate(names) if name in elsewhere or name in twice)
