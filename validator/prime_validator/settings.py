"""Settings of `validator run` and `validator juror run`: flag > environment (PRIME_VALIDATOR_*) >
TOML > default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from prime_broadcast.base_model import BaseModelSource, BaseModelText, parse_source
from prime_chain.link import ChainSettings
from prime_chain.mirror import MAX_GB
from prime_core.settings import Urls, UserPath, needed
from prime_core.waiting import FIRST_ANSWER_SECONDS
from prime_verify.engines import policy_room


class ReplaySettings(ChainSettings):
    """What a validator and a juror share. Relative paths are taken from the working directory."""

    model_config = SettingsConfigDict(env_prefix="PRIME_VALIDATOR_")

    wallet: UserPath | None = None
    """The keystore."""
    password_file: UserPath | None = None
    password_fd: int | None = None
    data: UserPath = Path("var/validator").absolute()
    """Our own folder: draw secrets, opinions, ballots, policies."""
    deployment: UserPath | None = None
    """Deployment JSON; by default the shipped file of the pool's chain, else, on a test network
    only, what the orchestrator names."""
    source: Urls = ()
    """Relays or origins to fetch policies from, before those that the orchestrator names."""
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = Field(default=None, ge=1)
    allow_private: bool = False
    """Connect to private and loopback addresses that others name (on one's own network). An
    orchestrator on this machine may always name them."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Settings(ReplaySettings):
    """Settings of `validator run`."""

    orchestrator: str = ""
    base_model: BaseModelText = None
    """Where the base model (policy 0) is taken from: FOLDER, URL or hf:owner/name[@revision]; what
    differs there, and without this setting all of it, comes from the pool (docs/nodes.md)."""
    policies: int = Field(default=3, ge=1)
    """Policies to keep loaded."""
    policy_memory_mb: int = Field(default=0, ge=0)
    """Memory limit in MiB for all loaded policies, by file size; 0: a share of what is free
    (prime_verify.engines.POLICY_SHARE)."""
    exact: Literal["", "float32", "bfloat16"] = ""
    """Announce this machine's exact class for files in this dtype, so that leases may name it.
    Empty: none is announced."""
    exact_engine: Literal["plain", "vllm"] = "plain"
    """Whose files these are. For vLLM's, this program needs an interpreter that has vLLM."""
    pack: int = Field(default=4, ge=1, le=64)
    """Files of one policy whose rows share a prefill."""
    idle_seconds: float = Field(default=0.3, gt=0)
    first_answer_seconds: float = Field(default=FIRST_ANSWER_SECONDS, ge=0)
    mirror: UserPath | None = None
    """Folder for a copy of what rewards and slashes depend on (prime_chain/mirror.py)."""
    mirror_listen: str = ""
    """HOST:PORT at which the copy is served."""
    mirror_url: str = ""
    """URL at which others reach it; by default http://HOST:PORT."""
    mirror_gb: float = Field(default=MAX_GB, gt=0)
    """Largest size of the copy, in 10^9 bytes."""

    def policy_bytes(self) -> int | None:
        """Returns how much memory loaded policies may take together; None if there is no bound.
        Raises UnavailableError if the device is not here."""
        return self.policy_memory_mb << 20 if self.policy_memory_mb else policy_room(self.device)

    @property
    def base_model_source(self) -> BaseModelSource | None:
        """Where the base model is taken from; the Hub as HF_ENDPOINT and HF_TOKEN say."""
        return parse_source(self.base_model, os.environ) if self.base_model else None

    def need(self, name: Literal["orchestrator", "rpc", "wallet"]) -> Any:
        """Returns a setting that has no default. Raises UserError if it is missing."""
        return needed(self, name)


class JurorSettings(ReplaySettings):
    """Settings of `validator juror run`."""

    orchestrator: Urls = ()
    """Orchestrators, or mirrors of them, whose pools' disputes this juror can judge. Mirrors that
    validators named on chain are asked as well."""
