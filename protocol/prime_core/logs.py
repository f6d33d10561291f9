"""Logging of all programs: one line per event on stderr, times in UTC.

PRIME_LOG_FORMAT=json writes JSON objects instead of text. Messages may contain external text
(files, peers, tasks), so non-printable characters are escaped: a message cannot imitate another
program's output or span several lines.

In JSON, an event also has the fields that its call passes (`extra=fields(...)`), and those of its
process (`set_process_fields`), so that logs can be filtered by node, lease or file. In text, the
message names them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from functools import cached_property
from typing import Any, Literal, TypedDict, Unpack

from prime_core.errors import UserError
from prime_core.printing import printable

FORMAT_VARIABLE = "PRIME_LOG_FORMAT"
VERBOSE_LIBRARIES = (
    "alembic", "boto3", "botocore", "docker", "httpcore", "httpx", "s3transfer", "urllib3",
    "uvicorn", "web3",
)  # fmt: skip
"""Libraries of which only warnings are shown. boto3's debug logs contain signatures."""
_FIELDS = "prime_fields"
"""Name of the fields in a log record."""


class FileFields(TypedDict, total=False):
    """A rollout file that an event is about. Digests and addresses are whole, as in the API."""

    node: str
    lease: str
    submission: str
    step: int
    policy: int
    """Version of the policy that made it."""


class Fields(FileFields, total=False):
    """What an event is about."""

    kind: Literal["lease", "file", "opinion", "verdict", "slash", "node", "policy", "batch"]
    """What changed; `status` says how. Other events have no kind."""
    status: str
    reason: str
    pool: int
    validator: str


_process_fields = Fields()


def fields(**about: Unpack[Fields]) -> dict[str, Fields]:
    """Returns the argument `extra` of a log call about these things."""
    return {_FIELDS: about}


def set_process_fields(**about: Unpack[Fields]) -> None:
    """Adds fields to every later event of this process that does not pass them itself."""
    _process_fields.update(about)


def formatter(form: str, *, colors: bool = False) -> logging.Formatter:
    """Returns structlog's formatter of standard log records.

    `form`: `json` for one object per event: `timestamp` (RFC 3339, UTC), `level`, `logger`,
    `event`, the event's fields and, for an exception, `exception` with its frames (without local
    variables). `text` for one line per event, with `colors` or without, followed by the lines of
    its traceback.
    """
    import structlog

    stamp = "iso" if form == "json" else "%Y-%m-%d %H:%M:%SZ"
    before: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt=stamp, utc=True),
    ]
    last: structlog.typing.Processor
    if form == "json":
        before += [structlog.stdlib.add_logger_name, _add_fields]
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        before.append(structlog.processors.ExceptionRenderer(frames))
        last = structlog.processors.JSONRenderer()
    else:
        before += [structlog.processors.ExceptionRenderer(), _escape]
        last = structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=before,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
    )


def _add_fields(logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Adds the fields of the process and of the event: a structlog processor."""
    event.update(_process_fields)
    event.update(getattr(event["_record"], _FIELDS, {}))
    return event


def _escape(logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Escapes what does not print in an event's message and traceback: a structlog processor."""
    event["event"] = printable(str(event["event"]))
    if "exception" in event:
        event["exception"] = printable(event["exception"], keep="\n")
    return event


class _Structured(logging.Formatter):
    """`formatter(form, colors=colors)`, made at the first event: structlog's import takes longer
    than a command that logs nothing."""

    def __init__(self, form: str, *, colors: bool) -> None:
        super().__init__()
        self._form, self._colors = form, colors

    @cached_property
    def _made(self) -> logging.Formatter:
        return formatter(self._form, colors=self._colors)

    def format(self, record: logging.LogRecord) -> str:
        return self._made.format(record)


def log_to_stderr(level: int | str) -> None:
    """Sets up the root logger; called again, it changes the level. A root logger with a handler of
    another origin is left alone. Libraries write warnings only.

    `level` is a number or a name. Text is colored on a terminal, unless NO_COLOR is set
    (no-color.org). Raises UserError if PRIME_LOG_FORMAT is neither `text` nor `json`.
    """
    form = os.environ.get(FORMAT_VARIABLE, "text")
    if form not in ("text", "json"):
        raise UserError(f"{FORMAT_VARIABLE} is {form!r}", hint="set it to text or json")
    for library in VERBOSE_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        handler.setFormatter(_Structured(form, colors=colors))
        root.addHandler(handler)
    if isinstance(root.handlers[0].formatter, _Structured):
        root.setLevel(level.upper() if isinstance(level, str) else level)
