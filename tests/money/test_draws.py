"""A validator cannot choose its randomness after it has seen a file, and anyone can check it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import judges
import pytest
import sqlalchemy as sa
from judges import appoint, bench, judge_of
from money_kit import FAKE_DEPLOYMENT, MANAGER, NODE, VALIDATOR, ManagerSide, key, open_manager
from pydantic import ValidationError

from prime_core import encoding
from prime_core.draw_checks import REVEAL_PATIENCE, StatedDraw, check_draw
from prime_core.draws import (
    DrawList,
    DrawReveal,
    SaltOpening,
    SignedDrawCommitment,
    file_secret,
    reveal_at,
    rows_secret,
)
from prime_core.errors import (
    ConflictError,
    NotFoundError,
    PolicyError,
    PrimeError,
    UntrustedError,
)
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.signing import LocalSigner
from prime_core.storage.base import digest_key, put_object
from prime_core.task import SignedLease
from prime_core.validator_messages import Job
from prime_core.verdict import Evidence, Reason
from prime_orchestrator.manager.draws import (
    EPOCHS_AHEAD,
    GRACE_EPOCHS,
    WITHHELD_SECONDS,
    DrawBoard,
    epoch_at,
    reveal_second,
    withheld,
)
from prime_orchestrator.store import leases, schema
from prime_orchestrator.store.draws import listing, second_secret
from prime_orchestrator.store.submissions import SubmissionRow
from prime_validator.draws import Draws

OTHER = key(21)
SECOND = DrawReveal(
    pool=1, validator=MANAGER.address, epoch=7, secret=encoding.sha256(b"the manager's")
)


def lease_of(mgr: ManagerSide, row: SubmissionRow) -> SignedLease:
    with mgr.store.read() as connection:
        found = leases.get(connection, row.lease_digest)
    assert found is not None
    return found.signed()


def job_of(mgr: ManagerSide, row: SubmissionRow) -> Job:
    """The file as its validator gets it."""
    lease = lease_of(mgr, row)
    with mgr.store.read() as connection:
        second = second_secret(connection, mgr.board.listed(mgr.objects, lease).second)
    return Job(
        submission_digest=row.digest,
        submission=row.signed(),
        lease=lease,
        receipt=row.receipt_answer(),
        file="",
        second=file_secret(second, row.digest),
        rows=1,
        until=0,
    )


def evidence_of(mgr: ManagerSide, row: SubmissionRow, **changes: Any) -> Evidence:
    """What the validator would publish on the file, were it a lie."""
    lease = lease_of(mgr, row)
    draw = mgr.bench.draws.draw(job_of(mgr, row))
    values: dict[str, Any] = {
        "chain_id": 31337,
        "submission": row.signed(),
        "lease": lease,
        "reason": int(Reason.WRONG_SKETCH),
        "detail": "",
        "run_digest": mgr.context.run.digest(),
        "validator": VALIDATOR.address,
        "validator_version": "test",
        "draw_secret": draw.secret,
        "rows_drawn": (0,),
        "statistics": {"draw_commitment": draw.commitment},
        "thresholds": {},
    }
    return Evidence(**(values | changes))


def check(mgr: ManagerSide, row: SubmissionRow, evidence: Evidence) -> tuple[str, ...]:
    stated = evidence.statistics.get("draw_commitment")
    return check_draw(
        StatedDraw(evidence.lease, evidence.validator, evidence.draw_secret, stated),
        row.digest,
        FAKE_DEPLOYMENT,
        mgr.context.run,
        lambda name: mgr.objects.get(digest_key(name), 1 << 20),
        manager=mgr.context.manager,
        now=mgr.now(),
    )


def wait_for_reveal(mgr: ManagerSide) -> None:
    run = mgr.context.run
    epoch = int(mgr.now()) // run.epoch_seconds
    due = reveal_at(epoch, epoch_seconds=run.epoch_seconds, lease_seconds=run.lease_seconds)
    mgr.now.time = float(due)
    mgr.bench.draws.prepare()
    assert reveal_second(mgr.store, mgr.objects, mgr.context, mgr.now)


def commitment(signer: LocalSigner, epoch: int, secret: Digest, **more: Any) -> Any:
    return judges.commitment(FAKE_DEPLOYMENT, signer, epoch, secret, **more)


def rebound(mgr: ManagerSide, evidence: Evidence, *commitments: SignedDrawCommitment) -> Evidence:
    """The evidence with its lease bound to other commitments, salt and all."""
    listed = DrawList(pool=1, second=SECOND.digest(), commitments=commitments)
    put_object(mgr.objects, SECOND.canonical())
    opening = SaltOpening(random=ZERO_DIGEST, draws=put_object(mgr.objects, listed.canonical()))
    signed = evidence.lease
    lease = signed.lease.model_copy(update={"salt": opening.salt()})
    bound = signed.model_copy(update={"lease": lease, "opening": opening})
    return evidence.model_copy(update={"lease": bound, "statistics": {}})


def combined(secret: Digest, digest: Digest) -> Digest:
    """The draw secret of a file from this secret and the manager's SECOND."""
    return rows_secret(file_secret(secret, digest), file_secret(SECOND.secret, digest))


