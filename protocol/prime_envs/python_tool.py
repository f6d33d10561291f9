"""The tool `python-1`: runs programs in Monty, a Python interpreter in Rust without files or
network.

Monty (pydantic-monty, pinned to one version) runs in a separate process with a memory limit, a
fixed clock and a fixed seed. Names and functions persist for the row's next program. A program that
runs longer than SECONDS ends with UNFINISHED, and the next one starts without names.

Machines may differ in the last bits of functions such as `sin`, and in what a slow one does not
finish. An answer is therefore not `exact`: a file with a different answer is not paid, but no one
is accused (docs/adr/0012).
"""

from __future__ import annotations

import atexit
import datetime
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prime_core.errors import UserError
from prime_envs.tools import Observation

MONTY = "1.4.0"
SECONDS = 2.0
CLOSE_TO_LIMIT = 0.1
"""In seconds; a program that takes longer here may not finish on a slower machine."""
MEMORY_BYTES = 64 << 20
RECURSION = 200
UNFINISHED = "error: the program did not finish"
MAX_PROGRAM = 8192
_POLICY: Any = {
    "random_start": {"seed": 0},
    "datetime": datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    "sleep": "zero",
}
_pool: Any = None


def require_monty() -> None:
    """Raises UserError unless the interpreter is installed in the version that python-1
    requires."""
    try:
        found = version("pydantic-monty")
    except PackageNotFoundError:
        found = None
    if found != MONTY:
        raise UserError(
            f"the tool python-1 needs pydantic-monty {MONTY}; {found or 'none'} is installed",
            hint="pip install 'prime-open[python-tool]'",
        )


def run(calls: Sequence[Mapping[str, str]]) -> Observation:
    """Returns the output of the last of a row's programs, or if it prints nothing, the value of its
    last expression.

    `calls` are the arguments of each call so far: `code` or `input`. Earlier programs are run
    again, so that a reply depends only on the row.
    """
    programs = [call.get("code", call.get("input", "")) for call in calls]
    started = 0
    found = Observation("")
    for number in range(len(programs)):
        found = _run_last(programs[started : number + 1])
        if found.text == UNFINISHED:
            started = number + 1
    slow = found.given_up is not None
    return Observation(found.text, exact=False, given_up=UNFINISHED if slow else None)


def _run_last(programs: Sequence[str]) -> Observation:
    """Runs the programs in one session. `given_up` is set if they came close to the limit."""
    global _pool
    import pydantic_monty as monty

    if _pool is None:
        pool = monty.Monty(max_processes=1, request_timeout=4 * SECONDS)
        pool.__enter__()
        atexit.register(pool.__exit__, None, None, None)
        _pool = pool
    limits: Any = {
        "max_feed_duration_secs": SECONDS,
        "max_memory": MEMORY_BYTES,
        "max_recursion_depth": RECURSION,
    }
    began = time.monotonic()
    text = ""
    try:
        with _pool.checkout(
            limits=limits, os_policy=_POLICY, assert_message_annotations=False
        ) as session:
            for program in programs:
                if time.monotonic() - began > SECONDS:
                    text = UNFINISHED
                    break
                text = _run_one(session, program)
    except (monty.MontyCrashedError, monty.MontyShutdown):
        text = UNFINISHED
    near = text == UNFINISHED or time.monotonic() - began > CLOSE_TO_LIMIT
    return Observation(text, given_up=UNFINISHED if near else None)


def _run_one(session: Any, program: str) -> str:
    import pydantic_monty as monty

    if len(program) > MAX_PROGRAM:
        return f"error: a program has at most {MAX_PROGRAM} characters"
    printed = monty.CollectString()
    try:
        value = session.feed_run(program, print_callback=printed)
    except (monty.MontyCrashedError, monty.MontyShutdown):
        raise
    except monty.MontyError as error:
        said = str(error)
        if said.startswith("TimeoutError"):
            return UNFINISHED
        for kind in ("MemoryError", "RecursionError"):  # their messages contain measurements
            if said.startswith(kind):
                said = kind
        return f"{printed.output}error: {said}"
    if printed.output:
        return printed.output.rstrip("\n")
    return repr(value) if value is not None and _plain(value) else "(no output)"


def _plain(value: Any) -> bool:
    """Whether a value's text is the same in every process: no sets, no memory addresses."""
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, [*value.keys(), *value.values()]))
    return value is None or type(value) in (bool, int, float, str)
