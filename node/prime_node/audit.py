"""Collects what an audit is based on: chain records, published objects, this machine's engine.

    subject (transaction, evidence or submission digest) ──► prime_verify.audit ──► result

The judging itself is in prime_verify/audit.py. Policies come through the relays and are verified.
`export` writes the following files. Objects are written as the bytes that their digest names, after
checking them; anyone can check them again with sha256sum.

    slash.json  evidence.json            of a slash: the chain's record, the validator's evidence
    submission.json  verdict.json        the orchestrator's record; the signed opinions
    verdict_table.json                   what was recomputed, row by row
    lease.json  run.json  rollout.parquet  calibration.json (if the run names its own)
    index.json                           SHA-256 of each file
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prime_broadcast.folder import PolicyFolder
from prime_broadcast.pool import Policies, PoolNames
from prime_chain import history
from prime_chain.events import ValidatorSet
from prime_chain.history import Slash
from prime_chain.leaves import find_leaf
from prime_chain.mirror import AnnouncedMirrors, AnySource, Follower, HttpSource, Mirror
from prime_chain.rewards import history_of
from prime_core import encoding, ids
from prime_core.calibration import CalibrationStatement
from prime_core.checkpoint import PolicyStatement
from prime_core.errors import MalformedError, NotFoundError, UserError
from prime_core.folders import make_folder
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.messages import SubmissionInfo
from prime_core.rollout import MAX_FILE_BYTES, SignedSubmission
from prime_core.run import RunDefinition
from prime_core.signing import Domain
from prime_core.transport.client import run_bytes
from prime_core.verdict import Verdict
from prime_engine.base import Engine
from prime_node.api import NodeApi
from prime_node.config import Settings
from prime_node.link import Link, connect, naming_mirrors
from prime_node.state import DataFolder
from prime_verify.audit import (
    MAX_OBJECT_BYTES,
    Library,
    Setting,
    audit_slash,
    audit_submission,
)
from prime_verify.audit_compare import Audit
from prime_verify.engines import FetchedEngines, load_engine
from prime_verify.proofs.thresholds import Calibration, parse_signed, shipped_as
from prime_verify.provers import provers_here


@dataclass(frozen=True)
class _Opened:
    """`published`: the orchestrator's items, or those of `mirrors` where it serves none."""

    api: NodeApi
    link: Link
    mirrors: AnnouncedMirrors
    published: AnySource


@contextmanager
def _opened(settings: Settings) -> Iterator[_Opened]:
    settings.need_rpc()
    private = settings.allow_private
    with ExitStack() as stack:
        api = NodeApi(settings.need_orchestrator(), None, allow_private=private)
        stack.callback(api.close)
        with naming_mirrors("give a mirror's URL there"):
            info = api.client.pool()
        link = connect(settings, info)
        stack.callback(link.close)
        mirrors = AnnouncedMirrors(link.client, link.deployment, link.pool, allow_private=private)
        stack.callback(mirrors.close)
        yield _Opened(api, link, mirrors, AnySource([HttpSource(api.client), mirrors]))


def replay(
    settings: Settings, subject: str, *, device: str = "cpu", dtype: str = "float32"
) -> Audit:
    """Audits what `subject` names, replaying on `device` in `dtype`. Raises UserError if it names
    nothing of this pool."""
    digest = ids.digest(subject)
    with _opened(settings) as opened:
        api, link, library = opened.api, opened.link, opened.published
        load = partial(load_engine, threads=settings.threads or 1, device=device, dtype=dtype)
        setting = _setting(settings, api, link, library, load, device)
        slash = find_slash(link, digest)
        if slash is not None:
            return audit_slash(slash, setting, library)
        try:
            library.submission(digest)
        except NotFoundError:
            slash = history.slash_of(link.client, link.deployment, digest)
            return audit_slash(slash, setting, library)
        return audit_submission(digest, setting, library, partial(_rooted, link, library, digest))


def _rooted(link: Link, library: Library, digest: Digest, info: SubmissionInfo) -> SignedSubmission:
    """Returns the signed submission from the leaves object of a root on chain, or from the
    transaction in which its node posted it."""
    events = history.read_events(link.client, link.deployment, contracts=("work",), pool=link.pool)
    found = find_leaf(
        link.client, link.deployment, events, link.pool, digest, info.root, library.object
    )
    return found.signed


