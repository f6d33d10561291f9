"""What every program answers: -h, --version, completion, and one sentence where an extra lacks."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from typing import Any

import click
import pytest
import typer

from prime_core import logs
from prime_core.command_line import run
from prime_core.logs import log_to_stderr

PROGRAMS = sorted(
    (one for one in entry_points(group="console_scripts") if one.dist is not None
     and one.dist.name == "prime-open"),
    key=lambda one: one.name,
)  # fmt: skip
HANDED_ON = {("validate",)}
"""`orchestrator validate` becomes the process `validator run`, which is looked at as that."""
by_name = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def called(program: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Calls the program's entry point as a shell does; returns its exit status."""
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{program.name}", *words])
    try:
        program.load()()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_all_programs_are_looked_at() -> None:
    assert {"prime-node", "orchestrator", "validator", "trainer"} <= {p.name for p in PROGRAMS}


@by_name
def test_version_names_the_program(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(program, monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"{program.name} {version('prime-open')}\n"


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command below a Click group, as the words that call it."""
    yield path
    if hasattr(group, "list_commands"):
        context = click.Context(group)
        for name in group.list_commands(context):
            _, command, _ = group.resolve_command(context, [name])
            yield from commands(command, (*path, name))


@pytest.mark.slow
@by_name
def test_every_command_has_short_help(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    app = importlib.import_module(program.module).app
    found = set(commands(typer.main.get_command(app))) - HANDED_ON
    for words in sorted(found):
        assert called(program, monkeypatch, *words, "-h") == 0, words
        shown = capsys.readouterr()
        assert shown.out.lstrip().startswith(f"Usage: {' '.join([program.name, *words])}"), words
        assert shown.err == ""
        lines = shown.out.partition("Commands:\n")[2].splitlines()
        assert not [line for line in lines if line.endswith("...")], "cut at 80 columns"


@pytest.mark.parametrize(
    "words",
    ["orchestrator relay", "trainer run", "trainer follow", "validator run", "prime-node join"]
    + [f"orchestrator rewards {name}" for name in ("list", "rebuild", "explain", "settle")],
)
def test_what_fetches_from_addresses_that_others_name_may_be_allowed_private_ones(
    words: str,
) -> None:
    """The message of PrivateAddressError names the option."""
    name, *path = words.split()
    [program] = [one for one in PROGRAMS if one.name == name]
    command: Any = typer.main.get_command(importlib.import_module(program.module).app)
    for word in path:
        _, command, _ = command.resolve_command(click.Context(command), [word])
    assert "--allow-private" in {option for one in command.params for option in one.opts}


@by_name
def test_completion_offers_the_commands_in_bash(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = importlib.import_module(program.module).app
    command = typer.main.get_command(app)
    names = getattr(command, "list_commands", lambda _: ["--version"])(click.Context(command))
    variable = f"_{program.name}_COMPLETE".replace("-", "_").upper()
    monkeypatch.setenv(variable, "complete_bash")
    typed = "--ver" if names == ["--version"] else names[0][:2]
    monkeypatch.setenv("COMP_WORDS", f"{program.name} {typed}")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert called(program, monkeypatch) == 0
    assert names[0] in capsys.readouterr().out.split()


@by_name
def test_a_warning_is_one_json_object_if_json_is_wanted(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = importlib.import_module(program.module).app
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
    monkeypatch.setenv("PRIME_LOG_FORMAT", "json")
    monkeypatch.setattr(logs, "_process_fields", logs.Fields())

    @app.command("log-something")
    def log_something() -> None:
        log = logging.getLogger("prime.test")
        log.info("a step")
        log.warning("the disk is slow:\n%d s", 3)
        log_to_stderr("info")
        log.info("as a service")

    assert called(program, monkeypatch, "log-something") == 0
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "event": "the disk is slow:\n3 s", "level": "warning", "logger": "prime.test"
    }  # fmt: skip
    assert (second["event"], second["level"]) == ("as a service", "info")


@by_name
def test_an_unknown_log_format_is_one_sentence(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = importlib.import_module(program.module).app
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])

    @app.command("nothing")
    def nothing() -> None: ...

    monkeypatch.setenv("PRIME_LOG_FORMAT", "xml")
    assert called(program, monkeypatch, "nothing") == 64
    assert capsys.readouterr().err == (
        f"{program.name}: PRIME_LOG_FORMAT is 'xml'; set it to text or json\n"
    )


def test_a_missing_extra_is_one_sentence_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def needs() -> None:
        importlib.import_module("docker")

    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(SystemExit) as ended:
        run(app, "prime-node", [])
    assert ended.value.code == 69
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'prime-open[node]'" in said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 69, "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "kept"), 64, "kept: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "kept"), 64, "kept: Read-only file system"),
        (MemoryError("CUDA out of memory"), 69, "or its card (CUDA out of memory); end other"),
        (MemoryError(), 69, "no memory is left on this machine or its card; end other programs"),
    ],
    ids=("full", "not ours", "read-only", "card", "memory"),
)
def test_a_disk_or_memory_that_takes_nothing_is_one_sentence(
    error: Exception, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def write() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run(app, "program", [])
    assert ended.value.code == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("program: ")
    assert said in line


def test_any_other_error_of_the_system_is_a_defect() -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def write() -> None:
        raise OSError(errno.EBADF, "Bad file descriptor", "kept")

    with pytest.raises(OSError, match="Bad file"):
        run(app, "program", [])
