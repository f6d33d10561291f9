"""Planted files: like any other until the verdict; nothing of them stays but what was learned."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import sqlalchemy as sa
from money_kit import MANAGER, NODE, OTHER, RUN, VALIDATOR, ManagerSide

from prime_core.encoding import sha256
from prime_core.errors import UserError
from prime_core.verdict import Reason
from prime_orchestrator.manager import settlement
from prime_orchestrator.manager.batches import seal_ready_batches
from prime_orchestrator.manager.funding import owed_by
from prime_orchestrator.manager.planting import Planted, reveal
from prime_orchestrator.manager.roots import post_roots
from prime_orchestrator.store import groups, leases, opinions, schema, submissions
from prime_orchestrator.store.submissions import SubmissionRow
from prime_verify.canaries import lies, planting

SECRET = bytes(range(32))
PLANTED = Planted(frozenset({NODE.address}), SECRET, one_in=4)


@pytest.fixture
def mgr(mgr: ManagerSide) -> ManagerSide:
    mgr.admit(OTHER)
    return mgr


def of_kind(mgr: ManagerSide, honest: bool) -> SubmissionRow:
    """A submission of the planted node whose lease asks for an honest file, or a lie."""
    for _ in itertools.count():
        row = mgr.submit(NODE)
        if (planting.kind(SECRET, row.lease_digest) == planting.HONEST) == honest:
            return row
        mgr.judge(row)
        reveal(mgr.store, mgr.context, PLANTED, mgr.now)
    raise AssertionError


def record(mgr: ManagerSide) -> opinions.TrackRecord:
    with mgr.store.read() as connection:
        (found,) = opinions.track_records(connection)
    assert found.validator == VALIDATOR.address
    return found


def settled(mgr: ManagerSide) -> None:
    """Nothing is left that pays, trains, slashes or ejects."""
    for table in (schema.credits, schema.groups, schema.slashes, schema.intents, schema.drift):
        assert mgr.count(table) == 0, table.name
    assert mgr.node_status(NODE.address) == "active"


def test_an_honest_planted_file_brings_nothing_but_a_mark_for_its_validator(
    mgr: ManagerSide,
) -> None:
    row = of_kind(mgr, honest=True)
    before = record(mgr) if mgr.count(schema.opinions) else None
    mgr.judge(row)
    assert mgr.count(schema.credits) == 1, "the validator's books look as for any file"
    assert reveal(mgr.store, mgr.context, PLANTED, mgr.now) == [row.digest]
    settled(mgr)
    after = record(mgr)
    assert after.honest == (before.honest if before else 0) + 1
    assert after.accused == 0
    assert reveal(mgr.store, mgr.context, PLANTED, mgr.now) == [], "once"


def test_an_honest_planted_file_that_is_rejected_is_a_false_accusation(mgr: ManagerSide) -> None:
    row = of_kind(mgr, honest=True)
    mgr.judge(row, Reason.WRONG_SAMPLING)
    assert mgr.node_status(NODE.address) == "quarantined"
    reveal(mgr.store, mgr.context, PLANTED, mgr.now)
    settled(mgr)
    assert record(mgr).accused == 1


def test_a_planted_lie_is_caught_or_missed_and_costs_its_node_nothing(mgr: ManagerSide) -> None:
    caught = of_kind(mgr, honest=False)
    missed_before = record(mgr).missed if mgr.count(schema.opinions) else 0
    mgr.judge(caught, Reason.WRONG_ACTIVATIONS)
    reveal(mgr.store, mgr.context, PLANTED, mgr.now)
    settled(mgr)
    assert record(mgr).missed == missed_before
    missed = of_kind(mgr, honest=False)
    mgr.judge(missed)
    reveal(mgr.store, mgr.context, PLANTED, mgr.now)
    settled(mgr)
    found = record(mgr)
    assert found.missed > missed_before
    assert found.lying >= 2


def test_lies_beyond_the_most_faults_of_a_settlement_count_for_no_validator(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        mgr.judge(of_kind(mgr, honest=False))  # missed
        reveal(mgr.store, mgr.context, PLANTED, mgr.now)
    turn = settlement._Turn(int(mgr.now()) // RUN.epoch_seconds, -1, None, new_leaves=True)
    for most, counted in ((2, 2), (9, 3)):
        monkeypatch.setattr(settlement, "MAX_FAULTS", most)
        with mgr.store.read() as connection:
            lies, faults = settlement._planted(connection, mgr.context, turn)
        assert (len(faults), lies) == (counted, {VALIDATOR.address: counted})


def test_no_planted_file_is_ever_rooted_or_sealed_before_or_after_its_verdict(
    mgr: ManagerSide,
) -> None:
    without = PLANTED.accounts
    rows = [mgr.submit(NODE) for _ in range(RUN.root_submissions)]
    for row in rows:
        mgr.judge(row)
    with mgr.store.read() as connection:
        assert groups.free(connection, step=0, max_staleness=2), "its groups lie ready"
    seal = (mgr.store, mgr.objects, MANAGER, mgr.context, mgr.now)
    assert seal_ready_batches(*seal, without) == []
    mgr.now.time += RUN.root_seconds
    assert post_roots(mgr.store, mgr.objects, mgr.context, mgr.now, without) == []
    paid = mgr.submit(OTHER)
    mgr.now.time += RUN.root_seconds
    assert len(post_roots(mgr.store, mgr.objects, mgr.context, mgr.now, without)) == 1
    assert mgr.row(paid.digest).root_id is not None
    reveal(mgr.store, mgr.context, PLANTED, mgr.now)
    assert post_roots(mgr.store, mgr.objects, mgr.context, mgr.now) == [], "for good"
    assert all(mgr.row(row.digest).root_id is None for row in rows)


def test_a_rooted_file_of_a_planted_node_is_an_ordinary_file(mgr: ManagerSide) -> None:
    """The node joined before the orchestrator knew that it is planted; a root may also appear
    between verdict and reveal, or after it."""
    paid = mgr.submit(NODE)
    mgr.now.time += RUN.root_seconds
    assert len(post_roots(mgr.store, mgr.objects, mgr.context, mgr.now)) == 1
    mgr.judge(paid)
    with mgr.store.read() as connection:
        owed = owed_by(connection, mgr.context, PLANTED.accounts)
    assert owed == 20 * RUN.price_per_unit, "it will be paid"
    assert reveal(mgr.store, mgr.context, PLANTED, mgr.now) == []
    assert not mgr.row(paid.digest).shadow
    assert (mgr.count(schema.credits), mgr.count(schema.planted)) == (1, 0)
    later = mgr.submit(NODE)
    mgr.judge(later)
    assert reveal(mgr.store, mgr.context, PLANTED, mgr.now) == [later.digest]

    def counted() -> list[str]:
        with mgr.store.read() as connection:
            rows = opinions.on_planted(connection, 0, mgr.now() + 1)
            return [one.opinion.submission_digest for one in rows]

    assert counted() == [later.digest]
    with mgr.store.begin() as connection:
        connection.execute(
            sa.update(schema.submissions)
            .where(schema.submissions.c.digest == later.digest)
            .values(root_id=mgr.row(paid.digest).root_id, leaf_index=1)
        )
    assert counted() == [], "settled as an ordinary file, it charges no validator"


def test_nothing_in_the_store_marks_a_planted_file_before_its_verdict(mgr: ManagerSide) -> None:
    planted, other = mgr.submit(NODE), mgr.submit(OTHER)
    apart = {
        name
        for name, value in vars(planted).items()
        if value != vars(other)[name]
        and name not in ("digest", "lease_digest", "node", "sha256", "size", "body", "receipt")
    }
    assert apart == {"received_at"}
    assert mgr.count(schema.planted) == 0


def test_planted_files_count_in_a_nodes_history_like_any(mgr: ManagerSide) -> None:
    """Else a validator could tell the node by how many rows it has to draw."""
    mgr.judge(mgr.submit(NODE))
    reveal(mgr.store, mgr.context, PLANTED, mgr.now)
    with mgr.store.read() as connection:
        assert submissions.accepted_of(connection, NODE.address) == 1


def test_planted_nodes_get_their_share_of_leases_and_no_more(mgr: ManagerSide) -> None:
    def may(account: str) -> bool:
        with mgr.store.read() as connection:
            return PLANTED.may_lease(connection, account, mgr.now())  # type: ignore[arg-type]

    assert may(NODE.address)
    mgr.submit(NODE)
    assert not may(NODE.address), "one in four"
    assert may(OTHER.address)
    for _ in range(3):
        mgr.submit(OTHER)
    with mgr.store.read() as connection:
        assert leases.given_to(connection, PLANTED.accounts, 0.0) == 1
    mgr.now.time += 1
    mgr.submit(OTHER)
    assert may(NODE.address)


@pytest.mark.slow
def test_a_planted_file_without_opinions_ends_without_a_mark(mgr: ManagerSide) -> None:
    row = mgr.submit(NODE)
    mgr.now.time += RUN.validity_seconds + 1
    assert reveal(mgr.store, mgr.context, PLANTED, mgr.now) == [row.digest]
    assert mgr.count(schema.planted) == 0


def test_half_of_the_planted_files_are_honest_and_the_rest_lie_in_every_way() -> None:
    kinds = [planting.kind(SECRET, sha256(str(i).encode())) for i in range(4000)]
    honest = kinds.count(planting.HONEST)
    assert 1850 < honest < 2150
    assert set(kinds) == {planting.HONEST, *planting.PLANTED_LIES}
    assert set(planting.PLANTED_LIES) == set(lies.PLANTED)
    assert kinds != [planting.kind(bytes(32), sha256(str(i).encode())) for i in range(4000)]


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("ab" * 32, 0o644, "others may read"),
        ("xyz", 0o600, "hexadecimal"),
        ("ab", 0o600, "1 bytes"),
    ],
)
def test_a_secret_that_is_none_is_refused(tmp_path: Path, text: str, mode: int, said: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UserError, match=said):
        planting.read_secret(path)
