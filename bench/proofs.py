"""Cost and soundness of activation proofs: `python -m bench proofs [--json] [--quick]`.

One thread, hidden size 5120, 4,096 tokens, CPU time, medians of repeated runs. The peer (`toploc`
0.1.6) is represented by figures measured earlier, on another day, as its rows say. Forgeries and
malformed proofs are counted, not timed.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.form import Row
from protocol.core.errors import MalformedError
from protocol.core.rollout import PROOF_WINDOW
from protocol.proofs import activations
from protocol.proofs.sketch import float_to_bf16
from protocol.proofs.thresholds import FLOORS

EARLIER_BUILD_US, EARLIER_VERIFY_US = 33.5, 19.0
"""µs a token of toploc 0.1.6 on one CPU thread, H 5120 × 4,096 tokens, measured earlier."""
PACKAGES = ("numpy",)
Windows = list[NDArray[np.uint16]]


def _windows(tokens: int, hidden: int, seed: int) -> Windows:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((tokens, hidden), dtype=np.float32)
    values[:, rng.integers(0, hidden, 4)] *= 20  # outlier dimensions, as trained models have
    return activations.split_windows(float_to_bf16(values))


def _decode(proofs: Sequence[bytes], windows: Windows) -> list[activations.DecodedProof]:
    return [activations.decode(p, len(w)) for p, w in zip(proofs, windows, strict=True)]


def _median_us(work: Callable[[], object], tokens: int, repeats: int) -> float:
    """CPU time, so that a busy machine does not count."""
    work()
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return statistics.median(spent) / tokens * 1e6


def timing(hidden: int, tokens: int, repeats: int) -> list[Row]:
    """Build and verify, µs a token, and their ratio to the peer."""
    windows = _windows(tokens, hidden, 0)
    proofs = activations.build(windows)
    build = _median_us(lambda: activations.build(windows), tokens, repeats)
    verify = _median_us(
        lambda: activations.verify(_decode(proofs, windows), windows), tokens, repeats
    )
    name = "toploc 0.1.6, measured earlier"
    return [
        Row("build_us_token", build, "µs"),
        Row("verify_us_token", verify, "µs"),
        Row("build_ratio", EARLIER_BUILD_US / build, "×", 6, "higher", EARLIER_BUILD_US, name),
        Row("verify_ratio", EARLIER_VERIFY_US / verify, "×", 4, "higher", EARLIER_VERIFY_US, name),
    ]


def _passes(proof: bytes, window: NDArray[np.uint16]) -> bool:
    """Whether a proof passes as one of float32 states, window by window."""
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


def forgeries(hidden: int, count: int) -> list[Row]:
    """How many of each kind of made-up proof pass, and how many honest ones do not."""
    windows = _windows(count * PROOF_WINDOW, hidden, 1)
    proofs = activations.build(windows)
    accepted = 0
    for window in windows:
        typical = int(np.median(window[activations.largest(window)] & 0x7FFF))
        constant = struct.pack(">129H", activations.MAX_MODULUS, typical, *[0] * 127)
        modulus_h = struct.pack(">129H", hidden, typical, *[0] * 127)
        (negated,) = activations.build([window ^ np.uint16(0x8000)])
        accepted += sum(_passes(proof, window) for proof in (constant, modulus_h, negated))
    accepted += sum(_passes(p, w) for p, w in zip(proofs[1:], windows, strict=False))
    rejected = sum(not _passes(p, w) for p, w in zip(proofs, windows, strict=True))
    return [
        Row("forgeries_accepted", accepted, f"of {4 * count - 1}", 0),
        Row("honest_windows_rejected", rejected, f"of {count}, same set-up", 0),
    ]


def malformed(count: int) -> Row:
    """Random bytes through decoding and comparison; anything but MalformedError counts."""
    rng = np.random.default_rng(2)
    (window,) = _windows(8, 64, 3)
    crashes = 0
    for _ in range(count):
        data = rng.bytes(int(rng.choice([0, 1, 2, 257, 258, 258, 259])))
        try:
            activations.verify([activations.decode(data, len(window))], [window])
        except MalformedError:
            continue
        except Exception:
            crashes += 1
    return Row("crashes", crashes, f"of {count} malformed proofs", 0)


def run(quick: bool) -> list[Row]:
    """All rows; `quick` takes a smaller size of the same work."""
    hidden, tokens, repeats, windows = (1024, 1024, 3, 50) if quick else (5120, 4096, 7, 300)
    return [
        *timing(hidden, tokens, repeats),
        *forgeries(hidden, windows),
        malformed(200 if quick else 5000),
    ]
