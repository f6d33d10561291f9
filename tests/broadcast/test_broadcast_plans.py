"""Which way a policy comes: by bytes, by time, and from an anchor once the whole is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from broadcast_world import Run, same_files

from prime_broadcast import layout
from prime_broadcast.client import fetch
from prime_broadcast.manifest import MANIFEST_NAME, verify_folder
from prime_broadcast.plans import Base, Speed, plan_from_anchor, plan_route
from prime_broadcast.server import Origin
from prime_broadcast.sources import SourceBook
from prime_core.checkpoint import DeltaEntry, FileEntry, Manifest, SignedManifest
from prime_core.errors import UnavailableError
from prime_core.ids import digest
from prime_trainer.finished import write_files

GB = 10**9


def policy(version: int, size: int, *deltas: tuple[int, int]) -> Manifest:
    """A policy of `size` bytes with deltas (base, bytes); only what plans look at is set."""
    return Manifest.model_construct(
        version=version,
        files=(FileEntry.model_construct(size=size),),
        result_digest=digest(bytes([version]) * 32),
        deltas=tuple(
            DeltaEntry.model_construct(base=b, base_digest=digest(bytes([b]) * 32), size=n)
            for b, n in deltas
        ),
    )


ZERO = policy(0, 60 * GB)
CHAIN = {n: policy(n, 60 * GB, (n - 1, 3 * GB)) for n in range(1, 6)}
HERE = [Base(Path("0"), ZERO)]


def hops(version: int, speed: Speed | None) -> int:
    return len(plan_route(CHAIN[version], HERE, CHAIN, speed).hops)


def test_without_a_known_bandwidth_bytes_decide() -> None:
    assert hops(5, None) == 5


def test_on_slow_links_time_agrees_with_bytes() -> None:
    assert hops(5, Speed(75e6, 1e9)) == 5


def test_on_fast_links_a_long_chain_gives_way_to_the_whole() -> None:
    assert hops(5, Speed(10e9, 0.5e9)) == 0


def test_a_gain_of_less_than_a_second_is_not_worth_the_others_bandwidth() -> None:
    small, chain = policy(0, GB), {1: policy(1, GB, (0, GB // 20))}
    plan = plan_route(chain[1], [Base(Path("0"), small)], chain, Speed(10e9, 2e9))
    assert len(plan.hops) == 1


def test_the_book_knows_a_bandwidth_once_sources_have_delivered() -> None:
    book = SourceBook(lambda: 0.0)
    urls = ["http://a", "http://b", "http://c"]
    assert book.speed(urls, 4) is None
    for url, seconds in zip(urls, (1.0, 2.0, 4.0), strict=True):
        source = book.pick([url], (), 1)
        assert source is not None
        book.good(source, 1000, seconds)
    assert book.speed(urls, 2) == Speed(1500.0)
    book.applied(4000, 2.0)
    assert book.speed(urls, 4) == Speed(1750.0, 2000.0)


def test_the_cheapest_anchor_is_the_nearest() -> None:
    plan = plan_from_anchor(CHAIN[5], CHAIN | {0: ZERO})
    assert plan is not None
    assert plan.anchor == CHAIN[4]
    assert len(plan.hops) == 1
    assert plan_from_anchor(CHAIN[5], CHAIN, [1, 2, 3, 4]) is None


@pytest.fixture
def published(run: Run) -> list[SignedManifest]:
    return [run.publish() for _ in range(8)]


def whole_ones(run: Run) -> list[int]:
    return [v for v in layout.versions(run.root) if not layout.is_thin(run.root, v)]


def test_thinning_keeps_recent_ones_anchors_pinned_ones_and_all_deltas(
    run: Run, published: list[SignedManifest]
) -> None:
    assert layout.thin(run.root, keep_whole=2, anchor_every=4, pinned=[2]) == [1, 3, 5]
    assert whole_ones(run) == [0, 2, 4, 6, 7]
    assert layout.versions(run.root) == list(range(8))
    assert (layout.version_folder(run.root, 3) / "delta-2").is_file()
    assert not (layout.version_folder(run.root, 3) / "model.safetensors").exists()
    assert layout.thin(run.root, keep_whole=2, anchor_every=4, pinned=[2]) == []


def test_a_version_that_no_chain_leads_to_is_never_thinned(
    run: Run, published: list[SignedManifest]
) -> None:
    layout.prune(run.root, 5)
    assert layout.versions(run.root) == [3, 4, 5, 6, 7]
    assert layout.thin(run.root, keep_whole=1, anchor_every=100) == [4, 5, 6]
    assert whole_ones(run) == [3, 7]


def test_pruning_spares_what_thin_versions_are_made_from(
    run: Run, published: list[SignedManifest]
) -> None:
    layout.thin(run.root, keep_whole=1, anchor_every=4)
    assert layout.prune(run.root, 2) == [0, 1, 2, 3]
    assert layout.versions(run.root) == [4, 5, 6, 7]


def test_versions_expire_by_the_age_of_those_after_them_and_never_what_others_need(
    run: Run, published: list[SignedManifest]
) -> None:
    layout.thin(run.root, keep_whole=1, anchor_every=4)

    def publish_at(version: int, time: float) -> None:
        os.utime(layout.version_folder(run.root, version) / MANIFEST_NAME, (time, time))

    for version in range(8):
        publish_at(version, 100.0 + version)
    assert layout.expired(run.root, 100.0, keep=1, later=1) == []
    assert layout.expired(run.root, 104.0, keep=1, later=3) == [], "0 stays, 1 to 3 are in use"
    assert layout.expired(run.root, 105.0, keep=1, later=3) == [], "2 is made from 1"
    assert layout.expired(run.root, 107.0, keep=1, later=1) == [1, 2, 3], "7 is made from 4"
    assert layout.expired(run.root, 107.0, keep=6, later=1) == []
    assert layout.expired(run.root, 107.0, keep=1, later=1, named={2, 99}) == [3], "2 needs 1"
    publish_at(2, 10**10)
    assert layout.expired(run.root, 107.0, keep=1, later=1) == [], "published again since"
    layout.remove(run.root, [1, 2, 3])
    assert layout.versions(run.root) == [0, 4, 5, 6, 7]
    assert run.index() == [7, 6, 5, 4, 0]


def test_a_thinned_version_comes_from_its_anchor_bit_for_bit(
    run: Run, published: list[SignedManifest], tmp_path: Path
) -> None:
    wanted = [run.file(6, f.name) for f in published[6].manifest.files]
    layout.thin(run.root, keep_whole=1, anchor_every=4)
    chain = {s.manifest.version: s.manifest for s in published}
    with Origin(run.root) as origin:
        stats = fetch(published[6], [origin.url], tmp_path / "6", chain=chain, patience=30.0)
        with pytest.raises(UnavailableError, match="no source has policy 6 whole"):
            fetch(published[6], [origin.url], tmp_path / "again", patience=30.0)
    assert (stats.route, stats.hops) == ("delta", (5, 6))
    assert [(tmp_path / "6" / f.name).read_bytes() for f in published[6].manifest.files] == wanted


def test_a_node_that_has_a_base_never_notices_the_thinning(
    run: Run, published: list[SignedManifest], tmp_path: Path
) -> None:
    chain = {s.manifest.version: s.manifest for s in published}
    with Origin(run.root) as origin:
        fetch(published[4], [origin.url], tmp_path / "4")
        layout.thin(run.root, keep_whole=1, anchor_every=100)
        base = Base(tmp_path / "4", published[4].manifest)
        fetch(published[7], [origin.url], tmp_path / "7", bases=[base], chain=chain)
    assert same_files(tmp_path / "7", run, 7)


@pytest.mark.parametrize("version", [4, 6, 7])
def test_an_origin_makes_its_own_thinned_versions_again(
    run: Run, published: list[SignedManifest], tmp_path: Path, version: int
) -> None:
    wanted = [run.file(version, f.name) for f in published[version].manifest.files]
    layout.thin(run.root, keep_whole=1, anchor_every=4)
    (tmp_path / "out").mkdir()
    write_files(run.root, version, tmp_path / "out")
    verify_folder(tmp_path / "out", published[version].manifest)
    made = [(tmp_path / "out" / f.name).read_bytes() for f in published[version].manifest.files]
    assert made == wanted
