"""Nodes in network namespaces behind shaped, lossy links.

Each host is a namespace with one veth into a bridge; token-bucket filters on both ends hold it to
`mbit` in either direction, and each host drops a share of the packets that reach it (iptables'
`statistic`, which works where the kernel lacks netem). No delay is added: what a packet waits, it
waits in the filters' queues. Needs root; where the kernel or its rights forbid any of it, nothing
is measured and one sentence says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.broadcast_delta import write_pair
from bench.broadcast_parts import Child, Stage, remove
from bench.broadcast_whole import FILE, require_same
from prime_core.errors import UnavailableError

MBIT, LOSS = 100, 0.01
NODES, RELAYS = 8, 2
PEER_SHARD = 2 << 20
"""Bytes; its usual 50 MB would make one shard of this policy, and its relays would stand idle."""


@dataclass(frozen=True)
class Network:
    """Namespaces by host number; host n has the address 10.77.0.(n + 1)."""

    names: list[str]

    def host(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def prefix(self, number: int) -> list[str]:
        """What runs a command in the host."""
        return ["ip", "netns", "exec", self.names[number]]


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Hosts on one switch, removed at the end. Raises UnavailableError if this machine does not
    allow it."""
    tag = f"bb{os.getpid()}"
    switch = f"{tag}-switch"
    names = [f"{tag}-{number}" for number in range(hosts)]
    with ExitStack() as stack:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        made = Network(names)
        for number, name in enumerate(names):
            _connect(switch, name, f"port{number}", f"{made.host(number)}/24", MBIT)
            _run(
                "ip",
                "netns",
                "exec",
                name,
                "iptables",
                "-A",
                "INPUT",
                "!",
                "-i",
                "lo",
                "-m",
                "statistic",
                "--mode",
                "random",
                "--probability",
                str(LOSS),
                "-j",
                "DROP",
            )
        yield made


def _connect(switch: str, name: str, port: str, address: str, mbit: int) -> None:
    # One packet at a time on the wire (no offload), so that a drop is one of 1,500 bytes.
    whole = ("gso_max_segs", "1")
    _run("ip", "-n", name, "link", "add", "eth0", *whole, "type", "veth", "peer", "name", port,
         "netns", switch)  # fmt: skip
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", name, "link", "set", "eth0", "up")
    _run("ip", "-n", name, "address", "add", address, "dev", "eth0")
    for where, device in ((name, "eth0"), (switch, port)):
        _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", "rate",
             f"{mbit}mbit", "burst", "32kb", "latency", "50ms")  # fmt: skip


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UnavailableError(f"there is no {command[0]} on this machine") from error
    if done.returncode != 0:
        raise UnavailableError(f"`{' '.join(command)}`: {done.stderr.strip()[:200]}")


@dataclass
class Shaped:
    """Seconds until every node has the policy, one a repetition. `size` and `delta` in bytes."""

    size: int
    delta: int
    whole: list[float] = field(default_factory=list)
    by_delta: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)


def shaped(stage: Stage, python: Path | None, scale: int, repeats: int) -> Shaped:
    """Two relays and eight nodes: whole, by delta, and the peer's, in turn. Raises UnavailableError
    where no such network can be made."""
    with network(1 + RELAYS + NODES) as net:
        return _Shaped(stage, net, python, scale, repeats).run(repeats)


