"""`python -P devnet/liars.py KIND …`: the worker of a lying node.

An otherwise honest agent starts it through its development setting `worker_command`. Takes the
honest worker's arguments."""

from __future__ import annotations

import sys
from functools import partial

from prime_core.errors import UserError
from prime_node.planting import LyingBuilder
from prime_node.worker.__main__ import main as worker_main
from prime_verify.canaries.lies import LIES


def known(kind: str) -> str:
    """`kind`, if there is such a lie. Raises UserError, with all there are."""
    if kind not in LIES:
        raise UserError(f"there is no lie {kind!r}", hint=f"known are {', '.join(sorted(LIES))}")
    return kind


def main() -> int:
    kind, *arguments = sys.argv[1:] or [""]
    lie = LIES[known(kind)].make
    return worker_main(arguments, partial(LyingBuilder, lambda job: lie))


if __name__ == "__main__":
    sys.exit(main())
