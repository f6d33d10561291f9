"""Proof of memory: every card of a machine is filled with blocks that are slow to make, and then
shows, in a time that suffices to read them and not to make them, that it holds them all.

From the seed of the fill come one operand A [width, width] (int8) and a key for each block of each
card. A block is a chain: x = A · key, then `rounds` times x = A · x, each time keeping the
second-lowest byte of each number (int8). So a byte costs rounds · width multiply-adds, of the kind
that the tensor cores of a GPU do fastest, and the bytes look random.

Once the fill is announced, a second seed gives a matrix V [columns, width] and a vector h. The mark
of a block x is the second-lowest byte of h · y, where y has the second-lowest bytes of V · x. It
depends on every byte of the block, is not linear, and cannot be known before the seed is. So many
columns cost a GPU a fraction of a second, and most processors, which read blocks from the machine's
own memory fast enough, much more. The commitment is the root of a SHA-256 tree over the marks of
all blocks. Then the verifier draws blocks of each card, makes them again itself, and compares their
marks with the opened ones. A prover that knows the blocks of a share s of a card passes n draws
with a chance of about sⁿ. What it does not hold it must make or fetch while the time runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from prime_core.errors import MalformedError, UntrustedError
from prime_core.ids import Digest, digest, to_bytes
from prime_core.known_cards import FASTEST, KnownCard
from prime_verify.proofs import tree
from prime_verify.proofs.cards import OnTorch, exact, second_byte, stream

KEY = 16
"""Bytes of a block's key."""
SLAB = 4096
"""Blocks whose marks, a byte each, are one leaf."""
_FOLD = 8
"""Columns of the product that gives marks. The first is h; integer products on a GPU take eight."""
_EXACT = 1024
"""Longest inner dimension whose int8 products sum exactly in float32: 1024 · 2¹⁴ = 2²⁴."""
_MADE_AT_ONCE = 1 << 14
_READ_AT_ONCE = 1 << 17
"""Blocks. At a width of 2,048, making takes 200 MB more than the blocks, and reading 700 MB."""
FILLED_SHARE = 0.85
"""Share of a card's claimed memory that is filled; the rest is for the driver and the proof."""
MAKING_SECONDS = 1.5
READING_SLACK, READINGS = 0.3, 2
WIDTH, COLUMNS = 2048, 512
CPU_SIZES = (SLAB, 256, 64)
MAX_WIDTH, MAX_ROUNDS, MAX_CARDS = 4096, 1024, 64
MAX_BYTES = 1 << 38
"""Most that a card is filled with."""


class Block(NamedTuple):
    """A block's place."""

    card: int
    number: int


@dataclass(frozen=True)
class Fill:
    """Sizes of a proof of memory. `blocks` is per card; reading a byte costs `columns`
    multiply-adds. Raises MalformedError out of bounds."""

    blocks: int
    width: int
    columns: int
    cards: int
    rounds: int

    def __post_init__(self) -> None:
        sizes_fit = (
            self.blocks >= SLAB
            and KEY <= self.width <= MAX_WIDTH
            and _FOLD <= self.columns <= self.width
            and 1 <= self.cards <= MAX_CARDS
            and 1 <= self.rounds <= MAX_ROUNDS
            and self.card_bytes <= MAX_BYTES
        )
        if not sizes_fit or self.blocks % SLAB or self.width % KEY or self.columns % _FOLD:
            raise MalformedError(f"the sizes of the proof of memory are out of bounds: {self}")

    @property
    def card_bytes(self) -> int:
        """Memory of a card that is filled."""
        return self.blocks * self.width

    @property
    def slabs(self) -> int:
        """Leaves of one card."""
        return self.blocks // SLAB

    @property
    def opened_bytes(self) -> int:
        """Exact length of one opened block."""
        return SLAB + 32 * (tree.depth(self.slabs) + tree.depth(self.cards))

    def drawn(self, randomness: bytes) -> tuple[Block, ...]:
        """The blocks drawn by `randomness`, eight bytes each, from one card after the other."""
        numbers = np.frombuffer(randomness, dtype="<u8")
        return tuple(
            Block(at % self.cards, int(number) % self.blocks) for at, number in enumerate(numbers)
        )


