"""Fetching under faults: each ends in the right weights or one clear error, never half-applied."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from broadcast_world import (
    CHUNK,
    Run,
    answer,
    bad_server,
    base_of,
    get,
    left_in,
    plain_server,
    same_files,
    sign,
)

from prime_broadcast import delta, layout
from prime_broadcast.client import Base, fetch, plan_route
from prime_broadcast.manifest import verify_folder
from prime_broadcast.server import Origin
from prime_broadcast.sources import SourceBook
from prime_core.errors import MalformedError, UnavailableError, UntrustedError


def test_a_policy_arrives_whole_verified_and_under_its_name(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    seen: list[tuple[int, int]] = []
    with Origin(run.root) as origin:
        stats = get(
            signed, [origin.url], tmp_path / "n" / "0", progress=lambda *at: seen.append(at)
        )
    assert same_files(tmp_path / "n" / "0", run, 0)
    assert left_in(tmp_path / "n") == {"0"}
    verify_folder(tmp_path / "n" / "0", signed.manifest)
    size = stats.policy_bytes
    assert (stats.route, stats.bytes_received, stats.bytes_written) == ("whole", size, size)
    assert stats.by_source == {origin.url: size}
    assert seen[-1] == (size, size)
    assert not stats.faults
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "n" / "0").iterdir()} == {0o644}


def test_what_is_there_already_is_not_fetched_again(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    with Origin(run.root) as origin:
        get(signed, [origin.url], tmp_path / "0")
    assert get(signed, [], tmp_path / "0").route == "present"


def test_another_policy_under_the_same_name_is_refused(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    with Origin(run.root) as origin:
        get(signed, [origin.url], tmp_path / "0")
    other = sign(signed.manifest.model_copy(update={"step": 5}))
    with pytest.raises(UntrustedError, match="one version has one manifest"):
        get(other, [], tmp_path / "0")


def test_a_failed_fetch_resumes_without_fetching_a_verified_chunk_again(
    run: Run, tmp_path: Path
) -> None:
    signed = run.publish()
    served: list[int] = []

    def dies(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if len(served) == 10:
            handler.close_connection = True
            return
        served.append(len(body))
        answer(handler, body)

    with bad_server(run.root, dies) as mortal, pytest.raises(UnavailableError):
        get(signed, [mortal], tmp_path / "0", patience=0.3)
    assert not (tmp_path / "0").exists()
    with Origin(run.root) as origin:
        stats = get(signed, [origin.url], tmp_path / "0")
    assert stats.kept == 10
    assert stats.bytes_received == stats.policy_bytes - sum(served)
    assert same_files(tmp_path / "0", run, 0)


def test_damage_in_what_an_earlier_try_left_is_found(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    count = [0]

    def dies(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        count[0] += 1
        if count[0] > 8:
            handler.close_connection = True
            return
        answer(handler, body)

    with bad_server(run.root, dies) as mortal, pytest.raises(UnavailableError):
        get(signed, [mortal], tmp_path / "0", patience=0.3)
    (partial,) = (p for p in tmp_path.iterdir() if p.name.startswith(".partial-0-"))
    left = [
        (path, start)
        for path in (partial / "files").iterdir()
        for start in range(0, len(run.file(0, path.name)), CHUNK)
        if path.read_bytes()[start : start + CHUNK] == run.file(0, path.name)[start : start + CHUNK]
    ]
    assert len(left) > 4
    path, start = left[2]
    with path.open("r+b") as file:
        file.seek(start + 7)
        byte = file.read(1)
        file.seek(start + 7)
        file.write(bytes([byte[0] ^ 1]))
    with Origin(run.root) as origin:
        stats = get(signed, [origin.url], tmp_path / "0")
    assert stats.kept == len(left) - 1
    assert same_files(tmp_path / "0", run, 0)


@pytest.mark.parametrize("allowed", [0, 1, 7])
def test_a_full_disk_is_one_sentence_and_can_be_resumed_from_the_same_source(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    signed = run.publish()
    book = SourceBook()
    real, count = os.pwrite, [0]

    def fills(fd: int, data: bytes, offset: int) -> int:
        count[0] += 1
        if count[0] > allowed:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with Origin(run.root) as origin:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fills)
            with pytest.raises(UnavailableError, match="disk is full"):
                get(signed, [origin.url], tmp_path / "0", book=book)
        assert not (tmp_path / "0").exists()
        stats = get(signed, [origin.url], tmp_path / "0", book=book)
        assert book.get(origin.url).in_use == 0
    assert stats.kept == allowed
    assert same_files(tmp_path / "0", run, 0)


def test_a_full_disk_costs_a_source_without_ranges_nothing_either(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = run.publish()
    book = SourceBook()

    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if "model" in Path(f"/proc/self/fd/{fd}").readlink().name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with plain_server(run.root) as mirror:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(UnavailableError, match="disk is full"):
                get(signed, [mirror], tmp_path / "0", book=book)
        get(signed, [mirror], tmp_path / "0", book=book)
    assert same_files(tmp_path / "0", run, 0)


def test_too_little_space_is_said_before_anything_is_fetched(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    signed = run.publish()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with Origin(run.root) as origin:
        with pytest.raises(UnavailableError, match="are needed"):
            get(signed, [origin.url], tmp_path / "0")
        assert origin.counters.requests == 0


# Deltas


def test_a_node_with_the_base_fetches_only_the_delta(run: Run, tmp_path: Path) -> None:
    zero, one = run.publish(), run.publish()
    with Origin(run.root) as origin:
        get(zero, [origin.url], tmp_path / "0")
        stats = get(one, [origin.url], tmp_path / "1", bases=[base_of(tmp_path / "0", zero)])
    assert (stats.route, stats.hops) == ("delta", (1,))
    assert stats.bytes_received == one.manifest.deltas[0].size < stats.policy_bytes / 10
    assert same_files(tmp_path / "1", run, 1)
    assert left_in(tmp_path) == {"run", "0", "1"}


def test_a_node_that_missed_versions_takes_the_chain_if_it_is_cheaper(
    run: Run, tmp_path: Path
) -> None:
    signed = [run.publish() for _ in range(4)]
    chain = {s.manifest.version: s.manifest for s in signed}
    with Origin(run.root) as origin:
        get(signed[0], [origin.url], tmp_path / "0")
        stats = get(
            signed[3],
            [origin.url],
            tmp_path / "3",
            bases=[base_of(tmp_path / "0", signed[0])],
            chain=chain,
        )
    assert (stats.route, stats.hops) == ("delta", (1, 2, 3))
    assert same_files(tmp_path / "3", run, 3)
    assert left_in(tmp_path) == {"run", "0", "3"}


def test_the_plan_is_the_cheapest_path(run: Run, tmp_path: Path) -> None:
    signed = [run.publish() for _ in range(4)]
    manifests = [s.manifest for s in signed]
    chain = {m.version: m for m in manifests}
    bases = [Base(tmp_path / str(v), manifests[v]) for v in (0, 2)]
    assert [h.target.version for h in plan_route(manifests[3], bases, chain).hops] == [3]
    assert [h.target.version for h in plan_route(manifests[3], bases[:1], chain).hops] == [1, 2, 3]
    assert plan_route(manifests[3], bases[:1], {}).hops == ()
    assert plan_route(manifests[3], [], chain).hops == ()
    dear = manifests[3].model_copy(
        update={"deltas": (manifests[3].deltas[0].model_copy(update={"size": 1 << 30}),)}
    )
    assert plan_route(dear, bases, chain).hops == ()
    other = manifests[2].model_copy(update={"result_digest": manifests[0].result_digest})
    assert plan_route(manifests[3], [Base(tmp_path / "2", other)], chain).hops == ()


def test_a_damaged_base_falls_back_to_the_whole(run: Run, tmp_path: Path) -> None:
    zero, one = run.publish(), run.publish()
    with Origin(run.root) as origin:
        get(zero, [origin.url], tmp_path / "0")
        with (tmp_path / "0" / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        stats = get(one, [origin.url], tmp_path / "1", bases=[base_of(tmp_path / "0", zero)])
    assert stats.route == "whole"
    assert [fault.kind for fault in stats.faults] == ["delta"]
    assert same_files(tmp_path / "1", run, 1)


def test_a_missing_delta_falls_back_to_the_whole(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prime_broadcast import client

    monkeypatch.setattr(client, "DELTA_PATIENCE", 0.3)
    zero, one = run.publish(), run.publish()
    with Origin(run.root) as origin:
        get(zero, [origin.url], tmp_path / "0")
        (layout.version_folder(run.root, 1) / "delta-0").unlink()
        stats = get(one, [origin.url], tmp_path / "1", bases=[base_of(tmp_path / "0", zero)])
    assert stats.route == "whole"
    assert same_files(tmp_path / "1", run, 1)


def test_a_kill_while_applying_a_delta_leaves_nothing_half_applied(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = run.publish(), run.publish()

    class Killed(BaseException):
        pass

    real = delta.write_at
    count = [0]

    def dies(fd: int, data: bytes, offset: int) -> None:
        count[0] += 1
        real(fd, data[: len(data) // 2], offset)
        raise Killed

    with Origin(run.root) as origin:
        get(zero, [origin.url], tmp_path / "0")
        bases = [base_of(tmp_path / "0", zero)]
        with monkeypatch.context() as patch:
            patch.setattr(delta, "write_at", dies)
            with pytest.raises(Killed):
                get(one, [origin.url], tmp_path / "1", bases=bases)
        assert count == [1]
        assert not (tmp_path / "1").exists()
        stats = get(one, [origin.url], tmp_path / "1", bases=bases)
    assert stats.route == "delta"
    assert stats.bytes_received == 0, "the delta itself was kept"
    assert same_files(tmp_path / "1", run, 1)


def test_a_manifest_whose_chunks_and_file_disagree_is_refused_before_a_byte_is_fetched(
    run: Run, tmp_path: Path
) -> None:
    from prime_broadcast.manifest import result_digest

    signed = run.publish()
    files = tuple(
        f.model_copy(update={"digest": signed.manifest.files[1].digest}) if n == 0 else f
        for n, f in enumerate(signed.manifest.files)
    )
    forged = signed.manifest.model_copy(
        update={"files": files, "result_digest": result_digest(files)}
    )
    with Origin(run.root) as origin:
        with pytest.raises(MalformedError, match="not made of its chunks"):
            fetch(forged, [origin.url], tmp_path / "0", patience=5.0)
        assert origin.counters.requests == 0
    assert not (tmp_path / "0").exists()


def test_two_fetches_of_one_policy_do_not_disturb_each_other(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    routes: list[str] = []
    with Origin(run.root) as origin:
        threads = [
            threading.Thread(
                target=lambda: routes.append(get(signed, [origin.url], tmp_path / "0").route)
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(routes) == ["present"] * 3 + ["whole"]
    assert same_files(tmp_path / "0", run, 0)
