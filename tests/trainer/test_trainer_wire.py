"""What rank 0 tells the others arrives as it was, or not at all; it is never code."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import trainer_kit as kit
from hypothesis import given
from hypothesis import strategies as st

from prime_core.errors import FatalError
from prime_core.ids import Digest, Step
from prime_trainer.data import BadBatch, TrainingBatch, decode_message, encode_message


def batch(groups: int, samples: int, seed: int) -> TrainingBatch:
    rows = kit.conversations(kit.rows(groups, samples, seed=seed))
    keys = tuple((Digest(f"0x{seed:064x}"), number) for number in range(groups))
    cut = tuple(tuple(rows[i : i + samples]) for i in range(0, len(rows), samples))
    return TrainingBatch(Step(seed), Digest(f"0x{seed + 1:064x}"), cut, keys, groups + 3, 3)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000))
def test_a_batch_arrives_to_the_last_bit(groups: int, samples: int, seed: int) -> None:
    sent = batch(groups, samples, seed)
    assert decode_message(encode_message(sent)) == sent


def test_which_batch_is_skipped_and_why_arrives() -> None:
    bad = BadBatch(Step(7), "file 0x12 is of policy 9")
    assert decode_message(encode_message(bad)) == bad


def test_that_the_run_stops_arrives() -> None:
    assert decode_message(encode_message(None)) is None


@given(st.integers(0, 4000), st.integers(1, 255))
def test_bytes_that_are_no_message_are_an_error_and_never_run(place: int, change: int) -> None:
    whole = encode_message(batch(2, 2, 1))
    cut = whole[: place % len(whole)]
    with pytest.raises(FatalError, match="cannot be read"):
        decode_message(cut)
    header = 8 + int.from_bytes(whole[:8], "little")
    spoilt = bytearray(whole)
    spoilt[place % header] ^= change
    with contextlib.suppress(FatalError):  # anything else that is raised fails the test
        decode_message(bytes(spoilt))


def test_a_pickle_is_not_opened() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("unpickled",))

    with pytest.raises(FatalError):
        decode_message(pickle.dumps(Bomb()))
