"""The node's folder of policies: verified, whole, one manifest a version."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from broadcast_world import STRANGER, TRUST, Run, same_files, sign

from prime_broadcast.client import Base
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import MANIFEST_NAME, signed_bytes
from prime_broadcast.pool import Policies
from prime_broadcast.server import Origin
from prime_core.checkpoint import SignedManifest
from prime_core.errors import PolicyError, UnavailableError, UntrustedError


@pytest.fixture
def folder(tmp_path: Path) -> PolicyFolder:
    return PolicyFolder(tmp_path / "policies", TRUST)


def test_policies_arrive_whole_then_by_deltas_then_not_at_all(
    run: Run, folder: PolicyFolder
) -> None:
    signed = [run.publish() for _ in range(4)]
    assert folder.latest() is None
    with Origin(run.root) as origin:
        routes = [
            folder.ensure(0, signed[0], [origin.url]).stats.route,
            folder.ensure(1, signed[1], [origin.url]).stats.route,
            folder.ensure(3, signed[3], [origin.url], others=signed).stats.route,
        ]
    assert routes == ["whole", "delta", "delta"]
    assert folder.ensure(3, signed[3], []).stats.route == "present"
    assert (folder.latest(), folder.versions()) == (3, [0, 1, 3])
    assert all(same_files(folder.path(v), run, v) for v in (0, 1, 3))
    assert folder.manifest(3) == signed[3]
    folder.verify(3)


def test_an_older_policy_stays_once_it_was_fetched(run: Run, folder: PolicyFolder) -> None:
    """A juror replays files of any policy, in any order."""
    signed = [run.publish() for _ in range(3)]

    class Named:
        def policy(self, version: int) -> SignedManifest:
            return signed[version]

        def relays(self) -> list[str]:
            return []

    with Origin(run.root) as origin:
        policies = Policies(folder, Named(), sources=[origin.url], keep=2)
        for version in (1, 2, 0):
            assert policies.ensure(version, signed[version].manifest.digest()).is_dir()
    assert folder.versions() == [0, 1, 2]


def test_everything_in_it_can_be_read_by_a_container(run: Run, folder: PolicyFolder) -> None:
    old = os.umask(0o077)
    try:
        with Origin(run.root) as origin:
            path = folder.ensure(0, run.publish(), [origin.url]).path
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o755
    assert {p.stat().st_mode & 0o777 for p in path.iterdir()} == {0o644}


def test_only_the_trainers_policies_are_taken(run: Run, folder: PolicyFolder) -> None:
    signed = run.publish()
    with Origin(run.root) as origin:
        with pytest.raises(UntrustedError, match="not by the trainer"):
            folder.ensure(0, sign(signed.manifest, STRANGER), [origin.url])
        with pytest.raises(UntrustedError, match="of policy 0, not 1"):
            folder.ensure(1, signed, [origin.url])
        assert origin.counters.requests == 0
    assert folder.versions() == []


def test_a_policy_larger_than_the_owner_s_limit_is_not_fetched(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    size = sum(file.size for file in signed.manifest.files)
    with Origin(run.root) as origin:
        small = PolicyFolder(tmp_path / "small", TRUST, most_bytes=size - 1)
        with pytest.raises(PolicyError, match="more than the"):
            small.ensure(0, signed, [origin.url])
        assert origin.counters.requests == 0
        fits = PolicyFolder(tmp_path / "fits", TRUST, most_bytes=size)
        assert fits.ensure(0, signed, [origin.url]).stats.route == "whole"


def test_a_version_that_is_here_cannot_change(run: Run, folder: PolicyFolder) -> None:
    signed = run.publish()
    with Origin(run.root) as origin:
        folder.ensure(0, signed, [origin.url])
        other = sign(signed.manifest.model_copy(update={"step": 5}))
        with pytest.raises(UntrustedError, match="one version has one manifest"):
            folder.ensure(0, other, [origin.url])


def restamped(signed: SignedManifest, **changes: int) -> SignedManifest:
    """Another manifest of the same files, as the trainer's key would sign it."""
    return sign(signed.manifest.model_copy(update=changes))


def test_a_version_that_was_here_cannot_come_back_as_another(
    run: Run, folder: PolicyFolder
) -> None:
    signed = [run.publish() for _ in range(2)]
    with Origin(run.root) as origin:
        for version in range(2):
            folder.ensure(version, signed[version], [origin.url])
        assert folder.prune(1) == [0]
        asked = origin.counters.requests
        with pytest.raises(UntrustedError, match="two signed manifests for policy 0"):
            folder.ensure(0, restamped(signed[0], step=1), [origin.url])
        assert origin.counters.requests == asked
        assert folder.versions() == [1]
        folder.ensure(0, signed[0], [origin.url])


