"""How every program reads its settings: flag > environment > TOML > what it remembers > default.

Settings are built once at the edge and handed in; nothing is read at import.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from prime_core.errors import UserError


class BaseSettings(BaseModel):
    """Base of every program's settings. (pydantic-settings does the same for 0.15 s of CPU at each
    start.)"""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    ENV_PREFIX: ClassVar[str]
    """What the environment variable of a setting begins with; its name in capitals follows."""


Settings = TypeVar("Settings", bound=BaseSettings)


def _split(value: object) -> object:
    """The environment carries a list as comma-separated text."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


Urls = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""A list of URLs; comma-separated in the environment."""
UserPath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
"""A path as a person types it: ~ is their home, and it stays valid if we change folder."""


def load_settings(
    kind: type[Settings],
    flags: Mapping[str, object],
    toml: Path | None = None,
    memory: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings of `kind` from flags (None or () = not given), environment, a TOML file that may be
    missing, and what an earlier command remembered.

    Raises UserError with the setting's name if a value is wrong or the file is not TOML.
    """

    given = {name: value for name, value in flags.items() if value not in (None, ())}
    try:
        file = tomllib.loads(toml.read_text()) if toml is not None and toml.is_file() else {}
        environment = {
            name: os.environ[variable]
            for name in kind.model_fields
            if (variable := kind.ENV_PREFIX + name.upper()) in os.environ
        }
        loaded = kind.model_validate({**(memory or {}), **file, **environment, **given})
    except ValidationError as error:
        unknown = [str(one["loc"][0]) for one in error.errors() if one["type"] == "extra_forbidden"]
        if unknown:
            raise UserError(
                "; ".join(_unknown(name, kind) for name in unknown), hint=f"mend {toml or 'it'}"
            ) from error
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "?"
        variable = f"{kind.ENV_PREFIX}{name.upper()}"
        raise UserError(
            f"the setting {name!r} is wrong: {first['msg']}",
            hint=f"set it by --{name.replace('_', '-')}, {variable} or in {toml or 'TOML'}",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{toml} is not TOML: {error}", hint="mend or remove the file") from error
    return loaded


def _unknown(name: str, kind: type[BaseSettings]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), kind.model_fields, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"there is no setting {name!r}{meant}"


def settings_file(config: Path | None) -> Path | None:
    """The TOML file that `--config` names. Raises UserError if it is not there."""
    if config is None:
        return None
    if not config.expanduser().is_file():
        raise UserError(f"there is no settings file at {config}", hint="check --config")
    return config.expanduser()


def needed(settings: BaseSettings, name: str, what: str = "") -> Any:
    """A setting without default; `what` is its name in prose. Raises UserError if it is missing."""
    value = getattr(settings, name)
    if value in (None, "", ()):
        flag, prefix = name.replace("_", "-"), settings.ENV_PREFIX
        raise UserError(
            f"no {what or name} is named", hint=f"add --{flag} (or set {prefix}{name.upper()})"
        )
    return value
