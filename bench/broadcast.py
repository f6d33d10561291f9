"""The broadcast compared with SHARDCAST: `python -m bench broadcast [--json] [--quick]`;
some parts alone by `python -m bench.broadcast whole clients …`, one row a line.

Every figure is a median of separate processes on this machine. Each repetition of ours is followed
at once by one of the peer's and one of the limits' (cp; curl twice, from a server that only calls
sendfile).

whole     1 GiB origin → relay → client. The clock starts when the relay hears of a version that
          the origin serves and ends when the client's folder is there, verified. The peer's client
          starts when its relay has every shard: it cannot start earlier without waiting longer.
          Next to it, the processor seconds of all processes, and those of a bare loop that
          receives, hashes and writes: with few cores, they limit every program.
clients   the same for 16 clients through two relays. The peer runs with 16, 4 and 1; its best
          counts. Clients of the peer share two files on a machine; here each has its own.
          16 curls from two sendfile servers, without relays, show what unverified bytes cost.
depth     a chain of relays; every server is held to 30 MB/s by its own limiter and serves one.
shaped    8 nodes in network namespaces (bench/broadcast_net.py), whole and by delta.
delta     bench/broadcast_delta.py, and the devnet's own policies (bench/broadcast_policies.py).
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.broadcast_delta import RATES, Measured, measure, write_pair
from bench.broadcast_net import LOSS, MBIT, NODES, shaped
from bench.broadcast_parts import PEER, Stage, peer_python, stage
from bench.broadcast_whole import Whole, chains, many_clients, one_client
from bench.form import ROOT, Row
from prime_core.errors import UnavailableError, UserError

PACKAGES = ("blake3", "numpy", "zstandard")
GIB = 1 << 30
EARLIER_WHOLE = 0.13e9
"""Bytes/s of the peer, origin → relay → client, 1 GiB on loopback, measured earlier elsewhere."""
EARLIER = f"{PEER}, measured earlier"
CLIENTS = 16
LINK = 30e6
BARS = {1e-6: 40.0, 3e-6: 20.0, 1e-5: 8.0}


@dataclass(frozen=True)
class Sizes:
    """Bytes and repetitions of each part; `scale` divides the made-up model's width."""

    repeats: int = 5
    whole: int = 1 << 30
    client: int = 256 << 20
    depth: int = 256 << 20
    scale: int = 1
    shaped_scale: int = 3
    steps: int = 13


QUICK = Sizes(
    repeats=1, whole=64 << 20, client=8 << 20, depth=96 << 20, scale=4, shaped_scale=8, steps=0
)


def run(quick: bool) -> list[Row]:
    """All rows; `quick` takes a smaller size of the same work, once. What could not be measured is
    reported on stderr, one sentence each, and has no row."""
    sizes = QUICK if quick else Sizes()
    python, why = peer_python()
    if python is None:
        _tell(f"the peer does not run: {why}")
    rows: list[Row] = []
    peaks: dict[str, int] = {}
    for part in PARTS:
        with stage() as made:
            try:
                found = part(made, python, sizes)
            except UnavailableError as error:
                if part is not _shaped:
                    raise
                _tell(f"shaped links are left out: {error}")
                found = []
            for row in found:
                _tell(f"{row.name} {row.value:.4g} {row.unit}")
            rows += found
            peaks.update({f"{part.__name__[1:]}: {k}": v for k, v in made.peaks().items()})
    worst = max(peaks, key=lambda name: peaks[name])
    rows.append(Row("peak_mb", peaks[worst] / 1e6, f"MB RssAnon ({worst})", 150))
    rows.append(Row("load", os.getloadavg()[0], "1-minute load average at the end"))
    return rows


