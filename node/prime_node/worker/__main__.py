"""What runs in the container: `python -m prime_node.worker`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from prime_core.errors import PrimeError, UnavailableError
from prime_core.logs import log_to_stderr
from prime_core.memory import collect_rarely
from prime_core.run import RunDefinition
from prime_envs.sources import DATASETS_FOLDER
from prime_envs.sources import VARIABLE as DATASETS
from prime_node.worker.client import BridgeClient
from prime_node.worker.loop import StopFlag, work
from prime_node.worker.rollout_builder import Options, RolloutBuilder
from prime_verify.engines import ENGINES


def parse(arguments: Sequence[str]) -> Options:
    """Parses the command line into Options; argparse ends the program on a wrong one."""
    parser = argparse.ArgumentParser(prog="python -m prime_node.worker", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--policies", type=Path, required=True)
    parser.add_argument("--outbox", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--generation-batch", type=int, default=0)
    parser.add_argument("--tensor-parallel", type=int, default=0)
    parser.add_argument("--memory-share", type=float, default=0.0)
    parser.add_argument("--max-length", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", choices=ENGINES, default="plain")
    parser.add_argument(
        "--throttle", type=float, default=1.0, help="DEVELOPMENT ONLY: take N times as long"
    )
    return Options(**vars(parser.parse_args(arguments)))


def main(
    arguments: Sequence[str] | None = None,
    make_builder: Callable[[RunDefinition, Options], RolloutBuilder] = RolloutBuilder,
) -> int:
    """Runs a worker until SIGTERM; returns the exit status."""
    collect_rarely()  # until an engine has loaded its model
    options = parse(sys.argv[1:] if arguments is None else arguments)
    log_to_stderr(logging.INFO)
    os.environ.setdefault(DATASETS, str(options.policies / DATASETS_FOLDER))
    stop = StopFlag()
    stop.install()
    bridge = BridgeClient(options.socket)
    try:
        work(bridge, make_builder(bridge.run(), options), stop)
    except PrimeError as error:
        logging.getLogger("prime.worker").error("%s", error)
        return error.exit_code
    except MemoryError as error:
        logging.getLogger("prime.worker").error("this machine has no memory left: %s", error)
        return UnavailableError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