def test_steps_never_run_backwards_even_if_another_server_brought_the_previous_version(
    run: Run, folder: PolicyFolder
) -> None:
    signed = [run.publish() for _ in range(3)]
    with Origin(run.root) as origin:
        folder.ensure(1, signed[1], [origin.url])
        for one in (folder, PolicyFolder(folder.root, TRUST)):
            asked = origin.counters.requests
            with pytest.raises(UntrustedError, match="policy 2 claims step 0, but policy 1 is of"):
                one.ensure(2, restamped(signed[2], step=0), [origin.url])
            with pytest.raises(UntrustedError, match="policy 0 claims step 2, but policy 1 is of"):
                one.ensure(0, restamped(signed[0], step=2), [origin.url])
            assert origin.counters.requests == asked
            assert one.versions() == [1]
            one.verify(1)
        folder.ensure(2, restamped(signed[2], step=1), [origin.url])
        assert folder.versions() == [1, 2]


@pytest.mark.parametrize("what", ["another pool's", "a digit flipped"])
def test_a_foreign_manifest_on_disk_blames_no_server(
    run: Run, folder: PolicyFolder, what: str
) -> None:
    signed = [run.publish() for _ in range(4)]

    def lay(version: int) -> None:
        """A manifest of a step far ahead."""
        honest = signed[version]
        later = honest.manifest.model_copy(update={"step": 9})
        bad = honest.model_copy(update={"manifest": later})
        if what == "another pool's":
            bad = restamped(honest, step=9, pool=TRUST.pool + 1)
        folder.path(version).mkdir(exist_ok=True)
        (folder.path(version) / MANIFEST_NAME).write_bytes(signed_bytes(bad))

    with Origin(run.root) as origin:
        folder.ensure(0, signed[0], [origin.url])
        lay(1)
        folder.ensure(2, signed[2], [origin.url])
        lay(3)
        with pytest.raises(UntrustedError, match="one version has one manifest"):
            folder.ensure(3, signed[3], [origin.url])
        folder.discard(3)
        folder.ensure(3, signed[3], [origin.url])
    assert all(same_files(folder.path(version), run, version) for version in (0, 2, 3))
    assert folder.manifest(3) == signed[3]


def test_what_never_arrived_blames_no_server(run: Run, folder: PolicyFolder) -> None:
    signed = run.publish()
    with pytest.raises(UnavailableError):
        folder.ensure(0, restamped(signed, step=9), ["http://127.0.0.1:1"], patience=0.1)
    with Origin(run.root) as origin:
        folder.ensure(0, signed, [origin.url])
    assert folder.manifest(0) == signed


def test_links_of_a_chain_that_are_not_the_trainers_are_left_out(
    run: Run, folder: PolicyFolder
) -> None:
    signed = [run.publish() for _ in range(3)]
    forged = sign(signed[1].manifest, STRANGER)
    with Origin(run.root) as origin:
        folder.ensure(0, signed[0], [origin.url])
        arrived = folder.ensure(2, signed[2], [origin.url], others=[signed[0], forged])
    assert arrived.stats.route == "whole"
    assert same_files(arrived.path, run, 2)


def test_damage_on_disk_is_found_and_mended(run: Run, folder: PolicyFolder) -> None:
    signed = run.publish()
    with Origin(run.root) as origin:
        path = folder.ensure(0, signed, [origin.url]).path
        (path / "config.json").write_text("{}")
        with pytest.raises(UntrustedError, match=r"config\.json"):
            folder.verify(0)
        folder.discard(0)
        assert folder.latest() is None
        folder.ensure(0, signed, [origin.url])
    folder.verify(0)


def test_a_reader_keeps_what_it_opened_when_the_version_is_pruned(
    run: Run, folder: PolicyFolder
) -> None:
    signed = [run.publish() for _ in range(4)]
    with Origin(run.root) as origin:
        for version in range(4):
            folder.ensure(version, signed[version], [origin.url])
    with (folder.path(0) / "model.safetensors").open("rb") as file:
        assert folder.prune(2, pinned={1}) == [0]
        assert file.read() == run.file(0)
    assert folder.versions() == [1, 2, 3]
    assert folder._bases() == [Base(folder.path(v), signed[v].manifest) for v in (1, 2, 3)]


def test_what_a_killed_fetch_left_goes_with_its_version(run: Run, folder: PolicyFolder) -> None:
    signed = [run.publish() for _ in range(3)]
    with pytest.raises(UnavailableError):
        folder.ensure(0, signed[0], ["http://127.0.0.1:1"], patience=0.1)
    assert list(folder.root.glob(".partial-0-*"))
    with Origin(run.root) as origin:
        folder.ensure(1, signed[1], [origin.url])
        folder.ensure(2, signed[2], [origin.url])
    assert folder.latest() == 2
    folder.prune(1)
    assert not list(folder.root.glob(".partial-*"))


def _ensure_in_child(root: Path, signed: SignedManifest, url: str, start: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    PolicyFolder(root, TRUST).ensure(0, signed, [url])


@pytest.mark.slow
def test_several_processes_may_ask_for_the_same_version(run: Run, folder: PolicyFolder) -> None:
    signed = run.publish()
    context = multiprocessing.get_context("spawn")
    start = context.Event()
    with Origin(run.root) as origin:
        children = [
            context.Process(target=_ensure_in_child, args=(folder.root, signed, origin.url, start))
            for _ in range(3)
        ]
        for child in children:
            child.start()
        start.set()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0, 0, 0]
        size = sum(entry.size for entry in signed.manifest.files)
        assert origin.counters.bytes_sent < size + 1000
    assert same_files(folder.path(0), run, 0)
