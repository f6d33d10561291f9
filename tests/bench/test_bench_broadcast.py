"""The broadcast's bench: its arithmetic."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.broadcast import parts
from bench.broadcast_delta import WARM_UP, adamw_pair, entropy_bytes, shapes, write_pair
from bench.broadcast_paper import Network, by_delta, enough_relays, levels, rate, whole
from bench.broadcast_parts import Child, sendfile_server
from bench.broadcast_whole import FILE, curls, receive, require_same
from prime_broadcast.manifest import build_manifest
from prime_core.errors import UnavailableError, UntrustedError, UserError

LINK = 590e6 / 8


def test_the_made_up_model_has_a_hundred_million_parameters() -> None:
    assert sum(math.prod(shape) for shape in shapes(1).values()) == pytest.approx(1e8, rel=0.01)


def test_one_step_of_noise_moves_a_weight_by_a_third_of_the_rate() -> None:
    rng = np.random.default_rng(0)
    masters = rng.standard_normal(50_000, np.float32) * np.float32(0.02)
    noise = (rng.standard_normal(50_000, np.float32) for _ in range(WARM_UP + 1))
    before, after = adamw_pair(masters, noise, 1e-3)
    # Mean of 11 unit normals under beta 0.9: sqrt((1-b)/(1+b) * (1+b^11)/(1-b^11)) = 0.317.
    assert np.std(after - before) == pytest.approx(0.317e-3, rel=0.03)
    assert np.std(before - masters) > np.std(after - before)


def test_adamw_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    masters = rng.standard_normal(1000, np.float32)
    noise = [rng.standard_normal(1000, np.float32) for _ in range(WARM_UP + 1)]
    before, after = adamw_pair(masters, iter(noise), 1e-3)
    parameter = torch.nn.Parameter(torch.from_numpy(masters.copy()))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.01)
    for number, gradient in enumerate(noise):
        if number == WARM_UP:
            np.testing.assert_allclose(parameter.detach().numpy(), before, rtol=1e-5, atol=1e-7)
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    np.testing.assert_allclose(parameter.detach().numpy(), after, rtol=1e-5, atol=1e-7)


def test_the_entropy_is_that_of_positions_and_differences(tmp_path: Path) -> None:
    old, new = write_pair(tmp_path, 1e-5, scale=16)
    before = (old / FILE).read_bytes()
    header = 8 + int.from_bytes(before[:8], "little")
    words = np.frombuffer(before, "<u2", offset=header).copy()
    assert entropy_bytes(old / FILE, old / FILE) == 0
    (tmp_path / "one").write_bytes(before[:header] + (words + 1).tobytes())
    assert entropy_bytes(old / FILE, tmp_path / "one") == 0  # all changed, all by one: no choice
    half = words.copy()
    half[::2] += 1
    (tmp_path / "half").write_bytes(before[:header] + half.tobytes())
    assert entropy_bytes(old / FILE, tmp_path / "half") == pytest.approx(words.size / 8, rel=1e-3)
    assert 0 < entropy_bytes(old / FILE, new / FILE) < len(before) / 4


def test_the_pair_of_policies_can_be_published(tmp_path: Path) -> None:
    old, new = write_pair(tmp_path, 3e-6, scale=16)
    first = build_manifest(old, pool=0, version=0, step=0)
    second = build_manifest(new, pool=0, version=1, step=1)
    assert first.result_digest != second.result_digest
    assert [entry.size for entry in first.files] == [entry.size for entry in second.files]


def test_a_policy_takes_its_bytes_over_the_narrowest_link() -> None:
    wide = Network(nodes=1000, link=LINK, relays=200, relay_link=1e12, efficiency=1.0)
    assert whole(62e9, wide).carried == pytest.approx(62e9 / LINK)
    assert rate(Network(1000, LINK, 10, 100 * LINK, 0, 1.0)) == pytest.approx(LINK)
    assert rate(Network(1000, LINK, 10, 50 * LINK, 0, 1.0)) == pytest.approx(LINK / 2)


def test_depth_costs_a_chunk_a_level() -> None:
    assert [levels(count, 2) for count in (1, 2, 3, 6, 7, 14, 15)] == [1, 1, 2, 2, 3, 3, 4]
    chain = Network(nodes=1, link=LINK, relays=4, relay_link=2 * LINK, fan_out=1, efficiency=1.0)
    found = whole(62e9, chain)
    assert found.depth == pytest.approx(4 * (16 << 20) / LINK)
    assert found.seconds == found.carried + found.depth


def test_a_delta_is_carried_smaller_and_then_applied() -> None:
    net = Network(nodes=100, link=LINK, relays=20, relay_link=1e12, efficiency=1.0)
    found = by_delta(62e9, 50, 1e9, net)
    assert found.carried == pytest.approx(62e9 / 50 / LINK)
    assert found.applied == pytest.approx(62)


def test_enough_relays_leave_no_node_waiting() -> None:
    net = Network(nodes=1000, link=LINK, relays=1, relay_link=10e9 / 8, efficiency=1.0)
    count = enough_relays(net)
    assert rate(Network(1000, LINK, count, 10e9 / 8, 2, 1.0)) == pytest.approx(LINK)
    assert rate(Network(1000, LINK, count - 1, 10e9 / 8, 2, 1.0)) < LINK
    assert enough_relays(Network(1000, LINK, 1, LINK, 2)) == 0  # no number of such relays is


def test_wrong_bytes_spoil_the_bench(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    require_same(tmp_path / "a", tmp_path / "a")
    with pytest.raises(UntrustedError):
        require_same(tmp_path / "a", tmp_path / "b")


def test_a_dead_process_is_reported_with_its_last_output(tmp_path: Path) -> None:
    code = "import sys; print('{}', flush=True); sys.exit('no such thing')"
    child = Child("victim", [sys.executable, "-c", code], tmp_path / "log")
    try:
        with pytest.raises(UnavailableError, match=r"victim died.*no such thing"):
            child.receive()
    finally:
        child.close()


def test_the_bare_receiver_and_the_curls_get_the_very_bytes(tmp_path: Path) -> None:
    """The floor is of the same work: what it counts has arrived whole."""
    file = tmp_path / "file"
    file.write_bytes(np.random.default_rng(4).bytes((9 << 20) + 17))
    with sendfile_server(file) as url:
        reported = receive(int(url.rstrip("/").rpartition(":")[2]), tmp_path / "floor")
    require_same(file, tmp_path / "floor")
    assert reported["bytes"] == file.stat().st_size
    assert reported["processor"] > 0
    targets = [tmp_path / f"curl-{number}" for number in range(3)]
    assert curls(file, targets, 2) > 0
    for target in targets:
        require_same(file, target)


def test_the_processor_seconds_of_a_child_include_its_own_childrens(tmp_path: Path) -> None:
    """The peer fetches by wget processes."""
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    script = (
        "import json, subprocess, sys\nprint(json.dumps({}), flush=True)\nsys.stdin.readline()\n"
        f"subprocess.run([sys.executable, '-c', {burn!r}])\n"
        "print(json.dumps({}), flush=True)\nsys.stdin.readline()"
    )
    child = Child("burner", [sys.executable, "-c", script], tmp_path / "log")
    try:
        before = child.processor()
        child.ask(do="burn")
        assert child.processor() - before >= 0.29
    finally:
        child.close()


def test_a_part_that_there_is_not_is_named_before_anything_runs() -> None:
    with pytest.raises(UserError, match="no part 'depths'"):
        parts(["whole", "depths"])
