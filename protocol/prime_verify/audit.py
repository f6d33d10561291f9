"""Audit: anyone reruns the validator's code on published data.

    slash      transaction → proposal → evidence object → file, policy → the same drawn rows →
               same outcome and reason? → match | mismatch
    accepted   submission → its leaf in a root on chain → verdict, tables, file, policy → rows of
               each opinion as drawn, every reward regraded, rows replayed → accepted | mismatch
    void       as accepted; the same reason → match

Every signature and digest on the way is checked; evidence that does not belong to the slash is also
a mismatch. If something is unavailable (file deleted, policy not served, setup not calibrated
here), the result is *cannot tell*, which accuses no one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from prime_core.deployment import Deployment
from prime_core.draw_checks import StatedDraw, check_draw
from prime_core.draws import file_secret
from prime_core.errors import (
    MalformedError,
    NotFoundError,
    UnavailableError,
    UntrustedError,
)
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.messages import SubmissionInfo
from prime_core.opinions import check_opinions
from prime_core.revisions import RunHistory
from prime_core.rollout import MAX_FILE_BYTES, SignedSubmission
from prime_core.run import RunDefinition
from prime_core.task import SignedLease, shadow_pool
from prime_core.verdict import Evidence, Outcome, Reason, SignedOpinion, Verdict, VerdictTable
from prime_envs.base import Environment
from prime_verify.audit_compare import Audit, compare_slash, compare_verdict
from prime_verify.case import Case
from prime_verify.engines import EngineProvider
from prime_verify.finding import Finding
from prime_verify.proofs.thresholds import Calibration, shipped
from prime_verify.provers import Provers
from prime_verify.verify import verify_file

MAX_OBJECT_BYTES = 32 << 20


class Library(Protocol):
    """Source of published objects (an orchestrator, or a copy of its objects)."""

    def object(self, digest: Digest, limit: int) -> bytes:
        """Returns the bytes with SHA-256 `digest`. Raises NotFoundError, UnavailableError."""
        ...

    def submission(self, digest: Digest) -> SubmissionInfo:
        """Returns the orchestrator's record of a submission. Raises NotFoundError."""
        ...

    def lease(self, digest: Digest) -> SignedLease:
        """Returns the signed lease with this digest. Raises NotFoundError."""
        ...


class RecordedSlash(Protocol):
    """A slash as recorded on chain: the accused node, the leaf, the reason, and where the evidence
    is."""

    @property
    def node(self) -> Address: ...
    @property
    def leaf(self) -> Digest: ...
    @property
    def evidence(self) -> Digest: ...
    @property
    def reason(self) -> int: ...


@dataclass(frozen=True)
class _Rejection:
    """The accusation of a rejection whose slash may not be on chain yet."""

    node: Address
    leaf: Digest
    evidence: Digest
    reason: int


@dataclass(frozen=True)
class Setting:
    """The basis of an audit: accounts as recorded on chain, the run, and this machine's engines.

    `validators`: every account that the pool ever appointed; `now` is in Unix seconds.
    """

    deployment: Deployment
    pool: int
    manager: Address
    validators: frozenset[Address]
    runs: RunHistory
    environments: Callable[[RunDefinition], Environment]
    engines: EngineProvider
    now: float
    calibration: Calibration | None = None
    provers: Provers | None = None


def audit_slash(slash: RecordedSlash, setting: Setting, library: Library) -> Audit:
    """Replays a slash's evidence. The result is *match* if this machine makes the same finding on
    the same file."""
    expected = Reason(slash.reason)
    try:
        raw = library.object(slash.evidence, MAX_OBJECT_BYTES)
        evidence = _parse_evidence(raw)
        _check_evidence(evidence, slash, setting)
        notes = check_draw(
            StatedDraw(
                evidence.lease, evidence.validator, Digest(evidence.draw_secret),
                evidence.statistics.get("draw_commitment"),
            ),
            slash.leaf, setting.deployment, setting.runs.first,
            lambda name: library.object(name, MAX_OBJECT_BYTES),
            manager=setting.manager, now=setting.now,
        )  # fmt: skip
        data = library.object(evidence.submission.submission.sha256, MAX_FILE_BYTES)
        _check_calibration(evidence, setting)
    except (NotFoundError, UnavailableError) as error:
        return Audit("cannot tell", str(error), expected)
    except (UntrustedError, MalformedError) as error:
        return Audit("mismatch", f"the evidence does not hold: {error}", expected)

    def judge(as_listed: bool) -> Finding:
        return _run(
            data,
            evidence.submission,
            evidence.lease,
            evidence.draw_secret,
            setting,
            draw_count=len(evidence.rows_drawn),  # may exceed the run's share
            rewards_first=evidence.reason == Reason.TAMPERED_REWARD,
            as_listed=as_listed,
        )

    return compare_replays(evidence, setting.calibration or shipped(), judge, notes)


