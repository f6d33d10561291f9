"""Manifests: what is accepted, what is refused, and what `verify_folder` catches."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from broadcast_world import DOMAIN, POOL, STRANGER, TRAINER, TRUST, Run, sign

from prime_broadcast.manifest import (
    History,
    Trust,
    build_manifest,
    check_manifest,
    choose_chunk_size,
    hash_file,
    parse_signed,
    result_digest,
    signed_bytes,
    verify_folder,
)
from prime_core.checkpoint import FileEntry, Manifest, file_digest
from prime_core.errors import MalformedError, UntrustedError, UserError
from prime_core.ids import Digest, digest
from prime_core.signing import Domain

ZERO = "0x" + "00" * 32


def folder_of(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, data in files.items():
        (path / name.replace("__", ".")).write_bytes(data)
    return path


def built(folder: Path, version: int = 3, step: int = 3, chunk_size: int = 4096) -> Manifest:
    return build_manifest(folder, pool=POOL, version=version, step=step, chunk_size=chunk_size)


def test_a_folder_verifies_against_its_own_manifest_and_no_changed_one_does(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", weights__bin=os.urandom(10_000), empty=b"")
    manifest = built(folder)
    assert [(f.name, f.size, len(f.chunks)) for f in manifest.files] == [
        ("empty", 0, 0),
        ("weights.bin", 10_000, 3),
    ]
    verify_folder(folder, manifest)

    data = bytearray((folder / "weights.bin").read_bytes())
    data[5000] ^= 1
    (folder / "weights.bin").write_bytes(data)
    with pytest.raises(UntrustedError, match=r"weights\.bin.*chunk 1 of 3"):
        verify_folder(folder, manifest)
    (folder / "weights.bin").write_bytes(data[:-1])
    with pytest.raises(UntrustedError, match="9999 bytes"):
        verify_folder(folder, manifest)
    (folder / "weights.bin").unlink()
    with pytest.raises(UntrustedError, match="missing"):
        verify_folder(folder, manifest)


def test_a_file_that_the_manifest_lacks_fails_verification(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", weights__bin=b"x")
    manifest = built(folder)
    (folder / "more.bin").write_bytes(b"y")
    with pytest.raises(UntrustedError, match=r"more\.bin"):
        verify_folder(folder, manifest)


def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", weights__bin=b"x")
    manifest = built(folder)
    (folder / "weights.bin").rename(tmp_path / "elsewhere")
    (folder / "weights.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MalformedError, match="symbolic link"):
        verify_folder(folder, manifest)
    with pytest.raises(UserError, match="not a regular file"):
        built(folder)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_plain_files_can_be_published(tmp_path: Path, kind: str) -> None:
    folder = folder_of(tmp_path / "a", weights__bin=b"x")
    odd = folder / "odd"
    if kind == "link":
        odd.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.mkdir()
    with pytest.raises(UserError, match="odd is not a regular file"):
        built(folder)


@pytest.mark.parametrize("name", [".hidden", "-x", "a b", "ü.bin", "a\nb"])
def test_files_with_odd_names_cannot_be_published(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path / "a", weights__bin=b"x")
    (folder / name).write_bytes(b"")
    with pytest.raises(UserError, match="cannot be a policy's file"):
        built(folder)


def test_the_result_digest_does_not_depend_on_order(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", a=os.urandom(9000), b=b"2", c=b"")
    made = built(folder)
    assert result_digest(reversed(made.files)) == made.result_digest
    (folder / "b").rename(folder / "d")
    assert built(folder).result_digest != made.result_digest


def test_a_files_digest_names_its_size_its_chunk_size_and_every_chunk(tmp_path: Path) -> None:
    """So that no other file, nor the same cut otherwise, can pass for it."""
    a, b = Digest("0x" + "aa" * 32), Digest("0x" + "bb" * 32)
    made = {
        file_digest(8192, 4096, (a, b)),
        file_digest(8191, 4096, (a, b)),
        file_digest(8192, 8192, (a, b)),
        file_digest(8192, 4096, (b, a)),
        file_digest(8192, 4096, (a, a)),
        file_digest(8192, 4096, (a,)),
    }
    assert len(made) == 6
    folder = folder_of(tmp_path / "a", a=os.urandom(9000))
    assert built(folder).result_digest != built(folder, chunk_size=8192).result_digest


def test_a_files_digest_is_what_the_page_says() -> None:
    """A vector for other implementations (docs/adr/0005)."""
    from blake3 import blake3

    chunks = [blake3(b"one").digest(), blake3(b"two").digest()]
    preimage = b"prime/file/v1" + (4099).to_bytes(8, "big") + (4096).to_bytes(8, "big")
    expected = "0x" + blake3(preimage + b"".join(chunks)).hexdigest()
    assert file_digest(4099, 4096, [digest(chunk) for chunk in chunks]) == expected
    assert expected == ("0xef787b7b7b700ea02a8642a89d762ac5468a89a063579ff2b2524fb76205738c")


def entry(name: str, data_size: int = 0, chunks: int = 0) -> FileEntry:
    each = (Digest(ZERO),) * chunks
    whole = file_digest(data_size, 4096, each)
    return FileEntry(name=name, size=data_size, digest=whole, chunks=each)


def manifest_of(*files: FileEntry, **change: object) -> Manifest:
    return Manifest(
        pool=POOL,
        version=3,
        step=3,
        chunk_size=4096,
        files=files,
        result_digest=result_digest(files),
    ).model_copy(update=change)


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        (manifest_of(entry("a"), entry("a")), "two files named"),
        (manifest_of(entry("a"), entry("A")), "two files named"),
        (manifest_of(entry("manifest.json")), "reserved"),
        (manifest_of(entry("delta-2")), "reserved"),
        (manifest_of(entry("a", 4097, 1)), "lists 1 chunks"),
        (manifest_of(entry("a", 0, 1)), "lists 1 chunks"),
        (manifest_of(entry("a"), result_digest=ZERO), "result digest"),
        (manifest_of(entry("a", 5, 1).model_copy(update={"digest": ZERO})), "not made of"),
        (manifest_of(entry("a", 5, 1), chunk_size=8192), "not made of"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(manifest: Manifest, why: str) -> None:
    with pytest.raises(MalformedError, match=why):
        check_manifest(manifest)


def test_a_manifest_beyond_the_size_limit_is_refused() -> None:
    check_manifest(manifest_of(entry("a", 8192, 2)), max_bytes=8192)
    with pytest.raises(MalformedError, match="limit is 8191"):
        check_manifest(manifest_of(entry("a", 8192, 2)), max_bytes=8191)


@pytest.mark.parametrize(
    "name", ["../evil", "..", ".", "/etc/passwd", "a/b", "a\\b", "", "a" * 256, "a\0b", "ä"]
)
def test_names_that_leave_the_folder_are_refused_when_parsing(run: Run, name: str) -> None:
    body = json.loads(signed_bytes(run.publish()))
    body["manifest"]["files"][0]["name"] = name
    with pytest.raises(MalformedError, match="not a signed manifest"):
        parse_signed(json.dumps(body).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"version": -1},
        {"version": "1"},
        {"chunk_size": 1 << 40},
        {"chunk_size": 1},
        {"files": []},
        {"step": 1.0},
    ],
)
def test_unknown_fields_and_values_out_of_bounds_are_refused(
    run: Run, change: dict[str, object]
) -> None:
    body = json.loads(signed_bytes(run.publish()))
    body["manifest"] |= change
    with pytest.raises(MalformedError):
        parse_signed(json.dumps(body).encode())


def test_an_overlong_or_broken_manifest_is_refused(run: Run) -> None:
    raw = signed_bytes(run.publish())
    assert parse_signed(raw) is not None
    for bad in (raw[:-1], b"", b"[" * 100_000, b"null", b"\xff"):
        with pytest.raises(MalformedError):
            parse_signed(bad)
    with pytest.raises(MalformedError, match="exceeds the limit"):
        parse_signed(raw, limit=len(raw) - 1)


def test_only_the_trainers_signature_for_this_pool_and_contract_is_taken(run: Run) -> None:
    signed = run.publish()
    assert TRUST.check(signed) == signed.manifest
    with pytest.raises(UntrustedError, match=STRANGER.address):
        TRUST.check(sign(signed.manifest, STRANGER))
    with pytest.raises(UntrustedError, match=f"pool {POOL}, not for pool 8"):
        Trust(TRAINER.address, DOMAIN, 8).check(signed)
    for domain in (
        Domain(chain_id=1, contract=DOMAIN.contract),
        Domain(chain_id=DOMAIN.chain_id, contract=TRAINER.address),
    ):
        with pytest.raises(UntrustedError, match="not by the trainer"):
            Trust(TRAINER.address, domain, POOL).check(signed)


def test_a_changed_manifest_under_an_old_signature_is_refused(run: Run) -> None:
    signed = run.publish()
    changed = signed.manifest.model_copy(update={"step": 9})
    with pytest.raises(UntrustedError, match="not by the trainer"):
        TRUST.check(signed.model_copy(update={"manifest": changed}))


def test_a_version_has_one_manifest_and_steps_never_run_backwards() -> None:
    def at(version: int, step: int) -> Manifest:
        return manifest_of(entry("a"), version=version, step=step)

    history = History()
    assert history.admit(at(3, 30))
    assert not history.admit(at(3, 30))
    with pytest.raises(UntrustedError, match="two signed manifests for policy 3"):
        history.admit(at(3, 31))
    assert history.admit(at(5, 50))
    for version, step in ((4, 29), (4, 51), (6, 49), (2, 31)):
        with pytest.raises(UntrustedError, match="replayed"):
            history.admit(at(version, step))
    assert history.judge(at(4, 49)), "judged, not noted"
    assert history.admit(at(4, 40))


def test_chunk_sizes_grow_with_the_policy_and_stay_bounded() -> None:
    assert choose_chunk_size(0) == 1 << 20
    assert choose_chunk_size(32 << 20) == 1 << 20
    assert choose_chunk_size(33 << 20) == 2 << 20
    assert choose_chunk_size(256 << 20) == 8 << 20
    assert choose_chunk_size(1 << 30) == 16 << 20
    assert choose_chunk_size(1 << 40) == 16 << 20


def test_hashing_does_not_depend_on_how_the_file_is_read(tmp_path: Path) -> None:
    from blake3 import blake3

    path = tmp_path / "f"
    data = os.urandom(3 * 4096 + 5)
    path.write_bytes(data)
    size, whole, chunks = hash_file(path, 4096)
    assert size == len(data)
    assert whole == file_digest(len(data), 4096, chunks)
    parts = [data[i : i + 4096] for i in range(0, len(data), 4096)]
    assert list(chunks) == ["0x" + blake3(part).hexdigest() for part in parts]
    path.write_bytes(b"")
    assert hash_file(path, 4096) == (0, file_digest(0, 4096, ()), ())
