"""Reduces windows of hidden states to proofs, on the generating device, during generation.

    engine ── step: states (n, H) ──► buffer (rows, 32, H) ── a full window ──► 128 largest, sketch,
                                                                               digest → a few bytes

The memory for states therefore does not grow with the length of a row. CPUs use the reference
implementation (`activations`, `sketch`); accelerators use torch and, if available, the Triton
kernel of the sketch. Positions, values and digests are the same integers everywhere; sketches are
float64 sums, rounded to bf16.

The digest of a window is what an exact replay compares. With the window's bf16 bit patterns as
little-endian 32-bit words w_i (two elements each, the last one padded with 0):

    digest_j = (Σ_i c_j(i) · w_i mod 2⁶⁴) ≫ 32,   c_j(i) = splitmix64(4·i + j),   j = 0 … 3

four 32-bit words, little-endian: multilinear hashing, exact in any order of addition. Different
states collide with probability 2⁻¹²⁸ for anyone who lacks the true states. It is not a
cryptographic hash, but a party that has the true states does not need a collision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prime_core.errors import FatalError, MalformedError
from prime_core.proof_form import PROOF_TOPK, PROOF_WINDOW, SKETCH_DIMENSIONS
from prime_engine.recorder import on_device
from prime_verify.proofs import activations, sketch
from prime_verify.proofs.picking import largest_of
from prime_verify.proofs.sampling_torch import kernels, shift, signed

DIGEST_LANES = 4
_TOGETHER = 1 << 22
"""Elements reduced at once on an accelerator; bounds the temporary memory (32 MiB per tensor)."""
_GOLDEN = signed(sketch.GOLDEN)
_MULTIPLIER_1, _MULTIPLIER_2 = signed(sketch.MULTIPLIER_1), signed(sketch.MULTIPLIER_2)


@dataclass(frozen=True)
class Reduced:
    """W windows: `positions` int64 [W, k], ascending, and `values` uint16 [W, k] of the k largest
    magnitudes, `sketches` uint16 [W, 64] (bf16 bits), `digests` uint32 [W, 4]."""

    positions: NDArray[np.int64]
    values: NDArray[np.uint16]
    sketches: NDArray[np.uint16]
    digests: NDArray[np.uint32]


@lru_cache(maxsize=4)
def _coefficients(words: int) -> NDArray[np.uint64]:
    """c_j(i): uint64 [4, words]."""
    z = np.arange(1, DIGEST_LANES * words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.ascontiguousarray(z.reshape(words, DIGEST_LANES).T)


def digests(windows: Sequence[NDArray[np.uint16]]) -> NDArray[np.uint32]:
    """Digests of flattened windows (uint16 bf16 bits): uint32 [W, 4]."""
    found = np.empty((len(windows), DIGEST_LANES), dtype=np.uint32)
    for w, window in enumerate(windows):
        words = np.pad(window, (0, len(window) % 2)).astype("<u2").view("<u4").astype(np.uint64)
        found[w] = ((_coefficients(len(words)) * words).sum(axis=1) >> np.uint64(32)).astype("<u4")
    return found


def reduce_reference(states: NDArray[np.uint16], keys: Sequence[bytes]) -> Reduced:
    """Numpy version of `reduce`, for bf16 bits [W, N] and each window's 32-byte sketch key."""
    windows = list(states)
    positions = np.stack(largest_of(windows))
    values = np.take_along_axis(states, positions, axis=1)
    return Reduced(positions, values, sketch.build(windows, keys), digests(windows))


def reduce(states: Tensor, keys: Sequence[bytes]) -> Reduced:
    """Reduces W flattened windows, bf16 [W, N] on any device, with their 32-byte sketch keys.

    Raises MalformedError if an element is not finite.
    """
    if states.device.type == "cpu":
        return reduce_reference(states.view(torch.int16).numpy().view(np.uint16), keys)
    return reduce_on_device(states, keys)


def reduce_on_device(states: Tensor, keys: Sequence[bytes]) -> Reduced:
    """Torch and Triton version of `reduce`, on the device of `states`."""
    step = max(1, _TOGETHER // states.shape[1])
    parts = [
        _reduce_some(states[start : start + step], keys[start : start + step])
        for start in range(0, len(states), step)
    ]
    positions, values, sums, digest, peaks = (
        torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)
    )
    if peaks.max() >= 0x7F80:
        raise MalformedError("hidden states are not finite")
    return Reduced(
        positions,
        values.view(np.uint16),
        sketch.float_to_bf16(sums.astype(np.float32)),
        digest.astype(np.uint32),
    )


