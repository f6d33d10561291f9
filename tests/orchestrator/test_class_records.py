"""What the store keeps of exact classes, on both databases."""

from __future__ import annotations

from typing import Any

from orchestrator_world import signer

from prime_core.encoding import sha256
from prime_core.ids import Digest
from prime_core.node import Hardware
from prime_engine.exact import NumericClass
from prime_orchestrator.store import Store, exact_classes, nodes
from prime_orchestrator.store.exact_classes import SumRow

NUMERIC = NumericClass({"engine": "plain/1"}, Digest(sha256(b"fingerprint")))
OTHER = NumericClass({"engine": "plain/1"}, Digest(sha256(b"another")))
ONE, TWO = (signer(number).address for number in (1, 2))
MACHINE = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())


def with_nodes(store: Store) -> Store:
    """The store with two nodes of one provider."""
    with store.begin() as connection:
        for node in (ONE, TWO):
            nodes.admit(
                connection, node, speed_class=1, hardware=MACHINE, runtime="process", now=0.0
            )
            nodes.set_member(connection, node, provider=signer(3).address)
    return store


def test_a_mismatch_that_nothing_explains_starts_a_classs_rows_again(either_store: Store) -> None:
    store = with_nodes(either_store)
    key = NUMERIC.key

    def judged(node: Any, *, mismatched: bool, explained: bool = False) -> SumRow:
        with store.begin() as connection:
            exact_classes.judged(
                connection, key, node, rows=4, longest=9, mismatched=mismatched,
                explained=explained,
            )  # fmt: skip
            (found,) = exact_classes.sums(connection)
            assert exact_classes.totals(connection, key) == (found.files, found.mismatched)
        return found

    assert judged(ONE, mismatched=False) == SumRow(key, 1, 0, 4, 9, 1)
    assert judged(TWO, mismatched=False) == SumRow(key, 2, 0, 8, 9, 1), "one provider"
    assert judged(TWO, mismatched=True, explained=True) == SumRow(key, 3, 1, 8, 9, 1)
    assert judged(ONE, mismatched=True) == SumRow(key, 4, 2, 0, 0, 0)
    assert judged(TWO, mismatched=False) == SumRow(key, 5, 2, 4, 9, 1)


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
        assert exact_classes.members(connection, [first, second]) == {
            first: frozenset({ONE, TWO}), second: frozenset({ONE}),
        }  # fmt: skip
        exact_classes.join(connection, ONE, 5, [second], now=2.0, oldest=0)
        exact_classes.join(connection, TWO, 7, [second], now=2.0, oldest=6)
        assert exact_classes.of_accounts(connection, [ONE, TWO]) == {
            (ONE, 5): second, (TWO, 7): second,
        }  # fmt: skip
