"""Detects rows that repeat earlier ones: the same prompt and exactly the same answer, with other
noise.

A row is identified by its *mark*, a digest of its prompt and output tokens; the marks of every
accepted file are stored. Two files share a row if, according to the log-probabilities of at least
one of them, the answer had a probability below COINCIDENCE. Short or predictable answers recur
honestly and are ignored. A file with a row that another file has is replayed completely. If that
finds no fault, the other file is replayed too, independent of its verdict (manager/reviews.py),
because either may be the copy. The repetition itself accuses no one; only the replay does. Each
lease has its own noise, so a copied answer is not what its seed gives, and anyone can see that
without our records. An honest coincidence passes the replay and costs a prefill.

Not detected: answers changed by one token, and answers whose probability both files overstate (if
that row was not replayed).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from prime_verify.rollout_file import FileRow

COINCIDENCE = 1e-9
"""An answer less probable than this does not occur twice by chance."""
Seen = Callable[[Mapping[str, bool]], Collection[str]]
"""Returns those of the given marks (as from `marks`) that belong to other files."""


def mark(row: FileRow) -> str:
    """32 hex digits, equal for two rows if prompt and output tokens are the same."""
    digest = hashlib.sha256(b"prime/row-mark/v1")
    for tokens in (row.prompt_tokens, row.output_tokens):
        digest.update(len(tokens).to_bytes(4, "big") + np.array(tokens, dtype=">u4").tobytes())
    return digest.hexdigest()[:32]


def improbable(row: FileRow) -> bool:
    """Whether the row's claimed answer is too improbable to be drawn twice."""
    return float(row.logprobs.astype(np.float64).sum()) < math.log(COINCIDENCE)


def marks(rows: Sequence[FileRow]) -> dict[str, bool]:
    """The marks to store for a file: mark of each row → whether a row with it claims an answer too
    improbable to be drawn twice."""
    found: dict[str, bool] = {}
    for row in rows:
        name = mark(row)
        found[name] = found.get(name, False) or improbable(row)
    return found


def repeated(rows: Sequence[FileRow], seen: Seen) -> tuple[int, ...]:
    """Numbers of the rows that another file has, or that occur twice in this one although one of
    them claims an improbable answer."""
    names, claims = [mark(row) for row in rows], marks(rows)
    elsewhere = frozenset(seen(claims))
    twice = {name for name, times in Counter(names).items() if times > 1 and claims[name]}
    return tuple(n for n, name in enumerate(names) if name in elsewhere or name in twice)
