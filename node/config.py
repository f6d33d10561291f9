"""The agent's settings, built once at the edge: flag > PRIME_NODE_* > TOML > what the last `join`
in this data folder was told > default.

Nothing here is read at import and nothing below the CLI reads the environment.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from node.state import remembered
from protocol.core.errors import UserError

RuntimeName = Literal["docker", "process"]
ENV_PREFIX = "PRIME_NODE_"
DEFAULT_CONFIG = Path("~/.config/prime/node.toml")
DEFAULT_DATA = Path("~/.local/share/prime-node")


class Settings(BaseSettings):
    """Everything the agent and its commands can be told. Paths are expanded."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    orchestrator: str | None = None
    """Base URL of the pool's orchestrator."""
    rpc: Annotated[tuple[str, ...], NoDecode] = ()
    """RPC endpoints of the chain, tried in order."""
    deployment: Path | None = None
    """Deployment JSON; by default the one shipped for the chain that the RPC answers for."""
    pool: int | None = None
    """Pool number; by default the one the orchestrator serves."""
    wallet: Path | None = None
    """Keystore (v3) of the node."""
    password_file: Path | None = None
    password_fd: int | None = None
    provider: str | None = None
    """Owner account of this node; by default the wallet's own."""
    provider_wallet: Path | None = None
    """Keystore of the owner, where the owner is at this machine."""
    data: Path = DEFAULT_DATA
    """State: policies, outbox, journal, logs, lock."""
    runtime: RuntimeName = "docker"
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the worker; 0 = as many as the task's CPU limit."""
    generation_batch: int = Field(default=0, ge=0, le=4096)
    """Rows generated at once; 0 = the engine's own choice."""
    throttle: float = Field(default=1.0, ge=1.0, le=1000.0)
    """DEVELOPMENT ONLY: behave like a machine N times slower."""
    worker_command: Annotated[tuple[str, ...], NoDecode] = ()
    """DEVELOPMENT ONLY, process runtime only: what to run instead of our own worker."""

    @field_validator("rpc", "worker_command", mode="before")
    @classmethod
    def _split(cls, value: object, info: Any) -> object:
        """Environment variables carry lists as text: comma-separated URLs, a spaced command."""
        if isinstance(value, str):
            parts = value.split("," if info.field_name == "rpc" else None)
            return tuple(part.strip() for part in parts if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @field_validator(
        "data", "wallet", "password_file", "deployment", "provider_wallet", mode="after"
    )
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return value.expanduser().absolute() if value is not None else None

    def to_remember(self) -> dict[str, Any]:
        """What later commands in the same data folder may take for granted; no secret."""
        kept = {"orchestrator", "rpc", "deployment", "pool", "wallet", "password_file", "provider"}
        return self.model_dump(mode="json", include=kept, exclude_none=True)

    def need_orchestrator(self) -> str:
        """The orchestrator's URL. Raises UserError if none was given."""
        if not self.orchestrator:
            raise UserError(
                "no orchestrator is named",
                hint="add --orchestrator URL (or set PRIME_NODE_ORCHESTRATOR)",
            )
        return self.orchestrator.rstrip("/")

    def need_rpc(self) -> tuple[str, ...]:
        """The RPC endpoints. Raises UserError if none was given."""
        if not self.rpc:
            raise UserError(
                "no RPC endpoint is named", hint="add --rpc URL (or set PRIME_NODE_RPC)"
            )
        return self.rpc

    def need_wallet(self) -> Path:
        """The node's keystore. Raises UserError if none was given or it is not there."""
        if self.wallet is None:
            raise UserError(
                "no wallet is named",
                hint="add --wallet KEYSTORE; make one with: prime-node wallet new --out FILE",
            )
        if not self.wallet.is_file():
            raise UserError(
                f"there is no keystore at {self.wallet}",
                hint=f"make one with: prime-node wallet new --out {self.wallet}",
            )
        return self.wallet


def load(flags: Mapping[str, object], config: Path | None = None) -> Settings:
    """Settings from flags (None = not given), environment, TOML file and the data folder's memory.

    Raises UserError with the setting's name if a value is wrong or the file is not TOML.
    """
    path = _config_path(config)
    first = _load(flags, path, {})
    memory = remembered(first.data)
    return _load(flags, path, memory) if memory else first


def _load(flags: Mapping[str, object], path: Path, memory: dict[str, Any]) -> Settings:

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
            toml = TomlConfigSettingsSource(settings_cls, toml_file=path)
            kept = InitSettingsSource(settings_cls, init_kwargs=memory)
            return init_settings, env_settings, toml, kept

    given: dict[str, Any] = {
        name: value for name, value in flags.items() if value not in (None, ())
    }
    try:
        return Loaded(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "?"
        raise UserError(
            f"the setting {name!r} is wrong: {first['msg']}",
            hint=f"set it by --{name.replace('_', '-')}, {ENV_PREFIX}{name.upper()} or in {path}",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}", hint="mend or remove the file") from error


def _config_path(config: Path | None) -> Path:
    named = config or (Path(text) if (text := os.environ.get(f"{ENV_PREFIX}CONFIG")) else None)
    if named is not None:
        named = named.expanduser()
        if not named.is_file():
            raise UserError(f"there is no settings file at {named}", hint="check --config")
        return named
    return DEFAULT_CONFIG.expanduser()
