"""`python -m devnet.liars KIND …`: the worker of a lying node, started by an otherwise honest agent
through its development setting `worker_command`. Takes the honest worker's arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from node.worker.__main__ import main as worker_main
from node.worker.workshop import Job, Options, Workshop
from protocol.core.errors import UserError
from protocol.core.run import RunDefinition
from protocol.engine.base import Engine
from protocol.verification.engines import FolderEngines, load_engine
from protocol.verification.lies import LIES
from protocol.verification.scene import Scene


class LyingWorkshop(Workshop):
    """The honest workshop with one step of the builder replaced (protocol/verification/lies.py)."""

    def __init__(self, kind: str, run: RunDefinition, options: Options) -> None:
        super().__init__(run, options)
        self._make = LIES[kind].make
        self._variants: dict[str, FolderEngines] = {}
        self.engines = self._loaded(None, keep=2)  # an older policy beside the leased one

    def make(self, job: Job) -> bytes:
        version, policy = job.signed.policy_version, job.signed.lease.policy_digest

        def older() -> Engine | None:
            return next((engine for _, engine in self.engines.earlier(version)), None)

        scene = Scene(
            job.signed,
            job.lease_digest,
            self.run,
            self.environment,
            self.engines.engine(version, policy),
            variant=lambda name: self._variant(name).engine(version, policy),
            older=older,
        )
        return self._make(scene)

    def _variant(self, name: str) -> FolderEngines:
        """The node's policies, each with its weights changed once it is loaded."""
        from protocol.engine.variants import VARIANTS

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


def known(kind: str) -> str:
    """`kind`, if there is such a lie. Raises UserError, with all there are."""
    if kind not in LIES:
        raise UserError(f"there is no lie {kind!r}", hint=f"known are {', '.join(sorted(LIES))}")
    return kind


def main() -> int:
    kind, *arguments = sys.argv[1:] or [""]
    return worker_main(arguments, partial(LyingWorkshop, known(kind)))


if __name__ == "__main__":
    sys.exit(main())