def compare_replays(
    evidence: Evidence,
    calibration: Calibration,
    judge: Callable[[bool], Finding],
    notes: tuple[str, ...],
) -> Audit:
    """Compares a slash's evidence with `judge(False)`, this machine's finding.

    Older versions slashed by limits of cards that one party signed. If the findings differ and the
    file's card has such limits, `judge(True)` judges by them (Case.as_listed). If that agrees with
    the evidence, the authors followed the rules of their version: *cannot tell*.
    """
    finding = judge(False)
    audit = compare_slash(evidence, finding, notes)
    engine, dtype, device = (*finding.setup.split(" ", 2), "", "")[:3]
    setup = calibration.measured(engine, dtype, device)
    why = "" if setup is None else calibration.why_unlisted(setup)
    if audit.result != "mismatch" or not why:
        return audit
    older = compare_slash(evidence, judge(True), notes)
    if older.result == "mismatch":
        return audit
    detail = f"older versions find the same, by limits that accuse no one now: {why}"
    return replace(older, result="cannot tell", detail=detail)


def audit_submission(
    digest: Digest,
    setting: Setting,
    library: Library,
    rooted: Callable[[SubmissionInfo], SignedSubmission],
) -> Audit:
    """Judges an accepted, void or rejected submission again.

    `rooted` returns the signed submission from the root on chain; it raises NotFoundError,
    UntrustedError or UnavailableError. A rejected submission is audited by its evidence, whether or
    not its slash is on chain.
    """
    try:
        info = library.submission(digest)
        if info.verdict is None:
            return Audit("cannot tell", f"it has no verdict yet (it is {info.status})")
        verdict = _verdict(library.object(info.verdict, MAX_OBJECT_BYTES), digest, setting)
        said = verdict.deciding
        if said.outcome is Outcome.REJECTED:
            return _audit_rejected(digest, said, setting, library)
        signed = rooted(info)
        lease = library.lease(signed.submission.lease_digest)
        _check_pair(signed, lease, digest, setting)
        data = library.object(signed.submission.sha256, MAX_FILE_BYTES)
        table: VerdictTable | None = None
        notes: tuple[str, ...] = ()
        if said.outcome is Outcome.ACCEPTED:
            table = _table(said, library)
            notes = _check_draws(verdict, digest, lease, setting, library)
    except (NotFoundError, UnavailableError) as error:
        return Audit("cannot tell", str(error))
    except (UntrustedError, MalformedError, ValueError) as error:
        return Audit("mismatch", f"the published data is wrong: {error}")
    secret = file_secret(ZERO_DIGEST, digest)  # our own draw: any rows must pass
    finding = _run(data, signed, lease, secret, setting)
    return compare_verdict(said, table, finding, lease, notes)


def _audit_rejected(
    digest: Digest, verdict: SignedOpinion, setting: Setting, library: Library
) -> Audit:
    said = verdict.opinion
    evidence = _parse_evidence(library.object(said.evidence, MAX_OBJECT_BYTES))
    rejection = _Rejection(
        evidence.submission.node, digest, Digest(said.evidence), int(verdict.reason)
    )
    return audit_slash(rejection, setting, library)


# ── consistency of published objects ─────────────────────────────────────────────────────────────


def _parse_evidence(raw: bytes) -> Evidence:
    try:
        return Evidence.model_validate_json(raw)
    except ValueError as error:
        raise MalformedError("the evidence object does not parse") from error


def _check_evidence(evidence: Evidence, slash: RecordedSlash, setting: Setting) -> None:
    """Raises UntrustedError unless the evidence belongs to this slash and pool, and is signed."""
    _check_pair(evidence.submission, evidence.lease, slash.leaf, setting)
    for name, said, due in (
        ("chain", evidence.chain_id, setting.deployment.chain_id),
        ("reason", evidence.reason, slash.reason),
        ("node", evidence.submission.node, slash.node),
        ("run", evidence.run_digest, evidence.lease.lease.run_digest),
    ):
        if said != due:
            raise UntrustedError(f"the evidence's {name} is {said}, the slash's is {due}")
    if evidence.validator not in setting.validators:
        raise UntrustedError(f"{evidence.validator} was never a validator of pool {setting.pool}")


