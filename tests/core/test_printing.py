"""What strangers say (files, peers, tasks) cannot look like another program's word."""

from __future__ import annotations

import importlib
import io
import json
import logging

import pytest

from prime_core import logs
from prime_core.errors import UserError
from prime_core.logs import fields, formatter, set_process_fields
from prime_core.printing import printable
from prime_node.cli_common import tree_lines

HOSTILE = "cpu\x1b[2J\x1b]0;t\x07\n2026-01-01 00:00:00Z INFO    accepted\r\u202egnp\x9b\u2028"


@pytest.mark.parametrize("text", ["", "plain", "größer – 97 %", "日本", "\\n as written"])
def test_what_prints_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_what_does_not_print_is_written_out() -> None:
    assert printable(HOSTILE).isprintable()
    assert printable("a\x1b[2J\n\u202eb\U000e0001") == "a\\x1b[2J\\n\\u202eb\\U000e0001"
    assert printable("two\nlines\x07", keep="\n") == "two\nlines\\x07"


def test_a_log_has_one_line_for_each_event_of_any_content() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter("text"))
    log = logging.Logger("stranger", logging.INFO)
    log.addHandler(handler)
    log.info("made with %s", HOSTILE)
    assert written.getvalue().count("\n") == 1
    assert written.getvalue()[:-1].isprintable()
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("it failed")
    assert "Traceback" in written.getvalue()
    assert all(line.isprintable() for line in written.getvalue().split("\n"))


def test_json_logs_are_one_object_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_process_fields", logs.Fields())
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter("json"))
    log = logging.Logger("stranger", logging.INFO)
    log.addHandler(handler)
    log.info("made with %s", HOSTILE)
    set_process_fields(pool=7, node="0x1")
    log.info("it came", extra=fields(kind="file", status="received", node="0x2"))
    secret = "a local variable"
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("it failed")
    first, second, third = (json.loads(line) for line in written.getvalue().splitlines())
    assert first.pop("timestamp").endswith("Z")
    assert first == {"event": f"made with {HOSTILE}", "level": "info", "logger": "stranger"}
    assert (second["pool"], second["node"], second["status"]) == (7, "0x2", "received")
    assert (third["pool"], third["node"]) == (7, "0x1")
    assert third["exception"][0]["exc_type"] == "ValueError"
    assert secret not in written.getvalue()
    assert written.getvalue().isascii()


def test_published_words_reach_no_terminal_as_they_are() -> None:
    shown = tree_lines({"evidence": {"detail": HOSTILE, "rows": [HOSTILE]}})
    assert len(shown) == 3
    assert all(line.isprintable() for line in shown)


@pytest.mark.parametrize(
    "command",
    [
        "devnet.__main__",
        "prime_node.cli",
        "prime_orchestrator.cli.main",
        "prime_broadcast.cli",
        "prime_trainer.cli",
    ],
)
def test_no_command_ends_with_strangers_words_as_they_are(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise UserError(f"the peer said {HOSTILE}", hint=f"ask {HOSTILE}")

    module = importlib.import_module(command)
    monkeypatch.setattr(module, "app", fails)
    with pytest.raises(SystemExit):
        module.main()
    said = capsys.readouterr().err
    assert said.count("the peer said cpu\\x1b[2J") == said.count("ask cpu\\x1b[2J") == 1
    assert all(line.isprintable() for line in said.split("\n"))
