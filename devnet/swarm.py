"""Many nodes in one process: `python -m devnet.swarm --keys FILE …`.

Each is a whole agent with its own key, data folder, sessions, journal and chain connection. Only
its worker differs: a thread of this process instead of a container.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prime_core.errors import PrimeError
from prime_core.logs import log_to_stderr
from prime_core.run import RunDefinition
from prime_core.signing import LocalSigner
from prime_core.task import Task
from prime_core.waiting import until_stopped
from prime_node.agent import Agent
from prime_node.config import Settings
from prime_node.runtime.base import Mounts, WorkerOptions
from prime_node.worker.__main__ import parse
from prime_node.worker.client import BridgeClient
from prime_node.worker.loop import StopFlag, work
from prime_node.worker.rollout_builder import Built, Job, Options, RolloutBuilder

log = logging.getLogger("prime.swarm")
END_SECONDS = 60.0


class Builder(RolloutBuilder):
    """A worker's builder that has one lease at a time and rests between two, for `rest` seconds in
    the mean. It announces no exact class: that would load every policy on every node, hundreds of
    times on one machine."""

    concurrent = False

    def __init__(self, run: RunDefinition, options: Options, rest: float, stop: StopFlag) -> None:
        super().__init__(run, options)
        self._rest, self._stop = rest, stop
        self._rests_until = time.monotonic() + random.uniform(0.0, rest)

    def build(self, job: Job) -> Built:
        built = super().build(job)
        self._rests_until = time.monotonic() + self._rest * random.uniform(0.5, 1.5)
        return built

    def announce(self, bridge: BridgeClient) -> None:
        """Rests: the worker calls it before it asks for a lease."""
        self._stop.sleep(max(0.0, self._rests_until - time.monotonic()))


class ThreadTask:
    """A worker in a thread (see TaskHandle)."""

    def __init__(self, mounts: Mounts, options: WorkerOptions, rest: float) -> None:
        self._rest = rest
        self._stop = StopFlag()
        self._status: int | None = None
        self._said = ""
        self._arguments = options.arguments(mounts)
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        options = parse(self._arguments)
        bridge = BridgeClient(options.socket)
        try:
            work(bridge, Builder(bridge.run(), options, self._rest, self._stop), self._stop)
            self._status = 0
        except PrimeError as error:
            self._said, self._status = str(error), error.exit_code
        except Exception as error:
            log.exception("a worker died")
            self._said, self._status = repr(error), 1

    @property
    def name(self) -> str:
        return f"thread {self._thread.ident}"

    def wait(self, timeout: float) -> int | None:
        self._thread.join(timeout)
        return None if self._thread.is_alive() else self._status

    def stop(self, grace: float) -> int:
        self._stop.set()
        self._thread.join(grace)
        return self._status or 0

    def logs(self) -> str:
        return self._said


class ThreadRuntime:
    """Starts workers as threads (see Runtime)."""

    name: Literal["process"] = "process"

    def __init__(self, uid: int, rest: float) -> None:
        self.task_uid = uid
        self._rest = rest

    def check(self, task: Task | None) -> str:
        return "the worker is a thread of this process"

    def clean(self) -> int:
        return 0

    def start(self, task: Task, mounts: Mounts, options: WorkerOptions) -> ThreadTask:
        return ThreadTask(mounts, options, self._rest)


@dataclass(frozen=True)
class Words:
    """The command line."""

    orchestrator: str
    rpc: tuple[str, ...]
    deployment: Path
    keys: Path
    data: Path
    throttle: float
    rest: float


def _parse() -> Words:
    parser = argparse.ArgumentParser(prog="python -m devnet.swarm", description=__doc__)
    parser.add_argument("--orchestrator", required=True)
    parser.add_argument("--rpc", action="append", required=True)
    parser.add_argument("--deployment", type=Path, required=True)
    parser.add_argument("--keys", type=Path, required=True, help="a private key in each line")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--throttle", type=float, default=1.0)
    parser.add_argument("--rest", type=float, default=0.0, help="mean seconds between two leases")
    given = vars(parser.parse_args())
    return Words(**{**given, "rpc": tuple(given["rpc"])})


def _agent(words: Words, number: int, key: str) -> Agent:
    settings = Settings(
        orchestrator=words.orchestrator,
        rpc=words.rpc,
        deployment=words.deployment,
        data=words.data / str(number),
        runtime="process",
        threads=1,
        throttle=words.throttle,
        first_answer_seconds=600,
    )
    signer = LocalSigner(bytes.fromhex(key))
    return Agent(settings, signer, signer, runtime=ThreadRuntime(os.getuid(), words.rest))


def main() -> int:
    """Runs the nodes until SIGTERM, or until one ends by an error: then all end, with status 1."""
    words = _parse()
    log_to_stderr(logging.WARNING)
    stop = until_stopped()
    agents = [_agent(words, at, key) for at, key in enumerate(words.keys.read_text().split())]
    failed: list[int] = []

    def live(number: int, agent: Agent) -> None:
        try:
            agent.run()
        except Exception:
            log.exception("node %d ended", number)
        if not stop.is_set():
            failed.append(number)
            stop.set()

    threads = [
        threading.Thread(target=live, args=(at, agent), name=f"node-{at}", daemon=True)
        for at, agent in enumerate(agents)
    ]
    for thread in threads:
        thread.start()
    stop.wait()
    for agent in agents:
        agent.stop()
    for thread in threads:
        thread.join(END_SECONDS)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