def test_a_draw_is_bound_by_its_lease_and_shown_once_no_lease_needs_it(mgr: ManagerSide) -> None:
    row = mgr.submit(NODE)
    evidence = evidence_of(mgr, row)
    name = Digest(evidence.statistics["draw_commitment"])
    mgr.now.time += mgr.context.run.epoch_seconds  # the epoch is over, its leases are not
    mgr.bench.draws.prepare()
    assert not mgr.objects.exists(digest_key(name)), "a node could still compute its rows"
    (note,) = check(mgr, row, evidence)
    assert "is not shown before" in note
    wait_for_reveal(mgr)
    assert check(mgr, row, evidence) == ()
    reveal = DrawReveal.model_validate_json(mgr.objects.get(digest_key(name), 9999))
    mine = file_secret(reveal.secret, row.digest)
    assert rows_secret(mine, job_of(mgr, row).second) == evidence.draw_secret


def test_the_secret_is_the_leases_however_late_the_file_is_judged(mgr: ManagerSide) -> None:
    row = mgr.submit(NODE)
    job, before = job_of(mgr, row), evidence_of(mgr, row)
    mgr.now.time += 3 * mgr.context.run.epoch_seconds
    mgr.bench.draws.prepare()
    assert mgr.bench.draws.draw(job).secret == before.draw_secret
    other = job.model_copy(update={"submission_digest": encoding.sha256(b"another file")})
    assert mgr.bench.draws.draw(other).secret != before.draw_secret
    other = job.model_copy(update={"second": encoding.sha256(b"another second secret")})
    assert mgr.bench.draws.draw(other).secret != before.draw_secret, "neither party draws alone"


def test_a_validator_that_the_lease_does_not_name_has_no_draw(mgr: ManagerSide) -> None:
    row = mgr.submit(NODE)
    newcomer = bench(mgr.backend, OTHER, mgr.folder, seed=2).draws
    with pytest.raises(UntrustedError, match="names no draw commitment"):
        newcomer.draw(job_of(mgr, row))
    unbound = lease_of(mgr, row).model_copy(update={"opening": None})
    with pytest.raises(UntrustedError, match="commits to no draws"):
        mgr.bench.draws.draw(job_of(mgr, row).model_copy(update={"lease": unbound}))
    assert newcomer.draw(job_of(mgr, mgr.submit(NODE))), "the next lease names it"


