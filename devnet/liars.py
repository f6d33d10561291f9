"""`python -P devnet/liars.py KIND …`: the worker of a lying node.

An otherwise honest agent starts it through its development setting `worker_command`. Takes the
honest worker's arguments."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # a worker's PYTHONPATH has no devnet

from devnet.kinds import LIES, LongScene
from prime_core.errors import UserError
from prime_core.run import RunDefinition
from prime_engine.base import Engine
from prime_node.planting import LyingBuilder
from prime_node.worker.__main__ import main as worker_main
from prime_node.worker.rollout_builder import Job, Options
from prime_verify.rollout_file import FileError, FileRow, read_rollout_file


class Liar(LyingBuilder):
    """Makes every file by `lie`, with what the node had before."""

    def __init__(
        self, lie: Callable[[LongScene], bytes], run: RunDefinition, options: Options
    ) -> None:
        super().__init__(lambda job: None, run, options)
        self._lie = lie
        self._earlier: Sequence[FileRow] = ()
        self.engines = self._loaded(None, keep=2)  # an older policy next to the leased one

    def make(self, job: Job, engine: Engine) -> bytes:
        def older() -> Engine | None:
            earlier = self.engines.earlier(job.signed.policy_version)
            return next((engine for _, engine in earlier), None)

        scene = LongScene(**vars(self._scene(job)), older=older, earlier=self._earlier)
        content = self._lie(scene)
        with contextlib.suppress(FileError):  # some attacks produce no valid file
            self._earlier = read_rollout_file(content).rows
        return content


def known(kind: str) -> str:
    """`kind`, if there is such a lie. Raises UserError, with all there are."""
    if kind not in LIES:
        raise UserError(f"there is no lie {kind!r}", hint=f"known are {', '.join(sorted(LIES))}")
    return kind


def main() -> int:
    kind, *arguments = sys.argv[1:] or [""]
    return worker_main(arguments, partial(Liar, LIES[known(kind)].make))


if __name__ == "__main__":
    sys.exit(main())
