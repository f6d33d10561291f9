"""The log of every long-running program: one line an event on stderr, its time in UTC.

Much of what is logged was said by strangers (files, peers, tasks): what does not print is written
out, so that no message looks like another program's, or like several.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from prime_core.printing import printable

LINE = "%(asctime)s %(levelname)-7s %(message)s"


class PlainFormatter(logging.Formatter):
    """One printable line an event, then its traceback's, printable too."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable(super().formatException(ei), keep="\n")

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return printable(super().formatStack(stack_info), keep="\n")


def log_to_stderr(level: int | str, line: str = LINE) -> None:
    """Sets up the root logger, unless somebody has before; `level` by number or by its name."""
    formatter = PlainFormatter(line, "%Y-%m-%d %H:%M:%SZ")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(
        level=level.upper() if isinstance(level, str) else level, handlers=[handler]
    )
