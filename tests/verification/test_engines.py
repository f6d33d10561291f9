"""Engines by policy: only the policy that a lease names, from a folder of verified policies."""

from __future__ import annotations

import gc
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from prime_core.checkpoint import FileEntry, Manifest, SignedManifest
from prime_core.errors import UnavailableError
from prime_core.ids import ZERO_DIGEST, Digest, signature
from prime_verify.engines import (
    MANIFEST,
    FolderEngines,
    load_engine,
    loaded_bytes,
    policy_room,
)

TRAINED = Path(__file__).parents[2] / "devnet" / "model"


def _policy(root: Path, version: int) -> Digest:
    folder = root / str(version)
    shutil.copytree(TRAINED, folder)
    entry = FileEntry(name="model.safetensors", size=1, digest=ZERO_DIGEST, chunks=(ZERO_DIGEST,))
    manifest = Manifest(
        pool=1, version=version, step=version, chunk_size=4096, files=(entry,),
        result_digest=ZERO_DIGEST,
    )  # fmt: skip
    signed = SignedManifest(manifest=manifest, signature=signature(bytes(65)))
    (folder / MANIFEST).write_text(signed.model_dump_json())
    return manifest.digest()


def test_the_policy_of_the_lease_is_loaded_once(tmp_path: Path) -> None:
    wanted = _policy(tmp_path, 0)
    engines = FolderEngines(tmp_path)
    engine = engines.engine(0, wanted)
    assert engine is engines.engine(0, wanted)
    assert engine.name == "plain/1"


def test_no_weights_of_a_dropped_policy_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_engine.held.native_bfloat16", lambda: False)
    wanted = _policy(tmp_path, 0)
    engines = FolderEngines(tmp_path)
    engine: Any = engines.engine(0, wanted)
    tokens = tuple(range(3, 20))
    list(engine.in_dtype("bfloat16").proof_pass(tokens[:5], tokens[5:], 1.0))
    weights = weakref.ref(engine.model.get_output_embeddings().weight)
    del engine
    gc.disable()
    try:
        engines.close()
        assert weights() is None
    finally:
        gc.enable()


def test_another_digest_or_an_absent_version_is_unavailable(tmp_path: Path) -> None:
    wanted = _policy(tmp_path, 0)
    engines = FolderEngines(tmp_path)
    with pytest.raises(UnavailableError):
        engines.engine(0, ZERO_DIGEST)
    with pytest.raises(UnavailableError):
        engines.engine(1, wanted)
    (tmp_path / "0" / MANIFEST).write_text("{}")
    with pytest.raises(UnavailableError):
        engines.engine(0, wanted)


class Loaded:
    def __init__(self, name: str, closed: list[str]) -> None:
        self.name, self._closed = name, closed

    def close(self) -> None:
        self._closed.append(self.name)


