"""`python -m devnet.liars KIND …`: the worker of a lying node, started by an otherwise honest agent
through its development setting `worker_command`. Takes the honest worker's arguments."""

from __future__ import annotations

import sys
from functools import partial

from devnet.lies import LIES
from node.worker.__main__ import main as worker_main
from node.worker.workshop import Job, Options, Workshop
from protocol.core.errors import UserError
from protocol.core.run import RunDefinition
from protocol.engine.quantize import quantizer
from protocol.verification.engines import FolderEngines, load_engine


class LyingWorkshop(Workshop):
    """The honest workshop with one step of the builder replaced (see `lies.py`)."""

    def __init__(self, kind: str, run: RunDefinition, options: Options) -> None:
        super().__init__(run, options)
        self._build = LIES[kind]
        if kind == "int4":
            load = partial(
                load_engine,
                dtype=options.dtype,
                device=options.device,
                threads=options.threads,
                prepare=quantizer(bits=4),
            )
            self.engines = FolderEngines(options.policies, load, keep=1)

    def make(self, job: Job) -> bytes:
        engine = self.engines.engine(job.signed.policy_version, job.signed.lease.policy_digest)
        return self._build(job.signed, job.lease_digest, self.run, engine, self.environment)


def main() -> int:
    kind, *arguments = sys.argv[1:] or [""]
    if kind not in LIES:
        raise UserError(f"there is no lie {kind!r}; known are {', '.join(LIES)}")
    return worker_main(arguments, partial(LyingWorkshop, kind))


if __name__ == "__main__":
    sys.exit(main())
