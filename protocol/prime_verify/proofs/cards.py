"""Proof of cards: seeded int8 products on every card of a machine at once, committed to by one
digest, of which a few rows are opened and checked.

Operands, from the seed `operands`, the same for all cards (int8):

    A   [rows, inner]        B   [inner, columns]        H   [columns, 8]

Round r of card c reorders the groups of 64 rows of B by a permutation drawn from the seed `order`,
and computes C = A · B' exactly (int32). D is the second-lowest byte of each number of C (int8). The
mark of a row is the second-lowest byte of the first four numbers of its row of D · H. Dropping the
low byte makes marks nonlinear: no combination of the operands gives them without the product.

The commitment is the root of a SHA-256 tree over the marks of all rows, rounds and cards. Then the
verifier draws cells (card, round, row). The prover opens each with its row of C, the marks of the
row's slab, and the slab's path. The verifier checks the path, the row's mark, and the row itself by
Freivalds' method (1977) with vectors drawn after the commitment. A prover that computes a share s
of the rows passes n drawn cells with a chance of about sⁿ.

The seed `order` is shown only when the time starts, so operands are prepared before and nothing
else can be. The proof shows that this much was multiplied in this time on behalf of the node. It
does not show where: a machine that forwards the work to faster hardware passes.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from prime_core.errors import MalformedError, UnavailableError, UntrustedError
from prime_core.ids import Digest, digest, to_bytes
from prime_verify.proofs import tree

log = logging.getLogger("prime.proofs.cards")

GROUP = 64
"""Rows of B that a permutation moves together."""
SLAB = 1024
"""Rows whose marks are one leaf."""
MARK = 4
"""Bytes of a row's mark."""
_MARK_COLUMNS = 8
_BLOCK = 1024
"""Longest inner dimension whose int8 products sum exactly in float32: 1024 · 2¹⁴ = 2²⁴."""
_BATCH = 16
"""Rounds that a card computes before their marks are read back."""
VECTORS = 8
"""Vectors of Freivalds' check. Their entries are below 64, so a wrong row passes one with a chance
of at most 1/64, and all with one of 2⁻⁴⁸."""
MAX_INNER, MAX_COLUMNS, MAX_ROWS = 1 << 16, 2048, 1 << 16
"""Sums stay below 2³¹ (inner), and those of Freivalds' check below 2²⁴ (columns)."""
MAX_CARDS, MAX_ROUNDS = 64, 1 << 16
MAX_OPERAND, MAX_MARKS = 1 << 30, 1 << 31
"""Bytes of A and of a card's marks: what an orchestrator can make a prover hold."""
_COLUMNS_AT_ONCE = 64
"""Columns of B that a check holds at a time: 2 MB at the sizes for GPUs."""


class Cell(NamedTuple):
    """One row of one product."""

    card: int
    round: int
    row: int


