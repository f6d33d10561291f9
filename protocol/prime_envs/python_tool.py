"""The tool `python-1`: runs programs in Monty, a Python interpreter in Rust without files or
network.

Monty (pydantic-monty, pinned to one version) runs in a separate process with a memory limit, a
fixed clock and a fixed seed. Names and functions persist for the row's next program. A program that
reaches the limit of time (SECONDS for all of a row's programs) or memory ends its row as
`tool_limit`.

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
    again in the same session, so that a reply depends only on the row. `limit` says whether a
    program reached the limit of time or memory, or came close to that of time.
    """
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
    text: str | None = ""
    try:
        with _pool.checkout(
            limits=limits, os_policy=_POLICY, assert_message_annotations=False
        ) as session:
            for call in calls:
                text = _run_one(session, call.get("code", call.get("input", "")))
                if text is None or time.monotonic() - began > SECONDS:
                    return _LIMITED
    except (monty.MontyCrashedError, monty.MontyShutdown):
        return _LIMITED
    near = time.monotonic() - began > CLOSE_TO_LIMIT
    return Observation(text or "", exact=False, limit="near" if near else "")


_LIMITED = Observation("", exact=False, limit="reached")


def _run_one(session: Any, program: str) -> str | None:
    """What a program prints or is worth; None if it reached the limit of time or memory."""
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
        if said.startswith(("TimeoutError", "MemoryError")):
            return None
        if said.startswith("RecursionError"):  # its message contains measurements
            said = "RecursionError"
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
