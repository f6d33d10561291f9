"""Deltas: bit-identical, small where weights hardly changed, and never half-right."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from broadcast_world import bf16, safetensors_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prime_broadcast import codec, delta
from prime_broadcast.codec import Kind, decode_block, encode_block
from prime_broadcast.delta import ChunkCheck
from prime_broadcast.manifest import build_manifest, verify_folder
from prime_core import encoding
from prime_core.checkpoint import Manifest
from prime_core.errors import MalformedError, PrimeError, UntrustedError

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def put(path: Path, files: dict[str, bytes], version: int) -> Manifest:
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return build_manifest(path, pool=0, version=version, step=version, chunk_size=4096)


class Pair:
    """An old and a new policy folder with their delta."""

    def __init__(self, where: Path, old: dict[str, bytes], new: dict[str, bytes]) -> None:
        where.mkdir(parents=True, exist_ok=True)
        self.old, self.new, self.path = where / "old", where / "new", where / "delta-1"
        self.base = put(self.old, old, 1)
        self.target = put(self.new, new, 2)
        self.result = where / "result"
        self.result.mkdir()
        self.size = delta.encode(self.old, self.base, self.new, self.target, self.path)

    def apply(self) -> None:
        delta.apply(self.old, self.base, self.path, self.target, self.result)


@given(
    width=st.sampled_from(codec.WIDTHS),
    count=st.integers(1, 3000),
    density=st.floats(0, 1),
    small=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_any_block_of_any_width_comes_back_bit_for_bit(
    width: int, count: int, density: float, small: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, count * width, dtype=np.uint8).view(f"<u{width}")
    new = old.copy()
    where = np.flatnonzero(rng.random(count) < density)
    if small:
        new[where] += rng.integers(0, 3, where.size).astype(new.dtype)
    else:
        new[where] = rng.integers(0, 256, where.size * width, dtype=np.uint8).view(f"<u{width}")
    block = encode_block(old.tobytes(), new.tobytes(), width)
    back = decode_block(block, old.tobytes(), new.nbytes, width)
    assert bytes(back) == new.tobytes()


def test_the_form_follows_how_much_changed() -> None:
    old = np.arange(1000, dtype=np.uint16)
    few, most = old.copy(), old.copy()
    few[10] += 1
    most[:900] += 1
    assert encode_block(old.tobytes(), old.tobytes(), 2).kind is Kind.COPY
    assert encode_block(old.tobytes(), few.tobytes(), 2).kind is Kind.SPARSE
    assert encode_block(old.tobytes(), most.tobytes(), 2).kind is Kind.DENSE
    assert encode_block(None, old.tobytes(), 2).kind is Kind.RAW
    noise = os.urandom(2000)
    assert encode_block(old.tobytes(), noise, 2).kind is Kind.RAW


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 70_000])
def test_gaps_at_the_edges_of_a_byte_survive(gap: int) -> None:
    old = np.zeros(gap + 2, np.uint16)
    new = old.copy()
    new[gap] = 0xFFFF
    new[gap + 1] = 0x8000
    block = encode_block(old.tobytes(), new.tobytes(), 2)
    assert bytes(decode_block(block, old.tobytes(), new.nbytes, 2)) == new.tobytes()


def noise_tensors(rng: np.random.Generator) -> Tensors:
    return {
        "a.weight": ("BF16", (64, 50), bf16(rng.normal(0, 0.02, 3200)).tobytes()),
        "b.weight": ("F32", (300,), rng.normal(0, 1, 300).astype("<f4").tobytes()),
        "c.weight": ("F16", (7, 9), rng.normal(0, 1, 63).astype("<f2").tobytes()),
        "scalar": ("F32", (), b"\0\0\x80\x3f"),
        "nothing": ("BF16", (0, 4), b""),
    }


def nudged(tensors: Tensors, rng: np.random.Generator, share: float = 0.02) -> Tensors:
    """Some words of each tensor one unit in the last place off."""
    changed: Tensors = {}
    for name, (dtype, shape, data) in tensors.items():
        words = np.frombuffer(data, np.uint16 if dtype != "F32" else np.uint32).copy()
        words[rng.random(words.size) < share] += 1
        changed[name] = (dtype, shape, words.tobytes())
    return changed


def test_every_kind_of_change_comes_back_bit_for_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    old = noise_tensors(rng)
    new = nudged(old, rng)
    new["b.weight"] = ("F32", (150, 2), new["b.weight"][2])  # another shape: written whole
    new["c.weight"] = ("BF16", (7, 9), new["c.weight"][2])  # another type
    new["d.weight"] = ("BF16", (11,), os.urandom(22))  # new
    del new["nothing"]
    shard = safetensors_bytes({"a.weight": new.pop("a.weight")})  # moved to another file
    pair = Pair(
        tmp_path,
        {
            "model.safetensors": safetensors_bytes(old),
            "config.json": b'{"a": 1}',
            "tokenizer.json": b"t" * 9000,
            "gone.txt": b"gone",
        },
        {
            "model-1.safetensors": shard,
            "model-2.safetensors": safetensors_bytes(new),
            "config.json": b'{"a": 2}',
            "vocabulary.json": b"t" * 9000,  # the same bytes under another name
            "empty": b"",
        },
    )
    pair.apply()
    verify_folder(pair.result, pair.target)


def test_special_bit_patterns_survive(tmp_path: Path) -> None:
    patterns = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 1, 0x8001], np.uint16)
    old = np.tile(patterns, 8)
    new = np.repeat(patterns, 8)
    files = [
        {"m.safetensors": safetensors_bytes({"w": ("BF16", (64,), words.tobytes())})}
        for words in (old, new)
    ]
    pair = Pair(tmp_path, files[0], files[1])
    pair.apply()
    verify_folder(pair.result, pair.target)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\0" * 7,
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]" + b"data",
        (9).to_bytes(8, "little") + b'{"a": {}}' + b"data",
        (4).to_bytes(8, "little") + b"\xff\xfe{}" + b"data",
        safetensors_bytes({"w": ("BF16", (3,), b"toolong!")}),
        safetensors_bytes({"w": ("Q4", (4,), b"abcd")}),
    ],
)
def test_files_that_are_no_safetensors_are_carried_as_bytes(tmp_path: Path, broken: bytes) -> None:
    pair = Pair(tmp_path, {"m.safetensors": b"x" + broken}, {"m.safetensors": broken})
    pair.apply()
    verify_folder(pair.result, pair.target)


def test_overlapping_tensors_are_carried_as_bytes(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
    text += b'"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}'
    body = len(text).to_bytes(8, "little") + text + b"abcdef"
    pair = Pair(tmp_path, {"m.safetensors": body[:-1] + b"x"}, {"m.safetensors": body})
    pair.apply()
    verify_folder(pair.result, pair.target)


@given(
    shapes=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.4, 0.9]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_checkpoints_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[int], share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old: Tensors = {
        f"t{i}": ("BF16", (n,), bf16(rng.normal(0, 0.02, n)).tobytes())
        for i, n in enumerate(shapes)
    }
    new = nudged(old, rng, share)
    where = tmp_path_factory.mktemp("pair")
    files = [{"m.safetensors": safetensors_bytes(tensors)} for tensors in (old, new)]
    pair = Pair(where / "x", files[0], files[1])
    pair.apply()
    verify_folder(pair.result, pair.target)


def test_blocks_are_cut_and_joined_at_any_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "BLOCK", 64)
    rng = np.random.default_rng(2)
    old = noise_tensors(rng)
    pair = Pair(
        tmp_path,
        {"m.safetensors": safetensors_bytes(old), "same": b"s" * 1000},
        {"m.safetensors": safetensors_bytes(nudged(old, rng)), "same": b"s" * 1000},
    )
    pair.apply()
    verify_folder(pair.result, pair.target)


def step_pair(where: Path, count: int, rate: float) -> Pair:
    """Weights N(0, 0.02) before and after an update of `rate` × N(0, 1), published in bf16."""
    rng = np.random.default_rng(3)
    weights = rng.normal(0, 0.02, count).astype(np.float32)
    later = weights - np.float32(rate) * rng.normal(0, 0.3, count).astype(np.float32)
    files = [
        {"m.safetensors": safetensors_bytes({"w": ("BF16", (count,), bf16(w).tobytes())})}
        for w in (weights, later)
    ]
    return Pair(where, files[0], files[1])


@pytest.mark.parametrize(("rate", "least"), [(1e-6, 40), (3e-6, 20), (1e-5, 8)])
def test_one_steps_delta_is_small(tmp_path: Path, rate: float, least: float) -> None:
    pair = step_pair(tmp_path, 500_000, rate)
    assert 1_000_000 / pair.size >= least
    pair.apply()
    verify_folder(pair.result, pair.target)


def test_memory_stays_bounded_at_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK", 256 << 10)
    pair = step_pair(tmp_path, 6_000_000, 1e-6)  # 12 MB: 48 blocks
    tracemalloc.start()
    try:
        delta.encode(pair.old, pair.base, pair.new, pair.target, pair.path, threads=1)
        pair.apply()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, peak


def test_a_delta_on_the_wrong_base_is_refused(tmp_path: Path) -> None:
    pair = step_pair(tmp_path, 5000, 1e-4)
    other = pair.base.model_copy(update={"result_digest": pair.target.result_digest})
    with pytest.raises(UntrustedError, match="starts from"):
        delta.apply(pair.old, other, pair.path, pair.target, pair.result)


def test_a_damaged_base_is_noticed(tmp_path: Path) -> None:
    pair = step_pair(tmp_path, 5000, 1e-4)
    path = pair.old / "m.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UntrustedError, match="base is damaged"):
        pair.apply()


def test_a_deltas_result_is_reported_chunk_by_chunk_up_to_the_first_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "BLOCK", 1000)
    pair = step_pair(tmp_path, 10_000, 1e-4)
    count = len(pair.target.files[0].chunks)
    reported: list[tuple[str, int]] = []

    def apply() -> None:
        delta.apply(
            pair.old,
            pair.base,
            pair.path,
            pair.target,
            pair.result,
            on_chunk=lambda name, index: reported.append((name, index)),
        )

    apply()
    assert reported == [("m.safetensors", index) for index in range(count)]
    path = pair.old / "m.safetensors"
    data = bytearray(path.read_bytes())
    data[3 * 4096 + 7] ^= 1
    path.write_bytes(data)
    reported.clear()
    with pytest.raises(UntrustedError, match="base is damaged"):
        apply()
    assert reported == [("m.safetensors", index) for index in range(3)]


@given(
    size=st.integers(0, 40),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    wrong=st.integers(0, 80),
    more=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_chunks_in_order_are_judged_alike_however_the_pieces_fall(
    size: int, cuts: list[int], wrong: int, more: bool
) -> None:
    data = bytearray(range(size))
    chunks = [encoding.blake3_digest(bytes(data[at : at + 8])) for at in range(0, size, 8)]
    right: list[int] = []
    check = ChunkCheck(size, 8, chunks, right.append)
    if wrong < size:
        data[wrong] ^= 1
    if more:
        data += b"x"
    good, at, number = True, 0, 0
    while good and at < len(data):
        step = cuts[number % len(cuts)]
        good = check.feed(data[at : at + step])
        at, number = at + step, number + 1
    assert right == list(range(wrong // 8 if wrong < size else len(chunks)))
    assert good == (wrong >= size and not more)
    assert check.complete == (wrong >= size)


def test_a_delta_to_another_result_is_refused(tmp_path: Path) -> None:
    pair = step_pair(tmp_path, 5000, 1e-4)
    other = pair.target.model_copy(update={"result_digest": pair.base.result_digest})
    with pytest.raises(UntrustedError, match="does not lead to"):
        delta.apply(pair.old, pair.base, pair.path, other, pair.result)


@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_mutated_delta_is_refused_or_still_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    where = tmp_path_factory.mktemp("mutant")
    pair = step_pair(where / "x", 600, 1e-4)
    raw = bytearray(pair.path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "grow"]))
    place = data.draw(st.integers(0, len(raw) - 1))
    if kind == "flip":
        raw[place] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del raw[place:]
    else:
        raw += b"\0" * (place + 1)
    pair.path.write_bytes(raw)
    try:
        pair.apply()
    except PrimeError:
        return
    verify_folder(pair.result, pair.target)


def test_a_crafted_block_cannot_fill_the_memory() -> None:
    bomb = codec.Block(Kind.RAW, codec._compress(b"\0" * (64 << 20)))
    with pytest.raises(MalformedError, match="states"):
        decode_block(bomb, b"", 1024, 1)
    half = codec.Block(Kind.DENSE, codec._compress(bytes(3)))
    with pytest.raises(MalformedError, match="does not fit"):
        decode_block(half, bytes(3), 3, 2)
    gaps = codec.Block(Kind.SPARSE, codec._compress(b"\1" * (32 << 20)), b"")
    with pytest.raises(MalformedError, match="states"):
        decode_block(gaps, bytes(1024), 1024, 2)