def parts(names: Sequence[str]) -> list[Row]:
    """The rows of some parts only ("whole", "clients", "depth", "deltas", "devnet", "shaped"), at
    full size: for measuring again what one change concerns. Raises UserError for another name."""
    known = {part.__name__[1:]: part for part in PARTS}
    for name in names:
        if name not in known:
            raise UserError(f"there is no part {name!r}", hint=f"name some of: {', '.join(known)}")
    python, why = peer_python()
    if python is None:
        _tell(f"the peer does not run: {why}")
    rows: list[Row] = []
    for name in names:
        with stage() as made:
            rows += known[name](made, python, Sizes())
            rows += [
                Row(f"{name}_peak_mb", peak / 1e6, f"MB RssAnon of {child}")
                for child, peak in sorted(made.peaks().items(), key=lambda entry: -entry[1])[:1]
            ]
    return rows


def _tell(sentence: str) -> None:
    print(f"bench: {sentence}", file=sys.stderr)


def _whole(made: Stage, python: Path | None, sizes: Sizes) -> list[Row]:
    found = one_client(made, python, sizes.whole, sizes.repeats)
    ours = sizes.whole / found.median("ours")
    peer, name = EARLIER_WHOLE, EARLIER
    if python is not None:
        peer, name = sizes.whole / found.median("peer"), PEER
    curl, copy = (sizes.whole / found.median(who) for who in ("curl", "cp"))
    return [
        Row("whole_gbs", ours / 1e9, "GB/s", None, "higher", peer / 1e9, name),
        Row("whole_ratio", ours / peer, "×", 4, "higher", 1, name),
        Row("whole_vs_curl", ours / curl, "×", 0.5, "higher", 1, "curl twice over sendfile"),
        Row("curl_gbs", curl / 1e9, "GB/s, two hops", None, "higher"),
        Row("cp_gbs", copy / 1e9, "GB/s", None, "higher"),
        Row("whole_spread", _spread(found, "ours"), "slowest / fastest of ours"),
        Row("first_byte_ms", statistics.median(found.first_byte) * 1e3, "ms", None, "lower",
            sizes.whole / peer * 1e3, f"{name}: verified only at the end"),
        Row("write_amplification", max(found.amplification), "bytes written per byte", 1.05),
        Row("whole_cpu", found.processor["ours"] * GIB, "processor s a GiB, all processes", None,
            "lower", found.processor.get("peer", 0.0) * GIB or None, name),
        Row("floor_cpu", found.processor["floor"] * GIB,
            "processor s a GiB: recv, BLAKE3, write in a plain loop"),
        Row("curl_vs_peer", curl / peer, "×, two hops, nothing verified", None, "higher", 1, name),
    ]  # fmt: skip


def _spread(found: Whole, who: str) -> float:
    return max(found.seconds[who]) / min(found.seconds[who])


def _clients(made: Stage, python: Path | None, sizes: Sizes) -> list[Row]:
    found = many_clients(made, python, sizes.client, CLIENTS, sizes.repeats)
    ours = CLIENTS * sizes.client / statistics.median(found.ours)
    curl = CLIENTS * sizes.client / statistics.median(found.curl)
    rows = [
        Row("clients16_done", found.finished, f"of {CLIENTS}", CLIENTS, "higher"),
        Row("clients16_gbs", ours / 1e9, "GB/s, all together", None, "higher"),
        Row("clients16_cpu", found.processor * GIB, "processor s a GiB delivered", None, "lower"),
        Row("curl16_gbs", curl / 1e9, f"GB/s, {CLIENTS} curls, no relay, nothing verified"),
    ]
    if not found.peer:
        return [*rows, Row("clients16_ratio", ours / EARLIER_WHOLE, "×", 5, "higher", 1, EARLIER)]
    rates: dict[int, list[float]] = {}
    for seconds, asked, done in found.peer:
        rates.setdefault(asked, []).append(done * sizes.client / seconds)
    best = max(rates, key=lambda asked: statistics.median(rates[asked]))
    peer = statistics.median(rates[best])
    worst = min(done for _, asked, done in found.peer if asked == CLIENTS)
    name = f"{PEER}, best with {best} clients ({worst} of {CLIENTS} finish)"
    return [
        *rows,
        Row("clients16_ratio", ours / peer, "×", 5, "higher", peer / 1e9, f"{name}, GB/s"),
        Row("curl16_vs_peer", curl / peer, "×", None, "higher", peer / 1e9, f"{name}, GB/s"),
    ]


