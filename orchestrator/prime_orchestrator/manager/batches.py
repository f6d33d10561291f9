"""Seals accepted groups into batches, one per optimizer step.

Only this module excludes groups whose rewards are all equal; the trainer asserts that it did. Steps
are sealed in order, and step s only if s ≤ newest published policy + allowed staleness. Every row
of a batch is therefore at most that many policies old when it is trained.

A submitted file that is not in permanent storage yet (uploads.py) waits for a later batch, because
the trainer could not fetch it.

`choose` (prime_core/batch.py) selects the groups, `make_manifest` describes them, and
`seal_ready_batches` writes the batch.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from prime_core import encoding
from prime_core.batch import (
    BatchFile,
    BatchManifest,
    BatchStatement,
    FreeGroup,
    SignedBatch,
    choose,
)
from prime_core.errors import ConflictError, FatalError
from prime_core.ids import Address, Digest, to_bytes
from prime_core.logs import fields
from prime_core.run import RunDefinition
from prime_core.signing import Signer
from prime_core.storage.base import ObjectStore, digest_key, put_object
from prime_orchestrator.context import PoolContext
from prime_orchestrator.store import Connection
from prime_orchestrator.store import batches as store_batches
from prime_orchestrator.store import groups as store_groups
from prime_orchestrator.store import policies as store_policies
from prime_orchestrator.store.batches import BatchRow
from prime_orchestrator.store.engine import Store

log = logging.getLogger(__name__)


def may_seal(step: int, latest_version: int | None, max_staleness: int) -> bool:
    """Whether the policy that will train `step` is recent enough for the rows it would take."""
    return latest_version is not None and step <= latest_version + max_staleness


def batch_seed(run_digest: Digest, step: int) -> Digest:
    """Returns SHA-256("prime/batch/v1" ‖ run digest ‖ step as 8 bytes), the trainer's shuffling
    seed."""
    return encoding.sha256(b"prime/batch/v1" + to_bytes(run_digest) + step.to_bytes(8, "big"))


def make_manifest(
    chosen: Sequence[FreeGroup], *, pool: int, step: int, run_digest: Digest
) -> BatchManifest:
    """Returns the immutable manifest of a step: files sorted by SHA-256, groups by number.

    Raises FatalError if a group occurs twice or a file's groups disagree about it: the store is
    then inconsistent.
    """
    by_file: dict[Digest, list[FreeGroup]] = defaultdict(list)
    for group in chosen:
        by_file[group.submission_digest].append(group)
    files = []
    for submission_digest, members in by_file.items():
        first = members[0]
        numbers = sorted(g.group_no for g in members)
        faces = {(g.sha256, g.size, g.table, g.policy_version) for g in members}
        if len(set(numbers)) != len(numbers) or len(faces) != 1:
            raise FatalError(f"the groups of submission {submission_digest} contradict each other")
        files.append(
            BatchFile(
                sha256=first.sha256,
                size=first.size,
                table=first.table,
                submission_digest=submission_digest,
                policy_version=first.policy_version,
                groups=tuple(numbers),
            )
        )
    return BatchManifest(
        pool=pool,
        step=step,
        run_digest=run_digest,
        files=tuple(sorted(files, key=lambda f: (f.sha256, f.submission_digest))),
        rows=sum(g.rows for g in chosen),
        policy_versions=tuple(sorted({g.policy_version for g in chosen})),
        seed=batch_seed(run_digest, step),
    )


def seal_ready_batches(
    store: Store,
    objects: ObjectStore,
    signer: Signer,
    context: PoolContext,
    now: Callable[[], float],
    without: Collection[Address] = (),
) -> list[int]:
    """Seals every batch that is full and may be sealed; returns their steps, oldest first. Groups
    of the nodes in `without` are excluded (planted nodes, see planting.py).

    The manifest object is written first; it is named by its digest, so a crash leaves at most an
    unreferenced object. One transaction then writes the batch and marks its groups. The step is the
    primary key and only free groups are taken, so concurrent sealers or a restart seal nothing
    twice.
    """
    sealed: list[int] = []
    while (step := _seal_next(store, objects, signer, context, now(), without)) is not None:
        sealed.append(step)
    return sealed


def _seal_next(
    store: Store,
    objects: ObjectStore,
    signer: Signer,
    context: PoolContext,
    now: float,
    without: Collection[Address],
) -> int | None:
    run = context.run
    with store.read() as connection:
        step = store_batches.next_step(connection)
        latest = store_policies.latest_version(connection)
        if not may_seal(step, latest, run.max_staleness):
            return None
        least = run.groups_per_batch + run.surplus_groups
        if not store_groups.may_fill(connection, least, step=step, max_staleness=run.max_staleness):
            return None
        free = store_groups.free(
            connection, step=step, max_staleness=run.max_staleness, without=without
        )
    chosen = _choose_kept(objects, free, step, run)
    if chosen is None:
        return None
    manifest = make_manifest(chosen, pool=context.pool, step=step, run_digest=run.digest())
    digest = put_object(objects, manifest.canonical())
    statement = BatchStatement(pool=context.pool, step=step, manifest_digest=digest)
    batch = SignedBatch(
        manifest=manifest, signature=signer.sign(statement, context.domain(BatchStatement))
    )
    try:
        with store.begin() as connection:
            _write(connection, batch, digest, chosen, now)
    except ConflictError as error:
        log.warning("step %d is not sealed this turn: %s", step, error)
        return None
    log.info(
        "sealed step %d: %d rows, policies %s", step, manifest.rows, manifest.policy_versions,
        extra=fields(kind="batch", status="sealed", step=step),
    )  # fmt: skip
    return step


def _choose_kept(
    objects: ObjectStore, free: Sequence[FreeGroup], step: int, run: RunDefinition
) -> tuple[FreeGroup, ...] | None:
    """Applies `choose` to the groups whose files are stored where the trainer fetches them."""
    while True:
        chosen = choose(
            free,
            step=step,
            groups_per_batch=run.groups_per_batch,
            max_staleness=run.max_staleness,
            surplus=run.surplus_groups,
            selection=run.selection,
        )
        files = {group.sha256 for group in chosen or ()}
        absent = {sha256 for sha256 in files if not objects.exists(digest_key(sha256))}
        if not absent:
            return chosen
        log.warning("step %d: not kept yet, so left out: %s", step, ", ".join(sorted(absent)))
        free = [group for group in free if group.sha256 not in absent]


def _write(
    connection: Connection,
    batch: SignedBatch,
    digest: Digest,
    chosen: Sequence[FreeGroup],
    now: float,
) -> None:
    manifest = batch.manifest
    row = BatchRow(
        step=manifest.step,
        digest=digest,
        body=batch.model_dump_json(),
        rows=manifest.rows,
        mean_reward_micro=sum(g.reward_micro_sum for g in chosen)
        // sum(g.rows - g.ungraded for g in chosen),
        staleness_max=manifest.step - min(manifest.policy_versions),
        sealed_at=now,
    )
    if not store_batches.add(connection, row):
        raise ConflictError("another process has sealed it")
    names = [(g.submission_digest, g.group_no) for g in chosen]
    if store_groups.take(connection, names, manifest.step) != len(names):
        raise ConflictError("a file that it takes groups from was withdrawn meanwhile")
