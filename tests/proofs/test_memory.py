"""The proof of memory: equal blocks on every device, and what does not get past the check."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_core.errors import MalformedError, UnavailableError, UntrustedError
from prime_core.ids import Digest, digest
from prime_verify.proofs import memory
from prime_verify.proofs.memory import (
    SLAB,
    Block,
    Fill,
    Maker,
    MemoryProof,
    MemoryProver,
    NumpyFilled,
    TorchFilled,
    Vectors,
)

SEED, VECTORS, OTHER = (digest(bytes([n]) * 32) for n in (1, 2, 3))
FILL = Fill(blocks=2 * SLAB, width=64, columns=16, cards=2, rounds=3)
DRAWN = FILL.drawn(hashlib.shake_256(b"draw").digest(8 * 48))
Marks = np.ndarray[Any, Any]


@pytest.fixture
def prover() -> MemoryProver:
    return MemoryProver(SEED, FILL, ["numpy", "numpy"])


def check(root: Digest, prover: MemoryProver, drawn: tuple[Block, ...] = DRAWN) -> None:
    MemoryProof(SEED, VECTORS, FILL, root).check(drawn, prover.open(drawn))


def cheating(prover: MemoryProver, change: Callable[[int, Marks, Vectors], Marks]) -> Digest:
    """Commits after each card's held blocks passed through `change` (card, blocks, vectors), which
    gives the marks in place of the true ones."""

    class Cheat:
        def __init__(self, number: int, honest: Any) -> None:
            self.number, self.honest = number, honest

        def marks(self, vectors: Vectors) -> Iterator[Marks]:
            yield change(self.number, self.honest.held, vectors)

    prover.cards = [Cheat(number, card) for number, card in enumerate(prover.cards)]
    return prover.commit(VECTORS)


def test_an_honest_proof_passes_and_torch_commits_to_the_same(prover: MemoryProver) -> None:
    root = prover.commit(VECTORS)
    check(root, prover)
    torch = MemoryProver(SEED, FILL, ["cpu", "numpy"])
    assert torch.commit(VECTORS) == root
    assert torch.open(DRAWN) == prover.open(DRAWN)


@given(
    width=st.sampled_from([32, 48, 256, 1040, 2048]), columns=st.sampled_from([8, 24, 32]),
    rounds=st.integers(1, 4), card=st.integers(0, 3),
    seed=st.binary(min_size=32, max_size=32),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_blocks_are_those_of_the_definition_on_every_device(
    width: int, columns: int, rounds: int, card: int, seed: bytes
) -> None:
    """Integers of 64 bits, numpy's and torch's exact blocks; marks too."""
    fill = Fill(SLAB, width, columns, 4, rounds)
    a = memory._operand(digest(seed), fill).astype(np.int64)
    keys = memory._keys(digest(seed), card, 5, 3)
    x = keys.astype(np.int64) @ a[:, : memory.KEY].T
    for _ in range(rounds):
        x = (x >> 8).astype(np.int8).astype(np.int64) @ a.T
    expected = (x >> 8).astype(np.int8)
    assert np.array_equal(Maker(digest(seed), fill).blocks(keys), expected)
    vectors = memory._vectors(VECTORS, fill)
    y = ((expected.astype(np.int64) @ vectors.matrix.T.astype(np.int64)) >> 8).astype(np.int8)
    marks = ((y.astype(np.int64) @ vectors.fold[0].astype(np.int64)) >> 8).astype(np.int8)
    assert np.array_equal(memory._marks(expected, vectors), marks)
    device = object.__new__(TorchFilled)
    memory.OnTorch.__init__(device, "cpu")
    torch = device.torch
    whole = torch.from_numpy(memory._operand(digest(seed), fill))
    z = device.second_bytes(torch.from_numpy(keys), whole[:, : memory.KEY])
    for _ in range(rounds):
        z = device.second_bytes(z, whole)
    assert np.array_equal(z.numpy(), expected)
    device.held = z
    assert np.array_equal(next(device.marks(vectors)), marks)


def test_a_fill_has_the_entropy_that_it_takes() -> None:
    """Bytes are spread evenly, and no two blocks, cards or seeds share any."""
    held = NumpyFilled(SEED, FILL, 0).held
    counts = np.bincount(held.reshape(-1).view(np.uint8), minlength=256)
    mean = counts.mean()
    assert abs(counts - mean).max() < 6 * mean**0.5
    others = [NumpyFilled(SEED, FILL, 1).held, NumpyFilled(OTHER, FILL, 0).held]
    rows = {row.tobytes() for part in (held, *others) for row in part}
    assert len(rows) == 3 * FILL.blocks


def test_reading_and_making_go_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MemoryProver(SEED, FILL, ["cpu", "numpy"])
    root = whole.commit(VECTORS)
    monkeypatch.setattr(memory, "_MADE_AT_ONCE", SLAB)
    monkeypatch.setattr(memory, "_READ_AT_ONCE", SLAB)
    parts = MemoryProver(SEED, FILL, ["numpy", "cpu"])
    assert parts.commit(VECTORS) == root
    assert parts.open(DRAWN) == whole.open(DRAWN)


def test_any_changed_byte_of_an_opening_is_found(prover: MemoryProver) -> None:
    root, drawn = prover.commit(VECTORS), DRAWN[:2]
    opening = prover.open(drawn)
    proof = MemoryProof(SEED, VECTORS, FILL, root)
    for at in range(0, len(opening), 101):
        changed = bytearray(opening)
        changed[at] ^= 1
        with pytest.raises(UntrustedError, match="not what was committed to"):
            proof.check(drawn, bytes(changed))
    for wrong in (opening[:-1], opening + b"x", b""):
        with pytest.raises(MalformedError, match="bytes"):
            proof.check(drawn, wrong)
    with pytest.raises(MalformedError, match="no block"):
        prover.open([Block(0, FILL.blocks)])


def test_a_fill_of_another_seed_vector_or_card_fails(prover: MemoryProver) -> None:
    """Filled before the challenge; answered before the vector was known; the fill of card 0 played
    for both cards, as by one card that claims to be two."""
    for cheat in (MemoryProver(OTHER, FILL, ["numpy", "numpy"]), prover):
        root = cheat.commit(VECTORS if cheat is not prover else OTHER)
        with pytest.raises(UntrustedError, match="did not hold its block"):
            check(root, cheat)
    prover.cards = [prover.cards[0], prover.cards[0]]
    root = prover.commit(VECTORS)
    with pytest.raises(UntrustedError, match="card 1 did not hold"):
        check(root, prover)


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_a_share_of_the_blocks_does_not_pass(prover: MemoryProver, share: float) -> None:
    """The rest is invented."""
    random = np.random.default_rng(1)

    def change(card: int, held: Marks, vectors: Vectors) -> Marks:
        marks = memory._marks(held, vectors)
        lost = random.random(len(marks)) >= share
        marks[lost] = random.integers(-128, 128, lost.sum())
        return marks

    root = cheating(prover, change)
    with pytest.raises(UntrustedError, match="did not hold"):
        check(root, prover)
    passed = 0
    for number in range(300):
        drawn = FILL.drawn(hashlib.shake_256(number.to_bytes(4, "big")).digest(8 * 8))
        try:
            check(root, prover, drawn)
        except UntrustedError:
            continue
        passed += 1
    assert passed / 300 == pytest.approx(share**8, abs=0.08)


@pytest.mark.parametrize(
    "summary",
    [
        lambda held: np.where(np.arange(64) < 60, held, 0),  # 60 of 64 bytes of each block
        lambda held: held & np.int8(-2),  # seven of eight bits of each byte
        lambda held: np.repeat(held[:, ::2], 2, axis=1),  # half of them, each for two
        lambda held: np.broadcast_to(held.mean(axis=1, keepdims=True).astype(np.int8), held.shape),
    ],
    ids=["bytes", "bits", "pairs", "sums"],
)
def test_a_summary_of_the_blocks_does_not_give_their_marks(
    prover: MemoryProver, summary: Callable[[Marks], Marks]
) -> None:
    """Stored before the vector is known, in less memory than the blocks."""
    true = memory._marks(prover.cards[0].held, memory._vectors(VECTORS, FILL))  # type: ignore[attr-defined]

    def change(card: int, held: Marks, vectors: Vectors) -> Marks:
        return memory._marks(summary(held).astype(np.int8), vectors)

    root = cheating(prover, change)
    with pytest.raises(UntrustedError, match="did not hold"):
        check(root, prover)
    played = np.frombuffer(prover._marks[0], np.int8)
    assert (played == true).mean() < 0.7


def test_each_card_is_drawn_as_often() -> None:
    fill = Fill(SLAB, 64, 8, 8, 1)
    drawn = fill.drawn(hashlib.shake_256(b"x").digest(8 * 192))
    assert [sum(block.card == card for block in drawn) for card in range(8)] == [24] * 8
    assert all(0 <= block.number < SLAB for block in drawn)


def test_a_check_makes_blocks_only_for_true_paths(
    prover: MemoryProver, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = prover.commit(VECTORS)
    opening = prover.open(DRAWN)
    monkeypatch.setattr(memory, "Maker", None)
    with pytest.raises(UntrustedError, match="committed"):
        MemoryProof(SEED, VECTORS, FILL, root).check(DRAWN, bytes([opening[0] ^ 1]) + opening[1:])


def test_sizes_out_of_bounds_and_missing_devices_are_refused() -> None:
    good = {"blocks": SLAB, "width": 64, "columns": 16, "cards": 1, "rounds": 1}
    Fill(**good)
    for name, values in {
        "blocks": (0, SLAB - 1, SLAB + 1, 1 << 40), "width": (0, 40, 8192), "cards": (0, 65),
        "columns": (0, 12, 128), "rounds": (0, 1025),
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises(MalformedError):
                Fill(**good | {name: value})
    with pytest.raises(UnavailableError, match="cuda"):
        MemoryProver(SEED, Fill(**good), ["cuda:0"])


def test_checking_needs_no_torch() -> None:
    code = "import sys, prime_verify.proofs.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
