"""Publishing: a version appears whole, once, and the same when it is tried again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from broadcast_world import CHUNK, POOL, Run, sign

from prime_broadcast import layout
from prime_broadcast.layout import parse_address
from prime_broadcast.publish import finalize, publish
from prime_core.checkpoint import Manifest
from prime_core.errors import ConflictError, MalformedError, UnavailableError, UserError


def prepare(run: Run, source: Path, version: int) -> Manifest:
    return publish(source, run.root, pool=POOL, version=version, step=version, chunk_size=CHUNK)


def test_a_version_is_visible_only_after_it_is_signed(run: Run) -> None:
    source = run.checkpoint(run.folder / "c")
    manifest = prepare(run, source, 0)
    assert layout.versions(run.root) == []
    finalize(run.root, sign(manifest))
    assert layout.versions(run.root) == [0]
    assert run.index() == [0]
    assert layout.manifest_of(run.root, 0) == sign(manifest)


def test_published_files_are_copies_that_anyone_may_read(run: Run) -> None:
    source = run.checkpoint(run.folder / "c")
    (source / "model.safetensors").chmod(0o600)  # as save_pretrained leaves it
    old_umask = os.umask(0o077)
    try:
        finalize(run.root, sign(prepare(run, source, 0)))
    finally:
        os.umask(old_umask)
    published = layout.version_folder(run.root, 0)
    assert {p.stat().st_mode & 0o777 for p in published.iterdir()} == {0o644}
    before = run.file(0)
    (source / "model.safetensors").write_bytes(b"overwritten by the next save")
    assert run.file(0) == before


def test_publishing_again_after_a_crash_gives_the_same_manifest(run: Run) -> None:
    run.publish()
    run.step()
    source = run.checkpoint(run.folder / "c1")
    first = prepare(run, source, 1)  # and the process dies before it signs
    assert prepare(run, source, 1) == first
    finalize(run.root, sign(first))  # and dies before anyone hears of it
    assert prepare(run, source, 1) == first
    finalize(run.root, sign(first))
    assert run.index() == [1, 0]
    assert first.deltas[0].base == 0


def test_a_version_cannot_be_published_twice_with_other_files(run: Run) -> None:
    run.publish()
    run.step(1e-3)
    with pytest.raises(ConflictError, match="policy 0 is already published"):
        prepare(run, run.checkpoint(run.folder / "other"), 0)


def test_only_what_was_prepared_can_be_finalized(run: Run) -> None:
    signed = run.publish()
    with pytest.raises(ConflictError, match="was not prepared"):
        finalize(run.root, sign(signed.manifest.model_copy(update={"version": 5})))
    with pytest.raises(ConflictError, match="already published"):
        finalize(run.root, sign(signed.manifest.model_copy(update={"step": 5})))


def test_a_delta_that_does_not_pay_is_left_out(run: Run) -> None:
    run.publish()
    source = run.checkpoint(run.folder / "c1")
    (source / "model.safetensors").write_bytes(os.urandom(400_000))
    manifest = prepare(run, source, 1)
    assert manifest.deltas == ()
    finalize(run.root, sign(manifest))
    assert not list(layout.version_folder(run.root, 1).glob("delta-*"))


def test_deltas_may_reach_further_back(run: Run) -> None:
    for _ in range(3):
        run.publish()
    run.step()
    manifest = publish(
        run.checkpoint(run.folder / "c3"), run.root, pool=POOL, version=3, step=3, delta_from=2
    )
    assert [entry.base for entry in manifest.deltas] == [2, 1]


def test_an_empty_folder_cannot_be_published(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no file to publish"):
        prepare(run, tmp_path / "empty", 0)


def test_a_full_disk_leaves_nothing_visible(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    run.publish()
    run.step()
    source = run.checkpoint(run.folder / "c1")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(UnavailableError, match="disk is full"):
            prepare(run, source, 1)
    assert layout.versions(run.root) == [0]
    finalize(run.root, sign(prepare(run, source, 1)))
    assert layout.versions(run.root) == [0, 1]


def test_pruning_keeps_the_newest_and_the_pinned(run: Run) -> None:
    for _ in range(5):
        run.publish()
    assert layout.prune(run.root, 2, pinned=(1,)) == [0, 2]
    assert layout.versions(run.root) == [1, 3, 4]
    assert run.index() == [4, 3, 1]


@pytest.mark.parametrize(
    "path",
    [
        "/policies/../secret",
        "/policies/0/../../secret",
        "/policies/0/..",
        "/policies/0/.staging",
        "/policies/00/config.json",
        "/policies/-1/config.json",
        "/policies/0/a/b",
        "/policies/0/",
        "/policies/0/a\nb",
        "/policies/0/config.json\n",
        "/policies/" + "9" * 40 + "/config.json",
        "/policies//config.json",
        "//policies/0/config.json",
        "/etc/passwd",
        "/policies/.staging-1/config.json",
        "/policies/0/" + "a" * 300,
        "",
    ],
)
def test_no_address_leaves_the_layout(path: str) -> None:
    assert parse_address(path) is None


def test_an_index_from_outside_is_parsed_strictly(run: Run) -> None:
    run.publish()
    raw = (run.root / "policies" / "index.json").read_bytes()
    assert len(layout.parse_index(raw)) == 1
    body = json.loads(raw)
    newer = json.dumps({**body, "more": 1}).encode()
    assert layout.parse_index(newer) == layout.parse_index(raw), "a later field is ignored"
    for bad in ({"policies": {}}, [], {"policies": [body["policies"][0], 1]}):
        with pytest.raises(MalformedError):
            layout.parse_index(json.dumps(bad).encode())


def test_an_index_that_replays_thousands_of_manifests_is_refused_unread(run: Run) -> None:
    run.publish()
    body = json.loads((run.root / "policies" / "index.json").read_bytes())
    (only,) = body["policies"]
    with pytest.raises(MalformedError, match="not an index"):
        layout.parse_index(json.dumps({"policies": [only] * 6000}).encode())
    with pytest.raises(MalformedError, match="version 0 twice"):
        layout.parse_index(json.dumps({"policies": [only, only]}).encode())


def test_an_index_is_read_newest_first_however_it_is_written(run: Run) -> None:
    for _ in range(3):
        run.publish()
    body = json.loads((run.root / "policies" / "index.json").read_bytes())
    body["policies"].reverse()
    listed = layout.parse_index(json.dumps(body).encode())
    assert [signed.manifest.version for signed in listed] == [2, 1, 0]