def _depth(made: Stage, python: Path | None, sizes: Sizes) -> list[Row]:
    found = chains(made, sizes.depth, LINK, sizes.repeats)
    one, four = statistics.median(found[1]), statistics.median(found[4])
    return [
        Row("depth1_s", one, f"s for {sizes.depth >> 20} MiB at 30 MB/s a link"),
        Row("depth4_vs_1", four / one, "×", 1.3),
    ]


def _deltas(made: Stage, python: Path | None, sizes: Sizes) -> list[Row]:
    trainer, node = made.ours("trainer"), made.ours("node")
    rows: list[Row] = []
    measured: list[Measured] = []
    for rate in RATES:
        old, new = write_pair(made.fresh("pair"), rate, sizes.scale)
        found = measure(made, trainer, node, old, new, sizes.repeats)
        measured.append(found)
        name = f"{rate:.0e}".replace("e-0", "e")
        encode, apply = found.rates()
        rows += [
            Row(f"delta_ratio_{name}", found.ratio, "×", BARS[rate], "higher", 1,
                "whole files, as the peer sends"),
            Row(f"delta_over_entropy_{name}", found.delta / found.entropy, "×"),
            Row(f"encode_gbs_{name}", encode / 1e9, "GB/s of weights", None, "higher"),
            Row(f"apply_gbs_{name}", apply / 1e9, "GB/s of weights", None, "higher"),
        ]  # fmt: skip
    slowest_encode = min(found.rates()[0] for found in measured)
    slowest_apply = min(found.rates()[1] for found in measured)
    return [
        *rows,
        Row("encode_gbs", slowest_encode / 1e9, "GB/s, slowest of the three", 0.5, "higher"),
        Row("apply_gbs", slowest_apply / 1e9, "GB/s, slowest of the three", 1, "higher"),
    ]


def _devnet(made: Stage, python: Path | None, sizes: Sizes) -> list[Row]:
    """Real policies of the devnet's model; left out of quick runs."""
    if not sizes.steps:
        return []
    done = subprocess.run(
        [sys.executable, "-m", "bench.broadcast_policies", str(made.fresh("policies")), "--steps",
         str(sizes.steps)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode != 0:
        raise UnavailableError(f"the devnet's model was not trained: {done.stderr[-500:]}")
    folders = [Path(line) for line in done.stdout.split()]
    trainer, node = made.ours("trainer"), made.ours("node")
    found = [measure(made, trainer, node, old, new, 1) for old, new in itertools.pairwise(folders)]
    middle = sorted(found, key=lambda one: one.ratio)[len(found) // 2]
    return [
        Row("delta_ratio_devnet", middle.ratio, "×, its own policies at 3e-4", None, "higher"),
        Row("delta_over_entropy_devnet", middle.delta / middle.entropy, "×"),
    ]


def _shaped(made: Stage, python: Path | None, sizes: Sizes) -> list[Row]:
    found = shaped(made, python, sizes.shaped_scale, sizes.repeats)
    link = f"s, {NODES} nodes, {MBIT} Mb/s, {LOSS:.0%} loss"
    peer = statistics.median(found.peer) if found.peer else None
    name = PEER if found.peer else ""
    return [
        Row("shaped8_whole_s", statistics.median(found.whole), f"{link}, {found.size / 1e6:.1f} MB",
            None, "lower", peer, name),
        Row("shaped8_delta_s", statistics.median(found.by_delta),
            f"{link}, delta of {found.delta / 1e6:.2f} MB", None, "lower", peer,
            f"{name}: always whole" if name else ""),
    ]  # fmt: skip


PARTS: tuple[Callable[[Stage, Path | None, Sizes], list[Row]], ...] = (
    _whole, _clients, _depth, _deltas, _devnet, _shaped,
)  # fmt: skip

if __name__ == "__main__":
    for _row in parts(sys.argv[1:]):
        print(json.dumps(asdict(_row)), flush=True)