def test_a_second_commitment_for_an_epoch_and_an_early_or_false_reveal_are_refused(
    mgr: ManagerSide,
) -> None:
    """A validator that could replace its secret, or show it early, could steer the rows."""
    row, me = mgr.submit(NODE), mgr.bench.api
    epoch = mgr.bench.draws.draw(job_of(mgr, row)).epoch
    with pytest.raises(ConflictError, match="another secret"):
        me.commit([commitment(VALIDATOR, epoch, encoding.sha256(b"a better one"))])
    with pytest.raises(UntrustedError, match="not the caller's"):
        me.commit([commitment(OTHER, epoch, encoding.sha256(b"in its name"))])
    kept = mgr.bench.folder.secret(epoch)
    assert kept is not None
    shown = DrawReveal(pool=1, validator=VALIDATOR.address, epoch=epoch, secret=kept.secret)
    with pytest.raises(PolicyError, match="may still need"):
        me.reveal(shown)
    with pytest.raises(UntrustedError, match="not what the caller committed to"):
        me.reveal(shown.model_copy(update={"secret": encoding.sha256(b"another")}))


def test_a_secret_chosen_after_the_file_was_seen_is_a_lie(mgr: ManagerSide) -> None:
    row = mgr.submit(NODE)
    chosen = evidence_of(mgr, row, draw_secret=file_secret(encoding.sha256(b"good"), row.digest))
    wait_for_reveal(mgr)
    with pytest.raises(UntrustedError, match="not drawn by the secrets"):
        check(mgr, row, chosen)


def test_a_commitment_made_after_the_lease_does_not_open_its_salt(mgr: ManagerSide) -> None:
    row = mgr.submit(NODE)
    evidence = evidence_of(mgr, row)
    late = rebound(mgr, evidence, commitment(VALIDATOR, 1, encoding.sha256(b"late")))
    kept_salt = late.lease.model_copy(update={"lease": evidence.lease.lease})
    with pytest.raises(UntrustedError, match="commits to no draws"):
        check(mgr, row, late.model_copy(update={"lease": kept_salt}))
    bare = evidence.lease.model_copy(update={"opening": None})
    with pytest.raises(UntrustedError, match="commits to no draws"):
        check(mgr, row, evidence.model_copy(update={"lease": bare}))


def test_a_commitment_must_be_the_validators_for_this_pool(mgr: ManagerSide) -> None:
    row = mgr.submit(NODE)
    evidence = evidence_of(mgr, row)
    secret = encoding.sha256(b"s")
    with pytest.raises(UntrustedError, match="names no draw of"):
        check(mgr, row, rebound(mgr, evidence, commitment(OTHER, 1, secret)))
    forged = commitment(OTHER, 1, secret).model_copy(update={"validator": VALIDATOR.address})
    with pytest.raises(UntrustedError, match="not signed by the validator"):
        check(mgr, row, rebound(mgr, evidence, forged))
    with pytest.raises(UntrustedError, match="for this pool"):
        check(mgr, row, rebound(mgr, evidence, commitment(VALIDATOR, 1, secret, pool=2)))
    other = evidence.model_copy(update={"statistics": {"draw_commitment": encoding.sha256(b"o")}})
    with pytest.raises(UntrustedError, match="another draw than its lease"):
        check(mgr, row, other)


def test_a_reveal_of_another_epoch_pool_or_validator_or_no_reveal_at_all_is_a_lie(
    mgr: ManagerSide,
) -> None:
    """The object has the committed name, but what it says is not what was committed for."""
    row = mgr.submit(NODE)
    secret = encoding.sha256(b"s")
    evidence = evidence_of(mgr, row, draw_secret=combined(secret, row.digest))
    for changes in ({"epoch": 8}, {"pool": 2}, {"validator": OTHER.address}):
        values: dict[str, Any] = {
            "pool": 1, "validator": VALIDATOR.address, "epoch": 7, "secret": secret
        }  # fmt: skip
        shown = put_object(mgr.objects, DrawReveal(**(values | changes)).canonical())
        bound = rebound(mgr, evidence, commitment(VALIDATOR, 7, secret, name=shown))
        with pytest.raises(UntrustedError, match="another pool, validator or epoch"):
            check(mgr, row, bound)
    noise = put_object(mgr.objects, b"not a secret")
    with pytest.raises(UntrustedError, match="is not a secret"):
        check(mgr, row, rebound(mgr, evidence, commitment(VALIDATOR, 7, secret, name=noise)))
    honest = rebound(mgr, evidence, commitment(VALIDATOR, 7, secret))
    put_object(
        mgr.objects,
        DrawReveal(pool=1, validator=VALIDATOR.address, epoch=7, secret=secret).canonical(),
    )
    assert check(mgr, row, honest) == ()


