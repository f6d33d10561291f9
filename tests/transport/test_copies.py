"""Several published things in one answer."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from prime_chain.mirror import HttpSource
from prime_core.encoding import sha256
from prime_core.errors import MalformedError, NotFoundError, UnavailableError
from prime_core.ids import Digest
from prime_core.transport.copies import (
    MOST_BYTES,
    MOST_NAMES,
    MOST_TAKEN,
    pack,
    parse_names,
    unpack,
)

SMALL, HALF = b"a verdict", bytes(MOST_BYTES // 2)


def test_an_answer_gives_what_there_is_and_leaves_out_what_has_no_room() -> None:
    held = {sha256(data): data for data in (SMALL, HALF, HALF + b"1", HALF + b"2")}
    absent = sha256(b"absent")
    names = [("leases", absent), *(("objects", digest) for digest in held)]

    def read(kind: str, digest: Digest, limit: int) -> bytes:
        reads.append(digest)
        if digest not in held:
            raise NotFoundError("absent")
        if len(held[digest]) > limit:
            raise MalformedError("too large")
        return held[digest]

    text = ",".join(f"{kind}/{digest}" for kind, digest in names)
    assert parse_names(text) == names
    reads: list[Digest] = []
    found = unpack(pack(names, read))
    assert len(reads) == len(names) - 1, "nothing is read after what no longer fits"
    assert found == {f"leases/{absent}": None} | {f"objects/{sha256(d)}": d for d in (SMALL, HALF)}

    assert unpack(pack(names[1:], read, seconds=0)) == {f"objects/{sha256(SMALL)}": SMALL}
    large = bytes(MOST_BYTES + 1)
    held[sha256(large)] = large
    found = unpack(pack([("objects", sha256(large)), *names], read))
    assert f"objects/{sha256(HALF)}" in found, "what fits no answer keeps out nothing after it"

    def fails(kind: str, digest: Digest, limit: int) -> bytes:
        asked.append(digest)
        raise UnavailableError("the store does not answer")

    asked: list[Digest] = []
    assert (unpack(pack(names, fails)), len(asked)) == ({}, 1)


@pytest.mark.parametrize(
    "text",
    ["", "pool", "objects/0x12", "../objects/0x" + "0" * 64, f"objects/{sha256(b'')},",
     ",".join(f"objects/{sha256(bytes([n]))}" for n in range(MOST_NAMES + 1))],
)  # fmt: skip
def test_names_are_few_and_exact(text: str) -> None:
    with pytest.raises(MalformedError):
        parse_names(text)


NAME = f"objects/{sha256(b'it')}"


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}\n", b"[" * 10_000, b'[["a", -1]]\n', b'[["a", true]]\n', b'[["a", 3]]\nit',
     b'[["a", 1]]\nit', f'[["{NAME}", 2]]\nno'.encode(),
     f'[["leases/0x00", {MOST_TAKEN + 1}]]\n'.encode() + bytes(MOST_TAKEN + 1),
     json.dumps([["a", 0]] * 5000).encode() + b"\n"],
    ids=lambda answer: f"{answer[:14]!r} of {len(answer)}",
)  # fmt: skip
def test_an_answer_that_is_not_what_it_says_is_refused(answer: bytes) -> None:
    assert unpack(f'[["{NAME}", 2]]\nit'.encode()) == {NAME: b"it"}
    with pytest.raises(MalformedError):
        unpack(answer)


def test_a_source_that_gives_one_large_thing_at_a_time_does_not_fill_the_memory() -> None:
    asked: list[int] = []

    class Lying:
        def request(self, method: str, path: str, body: bytes, *, signed: bool) -> bytes:
            names = path.partition("=")[2].split(",")
            asked.append(len(names))
            size = MOST_TAKEN // 2
            return json.dumps([[names[0], size]]).encode() + b"\n" + bytes(size)

    names = [f"submissions/0x{n:064x}" for n in range(9)]
    assert list(HttpSource(cast(Any, Lying())).copies(names)) == names[:2]
    assert asked == [9, 8]