class _Shaped:
    """One line of consecutive versions: even ones are the older policy, odd ones the newer."""

    def __init__(
        self, stage: Stage, net: Network, python: Path | None, scale: int, repeats: int
    ) -> None:
        self._stage = stage
        self._net = net
        relays = range(1, 1 + RELAYS)
        nodes = range(1 + RELAYS, 1 + RELAYS + NODES)
        self._folders = write_pair(stage.fresh("pair"), 3e-6, scale)
        root = stage.fresh("shaped-origin")
        self._origin = self._ours("shaped-origin", 0)
        self._published = [
            self._origin.ask(
                do="publish", folder=str(self._folders[version % 2]), root=str(root),
                version=version,
            )
            for version in range(repeats + 1)
        ]  # fmt: skip
        self._url = self._origin.ask(do="origin", root=str(root))["url"]
        self._whole_relays = [self._ours(f"shaped-whole-{n}", n) for n in relays]
        self._delta_relays = [self._ours(f"shaped-delta-{n}", n) for n in relays]
        self._delta_urls = [
            relay.ask(do="relay", root=str(stage.fresh("relay")))["url"]
            for relay in self._delta_relays
        ]
        self._nodes = [self._ours(f"shaped-node-{n}", n) for n in nodes]
        self._here = [stage.fresh("node") for _ in nodes]
        self._peer_origin: Child | None = None
        if python is not None:
            self._peer_origin = self._peer(python, "shaped-peer-origin", 0)
            self._peer_url = self._peer_origin.ask(
                do="origin", root=str(stage.fresh("peer-origin"))
            )["url"]
            file = str(self._folders[1] / FILE)
            made = self._peer_origin.ask(do="publish", file=file, shard=PEER_SHARD)
            self._peer_version = made["version"]
            self._peer_relays = [self._peer(python, f"shaped-peer-relay-{n}", n) for n in relays]
            self._peer_nodes = [self._peer(python, f"shaped-peer-node-{n}", n) for n in nodes]

    def run(self, repeats: int) -> Shaped:
        self._bring(0, self._delta_relays, self._delta_urls, keep=True)
        found = Shaped((self._folders[1] / FILE).stat().st_size, self._published[1]["deltas"][0])
        for version in range(1, repeats + 1):
            roots = [self._stage.fresh("relay") for _ in self._whole_relays]
            urls = [
                relay.ask(do="relay", root=str(root))["url"]
                for relay, root in zip(self._whole_relays, roots, strict=True)
            ]
            found.whole.append(self._bring(version, self._whole_relays, urls, keep=False))
            for relay, root in zip(self._whole_relays, roots, strict=True):
                relay.ask(do="end")
                remove(root)
            found.by_delta.append(
                self._bring(version, self._delta_relays, self._delta_urls, keep=True)
            )
            if self._peer_origin is not None:
                found.peer.append(self._bring_peer())
        return found

    def _bring(self, version: int, relays: list[Child], urls: list[str], *, keep: bool) -> float:
        """Seconds until all nodes have `version`; `keep` means by delta from the one before."""
        manifest = self._published[version]["manifest"]
        begun = time.perf_counter()
        for relay in relays:
            relay.ask(do="offer", manifest=manifest, sources=[self._url])
        dests = []
        for node, here in zip(self._nodes, self._here, strict=True):
            dest = here / (str(version) if keep else "whole")
            base = str(here / str(version - 1)) if keep and version else ""
            node.send(do="fetch", manifest=manifest, sources=urls, dest=str(dest), base=base)
            dests.append(dest)
        for node in self._nodes:
            node.receive()
        seconds = time.perf_counter() - begun
        for dest in dests:
            require_same(self._folders[version % 2] / FILE, dest / FILE)
            if not keep:
                shutil.rmtree(dest)
        return seconds

    def _bring_peer(self) -> float:
        stage = self._stage
        begun = time.perf_counter()
        roots = [stage.fresh("peer-relay") for _ in self._peer_relays]
        for relay, root in zip(self._peer_relays, roots, strict=True):
            relay.send(do="relay", root=str(root), sources=[self._peer_url])
        urls = [relay.receive()["url"] for relay in self._peer_relays]
        for relay in self._peer_relays:
            relay.send(do="await", version=self._peer_version)
        for relay in self._peer_relays:
            relay.receive()
        dests = [stage.fresh("peer-node") for _ in self._peer_nodes]
        for node, dest in zip(self._peer_nodes, dests, strict=True):
            node.send(do="fetch", version=self._peer_version, sources=urls, dest=str(dest))
        paths = [node.receive()["path"] for node in self._peer_nodes]
        seconds = time.perf_counter() - begun
        for path in paths:
            if path is None:
                raise UnavailableError("a client of the peer did not finish on shaped links")
            require_same(self._folders[1] / FILE, Path(path))
        for folder in (*roots, *dests):
            shutil.rmtree(folder, ignore_errors=True)
        return seconds

    def _ours(self, name: str, number: int) -> Child:
        return self._stage.ours(name, self._net.host(number), self._net.prefix(number))

    def _peer(self, python: Path, name: str, number: int) -> Child:
        return self._stage.peer(python, name, self._net.host(number), self._net.prefix(number))
