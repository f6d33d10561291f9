"""Logging of long-running programs: one line per event on stderr, times in UTC.

PRIME_LOG_FORMAT=json writes JSON objects instead of text. Messages may contain external text
(files, peers, tasks), so non-printable characters are escaped: a message cannot imitate another
program's output or span several lines.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

from prime_core.errors import UserError
from prime_core.printing import printable

FORMAT_VARIABLE = "PRIME_LOG_FORMAT"
LOUD = (
    "alembic", "boto3", "botocore", "docker", "httpcore", "httpx", "s3transfer", "urllib3",
    "uvicorn", "web3",
)  # fmt: skip
"""Libraries of which only warnings are shown. boto3's debug logs contain signatures."""
LINE = "%(asctime)s %(levelname)-7s %(message)s"


class PlainFormatter(logging.Formatter):
    """One printable line per event, followed by the printable lines of its traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable(super().formatException(ei), keep="\n")

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return printable(super().formatStack(stack_info), keep="\n")


def json_formatter() -> logging.Formatter:
    """Formats an event as one JSON object: `timestamp` (RFC 3339, UTC), `level`, `logger`, `event`
    and, for an exception, `exception` with its frames (without local variables)."""
    import structlog

    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(tracebacks),
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(),
        ],
    )


def log_to_stderr(level: int | str, line: str = LINE) -> None:
    """Sets up the root logger, unless it already has a handler. Libraries write warnings only.

    `level` is a number or a name; `line` is the format of text lines. Raises UserError if
    PRIME_LOG_FORMAT is neither `text` nor `json`.
    """
    form = os.environ.get(FORMAT_VARIABLE, "text")
    if form not in ("text", "json"):
        raise UserError(f"{FORMAT_VARIABLE} is {form!r}", hint="set it to text or json")
    formatter = json_formatter() if form == "json" else PlainFormatter(line, "%Y-%m-%d %H:%M:%SZ")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(
        level=level.upper() if isinstance(level, str) else level, handlers=[handler]
    )
    for library in LOUD:
        logging.getLogger(library).setLevel(logging.WARNING)
