"""The agent's data folder: its lock, its status and its remembered settings.

lock          held (flock) by the one agent that uses this folder; contains its process id
settings.json settings given to `join`, so that `status`, `rewards`, … need no flags
pool          the pool that the folder belongs to
pool.json     its facts, which `join` has compared with the chain
instance      random id of this folder, sent with heartbeats
status.json   the agent's last heartbeat, for `prime-node status`
policies/     verified policies, one folder per version    (prime_broadcast/folder.py)
spool/        finished files with their journal            (prime_node/spool.py)
task/inbox/   the last file that the worker submitted (spool.py); task/bridge/ its socket;
              task/outbox/ where it writes if it runs without a container
logs/         the worker's output
chain/        the sender's journal, if the owner acts from this machine
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from prime_core.errors import UnavailableError, UserError
from prime_core.folders import held_alone
from prime_core.messages import PoolInfo
from prime_core.signing import Strict

_MAX_STATE_BYTES = 1 << 20


class AgentStatus(Strict):
    """What `prime-node status` shows of a running agent. Times in Unix seconds."""

    node: str
    pool: int
    pid: int
    started_at: int
    heard_at: int
    heartbeat_ms: int = 0
    """From the last heartbeat's request to its answer."""
    directive: str
    reason: str
    node_status: str
    policy_version: int | None
    latest_version: int | None
    files: dict[str, int]
    not_accepted: tuple[str, ...] = ()
    """The newest files that ended rejected or void, each with its reason in one sentence."""
    tokens_per_second: int
    swap_seconds: float | None = Field(default=None, exclude_if=lambda value: value is None)
    """For how long no token was made while the newest file's policy was loaded. None before the
    first file, or with an older image."""
    idle_seconds: float | None = Field(default=None, exclude_if=lambda value: value is None)
    """For how long the engine had no work between the newest two files."""
    task: str
    unpaid: str | None = None
    """Unpaid work in wei, as decimal text; None while the chain cannot be read."""


class DataFolder:
    """Paths under the --data folder. `make` creates the folders."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.policies = self.root / "policies"
        self.spool = self.root / "spool"
        self.task_outbox = self.root / "task" / "outbox"
        self.task_inbox = self.root / "task" / "inbox"
        self.bridge = self.root / "task" / "bridge"
        self.logs = self.root / "logs"
        self.chain = self.root / "chain"
        self._held = ExitStack()

    def make(self) -> None:
        """Creates the folders. Raises UserError if the disk refuses."""
        try:
            for folder in (self.root, self.spool, self.bridge, self.logs, self.chain):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in (self.policies, self.task_outbox):
                folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        except OSError as error:
            raise UserError(
                f"the data folder {self.root} cannot be used: {error.strerror}",
                hint="name another with --data DIR",
            ) from error

    def instance(self) -> str:
        """Returns the folder's random id (32 hex digits), which heartbeats carry; it is made when
        first asked for."""
        path = self.root / "instance"
        known = path.read_text(errors="replace") if path.is_file() else ""
        if not re.fullmatch(r"[0-9a-f]{32}", known):
            known = secrets.token_hex(16)
            _write(path, known)
        return known

    def bind(self, pool: PoolInfo) -> None:
        """Ties the folder to a pool: policies of another one have the same numbers. Raises
        UserError if the folder is another pool's already."""
        path = self.root / "pool"
        mine = f"pool {pool.pool} on chain {pool.chain_id}, run {pool.run_digest}"
        if not path.is_file():
            _write(path, mine)
        elif (kept := path.read_text(errors="replace")) != mine:
            raise UserError(
                f"the data folder {self.root} belongs to {kept[:200]}, and the orchestrator serves "
                f"{mine}",
                hint="name another folder for this pool: --data DIR",
            )

    def lock(self) -> None:
        """Locks the folder for this process, until `unlock` or its end. Raises UserError if another
        agent holds it."""
        self._held.enter_context(held_alone(self.root, "agent"))

    def unlock(self) -> None:
        self._held.close()

    def holder(self) -> int | None:
        """Returns the process id of the agent that uses this folder, or None. Raises UserError if
        this user may not ask."""
        path = self.root / "lock"
        with _readable(path):
            if not path.exists():
                return None
            with path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = file.read(32).strip()
                    return int(text) if text.isdigit() else None
        return None

    def empty_task_outbox(self) -> None:
        """Removes files and folders left by an earlier worker. Call it only while no task runs."""
        empty_folder(self.task_outbox)

    def write_status(self, status: AgentStatus) -> None:
        _write(self.root / "status.json", status.model_dump_json())

    def read_status(self) -> AgentStatus | None:
        """Returns the last status written, or None. Raises UserError if it cannot be read."""
        path = self.root / "status.json"
        if (raw := _read(path)) is None:
            return None
        try:
            return AgentStatus.model_validate_json(raw)
        except ValueError as error:
            raise UserError(
                f"{path} is damaged", hint="remove it: a running agent writes it again"
            ) from error

    def remember(self, settings: dict[str, Any]) -> None:
        """Saves the settings given to `join` (never a password) as defaults for the other
        commands."""
        _write(self.root / "settings.json", json.dumps(settings, indent=2, sort_keys=True))

    def remember_pool(self, pool: PoolInfo) -> None:
        """Saves the facts of the remembered orchestrator's pool, for the time that it is away."""
        _write(self.root / "pool.json", pool.model_dump_json())

    def known_pool(self, orchestrator: str | None) -> PoolInfo | None:
        """Returns the pool that `remember_pool` saved if it is of this orchestrator, else None.
        Raises UserError if it cannot be read."""
        path = self.root / "pool.json"
        if remembered(self.root).get("orchestrator") != orchestrator or not (raw := _read(path)):
            return None
        try:
            return PoolInfo.model_validate_json(raw)
        except ValueError as error:
            raise UserError(
                f"{path} is damaged", hint="remove it, or add --deployment FILE and --pool N"
            ) from error


def remembered(data: Path) -> dict[str, Any]:
    """Returns the settings an earlier `join` saved in this data folder; empty if none. Raises
    UserError if they cannot be read."""
    path = data.expanduser() / "settings.json"
    if (raw := _read(path)) is None:
        return {}
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", hint="remove it and join again") from error
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> bytes | None:
    """Returns a file's bytes; None if there is none, or it is too large to be ours."""
    with _readable(path):
        if not path.is_file() or path.stat().st_size > _MAX_STATE_BYTES:
            return None
        return path.read_bytes()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises UserError if the block may not read `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}",
            hint="use the account that runs the agent, or name another --data DIR",
        ) from error


def empty_folder(folder: Path) -> None:
    """Removes everything in `folder`, including folders created by others. Links are not
    followed."""
    for left in folder.iterdir():
        if left.is_symlink() or not left.is_dir():
            left.unlink()
        else:
            _remove_folder(left)


def _remove_folder(folder: Path) -> None:
    """Removes a folder created by others: permissions are opened, links are not followed."""
    folder.chmod(0o700)
    for place, names, _ in os.walk(folder):
        for inner in (Path(place, name) for name in names):
            if not inner.is_symlink():
                inner.chmod(0o700)
    shutil.rmtree(folder)


def _write(path: Path, text: str) -> None:
    """Writes the file atomically. Raises UnavailableError if the disk refuses."""
    partial = path.with_name(f".{path.name}.new")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written: {error.strerror}") from error
