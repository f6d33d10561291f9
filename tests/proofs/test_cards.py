"""The proof of cards: one digest on every device, and what a prover cannot get past the check."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from prime_core.errors import MalformedError, UnavailableError, UntrustedError
from prime_core.ids import Digest, digest
from prime_verify.proofs import cards, tree
from prime_verify.proofs.cards import Cell, NumpyCard, Proof, Prover, Work

OPERANDS, ORDER, OTHER = (digest(bytes([n]) * 32) for n in (1, 2, 3))
WORK = Work(rows=2048, inner=256, columns=64, cards=2, rounds=5)
DRAW = hashlib.shake_256(b"draw").digest(8 * 24)


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def honest(order: Digest = ORDER, devices: Sequence[str] = ("numpy", "numpy")) -> Prover:
    prover = Prover(OPERANDS, WORK, devices)
    prover.commit(order)
    return prover


@pytest.fixture(scope="module")
def made() -> tuple[Prover, Digest]:
    prover = Prover(OPERANDS, WORK, ["numpy", "numpy"])
    return prover, prover.commit(ORDER)


def check(root: Digest, drawn: Sequence[Cell], opening: bytes, order: Digest = ORDER) -> None:
    Proof(OPERANDS, order, WORK, root).check(drawn, opening, rng())


def test_an_honest_proof_passes_and_torch_commits_to_the_same(made: tuple[Prover, Digest]) -> None:
    prover, root = made
    drawn = WORK.cells(DRAW)
    check(root, drawn, prover.open(drawn))
    torch = Prover(OPERANDS, WORK, ["cpu", "numpy"])
    assert torch.commit(ORDER) == root
    assert torch.open(drawn) == prover.open(drawn)


def test_a_product_is_that_of_the_operands_reordered() -> None:
    a = cards.left_rows(OPERANDS, WORK, 0, WORK.rows).astype(np.int64)
    bt, ht = cards.right(OPERANDS, WORK), cards.mark_columns(OPERANDS, WORK)
    order = cards.orders(ORDER, WORK, 1, 3, 1)
    rows = [64 * int(group) + within for group in order[0] for within in range(64)]
    assert sorted(rows) == list(range(WORK.inner))
    product = a @ bt[:, rows].astype(np.int64).T
    digits = (product >> 8).astype(np.int8).astype(np.int64) @ ht.astype(np.int64).T
    made = NumpyCard(cards.left_rows(OPERANDS, WORK, 0, WORK.rows), bt, ht).marks(order)
    assert np.array_equal(made[0], (digits >> 8).astype(np.int8)[:, :4])


def test_products_are_exact_at_the_largest_sizes() -> None:
    """Sums of the extreme numbers, beyond what float32 holds."""
    a = np.full((2, cards.MAX_INNER), -128, np.int8)
    assert (cards.exact(a, a) == cards.MAX_INNER << 14).all()
    card = cards.TorchCard("cpu", a, a, a[:, :8])
    assert (card.exact(card._a, card._bt).numpy() == cards.MAX_INNER << 14).all()


def test_operands_can_be_had_in_parts() -> None:
    whole = cards.left_rows(OPERANDS, WORK, 0, WORK.rows)
    assert np.array_equal(cards.left_rows(OPERANDS, WORK, 700, 3), whole[700:703])
    every = cards.orders(ORDER, WORK, 1, 0, WORK.rounds)
    assert np.array_equal(cards.orders(ORDER, WORK, 1, 2, 2), every[2:4])
    assert not np.array_equal(cards.orders(ORDER, WORK, 0, 0, WORK.rounds), every)


def test_any_changed_byte_of_an_opening_is_found(made: tuple[Prover, Digest]) -> None:
    prover, root = made
    drawn = WORK.cells(DRAW)[:3]
    opening = prover.open(drawn)
    for at in range(0, len(opening), 97):
        changed = bytearray(opening)
        changed[at] ^= 1
        with pytest.raises(UntrustedError):
            check(root, drawn, bytes(changed))
    for wrong in (opening[:-1], opening + b"x", b""):
        with pytest.raises(MalformedError, match="bytes"):
            check(root, drawn, wrong)


def test_a_proof_for_another_order_fails(made: tuple[Prover, Digest]) -> None:
    """Precomputed for an order of the node's own choice."""
    early = honest(OTHER)
    root = digest(tree.root([tree.root(roots) for roots in early._rounds]))
    drawn = WORK.cells(DRAW)
    check(root, drawn, early.open(drawn), OTHER)
    with pytest.raises(UntrustedError, match="is not the product's"):
        check(root, drawn, early.open(drawn), ORDER)