def _reduce_some(states: Tensor, keys: Sequence[bytes]) -> tuple[Tensor, ...]:
    """(positions, bit patterns int16, float64 sums, digest words int64, and each one's largest
    magnitude, int64) of a few windows."""
    size = states.shape[1]
    bits = states.contiguous().view(torch.int16)
    magnitudes = bits.to(torch.int64).bitwise_and_(0x7FFF)
    # One 64-bit key orders by magnitude, then by the lowest index.
    order = torch.arange(size - 1, -1, -1, device=states.device)
    largest = (magnitudes << 32 | order).topk(min(PROOF_TOPK, size), dim=1, sorted=False).values
    positions = (size - 1 - largest.bitwise_and_(0xFFFFFFFF)).sort(dim=1).values
    values = bits.gather(1, positions)
    words = [[int.from_bytes(k[:4], "big"), int.from_bytes(k[4:8], "big")] for k in keys]
    key = on_device(words, states.device)
    triton = kernels() if states.is_cuda else None
    sums = _sketch(states, key) if triton is None else triton.sketch(states, key)
    return positions, values, sums, _digest(bits), magnitudes.amax(dim=1)


def _sketch_mix(x: Tensor) -> Tensor:
    """sketch.mix on int32 tensors, wrapping."""
    x = (x ^ shift(x, 16)).mul_(_MULTIPLIER_1)
    x.bitwise_xor_(shift(x, 15)).mul_(_MULTIPLIER_2)
    return x.bitwise_xor_(shift(x, 15))