def test_loaded_policies_stay_within_their_memory_but_the_one_in_use_is_always_there(
    tmp_path: Path,
) -> None:
    digests = [_policy(tmp_path, version) for version in range(3)]
    closed: list[str] = []
    size = loaded_bytes(tmp_path / "0")
    for budget, gone in ((2 * size, ["0"]), (size // 2, ["0", "1"])):
        closed.clear()
        engines = FolderEngines(
            tmp_path, lambda folder: Loaded(folder.name, closed), keep=9, max_bytes=budget
        )
        for version in range(3):
            engine: Any = engines.engine(version, digests[version])
            assert engine.name == str(version)
        assert closed == gone


def test_only_the_last_policies_stay_loaded_and_earlier_ones_come_newest_first(
    tmp_path: Path,
) -> None:
    digests = [_policy(tmp_path, version) for version in range(4)]
    loads: list[str] = []
    closed: list[str] = []

    def load(folder: Path) -> Any:
        loads.append(folder.name)
        return Loaded(folder.name, closed)

    engines = FolderEngines(tmp_path, load, keep=2, look_back=2)
    for version in (0, 1, 2, 2, 0):
        engines.engine(version, digests[version])
    assert loads == ["0", "1", "2", "0"]
    assert closed == ["0", "1"]
    assert [version for version, _ in engines.earlier(3)] == [2, 1]
    assert list(engines.earlier(0)) == []


class Replacing(Loaded):
    """Takes another policy in place, unless its version is in `answers`."""

    def __init__(self, name: str, closed: list[str], answers: dict[str, Any]) -> None:
        super().__init__(name, closed)
        self._answers = answers

    def replace_policy(self, folder: Path) -> bool:
        answer = self._answers.get(folder.name, True)
        if isinstance(answer, Exception):
            raise answer
        if answer:
            self.name = folder.name
        return bool(answer)


def test_a_policy_replaces_the_one_before_in_its_engine_where_that_works(tmp_path: Path) -> None:
    digests = [_policy(tmp_path, version) for version in range(5)]
    loads: list[str] = []
    closed: list[str] = []
    answers = {"2": False, "3": UnavailableError("mixed")}

    def load(folder: Path) -> Any:
        loads.append(folder.name)
        return Replacing(folder.name, closed, answers)

    engines = FolderEngines(tmp_path, load, keep=1)
    first = engines.engine(0, digests[0])
    assert engines.engine(1, digests[1]) is first
    assert (first.name, loads, closed) == ("1", ["0"], [])
    assert engines.engine(2, digests[2]).name == "2"  # it needs a new engine
    assert (loads, closed) == (["0", "2"], ["1"])
    assert engines.engine(3, digests[3]).name == "3"  # the old one may hold parts of both
    assert (loads, closed) == (["0", "2", "3"], ["1", "2"])
    assert engines.engine(4, digests[4]).name == "4"
    assert (loads, closed) == (["0", "2", "3"], ["1", "2"])


def test_with_room_for_several_a_policy_replaces_the_one_used_least_recently(
    tmp_path: Path,
) -> None:
    digests = [_policy(tmp_path, version) for version in range(5)]
    loads: list[str] = []
    closed: list[str] = []

    def load(folder: Path) -> Any:
        loads.append(folder.name)
        return Replacing(folder.name, closed, {"4": MemoryError()})

    size = loaded_bytes(tmp_path / "0")
    for room in ({"keep": 2}, {"keep": 9, "max_bytes": 2 * size}):
        loads.clear()
        closed.clear()
        engines = FolderEngines(tmp_path, load, **room)  # type: ignore[arg-type]
        first, second = (engines.engine(version, digests[version]) for version in (0, 1))
        assert first is not second
        engines.engine(0, digests[0])
        assert engines.engine(2, digests[2]) is second
        assert engines.engine(0, digests[0]) is first
        assert [first.name, second.name] == ["0", "2"]
        with pytest.raises(MemoryError):
            engines.engine(4, digests[4])
        assert closed == ["2"]  # it may hold parts of both
        assert engines.engine(0, digests[0]) is first
        assert loads == ["0", "1"]


def test_an_engine_in_use_is_not_replaced_by_earlier_policies(tmp_path: Path) -> None:
    digests = [_policy(tmp_path, version) for version in range(4)]
    closed: list[str] = []

    def load(folder: Path) -> Any:
        return Replacing(folder.name, closed, {})

    size = loaded_bytes(tmp_path / "0")
    engines = FolderEngines(tmp_path, load, keep=2)
    used = engines.engine(3, digests[3])
    found = [(version, engine, engine.name) for version, engine in engines.earlier(3)]
    assert [(version, name) for version, _, name in found] == [(2, "2"), (1, "1"), (0, "0")]
    assert len({id(engine) for _, engine, _ in found}) == 3
    assert (used.name, closed) == ("3", ["2", "1"])
    for room in ({"keep": 1}, {"max_bytes": 2 * size - 1}):
        one = FolderEngines(tmp_path, load, **room)  # type: ignore[arg-type]
        used = one.engine(3, digests[3])
        assert list(one.earlier(3)) == []
        assert used.name == "3"


def test_a_card_holds_policies_as_in_their_files_and_main_memory_in_float32(
    tmp_path: Path,
) -> None:
    _policy(tmp_path, 0)
    files = (tmp_path / "0" / "model.safetensors").stat().st_size
    assert loaded_bytes(tmp_path / "0") == 2 * files
    assert loaded_bytes(tmp_path / "0", "cuda:0,cuda:1") == files


def test_without_a_bound_policies_take_a_share_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prime_core.memory.available", lambda: 1000)
    assert policy_room("cpu") == 800
    monkeypatch.setattr("prime_core.memory.available", lambda: None)
    assert policy_room("cpu") is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    free = {"cuda:0": 500, "cuda:1": 300, "cuda:2": 400}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda name: (free[name], 1000))
    assert policy_room("all") == 720  # the layers are divided equally
    assert policy_room("cuda:0") == 400


def test_an_unknown_engine_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match="known are plain and vllm"):
        load_engine(TRAINED, engine="other")


def test_vllm_where_it_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it fails, as where it is not
    with pytest.raises(UnavailableError, match=r"setup_vllm\.sh"):
        load_engine(TRAINED, engine="vllm")
