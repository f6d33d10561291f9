"""What the store keeps of exact classes, on both databases."""

from __future__ import annotations

from orchestrator_world import signer

from prime_core.encoding import sha256
from prime_core.ids import Digest
from prime_core.node import Hardware
from prime_engine.exact import NumericClass
from prime_orchestrator.store import Store, exact_classes, nodes
from prime_orchestrator.store.exact_classes import SumRow

NUMERIC = NumericClass({"engine": "plain/1"}, Digest(sha256(b"fingerprint")))
OTHER = NumericClass({"engine": "plain/1"}, Digest(sha256(b"another")))
KEY = NUMERIC.key
ONE, TWO = (signer(number).address for number in (1, 2))
MACHINE = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())


def with_nodes(store: Store) -> Store:
    """The store with nodes 1 to 5; the first two are of one provider."""
    with store.begin() as connection:
        for number in range(1, 6):
            node = signer(number).address
            nodes.admit(
                connection, node, speed_class=1, hardware=MACHINE, runtime="process", now=0.0
            )
            nodes.set_member(connection, node, provider=signer(10 + max(number, 2)).address)
    return store


def judged(
    store: Store, node: int, validator: int, rows: int = 4, *, mismatched: bool = False,
    explained: bool = False, longest: int = 9, again: bool = False,
) -> SumRow:  # fmt: skip
    with store.begin() as connection:
        exact_classes.judged(
            connection, KEY, signer(node).address, validator=signer(validator).address, rows=rows,
            longest=longest, mismatched=mismatched, explained=explained, again=again, now=1.0,
        )  # fmt: skip
        (found,) = exact_classes.sums(connection, 8)
        assert exact_classes.totals(connection, KEY) == (found.files, found.mismatched)
    return found


def test_no_rows_count_that_only_one_validator_compared(either_store: Store) -> None:
    store = with_nodes(either_store)
    assert judged(store, 1, 20, 100) == SumRow(KEY, 1, 0, 0, 0, 0, 0)
    assert judged(store, 3, 20, 100, longest=50) == SumRow(KEY, 2, 0, 0, 0, 0, 0)
    assert judged(store, 3, 21, 5) == SumRow(KEY, 3, 0, 0, 5, 9, 0)
    assert judged(store, 3, 22, 6, longest=12) == SumRow(KEY, 4, 0, 0, 11, 12, 1)
    assert judged(store, 3, 22, 6) == SumRow(KEY, 5, 0, 0, 17, 12, 1), "without the first"
    assert judged(store, 1, 21, 200).rows == 212, "without the second"


def test_a_file_that_is_decided_again_counts_once(either_store: Store) -> None:
    store = with_nodes(either_store)
    for validator in (20, 21):
        found = judged(store, 1, validator, 10)
    assert judged(store, 1, 20, 10, again=True) == found == SumRow(KEY, 2, 0, 0, 10, 9, 1)
    assert judged(store, 1, 20, mismatched=True, again=True) == SumRow(KEY, 2, 1, 1, 0, 0, 0)


def test_providers_count_with_enough_rows_each_and_once_for_all_their_nodes(
    either_store: Store,
) -> None:
    store = with_nodes(either_store)
    for validator in (20, 21):
        judged(store, 1, validator, 4)
        found = judged(store, 3, validator, 7)
    assert found.providers == 0
    for validator in (20, 21):
        found = judged(store, 2, validator, 4)
    assert found.providers == 1, "eight rows of two nodes of one provider"
    for validator in (20, 21):
        found = judged(store, 3, validator, 1)
    assert found.providers == 2


def test_a_provider_that_differed_counts_against_its_class_once_and_its_rows_do_not_count(
    either_store: Store,
) -> None:
    store = with_nodes(either_store)
    for validator in (20, 21):
        for node in (1, 3):
            found = judged(store, node, validator, 10)
    assert found == SumRow(KEY, 4, 0, 0, 20, 9, 2)
    assert judged(store, 2, 20, mismatched=True, explained=True).differing == 0
    assert judged(store, 2, 20, mismatched=True) == SumRow(KEY, 6, 2, 1, 10, 9, 1)
    assert judged(store, 1, 20, mismatched=True) == SumRow(KEY, 7, 3, 1, 10, 9, 1), "as before"
    assert judged(store, 1, 21, 10) == SumRow(KEY, 8, 3, 1, 10, 9, 1)
    assert judged(store, 4, 20, mismatched=True) == SumRow(KEY, 9, 4, 2, 10, 9, 1)


def test_an_account_has_the_classes_that_it_announced_last(either_store: Store) -> None:
    store = with_nodes(either_store)
    with store.begin() as connection:
        first, second = (exact_classes.add(connection, one, 5) for one in (NUMERIC, OTHER))
        assert exact_classes.add(connection, NUMERIC, 5) == first, "announced twice"
        found = exact_classes.get(connection, first)
        assert found is not None
        assert found.numeric() == NUMERIC
        assert exact_classes.facts_of(connection, NUMERIC.key) == '{"engine": "plain/1"}'
        exact_classes.join(connection, ONE, 5, [first, second], now=1.0, oldest=0)
        exact_classes.join(connection, TWO, 5, [first], now=1.0, oldest=0)
        assert {*exact_classes.of_policy(connection, 5, NUMERIC.key)} == {first, second}
        assert exact_classes.of_policy(connection, 6, NUMERIC.key) == []
        assert exact_classes.members(connection, [first, second], [ONE, TWO]) == {
            first: frozenset({ONE, TWO}), second: frozenset({ONE}),
        }  # fmt: skip
        assert exact_classes.members(connection, [first], [TWO]) == {first: frozenset({TWO})}
        exact_classes.join(connection, ONE, 5, [second], now=2.0, oldest=0)
        exact_classes.join(connection, TWO, 7, [second], now=2.0, oldest=6)
        assert exact_classes.of_accounts(connection, [ONE, TWO]) == {
            (ONE, 5): second, (TWO, 7): second,
        }  # fmt: skip
        assert exact_classes.forget(connection, 5) == frozenset()
        assert exact_classes.forget(connection, 6) == {second}, "of any account"
        assert exact_classes.of_accounts(connection, [ONE, TWO]) == {(TWO, 7): second}
