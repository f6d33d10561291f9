"""Canonical bytes and Merkle trees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core import encoding
from prime_core.errors import MalformedError
from prime_core.ids import Digest, digest

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
leaf_lists = st.lists(st.binary(min_size=32, max_size=32).map(digest), min_size=1, max_size=40)


@given(json_values)
def test_canonical_json_round_trips_to_the_same_bytes(value: object) -> None:
    data = encoding.canonical_json(value)
    assert encoding.parse_canonical_json(data) == value


@pytest.mark.parametrize(
    "data", [b'{"b":1,"a":2}', b'{"a": 1}', b"[1.5]", b"[1", b'{"a":1,"a":1}', b"\xff"]
)
def test_bytes_that_are_not_canonical_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        encoding.parse_canonical_json(data)


def test_floats_have_no_canonical_form() -> None:
    with pytest.raises(MalformedError):
        encoding.canonical_json({"a": 0.5})


@given(leaf_lists, st.data())
def test_every_leaf_is_proved_and_no_other(leaves: list[Digest], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(leaves) - 1))
    root = encoding.merkle_root(leaves)
    proof = encoding.merkle_proof(leaves, index)
    assert encoding.merkle_verify(root, leaves[index], proof)
    stranger = encoding.keccak256(b"stranger")
    assert not encoding.merkle_verify(root, stranger, proof)


def test_a_tree_without_leaves_is_refused() -> None:
    with pytest.raises(MalformedError):
        encoding.merkle_root([])