def _sketch(states: Tensor, key: Tensor) -> Tensor:
    """Sums of sketch.build before rounding: float64 [W, 64]; `key` int64 [W, 2]."""
    windows, size = states.shape
    words = key.to(torch.int32)
    ids = torch.arange(1, (size + 3) // 4 + 1, dtype=torch.int32, device=states.device) * _GOLDEN
    hashed = _sketch_mix(_sketch_mix(words[:, :1] + ids) ^ words[:, 1:])
    octets = torch.stack([shift(hashed, 8 * i) if i else hashed for i in range(4)], dim=2)
    octets = octets.reshape(windows, -1)[:, :size].bitwise_and(0x7F).to(torch.int64)
    sums = torch.zeros((windows, 2 * SKETCH_DIMENSIONS), dtype=torch.float64, device=states.device)
    sums.scatter_add_(1, octets, states.to(torch.float64))
    return sums[:, :SKETCH_DIMENSIONS] - sums[:, SKETCH_DIMENSIONS:]


def _digest(bits: Tensor) -> Tensor:
    """Digests of int16 [W, N]: int64 [W, 4]."""
    if bits.shape[1] % 2:
        bits = torch.nn.functional.pad(bits, (0, 1))
    words = bits.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
    lanes = [(words * lane).sum(dim=1) >> 32 for lane in _table(words.shape[1], bits.device)]
    return torch.stack(lanes, dim=1).bitwise_and_(0xFFFFFFFF)


@lru_cache(maxsize=4)
def _table(words: int, device: torch.device) -> Tensor:
    """`_coefficients` on a device: int64 [4, words]."""
    return torch.from_numpy(_coefficients(words).view(np.int64)).to(device)


@dataclass(frozen=True)
class RowProof:
    """The reduced form of a row's states: proofs and sketches in file format, and the 16-byte
    digest of each window."""

    proofs: bytes
    sketch: bytes
    digests: tuple[bytes, ...]


@dataclass
class _Window:
    """A window of a row, in `slot` of the buffer. `number`: of its row; `filled`: its tokens."""

    row: int
    number: int
    slot: int
    filled: int = 0


@dataclass
class _Row:
    """A row. `begun`: number of windows opened so far. `window`: the open one; None once the row
    has ended. The rest: results of the reduced windows, in order."""

    begun: int = 0
    window: _Window | None = None
    proofs: list[bytes] = field(default_factory=list)
    sketches: list[NDArray[np.uint16]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


class WindowReducer:
    """Receives the states of rows during generation and keeps only their proofs.

    `key_of(row, window, tokens)` returns the 32-byte sketch key of a window from its own tokens. A
    position may be written again with another token until the next window of its row begins (an
    engine may discard a step). A window is closed when the next one begins or its row ends. Closed
    windows of half the rows are reduced at once, about every 16 steps, since a device takes little
    longer for many than for one.
    """

    def __init__(self, key_of: Callable[[int, int, Sequence[int]], bytes]) -> None:
        self._key_of = key_of
        self._rows: dict[int, _Row] = {}
        self._closed: list[_Window] = []
        self._free: list[int] = []
        self._states = torch.empty(0)
        self._tokens = torch.empty(0, dtype=torch.int64)

    def step(
        self, rows: Sequence[int], places: Sequence[int], tokens: Tensor, states: Tensor
    ) -> None:
        """Adds one token for each of n rows: `places` are positions in the output, `tokens` int64
        (n,), `states` bf16 (n, H) of the positions that predicted them.

        Raises FatalError if a row skips a position or returns to a closed window; MalformedError if
        states are not finite.
        """
        slots, at = [], []
        for row, place in zip(rows, places, strict=True):
            window = self._window(row, place, states)
            slots.append(window.slot)
            at.append(place % PROOF_WINDOW)
            window.filled = at[-1] + 1
        where, offset = on_device([slots, at], states.device).unbind()
        self._states[where, offset] = states
        self._tokens[where, offset] = tokens
        if len(self._closed) >= max(1, len(rows) // 2):
            self._reduce_closed()

    def end(self, rows: Sequence[int]) -> None:
        """Marks rows as complete."""
        for row in rows:
            window = self._rows[row].window
            if window is not None:
                self._closed.append(window)
            self._rows[row].window = None
        if all(one.window is None for one in self._rows.values()):
            self._reduce_closed()  # here, on the engine's thread

    def proof(self, row: int) -> RowProof:
        """Returns the proof of a row that has ended. Raises MalformedError if states are not
        finite."""
        self._reduce_closed()
        one = self._rows[row]
        sketches = np.stack(one.sketches)
        return RowProof(activations.pack(one.proofs), sketch.pack(sketches), tuple(one.digests))

    def _window(self, row: int, place: int, states: Tensor) -> _Window:
        """Returns the window of `row` that contains `place`, and opens it if `place` is its first
        position. Raises FatalError as `step` does."""
        one = self._rows.setdefault(row, _Row())
        window = one.window
        if place == one.begun * PROOF_WINDOW and (window is None or window.filled == PROOF_WINDOW):
            if window is not None:
                self._closed.append(window)
            window = one.window = _Window(row, one.begun, self._slot(states))
            one.begun += 1
        at = place - (one.begun - 1) * PROOF_WINDOW
        if window is None or not 0 <= at <= min(window.filled, PROOF_WINDOW - 1):
            raise FatalError(f"row {row} lacks the state before place {place}, or has closed it")
        return window

    def _slot(self, states: Tensor) -> int:
        if not self._free:
            count = len(self._states)
            more = max(8, count)
            shape = (more, PROOF_WINDOW, states.shape[1])
            new = torch.empty(shape, dtype=torch.bfloat16, device=states.device)
            places = torch.zeros((more, PROOF_WINDOW), dtype=torch.int64, device=states.device)
            self._states = torch.cat([self._states, new]) if count else new
            self._tokens = torch.cat([self._tokens, places]) if count else places
            self._free = list(range(count + more - 1, count - 1, -1))
        return self._free.pop()

    def _reduce_closed(self) -> None:
        """Reduces all closed windows, longest first: only a row's last window can be shorter, and
        proofs of a row are appended in order."""
        by_length: dict[int, list[_Window]] = {}
        for window in self._closed:
            by_length.setdefault(window.filled, []).append(window)
        self._closed = []
        for length in sorted(by_length, reverse=True):
            self._reduce(by_length[length], length)

    def _reduce(self, windows: Sequence[_Window], length: int) -> None:
        slots = on_device([[one.slot for one in windows]], self._states.device)[0]
        tokens = self._tokens[slots, :length].tolist()
        keys = [
            self._key_of(one.row, one.number, own) for one, own in zip(windows, tokens, strict=True)
        ]
        found = reduce(self._states[slots, :length].flatten(1), keys)
        built = activations.build_picked(found.positions, found.values)
        for i, one in enumerate(windows):
            row = self._rows[one.row]
            row.proofs.append(built[i])
            row.sketches.append(found.sketches[i])
            row.digests.append(found.digests[i].astype("<u4").tobytes())
        self._free += [one.slot for one in windows]