def test_a_list_with_two_commitments_of_one_validator_does_not_parse() -> None:
    """Else it could say afterwards which of them it chose."""
    two = [commitment(VALIDATOR, 1, encoding.sha256(bytes([n]))) for n in (1, 2)]
    with pytest.raises(ValidationError, match="one each"):
        DrawList(pool=1, second=ZERO_DIGEST, commitments=tuple(two))


def test_a_secret_that_is_withheld_after_it_was_due_leaves_the_audit_undecided(
    mgr: ManagerSide,
) -> None:
    row = mgr.submit(NODE)
    evidence = evidence_of(mgr, row)
    mgr.now.time += 10 * mgr.context.run.epoch_seconds + REVEAL_PATIENCE
    with pytest.raises(NotFoundError, match="was due and is not published"):
        check(mgr, row, evidence)


def named(mgr: ManagerSide) -> Digest | None:
    with mgr.store.begin() as connection:
        return mgr.board.current(connection, mgr.objects, mgr.context, mgr.now())


def test_only_the_present_epochs_commitments_are_named(mgr: ManagerSide) -> None:
    """An older secret may be about to be shown."""
    mgr.bench.draws.prepare()
    run, first = mgr.context.run, named(mgr)
    assert first is not None
    listed = DrawList.model_validate_json(mgr.objects.get(digest_key(first), 1 << 20))
    assert [c.commitment.epoch for c in listed.commitments] == [int(mgr.now()) // run.epoch_seconds]
    mgr.now.time += run.epoch_seconds
    assert named(mgr) not in (None, first), "a validator that is away has committed ahead"
    appoint(mgr.store, 1, VALIDATOR.address, on=False)
    assert named(mgr) is None, "one that was dismissed is not named"
    appoint(mgr.store, 1, VALIDATOR.address)
    mgr.now.time += EPOCHS_AHEAD * run.epoch_seconds
    assert named(mgr) is None, "but not forever: no one would judge the files"


@pytest.mark.slow
@pytest.mark.postgres
def test_a_list_is_in_order_though_the_database_sorts_letters_by_language(
    tmp_path: Path, empty_postgres: str
) -> None:
    """A linguistic collation puts `b` before `C`; addresses mix their cases, lists go by bytes."""
    mgr = open_manager(tmp_path, url=empty_postgres)
    signers = sorted((key(n) for n in range(40)), key=lambda signer: signer.address.lower())
    assert signers != sorted(signers, key=lambda signer: signer.address)
    for signer in signers:
        judges.commit_draws(mgr.store, mgr.context, signer, mgr.now)
    found = named(mgr)
    assert found is not None
    listed = DrawList.model_validate_json(mgr.objects.get(digest_key(found), 1 << 20))
    assert len(listed.commitments) == 40
    mgr.store.close()


def test_what_an_orchestrator_lost_to_an_older_backup_is_committed_again_and_holds_up_nothing(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, run = mgr.bench.draws, mgr.context.run
    draws.prepare()
    first = int(mgr.now()) // run.epoch_seconds
    with mgr.store.begin() as connection:
        connection.execute(sa.delete(schema.draw_commitments))
    mgr.now.time += run.epoch_seconds
    draws.prepare()
    assert named(mgr) is not None, "the next lease names the validator"
    mgr.now.time += 20 * run.epoch_seconds

    def proxy(shown: DrawReveal) -> None:
        raise NotFoundError("the server answered 404")

    with monkeypatch.context() as patch:
        patch.setattr(mgr.bench.api, "reveal", proxy)
        with pytest.raises(NotFoundError):
            draws.prepare()
    assert mgr.bench.folder.unrevealed()[0].epoch == first, "a proxy's answer decides nothing"
    draws.prepare()
    assert mgr.bench.folder.unrevealed()[0].epoch == first + 21
    with mgr.store.read() as connection:
        shown = {info.signed.commitment.epoch for info in listing(connection) if info.revealed}
    assert shown == {*range(first + 1, first + 1 + EPOCHS_AHEAD)}


def owed(mgr: ManagerSide) -> set[Address]:
    """The validators that new leases leave out, once the process is no longer new."""
    mgr.now.time += WITHHELD_SECONDS
    with mgr.store.begin() as connection:
        mgr.board.current(connection, mgr.objects, mgr.context, mgr.now())
        return set(withheld(connection, mgr.context, mgr.now()))


def to_grace_end(mgr: ManagerSide, epoch: int) -> None:
    """The time from which leases leave out a validator that hides its secret of `epoch`."""
    run = mgr.context.run
    due = reveal_at(epoch, epoch_seconds=run.epoch_seconds, lease_seconds=run.lease_seconds)
    mgr.now.time = float(due + GRACE_EPOCHS * run.epoch_seconds)


@pytest.mark.parametrize("files", [1, 2])  # decided alone, and with others
def test_a_validator_that_hides_the_secret_of_its_acceptances_gets_no_files_of_new_leases(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, files: int
) -> None:
    draws, run, other = mgr.bench.draws, mgr.context.run, bench(mgr.backend, OTHER, mgr.folder)
    given = [mgr.submit(NODE) for _ in range(files)]
    for _ in given:
        judge = mgr.bench if (job := mgr.bench.claim()) else other
        job = job or other.claim()
        assert job is not None
        judge.say(job, Reason.NONE, mgr.table_rows())
    epoch = epoch_at(run, mgr.now())
    assert set(judge_of(mgr.backend).tick()) == {row.digest for row in given}
    with mgr.store.read() as connection:
        said = {Address(v) for v in connection.scalars(sa.select(schema.opinions.c.validator))}
    assert said
    with monkeypatch.context() as hiding:
        hiding.setattr(Draws, "_reveal_due", lambda _: None)
        hiding.setattr(Draws, "_reveal_again", lambda *_: None)
        assert owed(mgr) == set()
        to_grace_end(mgr, epoch)
        mgr.now.time -= WITHHELD_SECONDS + 1
        assert owed(mgr) == set(), "not late yet"
        to_grace_end(mgr, epoch)
        draws.prepare()
        other.draws.prepare()
        assert owed(mgr) == said, "those that accepted none owe nothing that counts"
        name = named(mgr)
        left = {VALIDATOR.address, OTHER.address} - said
        assert (name is None) == (not left)
        if name is not None:
            listed = DrawList.model_validate_json(mgr.objects.get(digest_key(name), 1 << 20))
            assert {one.validator for one in listed.commitments} == left
        for one in said:
            assert f"{one} has not published its draw secret of epoch {epoch}" in caplog.text
        with mgr.store.begin() as connection:  # as once the files are archived
            connection.execute(sa.delete(schema.opinions))
        assert owed(mgr) == said
    draws.prepare()
    other.draws.prepare()
    assert owed(mgr) == set()


def test_a_store_of_an_older_backup_gets_published_secrets_again(mgr: ManagerSide) -> None:
    """And no validator is left out until all had the time for it."""
    assert mgr.judge(mgr.submit(NODE)).status == "accepted"
    draws, run = mgr.bench.draws, mgr.context.run
    epoch = epoch_at(run, mgr.now())
    to_grace_end(mgr, epoch)
    draws.prepare()
    assert owed(mgr) == set()
    with mgr.store.begin() as connection:  # as it was before the secret was published
        change = sa.update(schema.draw_commitments).where(schema.draw_commitments.c.epoch == epoch)
        connection.execute(change.values(revealed=False))
    mgr.board = DrawBoard(mgr.board.random)
    assert named(mgr) is not None
    mgr.now.time += (GRACE_EPOCHS - 1) * run.epoch_seconds
    assert owed(mgr) == {VALIDATOR.address}
    assert named(mgr) is not None, "the process is new"
    draws.prepare()
    assert owed(mgr) == set()


def test_no_orchestrator_gets_a_secret_before_it_is_due_or_stops_others_by_asking(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It could compute the rows of the files of open leases."""
    draws, run, folder = mgr.bench.draws, mgr.context.run, mgr.bench.folder
    epoch = epoch_at(run, mgr.now())
    to_grace_end(mgr, epoch)
    draws.prepare()
    present = epoch_at(run, mgr.now())
    folder.keep_secret(epoch - 1, encoding.sha256(b"never committed to"))
    mgr.now.time += run.epoch_seconds
    shown: list[int] = []

    def refuse(reveal: DrawReveal) -> None:
        shown.append(reveal.epoch)
        raise UntrustedError("the secret is not what the caller committed to")

    asked = (epoch - 1, epoch, *range(present + 1, present + EPOCHS_AHEAD + 1))
    commit = mgr.bench.api.commit
    monkeypatch.setattr(mgr.bench.api, "commit", lambda sent: (commit(sent), asked)[1])
    monkeypatch.setattr(Draws, "_reveal_due", lambda _: None)
    monkeypatch.setattr(mgr.bench.api, "reveal", refuse)
    draws.prepare()
    assert shown == [epoch]
    assert f"the secret of epoch {present + 1} before it is due" in caplog.text
    draws.prepare()
    assert shown == [epoch], "the commitments were taken"


@pytest.mark.parametrize("again", ["in the epoch", "later"])
def test_a_validator_that_lost_its_secrets_can_be_appointed_again(
    mgr: ManagerSide, again: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, me = mgr.context.run, VALIDATOR.address
    epoch = epoch_at(run, mgr.now())
    assert mgr.judge(mgr.submit(NODE)).status == "accepted"
    appoint(mgr.store, 1, me, on=False)
    over = (epoch + 1) * run.epoch_seconds
    if again == "later":
        to_grace_end(mgr, epoch)
        over = int(mgr.now())
    appoint(mgr.store, 1, me, at=over - (again == "in the epoch"))
    to_grace_end(mgr, epoch + EPOCHS_AHEAD)
    assert owed(mgr) == ({me} if again == "in the epoch" else set())
    lost = bench(mgr.backend, VALIDATOR, mgr.folder / "new", seed=9)
    assert f"asks for the draw secret of epoch {epoch}" in caplog.text
    assert lost.folder.secret(epoch) is None


@pytest.mark.parametrize("error", [PolicyError("not appointed"), ConflictError("another secret")])
def test_secrets_are_revealed_also_where_no_commitment_is_taken(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch, error: PrimeError
) -> None:
    """As after a dismissal: slashes rest on the evidence of the validator."""
    draws, run = mgr.bench.draws, mgr.context.run
    first = int(mgr.now()) // run.epoch_seconds
    draws.prepare()
    mgr.now.time += 2 * run.epoch_seconds + run.lease_seconds + 30

    def refused(_: object) -> None:
        raise error

    monkeypatch.setattr(mgr.bench.api, "commit", refused)
    with pytest.raises(PolicyError):
        draws.prepare()
    assert mgr.bench.folder.unrevealed()[0].epoch > first


def test_a_validator_after_an_absence_commits_again_and_reveals_what_was_due(
    mgr: ManagerSide,
) -> None:
    mgr.bench.draws.prepare()
    mgr.now.time += 20 * mgr.context.run.epoch_seconds
    mgr.bench.draws.prepare()
    mgr.bench.draws.prepare()
    with mgr.store.read() as connection:
        found = listing(connection)
    assert len(found) == 2 * EPOCHS_AHEAD
    assert [info.revealed for info in found] == [False] * EPOCHS_AHEAD + [True] * EPOCHS_AHEAD
    for info in found:
        statement = info.signed.commitment
        signer = statement.recover(FAKE_DEPLOYMENT.domain_of(statement), info.signed.signature)
        assert signer == VALIDATOR.address
        assert mgr.objects.exists(digest_key(statement.commitment)) == info.revealed
