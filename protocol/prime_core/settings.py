"""Settings of every program, in order of precedence: flag > environment > TOML > saved > default.

A program reads its settings once, when a command starts. Nothing is read at import.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic_settings
from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError
from pydantic_settings import (
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    SettingsConfigDict,
)

from prime_core.errors import UserError
from prime_core.given import parse_toml, read_given


class BaseSettings(pydantic_settings.BaseSettings):
    """Base of every program's settings. A program's class sets `env_prefix`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=True)


Settings = TypeVar("Settings", bound=BaseSettings)


def _split(value: object) -> object:
    """Splits comma-separated text, the form of a list in the environment."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


Urls = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list of URLs; comma-separated in the environment."""
UserPath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
"""An absolute path; `~` is expanded."""


_MEND = "correct or remove the file, or name another by --config"


def load_settings(
    kind: type[Settings],
    flags: Mapping[str, object],
    toml: Path | None = None,
    memory: Mapping[str, Any] | None = None,
) -> Settings:
    """Loads settings of `kind`.

    `flags`: values from the command line; None or an empty list means not given. `toml`: a file,
    which may be missing. `memory`: values saved by an earlier command. Raises UserError with the
    setting's name if a value is invalid, or if the file is not TOML.
    """

    given = {name: value for name, value in flags.items() if value not in (None, (), [])}
    try:
        sources = (
            InitSettingsSource(kind, dict(memory or {})),
            InitSettingsSource(kind, _values_in(toml)),
            EnvSettingsSource(kind),
            InitSettingsSource(kind, given),
        )
        values: dict[str, Any] = {}
        for source in sources:
            values |= source()
        loaded = kind.model_validate(values)
    except ValidationError as error:
        unknown = [
            [str(part) for part in one["loc"]]
            for one in error.errors()
            if one["type"] == "extra_forbidden"
        ]
        if unknown:
            raise UserError(
                "; ".join(_unknown(path, kind) for path in unknown), hint=f"correct {toml or 'it'}"
            ) from error
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "?"
        variable = variable_of(kind, name)
        raise UserError(
            f"the setting {name!r} is wrong: {first['msg']}",
            hint=f"set it by --{name.replace('_', '-')}, {variable} or in {toml or 'TOML'}",
        ) from error
    return loaded


def _values_in(toml: Path | None) -> dict[str, Any]:
    """The settings in a TOML file, which may be missing. Raises UserError."""
    if toml is None or not (path := toml.expanduser()).is_file():
        return {}
    return parse_toml(read_given(path, "settings file", _MEND, empty=True), path, _MEND)


def _unknown(path: Sequence[str], kind: type[BaseSettings]) -> str:
    """What is said of an unknown setting; all parts of `path` but the last are tables."""
    *tables, name = path
    known = kind.model_fields
    for table in tables:
        inner = known[table].annotation if table in known else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return f"there is no setting {'.'.join(path)!r}"
        known = inner.model_fields
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    similar = f"; did you mean {'.'.join([*tables, near[0]])}?" if near else ""
    return f"there is no setting {'.'.join(path)!r}{similar}"


def variable_of(kind: type[BaseSettings], name: str) -> str:
    """The environment variable of a setting."""
    return f"{kind.model_config['env_prefix']}{name.upper()}"


def settings_file(config: Path | None) -> Path | None:
    """The TOML file given by `--config`. Raises UserError if it cannot be read."""
    if config is None:
        return None
    path = config.expanduser()
    read_given(path, "settings file", "check --config", empty=True)
    return path


def needed(settings: BaseSettings, name: str, what: str = "") -> Any:
    """The value of a required setting; `what` is its name in prose. Raises UserError if it is
    missing."""
    value = getattr(settings, name)
    if value in (None, "", ()):
        flag, variable = name.replace("_", "-"), variable_of(type(settings), name)
        raise UserError(f"no {what or name} is named", hint=f"add --{flag} (or set {variable})")
    return value
