"""`prime-node verify FILE`: runs the validator's own checks on this machine.

    file → its lease (--lease, this node's journal, or the orchestrator) → run definition → the
    policy that the lease names, from this node's folder → prime_verify.verify → finding

The code is the validator's. Only the drawn rows differ, because the validator's secret is unknown
in advance: either a fresh draw of the run's share, or every row. Nothing is sent or signed.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prime_chain.mirror import HttpSource
from prime_core import encoding, ids
from prime_core.errors import UntrustedError, UserError
from prime_core.given import read_given
from prime_core.ids import Digest
from prime_core.rollout import MAX_FILE_BYTES
from prime_core.task import SignedLease
from prime_core.verdict import Outcome
from prime_envs.registry import environment_for
from prime_node.api import NodeApi
from prime_node.audit import run_calibration
from prime_node.config import Settings
from prime_node.spool import Spool
from prime_node.state import DataFolder
from prime_verify.audit_compare import other_class
from prime_verify.case import Case
from prime_verify.engines import FolderEngines, load_engine
from prime_verify.finding import Finding
from prime_verify.rollout_file import FileError, read_rollout_file
from prime_verify.verify import verify_file


@dataclass(frozen=True)
class Preflight:
    """What a validator would find. `lease` None: the file names no readable lease."""

    finding: Finding
    lease: Digest | None
    setup: str

    def as_json(self) -> dict[str, Any]:
        finding = self.finding
        return {
            "outcome": finding.outcome.name.lower(),
            "reason": finding.reason.name,
            "check": finding.check,
            "detail": finding.detail,
            "chance": finding.chance,
            "lease": self.lease,
            "setup": self.setup,
            "units": finding.units,
            "rows_replayed": list(finding.rows_drawn),
            "statistics": finding.decimal_statistics(),
            "thresholds": finding.decimal_thresholds(),
        }

    @property
    def ok(self) -> bool:
        return self.finding.outcome is Outcome.ACCEPTED


def verify(
    settings: Settings,
    file: Path,
    *,
    lease_file: Path | None = None,
    every_row: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
) -> Preflight:
    """Judges `file` as a validator that replays on `device` in `dtype` would. Raises UserError if
    file or lease cannot be read, UntrustedError if the lease found is not the one that the file
    names."""
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= MAX_FILE_BYTES else bytes(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}", hint="name a file") from error
    given = None if lease_file is None else read_lease(lease_file)
    try:
        made = read_rollout_file(data).metadata
    except FileError as error:
        return Preflight(Finding(error.reason, str(error)), None, "unknown")
    try:
        named = ids.digest(made.lease)
    except ValueError as error:
        raise UserError(
            f"{file} names no lease: {error}", hint="give a worker's rollout file"
        ) from error
    api = NodeApi(settings.need_orchestrator(), None, allow_private=settings.allow_private)
    try:
        library = HttpSource(api.client)
        signed = given or _lease(named, settings, library)
        if signed.lease.digest(api.client.domain("work")) != named:
            raise UntrustedError(f"the given lease is not {named}, which the file names")
        run = api.run(signed.lease.run_digest)
        data_folder = DataFolder(settings.data)
        finding = verify_file(
            Case(
                data,
                signed,
                named,
                run,
                environment_for(run),
                FolderEngines(
                    data_folder.policies,
                    partial(
                        load_engine, dtype=dtype, device=device, threads=settings.threads or None
                    ),
                    keep=1,
                ),
                draw_secret=ids.digest(secrets.token_bytes(32)),
                submission_digest=encoding.sha256(data),
                calibration=run_calibration(
                    run, library, api.client.pool().manager, api.client.domain("slasher")
                ),
                draw_count=run.rows_per_lease if every_row else None,
            )
        )
    finally:
        api.close()
    if finding.outcome is Outcome.ACCEPTED and (lacks := other_class(signed, finding)):
        finding = replace(finding, detail=f"{finding.detail}; by statistics only: {lacks}")
    return Preflight(finding, named, f"{made.engine}, {made.dtype} on {made.device}")


def read_lease(path: Path) -> SignedLease:
    """Reads a signed lease from a file. Raises UserError."""
    hint = "give its JSON, or leave --lease out: it is then looked up"
    raw = read_given(path, "signed lease", hint)
    try:
        return SignedLease.model_validate_json(raw)
    except ValueError as error:
        raise UserError(f"{path} holds no signed lease", hint=hint) from error


def _lease(named: Digest, settings: Settings, library: HttpSource) -> SignedLease:
    folder = DataFolder(settings.data).spool
    if (folder / "journal.sqlite").exists():
        entry = Spool(folder, now=lambda: 0.0, sweep=False).find(named)
        if entry is not None and entry.lease is not None:
            return entry.lease
    return library.lease(named)
