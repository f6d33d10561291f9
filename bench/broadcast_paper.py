"""How long a policy takes to thousands of nodes, computed from what was measured:
`python -m bench.broadcast_paper [--bytes 62e9] [--nodes 1000] [--link 590] …`.

The origin and the relays form a tree in which each serves `fan_out` relays and its share of the
nodes; nodes do not serve one another. Chunks are passed on as they arrive, so depth costs one
chunk's time a level, and the time is the bytes over the narrowest rate. A delta is applied after
its last chunk. What is left out: loss, queues, sources that fail, and the time to load weights.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from prime_broadcast.manifest import choose_chunk_size

MEGABIT = 1e6 / 8


@dataclass(frozen=True)
class Network:
    """Rates in bytes/s. `efficiency`: share of a link that was seen to carry chunks."""

    nodes: int
    link: float
    relays: int
    relay_link: float
    fan_out: int = 2
    efficiency: float = 0.9


@dataclass(frozen=True)
class Answer:
    """Seconds in all, and what they are made of."""

    carried: float
    depth: float
    applied: float

    @property
    def seconds(self) -> float:
        return self.carried + self.depth + self.applied


def levels(relays: int, fan_out: int) -> int:
    """Relays between the origin and the farthest node: levels of a full tree, the origin's
    children being the first."""
    depth, held, width = 0, 0, 1
    while held < relays:
        width *= fan_out
        held += width
        depth += 1
    return depth


def rate(net: Network) -> float:
    """Bytes/s that every node gets at once: its own link, or its share of a relay's."""
    served = net.fan_out + net.nodes / net.relays
    return net.efficiency * min(net.link, net.relay_link / served)


def whole(policy_bytes: float, net: Network) -> Answer:
    """The policy as it is."""
    return _sent(policy_bytes, choose_chunk_size(int(policy_bytes)), net)


def by_delta(policy_bytes: float, ratio: float, apply_rate: float, net: Network) -> Answer:
    """A delta `ratio` times smaller, cut into the policy's chunks, applied at `apply_rate` bytes of
    weights a second (a second waits for its last chunk: relays pass it on, nodes then apply)."""
    sent = _sent(policy_bytes / ratio, choose_chunk_size(int(policy_bytes)), net)
    return replace(sent, applied=policy_bytes / apply_rate)


def _sent(count: float, chunk: float, net: Network) -> Answer:
    hop = min(chunk, count) / rate(net)
    return Answer(count / rate(net), hop * levels(net.relays, net.fan_out), 0.0)


def enough_relays(net: Network) -> int:
    """The fewest relays with which no node waits for a relay's link."""
    spare = net.relay_link / net.link - net.fan_out
    return max(1, -int(-net.nodes // spare)) if spare > 0 else 0


def main(words: list[str]) -> int:
    """Prints a table: relays, whole, delta."""
    parser = argparse.ArgumentParser(prog="python -m bench.broadcast_paper", description=__doc__)
    parser.add_argument("--bytes", type=float, default=62e9, help="of the policy")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--link", type=float, default=590, help="of a node, Mb/s")
    parser.add_argument("--relay-link", type=float, default=10_000, help="of a relay, Mb/s")
    parser.add_argument("--fan-out", type=int, default=2, help="relays below a relay")
    parser.add_argument("--efficiency", type=float, default=0.88)
    parser.add_argument("--ratio", type=float, default=50.0, help="policy over delta")
    parser.add_argument("--apply", type=float, default=1e9, help="bytes of weights a second")
    asked = parser.parse_args(words)
    net = Network(
        asked.nodes, asked.link * MEGABIT, 1, asked.relay_link * MEGABIT, asked.fan_out,
        asked.efficiency,
    )  # fmt: skip
    enough = enough_relays(net)
    print(f"{'relays':>7} {'levels':>7} {'MB/s a node':>12} {'whole, s':>10} {'delta, s':>10}")
    for relays in sorted({8, 16, 32, max(1, enough)}):
        one = replace(net, relays=relays)
        print(
            f"{relays:7d} {levels(relays, one.fan_out):7d} {rate(one) / 1e6:12.1f} "
            f"{whole(asked.bytes, one).seconds:10.0f} "
            f"{by_delta(asked.bytes, asked.ratio, asked.apply, one).seconds:10.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
