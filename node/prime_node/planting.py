"""`python -m prime_node.planting SECRET_FILE …`: the worker of one of the manager's planted nodes,
started by an ordinary agent: prime-node join … --runtime process --worker-command "python -m
prime_node.planting FILE". Takes the worker's arguments after the file.

About half of the files are honest. The others cheat, each in a way determined by its lease and the
secret (prime_verify/canaries/planting.py). The node has a seat, but its stake is never at risk: the
orchestrator that shares the secret keeps its files off the chain. In any other pool such a node is
a cheater.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from prime_core.errors import UserError
from prime_core.run import RunDefinition
from prime_engine.base import Engine
from prime_node.worker.__main__ import main as worker_main
from prime_node.worker.client import BridgeClient
from prime_node.worker.rollout_builder import Job, Options, RolloutBuilder
from prime_verify.canaries.lies import PLANTED, Make
from prime_verify.canaries.planting import HONEST, kind, read_secret
from prime_verify.canaries.scene import Scene
from prime_verify.engines import FolderEngines, load_engine
from prime_verify.rollout_file import FileError


class LyingBuilder(RolloutBuilder):
    """The honest builder, except that `choose` may return an attack for a file (see lies.py)."""

    concurrent = False  # attacks use engines of their own

    def __init__(
        self, choose: Callable[[Job], Make | None], run: RunDefinition, options: Options
    ) -> None:
        super().__init__(run, options)
        self._choose = choose
        self._variants: dict[str, FolderEngines] = {}
        self.engines = self._loaded(None, keep=1)

    def announce(self, bridge: BridgeClient) -> None:
        """Announces nothing: the attacks are made for leases that statistics judge."""

    def make(self, job: Job, engine: Engine) -> bytes:
        lie = self._choose(job)
        return super().make(job, engine) if lie is None else lie(self._scene(job))

    def count(self, content: bytes) -> int:
        """Counts as the honest worker does, or returns 0: some attacks produce no valid file."""
        try:
            return super().count(content)
        except FileError:
            return 0

    def _scene(self, job: Job) -> Scene:
        version, policy = job.signed.policy_version, job.signed.lease.policy_digest
        return Scene(
            job.signed,
            job.lease_digest,
            self.run,
            self.environment,
            self.engines.engine(version, policy),
            variant=lambda name: self._variant(name).engine(version, policy),
        )

    def _variant(self, name: str) -> FolderEngines:
        """Returns the node's policies with modified weights."""
        from prime_engine.variants import VARIANTS

        if name not in self._variants:
            self._variants[name] = self._loaded(VARIANTS[name], keep=1)
        return self._variants[name]

    def _loaded(self, prepare: Callable[[Any], None] | None, *, keep: int) -> FolderEngines:
        options = self.options
        load = partial(
            load_engine,
            dtype=options.dtype,
            device=options.device,
            threads=options.threads,
            prepare=prepare,
        )
        return FolderEngines(options.policies, load, keep=keep)


def planted(secret: bytes, job: Job) -> Make | None:
    """Returns the attack for a job's lease, or None for an honest file."""
    name = kind(secret, job.lease_digest)
    return None if name == HONEST else PLANTED[name]


def main() -> int:
    if len(sys.argv) < 2:
        raise UserError("no secret is named", hint="python -m prime_node.planting SECRET_FILE …")
    path, *arguments = sys.argv[1:]
    choose = partial(planted, read_secret(Path(path)))
    return worker_main(arguments, partial(LyingBuilder, choose))


if __name__ == "__main__":
    sys.exit(main())