def published(settings: Settings, subject: str) -> dict[str, Any]:
    """Returns what is published about a slash (its evidence, and the mirrors of the validators who
    signed that they hold it) or a submission (its verdict), as plain values.

    Raises NotFoundError if nothing is, MalformedError if an object is not JSON.
    """
    digest = ids.digest(subject)
    with _opened(settings) as opened:
        library = opened.published
        slash = find_slash(opened.link, digest)
        if slash is not None:
            evidence = _values(library, slash.evidence)
            held_by = {who: opened.mirrors.urls.get(who, "") for who in slash.authors}
            return {"slash": slash.as_json(), "held_by": held_by, "evidence": evidence}
        info = library.submission(digest)
        verdict = None
        if info.verdict is not None:
            verdict = _values(library, info.verdict)
        return {"submission": info.model_dump(mode="json"), "verdict": verdict}


def _values(library: Library, name: Digest) -> Any:
    from pydantic_core import from_json

    try:
        return from_json(library.object(name, MAX_OBJECT_BYTES))
    except ValueError as error:
        raise MalformedError(f"object {name} is not JSON") from error


def export(settings: Settings, subject: str, folder: Path) -> list[Path]:
    """Writes everything an audit of `subject` is based on into `folder` ; returns the files.

    Raises UserError if it names nothing of this pool, NotFoundError if a part is not published.
    """
    digest = ids.digest(subject)
    with _opened(settings) as opened:
        api, library = opened.api, opened.published
        slash = find_slash(opened.link, digest)
        submission = submission_of(digest, slash, library)
        return write(gather(submission, slash, api.run, library), folder)


@contextmanager
def mirroring(settings: Settings, folder: Path, url: str, max_gb: float) -> Iterator[Follower]:
    """Opens a mirror of the pool in `folder`, which answers at `url` if that is not empty."""
    with _opened(settings) as opened:
        api, link = opened.api, opened.link
        mirror = Mirror(
            make_folder(folder),
            link.deployment,
            link.pool,
            HttpSource(api.client),
            max_bytes=int(max_gb * 10**9),
        )
        if url:
            mirror.describe(api.client.pool(), url)
        yield Follower(mirror, link.client, link.deployment)


def find_slash(link: Link, digest: Digest) -> Slash | None:
    """Returns the slash whose transaction, evidence or submission has this digest, or None."""
    for slash in history.read_slashes(link.client, link.deployment):
        named = (slash.proposed_tx, slash.ended_tx, slash.evidence, slash.leaf)
        if slash.pool == link.pool and digest in named:
            return slash
    return None


def _setting(
    settings: Settings,
    api: NodeApi,
    link: Link,
    library: Library,
    load: Callable[[Path], Engine],
    device: str,
) -> Setting:
    from prime_broadcast.access import Passes, ephemeral_signer
    from prime_broadcast.manifest import Trust
    from prime_broadcast.sources import SourceBook
    from prime_envs.registry import environment_for

    pool = link.contracts.pools.pool_of(link.pool)
    data = DataFolder(settings.data)
    data.make()
    trust = Trust(pool.trainer, link.deployment.domain_of(PolicyStatement), link.pool)
    passes = Passes(ephemeral_signer(), api.client.domain("registry"))
    folder = PolicyFolder(
        data.root / "audit" / str(link.deployment.chain_id) / str(link.pool),
        trust,
        book=SourceBook(passes=passes, public_only=not api.client.allows_private),
    )
    events = history.read_events(link.client, link.deployment, contracts=("pools",), pool=link.pool)
    validators = frozenset(
        event.validator for event in events if isinstance(event, ValidatorSet) and event.on
    )
    runs = history_of(events, link.pool, partial(run_bytes, api.client))
    return Setting(
        deployment=link.deployment,
        pool=link.pool,
        manager=pool.manager,
        validators=validators,
        runs=runs,
        environments=environment_for,
        engines=FetchedEngines(
            folder.root, Policies(folder, PoolNames(api.client)).ensure, load, device=device
        ),
        now=time.time(),
        calibration=run_calibration(
            runs.first, library, pool.manager, link.deployment.domain_of(CalibrationStatement)
        ),
        provers=provers_here(folder.root, device=device, threads=settings.threads or 1),
    )


def run_calibration(
    run: RunDefinition, library: Library, manager: Address, domain: Domain
) -> Calibration | None:
    """Returns the calibration that the run names, a shipped one or an object; None if it names none
    and so uses the shipped one. Raises MalformedError or UntrustedError if the object is not a
    calibration signed by the pool's manager."""
    if run.calibration == ZERO_DIGEST:
        return None
    if found := shipped_as(run.calibration):
        return found
    return parse_signed(library.object(run.calibration, MAX_OBJECT_BYTES), manager, domain)


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
        own = shipped_as(run.calibration)
        found["calibration.json"] = (
            own.canonical() if own else library.object(run.calibration, MAX_OBJECT_BYTES)
        )
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
            f"{subject} is neither a submission nor a slash of this pool",
            hint="prime-node audit list names every slash",
        ) from error
    return subject
