"""The log of every long-running program: one line an event on stderr, its time in UTC."""

from __future__ import annotations

import logging
import sys
import time

LINE = "%(asctime)s %(levelname)-7s %(message)s"


def log_to_stderr(level: int | str, line: str = LINE) -> None:
    """Sets up the root logger, unless somebody has before; `level` by number or by its name."""
    formatter = logging.Formatter(line, "%Y-%m-%d %H:%M:%SZ")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(
        level=level.upper() if isinstance(level, str) else level, handlers=[handler]
    )
