"""Exports everything that the audit of one file is based on, as plain files in a folder.

    slash.json  evidence.json            of a slash: the chain's record, the validator's evidence
    submission.json  verdict.json        the orchestrator's record; the signed opinions
    verdict_table.json                   what was recomputed, row by row
    lease.json  run.json  rollout.parquet  calibration.json (if the run names its own)
    index.json                           SHA-256 of each file

Objects are written as the bytes that their digest names, after checking them; anyone can check them
again with sha256sum.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from prime_chain.history import Slash
from prime_core import encoding
from prime_core.errors import MalformedError, NotFoundError, UserError
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.rollout import MAX_FILE_BYTES
from prime_core.run import RunDefinition
from prime_core.verdict import Verdict
from prime_verify.audit import MAX_OBJECT_BYTES, Library


def gather(
    submission: Digest,
    slash: Slash | None,
    run_of: Callable[[Digest], RunDefinition],
    library: Library,
) -> dict[str, bytes]:
    """Returns the files by name; `run_of` returns a run definition by its digest. Raises
    NotFoundError if the submission, its file or what its verdict names is not published."""
    info = library.submission(submission)
    lease = library.lease(info.lease_digest)
    run = run_of(lease.lease.run_digest)
    found = {
        "submission.json": info.model_dump_json().encode(),
        "lease.json": lease.model_dump_json().encode(),
        "run.json": run.raw(),
        "rollout.parquet": library.object(info.sha256, MAX_FILE_BYTES),
    }
    if slash is not None:
        found["slash.json"] = json.dumps(vars(slash) | {"amount": str(slash.amount)}).encode()
        found["evidence.json"] = library.object(slash.evidence, MAX_OBJECT_BYTES)
    elif info.evidence is not None:
        found["evidence.json"] = library.object(info.evidence, MAX_OBJECT_BYTES)
    if info.verdict is not None:
        found["verdict.json"] = library.object(info.verdict, MAX_OBJECT_BYTES)
        try:
            opinion = Verdict.model_validate_json(found["verdict.json"]).deciding.opinion
        except ValueError as error:
            raise MalformedError(f"the verdict {info.verdict} does not parse") from error
        found["verdict_table.json"] = library.object(opinion.table, MAX_OBJECT_BYTES)
    if run.calibration != ZERO_DIGEST:
        found["calibration.json"] = library.object(run.calibration, MAX_OBJECT_BYTES)
    return found


def write(files: dict[str, bytes], folder: Path) -> list[Path]:
    """Writes the files and index.json into `folder`, which is created if missing; returns the
    paths.

    Raises UserError if the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder", hint="name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    index = {name: encoding.sha256(content) for name, content in sorted(files.items())}
    whole = files | {"index.json": json.dumps(index, indent=1).encode()}
    for name, content in whole.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in sorted(whole)]


def submission_of(subject: Digest, slash: Slash | None, library: Library) -> Digest:
    """Returns the submission that a subject names. Raises UserError if it names none of this
    pool."""
    if slash is not None:
        return slash.leaf
    try:
        library.submission(subject)
    except NotFoundError as error:
        raise UserError(
            f"{subject} is no submission and no slash of this pool",
            hint="prime-node audit list names every slash",
        ) from error
    return subject