def _check_calibration(evidence: Evidence, setting: Setting) -> None:
    """Raises UntrustedError if the run names a different calibration than the evidence,
    UnavailableError if the run names none and this version ships another."""
    mine = (setting.calibration or shipped()).digest()
    if evidence.calibration in (ZERO_DIGEST, mine):
        return
    if setting.calibration is not None:
        raise UntrustedError(
            f"the evidence rests on calibration {evidence.calibration}, not {mine}"
        )
    raise UnavailableError(
        f"the evidence rests on calibration {evidence.calibration}; this version "
        f"({evidence.validator_version} made it) ships {mine}"
    )


def _check_pair(
    signed: SignedSubmission, lease: SignedLease, leaf: Digest, setting: Setting
) -> None:
    """Raises UntrustedError unless the node signed the leaf and the manager signed its lease."""
    claim, promise = signed.submission, lease.lease
    domain = setting.deployment.domain_of
    if claim.digest(domain(claim)) != leaf:
        raise UntrustedError("the submission is not the leaf")
    if claim.recover(domain(claim), signed.signature) != signed.node:
        raise UntrustedError("the submission is not signed by its node")
    if promise.recover(domain(promise), lease.signature) != setting.manager:
        raise UntrustedError("the lease is not signed by the pool's manager")
    if promise.digest(domain(promise)) != claim.lease_digest or promise.node != signed.node:
        raise UntrustedError("the submission answers to another lease")
    pools = (setting.pool, shadow_pool(setting.pool))  # contracts do not know the latter
    if promise.pool not in pools:
        raise UntrustedError("the lease is of another pool")
    setting.runs.of_lease(promise)


def _verdict(raw: bytes, digest: Digest, setting: Setting) -> Verdict:
    """Parses a verdict and checks all of its opinions."""
    try:
        verdict = Verdict.model_validate_json(raw)
    except ValueError as error:
        raise MalformedError("the verdict object does not parse") from error
    check_opinions(verdict, digest, setting.deployment, setting.validators)
    if verdict.deciding.opinion.pool not in (setting.pool, shadow_pool(setting.pool)):
        raise UntrustedError("the verdict is of another pool")
    return verdict


def _table(said: SignedOpinion, library: Library) -> VerdictTable:
    raw = library.object(Digest(said.opinion.table), MAX_OBJECT_BYTES)
    return VerdictTable.model_validate_json(raw)


def _check_draws(
    verdict: Verdict, digest: Digest, lease: SignedLease, setting: Setting, library: Library
) -> tuple[str, ...]:
    """Checks that each validator that accepted the file replayed the rows that the two secrets
    draw. Returns notes on draws that cannot be checked, as what they are based on is not published
    or not in a mirror.

    Raises UntrustedError if a validator replayed other rows, ValueError if its table does not
    parse.
    """
    notes: dict[str, None] = {}
    for one in verdict.opinions:
        if one.outcome is not Outcome.ACCEPTED:
            continue
        author = Address(one.validator)
        try:
            table = _table(one, library)
            if table.submission_digest != digest:
                raise UntrustedError("its table is of another file")
            found = check_draw(
                StatedDraw(lease, author, Digest(table.draw_secret), table=table),
                digest, setting.deployment, setting.runs.first,
                lambda name: library.object(name, MAX_OBJECT_BYTES),
                manager=setting.manager, now=setting.now,
            )  # fmt: skip
        except (NotFoundError, UnavailableError) as error:
            notes[f"the draw of {author} is not checked: {error}"] = None
            continue
        except UntrustedError as error:
            raise UntrustedError(
                f"the acceptance of {author} does not follow from the committed secrets: {error}"
            ) from error
        notes |= dict.fromkeys(found)
    return tuple(notes)


# ── rerun of the verifier ────────────────────────────────────────────────────────────────────────


def _run(
    data: bytes,
    signed: SignedSubmission,
    lease: SignedLease,
    secret: Digest,
    setting: Setting,
    *,
    draw_count: int | None = None,
    rewards_first: bool = False,
    as_listed: bool = False,
) -> Finding:
    claim, run = signed.submission, setting.runs.of_lease(lease.lease)
    return verify_file(
        Case(
            data,
            lease,
            claim.lease_digest,
            run,
            setting.environments(run),
            setting.engines,
            draw_secret=secret,
            submission_digest=claim.digest(setting.deployment.domain_of(claim)),
            submission=claim,
            calibration=setting.calibration,
            draw_count=draw_count,
            rewards_first=rewards_first,
            provers=setting.provers,
            as_listed=as_listed,
        )
    )
