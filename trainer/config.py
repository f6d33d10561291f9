"""Settings of `trainer run`, built once at the edge: flag > environment > TOML > default.

Environment variables begin with PRIME_TRAINER_ (PRIME_TRAINER_LEARNING_RATE, …). The run
definition, not this file, says what the objective is; here is how this trainer pursues it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from protocol.core.errors import UserError

ENV_PREFIX = "PRIME_TRAINER_"


class Settings(BaseSettings):
    """Everything the trainer can be told. Relative paths are taken from the working directory."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    orchestrator: str = ""
    """Base URL of the pool's orchestrator."""
    model: Path | None = None
    """Hugging Face folder of the run's base model (policy 0)."""
    data: Path = Path("var/trainer")
    """Checkpoints, metrics and the origin's policies."""
    run: Path | None = None
    """The run definition; by default the orchestrator's, its digest checked."""
    rpc: Annotated[tuple[str, ...], NoDecode] = ()
    """With `deployment`: the pool's facts are checked on chain before anything is trained."""
    deployment: Path | None = None
    pool: int | None = Field(default=None, ge=0)
    """Refuse to work for any other pool."""
    wallet: Path | None = None
    """Keystore (v3) of the pool's trainer."""
    password_file: Path | None = None
    password_fd: int | None = None
    origin_host: str = "127.0.0.1"
    origin_port: int = Field(default=0, ge=0, le=65_535)
    """Where relays fetch policies; 0 takes a free port."""
    origin_url: str = ""
    """How relays reach the origin, behind a proxy."""
    steps: int | None = Field(default=None, ge=0)
    """Stop after so many batches in all; by default never."""
    linger: bool = False
    """After the last step go on serving policies, which validators and auditors still need."""

    learning_rate: float = Field(default=3e-7, gt=0, le=1)
    warmup_steps: int = Field(default=25, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    gradient_clip: float = Field(default=0.1, gt=0)
    """Limit of the global gradient norm."""
    bf16: bool = False
    """Compute in bf16 (masters and reduction stay fp32); for GPUs."""
    row_tokens: int = Field(default=128, ge=1)
    """Samples are packed into rows of this many tokens (a longer one gets a row of its own)."""
    micro_tokens: int = Field(default=4096, ge=1)
    """Padded tokens of a micro-batch; what fits the device's memory."""
    delta_from: int = Field(default=2, ge=0, le=16)
    """Deltas are made from so many earlier versions."""
    log_level: str = "info"

    @field_validator("rpc", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """The environment carries the list as comma-separated text."""
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @field_validator("model", "data", "run", "deployment", "wallet", "password_file")
    @classmethod
    def _expand(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    def need(self, name: str) -> Any:
        """A setting without default. Raises UserError if it was not given."""
        value = getattr(self, name)
        if value in (None, ""):
            raise UserError(
                f"The setting {name!r} is missing.",
                hint=f"Add --{name.replace('_', '-')} or set {ENV_PREFIX}{name.upper()}.",
            )
        return value


def load(flags: Mapping[str, object], config: Path | None = None) -> Settings:
    """Settings from flags (None or () = not given), environment and TOML file.

    Raises UserError with the setting's name if a value is wrong or the file cannot be read.
    """
    if config is not None and not config.is_file():
        raise UserError(f"There is no settings file {config}.", hint="Name another by --config.")

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
            f"The setting {name!r} is wrong: {first['msg']}.",
            hint=f"Set it by --{name.replace('_', '-')}, {ENV_PREFIX}{name.upper()} or in TOML.",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{config} is not TOML: {error}.", hint="Mend the file.") from error
