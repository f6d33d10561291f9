"""Settings of `orchestrator serve`, built once at the edge: flag > environment > TOML > default.

Environment variables begin with PRIME_ORCHESTRATOR_ (PRIME_ORCHESTRATOR_PORT, …). Nothing is read
at import, and nothing below the CLI reads the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from prime_chain.link import ChainSettings
from prime_core import ids
from prime_core.errors import MalformedError, UserError
from prime_core.messages import MOST_SLOTS
from prime_core.settings import Urls, UserPath, load_settings, needed, settings_file
from prime_core.storage.base import ObjectStore
from prime_core.storage.directory import DirectoryStore
from prime_core.storage.signing import load_secret, save_secret
from prime_orchestrator.api.connections import Proxies
from prime_orchestrator.manager.planting import Planted
from prime_orchestrator.manager.remeasuring import EVERY_SECONDS
from prime_orchestrator.manager.standing import LEASE_SLOTS
from prime_verify.canaries.planting import read_secret

if TYPE_CHECKING:
    from prime_orchestrator.store import Store

ENV_PREFIX = "PRIME_ORCHESTRATOR_"


class Settings(ChainSettings):
    """Settings of the API process. Relative paths are taken from the working directory."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX)

    rpc_ws: Urls = ()
    """WebSocket endpoints (ws://, wss://) that announce new blocks. The chain is then read when one
    comes, and every `chain_poll_seconds` if none does."""
    chain_idle_seconds: float | None = Field(default=None, ge=0, le=300)
    """Pause between two reads of the chain's events while no transaction of ours is awaited and no
    event has come recently; by default 12 on public chains, none on a local one."""
    host: str = "127.0.0.1"
    port: int = Field(default=8470, ge=0, le=65_535)
    """0 takes a free port; the address is printed and written to `<data>/serve.json`."""
    public_url: str = ""
    """How others reach this server; by default http://host:port."""
    also_known_as: Urls = ()
    """Additional URLs that clients may use for this server (an internal name, for example).
    Requests addressed to any other host are refused."""
    data: UserPath = Path("var/orchestrator").absolute()
    database: str = ""
    """sqlite:///PATH or postgresql://…; by default a SQLite file under `data`."""
    replica: str = ""
    """A standby of the PostgreSQL `database`, from which public pages are read."""
    objects: UserPath | None = None
    """Folder of the object store; by default under `data`."""
    s3_bucket: str = Field(default="", pattern=r"^([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])?$")
    """Keep objects in this bucket instead of a folder (docs/storage.md). Credentials come from
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_SHARED_CREDENTIALS_FILE or the machine's role;
    they are not settings."""
    s3_endpoint: str = ""
    """URL of the S3 server; by default AWS."""
    s3_public_endpoint: str = ""
    """The same server as nodes, validators and the trainer reach it; by default s3_endpoint."""
    s3_region: str = "us-east-1"
    deployment: UserPath | None = None
    pool: int | None = Field(default=None, ge=0, lt=1 << 63)
    run: UserPath | None = None
    """The run definition: canonical JSON whose SHA-256 is the pool's run digest."""
    wallet: UserPath | None = None
    """Keystore of the pool's manager."""
    password_file: UserPath | None = None
    password_fd: int | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    allow_relay: Urls = ()
    """Accounts that may announce a relay without a seat in the pool."""
    planted: Urls = ()
    """The manager's own nodes whose files are planted (docs/verification.md)."""
    planted_secret: UserPath | None = None
    """File with the secret that these nodes share with this process."""
    planted_one_in: int = Field(default=50, ge=2)
    """One lease in this many goes to them."""
    lease_slots: int = Field(default=LEASE_SLOTS, ge=1, le=MOST_SLOTS)
    """Most leases that a node holds open at once; its measured speed may allow fewer."""
    remeasure_seconds: float = Field(default=EVERY_SECONDS, ge=0, allow_inf_nan=False)
    """Mean time between two measurements of a node's cards, in a run with `cards`; 0: never."""
    requests_per_second: int = Field(default=200, ge=0)
    """Average request rate allowed per client address; 0 removes the limit."""
    trusted_proxies: Urls = ()
    """Reverse proxies, by address or network, whose X-Forwarded-For identifies the client. By
    default none is trusted, and all clients behind one proxy count as one address."""

    @field_validator("allow_relay", "planted")
    @classmethod
    def _accounts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(ids.address(one) for one in value)
        except MalformedError as error:
            raise ValueError(str(error)) from error

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        Proxies(value)
        return value

    @field_validator("public_url", "s3_endpoint", "s3_public_endpoint")
    @classmethod
    def _plain_url(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("a URL begins with http:// or https://")
        if "@" in value:
            raise ValueError("credentials do not belong into a URL")
        return value.rstrip("/")

    @property
    def database_url(self) -> str:
        """The database to open."""
        from prime_orchestrator.store import sqlite_url

        return self.database or sqlite_url(self.data / "orchestrator.sqlite")

    @property
    def objects_folder(self) -> Path:
        """Folder of the object store."""
        return self.objects or self.data / "objects"

    @property
    def secret_file(self) -> Path:
        """This process's copy of the secret that signs URLs of an object folder."""
        return self.data / "store.secret"

    def open_objects(self, url: str, place: str, store: Store | None = None) -> ObjectStore:
        """Opens the object store: a folder whose signed URLs are served at `url`, or the part of
        the bucket named `place`, after testing access to it. A folder signs URLs with the secret
        that all processes on the database `store` share; without `store` it signs none.

        Raises UserError if the settings contradict each other or the bucket cannot be used,
        UnavailableError if the S3 server does not answer.
        """
        if not self.s3_bucket:
            if self.s3_endpoint or self.s3_public_endpoint:
                raise UserError("an S3 endpoint was given without a bucket", hint="add --s3-bucket")
            secret = b"" if store is None else self._url_secret(store)
            return DirectoryStore(self.objects_folder, url, secret)
        if self.objects is not None:
            raise UserError(
                "objects lie in a folder or in a bucket, not in both",
                hint="give either --objects or --s3-bucket",
            )
        from prime_core.storage.s3 import S3Store  # boto3 is an extra

        bucket = S3Store(
            self.s3_bucket,
            prefix=place,
            endpoint=self.s3_endpoint,
            public_endpoint=self.s3_public_endpoint,
            region=self.s3_region,
        )
        bucket.check()
        return bucket

    def _url_secret(self, store: Store) -> bytes:
        """Returns the database's secret of signed URLs. The first process puts that of its file
        there; every other one takes it over into its own file."""
        from prime_orchestrator.store import meta

        ours = load_secret(self.secret_file)
        with store.begin() as connection:
            secret = bytes.fromhex(meta.put_once(connection, meta.URL_SECRET, ours.hex()))
        if secret != ours:
            save_secret(self.secret_file, secret)
        return secret

    def planted_nodes(self) -> Planted:
        """Returns the planted nodes. Raises UserError if they have no secret, or its file is
        readable by others."""
        if not self.planted:
            return Planted()
        secret = read_secret(needed(self, "planted_secret"))
        accounts = frozenset(ids.address(one) for one in self.planted)
        return Planted(accounts, secret, self.planted_one_in)

    def need(self, name: Literal["deployment", "run", "wallet", "pool"]) -> Any:
        """Returns a setting that has no default. Raises UserError if it is missing."""
        return needed(self, name)


def load(flags: Mapping[str, object], config: Path | None = None) -> Settings:
    """Loads settings from flags (None or empty = not given), environment and TOML file.

    Raises UserError with the setting's name if a value is wrong, the file cannot be read, or a
    password was given as a flag.
    """
    for name in ("database", "replica"):
        refuse_password(str(flags.get(name) or ""), f"{ENV_PREFIX}{name.upper()}")
    return load_settings(Settings, flags, settings_file(config))


def refuse_password(database: str, variable: str) -> None:
    """Raises UserError if a database URL given as a flag contains a password; `variable` is the
    environment variable to use instead."""
    parts = urlsplit(database)
    if parts.password or "password" in parse_qs(parts.query):
        raise UserError(
            "a password on the command line can be read by every user of this machine",
            hint=f"set {variable}, or keep the password in ~/.pgpass",
        )