@dataclass(frozen=True)
class Work:
    """Sizes of a proof. `rounds` is per card. Raises MalformedError out of bounds."""

    rows: int
    inner: int
    columns: int
    cards: int
    rounds: int

    def __post_init__(self) -> None:
        sizes_fit = (
            SLAB <= self.rows <= MAX_ROWS
            and 2 * GROUP <= self.inner <= MAX_INNER
            and 8 <= self.columns <= MAX_COLUMNS
            and 1 <= self.cards <= MAX_CARDS
            and 1 <= self.rounds <= MAX_ROUNDS
            and self.rows * self.inner <= MAX_OPERAND
            and self.rounds * self.rows * MARK <= MAX_MARKS
        )
        parts_fit = not (self.rows % SLAB or self.inner % (2 * GROUP) or self.columns % 8)
        if not (sizes_fit and parts_fit):
            raise MalformedError(f"the sizes of the proof of cards are out of bounds: {self}")

    @property
    def card_multiply_adds(self) -> int:
        """Multiply-adds of one card, without those of the marks."""
        return self.rounds * self.rows * self.inner * self.columns

    @property
    def groups(self) -> int:
        return self.inner // GROUP

    @property
    def slabs(self) -> int:
        """Leaves of one round."""
        return self.rows // SLAB

    @property
    def depth(self) -> int:
        """Length of a leaf's path: through its round, its card, and the cards."""
        return sum(tree.depth(count) for count in (self.slabs, self.rounds, self.cards))

    @property
    def cell_bytes(self) -> int:
        """Exact length of one opened cell."""
        return SLAB * MARK + 32 * self.depth + 4 * self.columns

    def cells(self, randomness: bytes) -> tuple[Cell, ...]:
        """The cells drawn by `randomness`, eight bytes each."""
        numbers = np.frombuffer(randomness, dtype="<u8")
        total = self.cards * self.rounds * self.rows
        drawn = [int(number) % total for number in numbers]
        return tuple(
            Cell(n // (self.rounds * self.rows), n // self.rows % self.rounds, n % self.rows)
            for n in drawn
        )


# -- operands ----------------------------------------------------------------------------------


def stream(seed: Digest, label: str, first: int, count: int) -> NDArray[np.int8]:
    """Bytes `first` … `first + count` of a pseudo-random stream (AES-256 in counter mode); `first`
    is a multiple of 16."""
    key = hashlib.sha256(b"prime/cards/v1" + to_bytes(seed) + label.encode()).digest()
    counter = (first // 16).to_bytes(16, "big")
    encryptor = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    out = bytearray(count + 15)
    encryptor.update_into(bytes(count), out)
    return np.frombuffer(out, dtype=np.int8, count=count)


def left_rows(seed: Digest, work: Work, first: int, count: int) -> NDArray[np.int8]:
    """Rows `first` … of A, int8 [count, inner]."""
    flat = stream(seed, "A", first * work.inner, count * work.inner)
    return flat.reshape(count, work.inner)


def right(seed: Digest, work: Work, first: int = 0, count: int | None = None) -> NDArray[np.int8]:
    """Columns `first` … of B (all, without `count`), transposed, int8 [count, inner]."""
    count = work.columns - first if count is None else count
    flat = stream(seed, "B", first * work.inner, count * work.inner)
    return flat.reshape(count, work.inner)


def mark_columns(seed: Digest, work: Work) -> NDArray[np.int8]:
    """H transposed, int8 [8, columns]."""
    flat = stream(seed, "H", 0, _MARK_COLUMNS * work.columns)
    return flat.reshape(_MARK_COLUMNS, work.columns)


def orders(seed: Digest, work: Work, card: int, first: int, count: int) -> NDArray[np.int64]:
    """Permutations of rounds `first` … of a card, int64 [count, groups]: group g of B' is group
    `order[g]` of B."""
    width = 8 * work.groups
    raw = stream(seed, f"order {card}", first * width, count * width).view("<u8")
    return np.argsort(raw.reshape(count, work.groups), axis=1, kind="stable")


def _left(operands: Digest, order: Digest, work: Work, cell: Cell) -> NDArray[np.int8]:
    """The cell's row of A, int8 [inner], reordered as its round reorders B: times B, it gives the
    cell's row of C."""
    row = left_rows(operands, work, cell.row, 1).reshape(-1, GROUP)
    return row[np.argsort(orders(order, work, cell.card, cell.round, 1)[0])].reshape(-1)


def exact(a: NDArray[np.int8], bt: NDArray[np.int8]) -> NDArray[np.int32]:
    """a · btᵀ, int32 [rows of a, rows of bt]."""
    total = np.zeros((len(a), len(bt)), dtype=np.int32)
    for k in range(0, a.shape[1], _BLOCK):
        left = a[:, k : k + _BLOCK].astype(np.float32)
        total += (left @ bt[:, k : k + _BLOCK].astype(np.float32).T).astype(np.int32)
    return total


def second_byte(values: NDArray[np.int32]) -> NDArray[np.int8]:
    return (values >> 8).astype(np.int8)


def marks_of(products: NDArray[np.int32], ht: NDArray[np.int8]) -> NDArray[np.int8]:
    """Marks of rows of C, int8 [rows, MARK]."""
    return second_byte(exact(second_byte(products), ht))[:, :MARK]


# -- the prover --------------------------------------------------------------------------------


class Card(Protocol):
    """Something that multiplies."""

    def marks(self, orders: NDArray[np.int64]) -> NDArray[np.int8]:
        """The marks of the rounds with these permutations, int8 [rounds, rows, MARK]."""


@dataclass(frozen=True)
class NumpyCard:
    """The processor, by numpy. Operands as in the module's docstring, B and H transposed."""

    a: NDArray[np.int8]
    bt: NDArray[np.int8]
    ht: NDArray[np.int8]

    def marks(self, orders: NDArray[np.int64]) -> NDArray[np.int8]:
        grouped = self.bt.reshape(len(self.bt), -1, GROUP)
        found = []
        for order in orders:
            products = exact(self.a, grouped[:, order].reshape(self.bt.shape))
            found.append(marks_of(products, self.ht))
        return np.stack(found)


class OnTorch:
    """Exact int8 products on a device of torch: "cuda:1", or "cpu". On CUDA int8 with int32 sums on
    the tensor cores: large products by a Triton kernel if it runs here, others by torch._int_mm.
    Elsewhere exact float32 blocks. Raises UnavailableError without torch or the device."""

    def __init__(self, device: str) -> None:
        try:
            import torch
        except ImportError as error:
            raise UnavailableError(
                f"the card {device!r} needs torch, which is not installed"
            ) from error
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UnavailableError(f"torch sees no CUDA device, so {device!r} cannot be proven")
        self.torch = torch
        self.device = device
        self._integer = device.startswith("cuda")
        self._kernels = self._usable_kernels() if self._integer else None

    def _usable_kernels(self) -> ModuleType | None:
        """Returns the Triton kernels, or None if Triton does not run here: it needs a C compiler
        and a card that it supports. Raises UnavailableError if a product differs from torch's."""
        if importlib.util.find_spec("triton") is None:
            return None
        torch = self.torch
        try:
            # By name: the orchestrator imports this module, and has no torch.
            triton = importlib.import_module("prime_verify.proofs.kernels")
            size = triton.PRODUCT_TILE
            values = torch.arange(2 * size * size, device=self.device) * 37 % 251 - 125
            a, bt = values.to(torch.int8).view(2, size, size).unbind()
            with torch.cuda.device(self.device):
                made = triton.product(a, bt, **self._tiles())
        except Exception as error:  # of Triton, of the compiler that it starts, of the driver
            log.warning("%s multiplies without Triton, more slowly: %s", self.device, error)
            return None
        if not torch.equal(made, self._second_bytes(self.exact(a, bt))):
            raise UnavailableError(f"Triton's products on {self.device} are wrong")
        return triton

    def _tiles(self) -> dict[str, int]:
        """Arguments of kernels.product for this card's shared memory."""
        card = self.torch.cuda.get_device_properties(self.device)
        return {"inner_tile": 128 if card.shared_memory_per_multiprocessor > 150_000 else 64}

    def exact(self, a: Any, bt: Any) -> Any:
        """a · btᵀ, int32 [rows of a, rows of bt]."""
        torch = self.torch
        if self._integer:
            return torch._int_mm(a, bt.t())
        total = torch.zeros((len(a), len(bt)), dtype=torch.int32)
        for k in range(0, a.shape[1], _BLOCK):
            left, right = a[:, k : k + _BLOCK].float(), bt[:, k : k + _BLOCK].float()
            total += (left @ right.t()).to(torch.int32)
        return total

    def second_bytes(self, a: Any, bt: Any) -> Any:
        """The second-lowest bytes of a · btᵀ, int8 [rows of a, rows of bt]."""
        triton = self._kernels
        if triton and not any(size % triton.PRODUCT_TILE for size in (*a.shape, len(bt))):
            with self.torch.cuda.device(self.device):
                return triton.product(a, bt, **self._tiles())
        return self._second_bytes(self.exact(a, bt))

    def _second_bytes(self, values: Any) -> Any:
        """One strided copy on a little-endian device."""
        whole = values.contiguous().view(self.torch.int8)
        return whole.view(*values.shape, 4)[..., 1].contiguous()


class TorchCard(OnTorch):
    """A device of torch. Raises as OnTorch does."""

    def __init__(
        self, device: str, a: NDArray[np.int8], bt: NDArray[np.int8], ht: NDArray[np.int8]
    ) -> None:
        super().__init__(device)
        self._a, self._bt, self._ht = (self.torch.from_numpy(one).to(device) for one in (a, bt, ht))

    def marks(self, orders: NDArray[np.int64]) -> NDArray[np.int8]:
        torch = self.torch
        rows, (columns, inner) = len(self._a), self._bt.shape
        grouped = self._bt.view(torch.int64).view(columns, inner // GROUP, GROUP // 8)
        with torch.inference_mode():
            chosen = torch.from_numpy(orders).to(self.device)
            found = torch.empty((len(orders), rows, MARK), dtype=torch.int8, device=self.device)
            for number in range(len(orders)):
                bt = grouped.index_select(1, chosen[number]).view(torch.int8).view(columns, inner)
                digits = self.second_bytes(self._a, bt)
                found[number] = self.second_bytes(digits, self._ht)[:, :MARK]
            result: NDArray[np.int8] = found.cpu().numpy()
        return result


class Prover:
    """Computes a proof on all `devices` at once: torch devices, or "numpy" for the processor.

    The constructor prepares operands and warms the devices up; `commit` is what is timed. Keeps
    rounds · rows · MARK bytes a card. Raises UnavailableError if a device is missing.
    """

    def __init__(self, operands: Digest, work: Work, devices: Sequence[str]) -> None:
        assert len(devices) == work.cards
        self.work = work
        a = left_rows(operands, work, 0, work.rows)
        bt, ht = right(operands, work), mark_columns(operands, work)
        self._operands, self._bt = operands, bt
        self._cards: list[Card] = [
            NumpyCard(a, bt, ht) if device == "numpy" else TorchCard(device, a, bt, ht)
            for device in devices
        ]
        still = np.arange(work.groups, dtype=np.int64)[None]
        self._at_once([(card, still) for card in self._cards])
        self._order: Digest | None = None
        self._marks: list[NDArray[np.int8]] = []
        self._rounds: list[list[bytes]] = []

    @staticmethod
    def _at_once(asked: Sequence[tuple[Card, NDArray[np.int64]]]) -> None:
        with ThreadPoolExecutor(len(asked)) as pool:
            list(pool.map(lambda one: one[0].marks(one[1]), asked))

    def commit(self, order: Digest) -> Digest:
        """Computes all rounds of all cards and returns the root of their marks."""
        self._order = order
        count = self.work.cards
        with ThreadPoolExecutor(count) as pool, ThreadPoolExecutor(count) as hashing:
            parts = list(pool.map(lambda card: self._compute(card, order, hashing), range(count)))
        self._marks = [marks for marks, _ in parts]
        self._rounds = [roots for _, roots in parts]
        return digest(tree.root([tree.root(roots) for roots in self._rounds]))

    def _compute(
        self, card: int, order: Digest, hashing: ThreadPoolExecutor
    ) -> tuple[NDArray[np.int8], list[bytes]]:
        """Marks and round roots of one card. Marks of a batch are hashed during the next one."""
        work, batches, hashes = self.work, [], []
        for first in range(0, work.rounds, _BATCH):
            count = min(_BATCH, work.rounds - first)
            marks = self._cards[card].marks(orders(order, work, card, first, count))
            batches.append(marks)
            hashes.append(hashing.submit(_round_roots, marks))
        roots = [root for batch in hashes for root in batch.result()]
        return np.concatenate(batches), roots

    def open(self, cells: Sequence[Cell]) -> bytes:
        """The opening of drawn cells: for each its slab's marks, its path and its row of C. Raises
        MalformedError for a cell that is not in the proof."""
        assert self._order is not None, "commit comes first"
        work, out = self.work, []
        for cell in cells:
            if not all(
                0 <= at < end
                for at, end in zip(cell, (work.cards, work.rounds, work.rows), strict=True)
            ):
                raise MalformedError(f"the proof has no {cell}")
        lefts = [_left(self._operands, self._order, work, cell) for cell in cells]
        products = exact(np.stack(lefts), self._bt).astype("<i4")
        cards = [tree.root(roots) for roots in self._rounds]
        for cell, product in zip(cells, products, strict=True):
            marks = self._marks[cell.card][cell.round]
            slab = cell.row // SLAB
            path = [
                *tree.path(_slab_hashes(marks), slab),
                *tree.path(self._rounds[cell.card], cell.round),
                *tree.path(cards, cell.card),
            ]
            shown = marks[slab * SLAB : (slab + 1) * SLAB]
            out += [shown.tobytes(), b"".join(path), product.tobytes()]
        return b"".join(out)


# -- the verifier ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """What a verifier knows of a proof: its seeds, its sizes and the committed root."""

    operands: Digest
    order: Digest
    work: Work
    root: Digest

    def check(self, cells: Sequence[Cell], opening: bytes, rng: np.random.Generator) -> None:
        """Checks the opening of drawn cells: paths and marks of all, then rows, which costs most.
        `rng` must be unpredictable to the prover. Raises MalformedError for a wrong length,
        UntrustedError naming a wrong cell."""
        work = self.work
        if len(opening) != len(cells) * work.cell_bytes:
            raise MalformedError(
                f"an opening of {len(cells)} cells has {len(cells) * work.cell_bytes} bytes, "
                f"not {len(opening)}"
            )
        ht, products = mark_columns(self.operands, work), []
        for number, cell in enumerate(cells):
            data = opening[number * work.cell_bytes : (number + 1) * work.cell_bytes]
            marks, path = data[: SLAB * MARK], data[SLAB * MARK : -4 * work.columns]
            product = np.frombuffer(data[-4 * work.columns :], dtype="<i4").astype(np.int32)
            where = _named(cell)
            if self._root_by(marks, path, cell) != to_bytes(self.root):
                raise UntrustedError(f"the opening of {where} is not what was committed to")
            at = cell.row % SLAB * MARK
            if marks_of(product[None], ht).tobytes() != marks[at : at + MARK]:
                raise UntrustedError(f"the mark of {where} is not that of the row")
            products.append(product)
        x = rng.integers(0, 64, size=(work.columns, VECTORS)).astype(np.float32)
        y = self._folded(x)
        for cell, product in zip(cells, products, strict=True):
            left = _left(self.operands, self.order, work, cell).astype(np.int64)
            if not np.array_equal(product.astype(np.int64) @ x.astype(np.int64), left @ y):
                raise UntrustedError(f"{_named(cell)} is not the product's")

    def _folded(self, x: NDArray[np.float32]) -> NDArray[np.int64]:
        """B · x, int64 [inner, VECTORS]; exact, since each sum is below 2²⁴."""
        work = self.work
        total = np.zeros((VECTORS, work.inner), dtype=np.float32)
        for first in range(0, work.columns, _COLUMNS_AT_ONCE):
            some = x[first : first + _COLUMNS_AT_ONCE]
            total += some.T @ right(self.operands, work, first, len(some)).astype(np.float32)
        return total.T.astype(np.int64)

    def _root_by(self, marks: bytes, path: bytes, cell: Cell) -> bytes:
        work = self.work
        places = (cell.row // SLAB, work.slabs), (cell.round, work.rounds), (cell.card, work.cards)
        return tree.climb(tree.leaf(marks), places, path)


def _named(cell: Cell) -> str:
    return f"row {cell.row} of round {cell.round} on card {cell.card}"


def _slab_hashes(marks: NDArray[np.int8]) -> list[bytes]:
    """Leaves of one round, from its marks int8 [rows, MARK]."""
    raw = marks.tobytes()
    size = SLAB * MARK
    return [tree.leaf(raw[at : at + size]) for at in range(0, len(raw), size)]


def _round_roots(marks: NDArray[np.int8]) -> list[bytes]:
    return [tree.root(_slab_hashes(one)) for one in marks]
