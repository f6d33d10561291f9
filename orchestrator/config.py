"""Settings of `orchestrator serve`, built once at the edge: flag > environment > TOML > default.

Environment variables begin with PRIME_ORCHESTRATOR_ (PRIME_ORCHESTRATOR_PORT, …). Nothing is read
at import, and nothing below the CLI reads the environment.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from protocol.core.errors import UserError

ENV_PREFIX = "PRIME_ORCHESTRATOR_"


class Settings(BaseSettings):
    """What the API process can be told. Relative paths are taken from the working directory."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8470, ge=0, le=65_535)
    """0 takes a free port; the address is printed and written to `<data>/serve.json`."""
    public_url: str = ""
    """How others reach this server; by default http://host:port."""
    audience: str = Field(default="", max_length=512)
    """The name that session grants must carry; by default `public_url`."""
    data: Path = Path("var/orchestrator")
    database: str = ""
    """sqlite:///PATH or postgresql://…; by default a SQLite file under `data`."""
    objects: Path | None = None
    """Folder of the object store; by default under `data`."""
    deployment: Path | None = None
    rpc: Annotated[tuple[str, ...], NoDecode] = ()
    pool: int | None = Field(default=None, ge=0)
    run: Path | None = None
    """The run definition: canonical JSON whose SHA-256 is the pool's run digest."""
    wallet: Path | None = None
    """Keystore of the pool's manager."""
    password_file: Path | None = None
    password_fd: int | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    requests_per_second: int = Field(default=200, ge=0)
    """Bound on what one client address may ask on average; 0 lifts it."""

    @field_validator("rpc", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """The environment carries the list as comma-separated text."""
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @field_validator("data", "objects", "deployment", "run", "wallet", "password_file")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()

    @field_validator("public_url")
    @classmethod
    def _plain_url(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("a URL begins with http:// or https://")
        return value.rstrip("/")

    @property
    def database_url(self) -> str:
        """The database to open."""
        from orchestrator.store import sqlite_url

        return self.database or sqlite_url(self.data / "orchestrator.sqlite")

    @property
    def objects_folder(self) -> Path:
        """Where objects lie."""
        return self.objects or self.data / "objects"

    def need(self, name: Literal["deployment", "run", "wallet", "pool"]) -> Any:
        """A setting without default. Raises UserError if it was not given."""
        value = getattr(self, name)
        if value is None:
            raise UserError(
                f"the setting {name!r} is missing",
                hint=f"add --{name} (or set {ENV_PREFIX}{name.upper()})",
            )
        return value

    def need_rpc(self) -> tuple[str, ...]:
        """The RPC endpoints. Raises UserError if none was given."""
        if not self.rpc:
            raise UserError("no RPC endpoint is named", hint=f"add --rpc URL or {ENV_PREFIX}RPC")
        return self.rpc


def load(flags: Mapping[str, object], config: Path | None = None) -> Settings:
    """Settings from flags (None or () = not given), environment and TOML file.

    Raises UserError with the setting's name if a value is wrong, the file cannot be read, or a
    password was given as a flag.
    """
    if urlsplit(str(flags.get("database") or "")).password:
        raise UserError(
            "a password on the command line can be read by everybody on this machine",
            hint=f"set {ENV_PREFIX}DATABASE, or keep the password in ~/.pgpass",
        )
    if config is not None and not config.is_file():
        raise UserError(f"there is no settings file {config}", hint="name another by --config")

    class Loaded(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            toml = TomlConfigSettingsSource(settings_cls, toml_file=config)
            return init_settings, env_settings, toml

    given: dict[str, Any] = {n: value for n, value in flags.items() if value not in (None, ())}
    try:
        return Loaded(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "?"
        raise UserError(
            f"the setting {name!r} is wrong: {first['msg']}",
            hint=f"set it by --{name.replace('_', '-')}, {ENV_PREFIX}{name.upper()} or in TOML",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{config} is not TOML: {error}", hint="mend the file") from error
