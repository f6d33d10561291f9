"""Planted files: like any other until the verdict; nothing of them stays but what was learned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from money_kit import MANAGER, RUN, VALIDATOR, Shop, key, open_shop

from prime_core.encoding import sha256
from prime_core.errors import UserError
from prime_core.verdict import Reason
from prime_orchestrator.manager.batches import free_groups, seal_ready_batches
from prime_orchestrator.manager.planting import Planted, reveal
from prime_orchestrator.manager.roots import post_roots
from prime_orchestrator.store import leases, opinions, schema, submissions
from prime_orchestrator.store.submissions import SubmissionRow
from prime_verify.canaries import planting
from prime_verify.canaries.lies import LIES

NODE, OTHER = key(80), key(81)
SECRET = bytes(range(32))
PLANTED = Planted(frozenset({NODE.address}), SECRET, one_in=4)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = open_shop(tmp_path)
    made.publish(0)
    made.admit(NODE)
    made.admit(OTHER)
    yield made
    made.store.close()


def count(shop: Shop, table: sa.Table) -> int:
    with shop.store.read() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def of_kind(shop: Shop, honest: bool) -> SubmissionRow:
    """A submission of the planted node whose lease asks for an honest file, or a lie."""
    for _ in itertools.count():
        row = shop.submit(NODE)
        if (planting.kind(SECRET, row.lease_digest) == planting.HONEST) == honest:
            return row
        shop.judge(row)
        reveal(shop.store, shop.context, PLANTED, shop.now)
    raise AssertionError


def record(shop: Shop) -> opinions.Record:
    with shop.store.read() as connection:
        (found,) = opinions.track_records(connection)
    assert found.validator == VALIDATOR.address
    return found


def settled(shop: Shop) -> None:
    """Nothing is left that pays, trains, slashes or ejects."""
    for table in (schema.credits, schema.groups, schema.slashes, schema.intents, schema.drift):
        assert count(shop, table) == 0, table.name
    assert shop.node_status(NODE.address) == "active"


def test_an_honest_planted_file_brings_nothing_but_a_mark_for_its_validator(shop: Shop) -> None:
    row = of_kind(shop, honest=True)
    before = record(shop) if count(shop, schema.opinions) else None
    shop.judge(row)
    assert count(shop, schema.credits) == 1, "the validator's books look as for any file"
    assert reveal(shop.store, shop.context, PLANTED, shop.now) == [row.digest]
    settled(shop)
    after = record(shop)
    assert after.honest == (before.honest if before else 0) + 1
    assert after.accused == 0
    assert reveal(shop.store, shop.context, PLANTED, shop.now) == [], "once"


def test_an_honest_planted_file_that_is_rejected_is_a_false_accusation(shop: Shop) -> None:
    row = of_kind(shop, honest=True)
    shop.judge(row, Reason.WRONG_SAMPLING)
    assert shop.node_status(NODE.address) == "quarantined"
    reveal(shop.store, shop.context, PLANTED, shop.now)
    settled(shop)
    assert record(shop).accused == 1


def test_a_planted_lie_is_caught_or_missed_and_costs_its_node_nothing(shop: Shop) -> None:
    caught = of_kind(shop, honest=False)
    missed_before = record(shop).missed if count(shop, schema.opinions) else 0
    shop.judge(caught, Reason.WRONG_ACTIVATIONS)
    reveal(shop.store, shop.context, PLANTED, shop.now)
    settled(shop)
    assert record(shop).missed == missed_before
    missed = of_kind(shop, honest=False)
    shop.judge(missed)
    reveal(shop.store, shop.context, PLANTED, shop.now)
    settled(shop)
    found = record(shop)
    assert found.missed > missed_before
    assert found.lying >= 2


def test_no_planted_file_is_ever_rooted_or_sealed_before_or_after_its_verdict(shop: Shop) -> None:
    without = PLANTED.accounts
    rows = [shop.submit(NODE) for _ in range(RUN.root_submissions)]
    for row in rows:
        shop.judge(row)
    with shop.store.read() as connection:
        assert free_groups(connection, step=0, max_staleness=2), "its groups lie ready"
    seal = (shop.store, shop.objects, MANAGER, shop.context, shop.now)
    assert seal_ready_batches(*seal, without) == []
    shop.now.time += RUN.root_seconds
    assert post_roots(shop.store, shop.objects, shop.context, shop.now, without) == []
    paid = shop.submit(OTHER)
    shop.now.time += RUN.root_seconds
    assert len(post_roots(shop.store, shop.objects, shop.context, shop.now, without)) == 1
    assert shop.row(paid.digest).root_id is not None
    reveal(shop.store, shop.context, PLANTED, shop.now)
    assert post_roots(shop.store, shop.objects, shop.context, shop.now) == [], "for good"
    assert all(shop.row(row.digest).root_id is None for row in rows)


def test_nothing_in_the_store_marks_a_planted_file_before_its_verdict(shop: Shop) -> None:
    planted, other = shop.submit(NODE), shop.submit(OTHER)
    apart = {
        name
        for name, value in vars(planted).items()
        if value != vars(other)[name]
        and name not in ("digest", "lease_digest", "node", "sha256", "size", "body", "receipt")
    }
    assert apart == {"received_at"}
    assert count(shop, schema.planted) == 0


def test_planted_files_count_in_a_nodes_history_like_any(shop: Shop) -> None:
    """Else a validator could tell the node by how many rows it has to draw."""
    shop.judge(shop.submit(NODE))
    reveal(shop.store, shop.context, PLANTED, shop.now)
    with shop.store.read() as connection:
        assert submissions.accepted_of(connection, NODE.address) == 1


def test_planted_nodes_get_their_share_of_leases_and_no_more(shop: Shop) -> None:
    def may(account: str) -> bool:
        with shop.store.read() as connection:
            return PLANTED.may_lease(connection, account, shop.now())  # type: ignore[arg-type]

    assert may(NODE.address)
    shop.submit(NODE)
    assert not may(NODE.address), "one in four"
    assert may(OTHER.address)
    for _ in range(3):
        shop.submit(OTHER)
    with shop.store.read() as connection:
        assert leases.given_to(connection, PLANTED.accounts, 0.0) == 1
    shop.now.time += 1
    shop.submit(OTHER)
    assert may(NODE.address)


def test_a_planted_file_that_nobody_judges_ends_without_a_mark(shop: Shop) -> None:
    row = shop.submit(NODE)
    shop.now.time += RUN.validity_seconds + 1
    assert reveal(shop.store, shop.context, PLANTED, shop.now) == [row.digest]
    assert count(shop, schema.planted) == 0


def test_half_of_the_planted_files_are_honest_and_the_rest_lie_in_every_way() -> None:
    kinds = [planting.kind(SECRET, sha256(str(i).encode())) for i in range(4000)]
    honest = kinds.count(planting.HONEST)
    assert 1850 < honest < 2150
    assert set(kinds) == {planting.HONEST, *planting.PLANTED_LIES}
    assert set(planting.PLANTED_LIES) <= set(LIES)
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