def fill_of(known: KnownCard, cards: int, memory_mb: int) -> Fill:
    """Sizes for cards that claim `memory_mb` MiB each: FILLED_SHARE of it, in blocks of which the
    fastest card of the kind makes a quarter again in MAKING_SECONDS. Small ones for a processor."""
    if not known.judged:
        return Fill(*CPU_SIZES, cards=cards, rounds=4)
    blocks = SLAB * max(1, int(FILLED_SHARE * memory_mb * 2**20) // (SLAB * WIDTH))
    fastest = FASTEST * known.tera * 1e12
    rounds = math.ceil(4 * MAKING_SECONDS * fastest / (blocks * WIDTH * WIDTH))
    return Fill(blocks, WIDTH, COLUMNS, cards=cards, rounds=rounds)


def most_seconds(known: KnownCard, fill: Fill) -> float:
    """Longest time from the seed to the commitment: READINGS times what reading and its products
    take at the vendor's bandwidth and rate, and READING_SLACK. 0: it is not judged."""
    if not known.judged:
        return 0.0
    byte = 1 / (known.bandwidth * 1e9) + fill.columns / (known.tera * 1e12)
    return READING_SLACK + READINGS * fill.card_bytes * byte


def _operand(seed: Digest, fill: Fill) -> NDArray[np.int8]:
    return stream(seed, "memory", 0, fill.width**2).reshape(fill.width, fill.width)


def _keys(seed: Digest, card: int, first: int, count: int) -> NDArray[np.int8]:
    """Keys of blocks `first` … of a card, int8 [count, KEY]."""
    return stream(seed, f"memory {card}", first * KEY, count * KEY).reshape(count, KEY)


class Vectors(NamedTuple):
    """What blocks are multiplied with: V [columns, width] and, as its first row, h [8, columns]."""

    matrix: NDArray[np.int8]
    fold: NDArray[np.int8]


def _vectors(seed: Digest, fill: Fill) -> Vectors:
    columns = fill.columns
    return Vectors(
        stream(seed, "V", 0, columns * fill.width).reshape(columns, fill.width),
        stream(seed, "h", 0, _FOLD * columns).reshape(_FOLD, columns),
    )


class Maker:
    """Makes blocks by numpy."""

    def __init__(self, seed: Digest, fill: Fill) -> None:
        self._rounds = fill.rounds
        self._a = _operand(seed, fill)
        cuts = range(0, fill.width, _EXACT)
        self._parts = [  # as exact() takes them, converted once
            (k, np.ascontiguousarray(self._a[:, k : k + _EXACT].astype(np.float32).T)) for k in cuts
        ]

    def blocks(self, keys: NDArray[np.int8]) -> NDArray[np.int8]:
        """The blocks of these keys, int8 [blocks, width]."""
        x = second_byte(exact(keys, self._a[:, :KEY]))
        for _ in range(self._rounds):
            total = np.zeros(x.shape, dtype=np.int32)
            for k, part in self._parts:
                total += (x[:, k : k + _EXACT].astype(np.float32) @ part).astype(np.int32)
            x = second_byte(total)
        return x


def _marks(blocks: NDArray[np.int8], vectors: Vectors) -> NDArray[np.int8]:
    return second_byte(exact(second_byte(exact(blocks, vectors.matrix)), vectors.fold))[:, 0]


# -- the prover --------------------------------------------------------------------------------


class Filled(Protocol):
    """A card that holds its blocks."""

    def marks(self, vectors: Vectors) -> Iterator[NDArray[np.int8]]:
        """The marks of all blocks (int8), some slabs at a time."""


class NumpyFilled:
    """The machine's own memory, filled for card number `card`."""

    def __init__(self, seed: Digest, fill: Fill, card: int) -> None:
        maker = Maker(seed, fill)
        self.held = np.empty((fill.blocks, fill.width), dtype=np.int8)
        for first in range(0, fill.blocks, SLAB):
            self.held[first : first + SLAB] = maker.blocks(_keys(seed, card, first, SLAB))

    def marks(self, vectors: Vectors) -> Iterator[NDArray[np.int8]]:
        for first in range(0, len(self.held), SLAB):
            yield _marks(self.held[first : first + SLAB], vectors)


class TorchFilled(OnTorch):
    """A device of torch, filled for card number `card`. Raises as OnTorch does, and RuntimeError
    (of torch) if the device has no room."""

    def __init__(self, device: str, seed: Digest, fill: Fill, card: int) -> None:
        super().__init__(device)
        torch = self.torch
        with torch.inference_mode():
            a = torch.from_numpy(_operand(seed, fill)).to(device)
            start = a[:, :KEY].contiguous()
            self.held = torch.empty((fill.blocks, fill.width), dtype=torch.int8, device=device)
            for first in range(0, fill.blocks, _MADE_AT_ONCE):
                count = min(_MADE_AT_ONCE, fill.blocks - first)
                keys = torch.from_numpy(_keys(seed, card, first, count)).to(device)
                x = self.second_bytes(keys, start)
                for _ in range(fill.rounds):
                    x = self.second_bytes(x, a)
                self.held[first : first + count] = x
        next(self.marks(_vectors(seed, fill)))  # warms up, and waits for the device

    def marks(self, vectors: Vectors) -> Iterator[NDArray[np.int8]]:
        matrix, fold = (self.torch.from_numpy(one).to(self.device) for one in vectors)
        for first in range(0, len(self.held), _READ_AT_ONCE):
            with self.torch.inference_mode():
                y = self.second_bytes(self.held[first : first + _READ_AT_ONCE], matrix)
                found: NDArray[np.int8] = self.second_bytes(y, fold)[:, :1].cpu().numpy()
            yield found[:, 0]


class MemoryProver:
    """Fills all `devices` at once: torch devices, or "numpy" for the machine's own memory.

    The constructor fills; `commit` is what is timed. Raises UnavailableError if a device is
    missing, RuntimeError (of torch) if one has no room.
    """

    def __init__(self, seed: Digest, fill: Fill, devices: Sequence[str]) -> None:
        assert len(devices) == fill.cards
        self.fill = fill

        def filled(card: int) -> Filled:
            if devices[card] == "numpy":
                return NumpyFilled(seed, fill, card)
            return TorchFilled(devices[card], seed, fill, card)

        with ThreadPoolExecutor(fill.cards) as pool:
            self.cards: list[Filled] = list(pool.map(filled, range(fill.cards)))
        self._marks: list[bytes] = []
        self._leaves: list[list[bytes]] = []

    def commit(self, vectors: Digest) -> Digest:
        """Reads all blocks of all cards and returns the root of their marks."""
        made, count = _vectors(vectors, self.fill), self.fill.cards
        with ThreadPoolExecutor(count) as pool, ThreadPoolExecutor(count) as hashing:
            parts = list(
                pool.map(lambda card: self._read(self.cards[card], made, hashing), range(count))
            )
        self._marks = [marks for marks, _ in parts]
        self._leaves = [leaves for _, leaves in parts]
        return digest(tree.root([tree.root(leaves) for leaves in self._leaves]))

    def _read(
        self, card: Filled, vectors: Vectors, hashing: ThreadPoolExecutor
    ) -> tuple[bytes, list[bytes]]:
        """Marks and leaves of one card. Marks are hashed while the next ones are computed."""
        marks, hashes = [], []
        for found in card.marks(vectors):
            marks.append(some := found.tobytes())
            hashes.append(hashing.submit(_leaves_of, some))
        return b"".join(marks), [leaf for some in hashes for leaf in some.result()]

    def open(self, drawn: Sequence[Block]) -> bytes:
        """The opening of drawn blocks: for each its slab's marks and their path. Raises
        MalformedError for a block that is not in the proof."""
        out, cards = [], [tree.root(leaves) for leaves in self._leaves]
        for card, number in drawn:
            if not (0 <= card < self.fill.cards and 0 <= number < self.fill.blocks):
                raise MalformedError(f"the proof has no block {number} on card {card}")
            slab = number // SLAB
            path = [*tree.path(self._leaves[card], slab), *tree.path(cards, card)]
            out += [self._marks[card][slab * SLAB : (slab + 1) * SLAB], *path]
        return b"".join(out)


def _leaves_of(marks: bytes) -> list[bytes]:
    return [tree.leaf(marks[at : at + SLAB]) for at in range(0, len(marks), SLAB)]


# -- the verifier ------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryProof:
    """What a verifier knows of a proof: its seeds, its sizes and the committed root."""

    seed: Digest
    vectors: Digest
    fill: Fill
    root: Digest

    def check(self, drawn: Sequence[Block], opening: bytes) -> None:
        """Checks the opening of drawn blocks: paths of all, then marks, for which the blocks are
        made again. Raises MalformedError for a wrong length, UntrustedError naming a wrong
        block."""
        fill = self.fill
        expected = len(drawn) * fill.opened_bytes
        if len(opening) != expected:
            raise MalformedError(
                f"an opening of {len(drawn)} blocks has {expected} bytes, not {len(opening)}"
            )
        shown = []
        for at, (card, number) in enumerate(drawn):
            data = opening[at * fill.opened_bytes : (at + 1) * fill.opened_bytes]
            marks, path = data[:SLAB], data[SLAB:]
            places = (number // SLAB, fill.slabs), (card, fill.cards)
            if tree.climb(tree.leaf(marks), places, path) != to_bytes(self.root):
                raise UntrustedError(
                    f"the opening of block {number} on card {card} is not what was committed to"
                )
            shown.append(marks[number % SLAB])
        keys = [_keys(self.seed, card, number, 1) for card, number in drawn]
        made = Maker(self.seed, fill).blocks(np.concatenate(keys))
        true = _marks(made, _vectors(self.vectors, fill)).tobytes()
        for (card, number), one, other in zip(drawn, shown, true, strict=True):
            if one != other:
                raise UntrustedError(
                    f"card {card} did not hold its block {number}: another mark was opened"
                )
