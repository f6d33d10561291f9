"""The agent's settings, built once at the edge: flag > PRIME_NODE_* > TOML > settings saved by the
last `join` in this data folder > default.

Nothing is read at import, and nothing below the CLI reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from prime_broadcast.base_model import BaseModelSource, BaseModelText, parse_source
from prime_chain.amounts import parse_amount, parse_price, without_unit
from prime_chain.link import ChainSettings
from prime_core.errors import UserError
from prime_core.messages import MOST_SLOTS
from prime_core.settings import Urls, UserPath, load_settings, needed, settings_file
from prime_core.transport.addresses import is_loopback
from prime_core.waiting import FIRST_ANSWER_SECONDS
from prime_node.state import remembered

RuntimeName = Literal["docker", "process"]
ENV_PREFIX = "PRIME_NODE_"
DEFAULT_CONFIG = Path("~/.config/prime/node.toml")
DEFAULT_DATA = Path("~/.local/share/prime-node").expanduser()


def _words(value: object) -> object:
    """Splits a command given as space-separated words, as in the environment and the hidden
    flag."""
    if isinstance(value, str):
        return tuple(value.split())
    return tuple(value) if isinstance(value, list) else value


def _price(value: object) -> object:
    """Reads a price given as text (wei)."""
    if not isinstance(value, str):
        return value
    try:
        return parse_price(value)
    except UserError as error:
        raise ValueError(f"{error}; {error.hint}") from error


def _tokens(value: object) -> object:
    """Takes the unit from an amount given as text."""
    return without_unit(value) if isinstance(value, str) else value


class Settings(ChainSettings):
    """Settings of the agent and its commands. Paths are expanded."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX)

    orchestrator: str | None = None
    """Base URL of the pool's orchestrator."""
    deployment: UserPath | None = None
    """Deployment JSON; by default the shipped file of the pool's chain, else, on a test network
    only, what the orchestrator names."""
    pool: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Pool number; by default the one the orchestrator serves."""
    wallet: UserPath | None = None
    """The node's keystore (v3)."""
    password_file: UserPath | None = None
    password_fd: int | None = None
    provider: str | None = None
    """Owner account of this node; by default the wallet's own."""
    provider_wallet: UserPath | None = None
    """The owner's keystore, if the owner is at this machine."""
    provider_password_file: UserPath | None = None
    """File with the owner's password; without it, the node's password opens both."""
    data: UserPath = DEFAULT_DATA
    """State: policies, spool, journal, logs, lock."""
    runtime: RuntimeName = "docker"
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the worker; 0 = as many as the task's CPU limit."""
    generation_batch: int = Field(default=0, ge=0, le=4096)
    """Rows generated at once; 0 = the engine's own choice."""
    min_price: Annotated[int, BeforeValidator(_price)] = Field(default=0, ge=0)
    """Lowest price per paid token (wei) for which this node works, also as text with its unit
    ("0.0000004 PRIME"); revisions below it are declined."""
    max_unpaid: Annotated[Decimal | None, BeforeValidator(_tokens)] = Field(
        default=None, gt=0, max_digits=48, decimal_places=18
    )
    """Most unpaid work (tokens) with which this node takes a new lease; by default only the pool's
    bond and free funds limit it."""
    images: Urls = ()
    """Images that tasks may run here: references by digest, or repositories (what stands before
    "@"). Empty: any that the pool names."""
    image_gb: int = Field(default=64, ge=1)
    """Largest image (GiB) that is pulled."""
    pull_minutes: int = Field(default=180, ge=1)
    """Longest time (minutes) that a pull of an image takes."""
    task_memory_mb: int = Field(default=0, ge=0)
    """Most memory (MiB) that a task may ask for; 0 = nine tenths of this machine's."""
    task_pids: int = Field(default=4096, ge=8)
    """Most processes that a task may ask for."""
    task_cpus: float = Field(default=0.0, ge=0.0)
    """Most CPUs that a task's container may use; 0 = as many as the task asks for."""
    lease_slots: int = Field(default=0, ge=0, le=MOST_SLOTS)
    """Most leases that this node holds open at once; 0 = as many as the orchestrator allows."""
    policy_gb: int = Field(default=256, ge=1)
    """Largest policy (GiB of files) that is fetched."""
    base_model: BaseModelText = None
    """Where the base model (policy 0) is taken from: FOLDER, URL or hf:owner/name[@revision]; what
    differs there, and without this setting all of it, comes from the pool (docs/nodes.md)."""
    shadow: bool = False
    """Work for verdicts only: no seat, no stake, no pay (docs/protocol.md)."""
    first_answer_seconds: float = Field(default=FIRST_ANSWER_SECONDS, ge=0)
    """How long the first start in a data folder waits for answers from orchestrator and RPC."""
    allow_private: bool = False
    """Connect to private and loopback addresses that the orchestrator names, and pull images from
    registries there (on your own network).
    An orchestrator on this machine may always name them."""
    gpus: str = Field(default="all", pattern=r"^(all|none|\d{1,2}(,\d{1,2}){0,15})$")
    """Cards that this node uses: all, none (the CPU works), or their numbers as nvidia-smi shows
    them ("0,1"). Two agents on one machine need different ones (fingerprint.held_cards)."""
    tensor_parallel: int = Field(default=0, ge=0, le=64)
    """Cards that hold the model together; 0 = as many of the node's as the model can be split
    over."""
    memory_share: float = Field(default=0.0, ge=0.0, le=0.98)
    """Share of each card's memory that the engine takes; 0 = its own choice."""
    max_length: int = Field(default=0, ge=0)
    """Longest row in tokens that the engine makes room for; 0 = what the cards hold."""
    shm_mb: int = Field(default=0, ge=0)
    """Shared memory (MiB) of the task's container; 0 = 64, or 1024 with more than one card."""
    throttle: float = Field(default=1.0, ge=1.0, le=1000.0)
    """DEVELOPMENT ONLY: behave like a machine N times slower."""
    worker_command: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)] = ()
    """DEVELOPMENT ONLY, process runtime only: what to run instead of our own worker."""

    def to_remember(self) -> dict[str, Any]:
        """Settings that later commands in the same data folder need not repeat; no secret. The
        runtime, its size and the owner's limits are kept only if they were given."""
        always = {
            "orchestrator",
            "rpc",
            "rpc_quorum",
            "deployment",
            "pool",
            "wallet",
            "password_file",
            "provider",
        }
        given = {
            "runtime",
            "threads",
            "generation_batch",
            "min_price",
            "max_unpaid",
            "images",
            "image_gb",
            "pull_minutes",
            "task_memory_mb",
            "task_pids",
            "task_cpus",
            "lease_slots",
            "policy_gb",
            "base_model",
            "gpus",
            "tensor_parallel",
            "memory_share",
            "max_length",
            "shm_mb",
        }
        kept = always | (given & self.model_fields_set)
        return self.model_dump(mode="json", include=kept, exclude_none=True)

    @property
    def public_only(self) -> bool:
        """Whether addresses that the orchestrator names must be public."""
        return not (self.allow_private or is_loopback(self.orchestrator or ""))

    @property
    def base_model_source(self) -> BaseModelSource | None:
        """Where the base model is taken from; the Hub as HF_ENDPOINT and HF_TOKEN say."""
        return parse_source(self.base_model, os.environ) if self.base_model else None

    @property
    def max_unpaid_wei(self) -> int | None:
        limit = self.max_unpaid
        return None if limit is None else parse_amount(f"{limit:f}")

    def need_orchestrator(self) -> str:
        """Returns the orchestrator's URL. Raises UserError if it is missing."""
        return str(needed(self, "orchestrator")).rstrip("/")

    def need_wallet(self) -> Path:
        """Returns the path of the node's keystore. Raises UserError if none was given."""
        if self.wallet is None:
            raise UserError(
                "no wallet is named",
                hint="add --wallet KEYSTORE; make one with: prime-node wallet new --out FILE",
            )
        return self.wallet


def load(flags: Mapping[str, object], config: Path | None = None) -> Settings:
    """Loads settings from flags (None = not given), environment, TOML file and the data folder's
    saved settings.

    Raises UserError with the setting's name if a value is wrong or the file is not TOML.
    """
    path = _config_path(config)
    first = load_settings(Settings, flags, path)
    memory = remembered(first.data)
    return load_settings(Settings, flags, path, memory) if memory else first


def _config_path(config: Path | None) -> Path:
    named = config or (Path(text) if (text := os.environ.get(f"{ENV_PREFIX}CONFIG")) else None)
    return settings_file(named) or DEFAULT_CONFIG.expanduser()