def skipping(rows: np.ndarray[Any, Any]) -> tuple[Prover, Digest]:
    """A prover that invents the marks of these rows in every round."""
    prover = Prover(OPERANDS, WORK, ["numpy", "numpy"])

    class Lazy:
        def __init__(self, card: cards.Card) -> None:
            self.card = card

        def marks(self, orders: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            found = self.card.marks(orders)
            found[:, rows] = rng().integers(-128, 128, found[:, rows].shape, dtype=np.int8)
            return found

    prover._cards = [Lazy(card) for card in prover._cards]
    return prover, prover.commit(ORDER)


def test_a_wrong_row_is_found_whenever_it_is_drawn() -> None:
    """Three rows of 2,048 are invented. With the invented marks, the true row has another; with the
    true marks, the path leads elsewhere."""
    prover, root = skipping(np.array([5, 700, 1500]))
    check(root, fine := [Cell(0, 0, 6), Cell(1, 4, 1501)], prover.open(fine))
    drawn = [Cell(1, 2, 700)]
    true = prover.open(drawn)
    with pytest.raises(UntrustedError, match="the mark of row 700 of round 2 on card 1"):
        check(root, drawn, true)
    right = honest().open(drawn)
    with pytest.raises(UntrustedError, match="not what was committed to"):
        check(root, drawn, right)


def test_a_row_of_the_right_mark_that_is_not_the_products_fails(
    made: tuple[Prover, Digest],
) -> None:
    """The low byte of a number does not reach the mark; Freivalds' check sees it."""
    prover, root = made
    drawn = [Cell(0, 1, 9)]
    opening = prover.open(drawn)
    row = np.frombuffer(opening[-4 * WORK.columns :], "<i4").astype(np.int32)
    row[3] ^= 1
    with pytest.raises(UntrustedError, match="row 9 of round 1 on card 0 is not the product's"):
        check(root, drawn, opening[: -4 * WORK.columns] + row.astype("<i4").tobytes())


def test_a_share_of_skipped_rows_is_found_as_often_as_is_said() -> None:
    """A fifth of the rows is skipped: 24 cells miss them with a chance of 0.8²⁴ = 0.47 %."""
    passed = 0
    for number in range(4000):
        drawn = WORK.cells(hashlib.shake_256(number.to_bytes(4, "big")).digest(8 * 24))
        passed += all(cell.row >= WORK.rows // 5 for cell in drawn)
    assert 5 <= passed <= 40
    assert {cell.card for cell in drawn} == {0, 1}
    assert all(cell.round < WORK.rounds and cell.row < WORK.rows for cell in drawn)


def test_a_check_holds_little_of_the_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone can have openings checked, several at once: each holds a few columns of B. Paths and
    marks, which cost little, are checked first."""
    held: list[int] = []
    stream = cards.stream

    def counted(seed: Digest, label: str, first: int, count: int) -> np.ndarray[Any, Any]:
        if label == "B":
            held.append(count)
        return stream(seed, label, first, count)

    work = Work(rows=1024, inner=256, columns=512, cards=1, rounds=1)
    prover = Prover(OPERANDS, work, ["numpy"])
    proof = Proof(OPERANDS, ORDER, work, prover.commit(ORDER))
    drawn = work.cells(DRAW)
    opening = prover.open(drawn)
    monkeypatch.setattr(cards, "stream", counted)
    proof.check(drawn, opening, rng())
    assert sum(held) == work.inner * work.columns
    assert max(held) == 64 * work.inner
    held.clear()
    with pytest.raises(UntrustedError, match="committed"):
        proof.check(drawn, bytes([opening[0] ^ 1]) + opening[1:], rng())
    assert not held


def test_sizes_out_of_bounds_and_missing_devices_are_refused() -> None:
    good = {"rows": 1024, "inner": 128, "columns": 8, "cards": 1, "rounds": 1}
    Work(**good)
    for name, values in {
        "rows": (0, 1023, 1 << 17), "inner": (64, 192, 1 << 17), "columns": (4, 12, 4096),
        "cards": (0, 65), "rounds": (0, (1 << 16) + 1),
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises(MalformedError):
                Work(**good | {name: value})
    for large in ({"rows": 1 << 16, "inner": 1 << 15}, {"rows": 1 << 16, "rounds": 1 << 14}):
        with pytest.raises(MalformedError):  # each fits, and a node would hold gigabytes
            Work(**good | large)
    with pytest.raises(UnavailableError, match="cuda"):
        Prover(OPERANDS, Work(**good), ["cuda:0"])


def test_checking_needs_no_torch() -> None:
    code = "import sys, prime_verify.proofs.cards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
