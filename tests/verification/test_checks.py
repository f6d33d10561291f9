"""The list of checks: its table in docs/verification.md, its reasons, and its order."""

from __future__ import annotations

import gc
import re
import weakref
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core import encoding, seeds
from prime_core.ids import ZERO_DIGEST
from prime_core.verdict import MANAGERS_OWN, Reason
from prime_verify.case import Case
from prime_verify.checks import CHECKS, ordered
from prime_verify.proofs.thresholds import LEAST_TOKENS
from prime_verify.replay_checks import draw
from prime_verify.verify import verify_file

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
GIVEN_ELSEWHERE = {Reason.NONE, Reason.LATE} | MANAGERS_OWN
"""An accepted file's, and those that no look at the file gives. LATE follows from the receipt."""
FOR_ANY_CHECK = {Reason.OUT_OF_RESOURCES}


def test_the_documented_table_is_the_list_of_checks() -> None:
    table = PAGE.read_text().split("| check | what it compares | reasons | outcomes |\n", 1)[1]
    rows = re.findall(r"^\| (.+?) \| .+ \| (.+?) \| (.+?) \|$", table.split("\n\n", 1)[0], re.M)
    assert rows == [
        (
            check.name,
            ", ".join(reason.name for reason in check.reasons),
            ", ".join(outcome.name.lower() for outcome in check.outcomes),
        )
        for check in CHECKS
    ]


def test_names_are_different_and_every_reason_has_a_check() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    given = {reason for check in CHECKS for reason in check.reasons}
    assert given == set(Reason) - GIVEN_ELSEWHERE - FOR_ANY_CHECK


@pytest.mark.parametrize(
    ("tools", "grader", "rewards_first"), list(product((False, True), repeat=3))
)
def test_only_what_has_a_time_limit_waits_for_the_replay(
    tools: bool, grader: bool, rewards_first: bool
) -> None:
    environment = SimpleNamespace(tools_may_give_up=tools, may_give_up=grader)
    case: Any = SimpleNamespace(environment=environment, rewards_first=rewards_first)
    found = [check.name for check in ordered(case)]
    late = ["replies"] * tools + ["rewards"] * (grader and not rewards_first)
    assert found == [check.name for check in CHECKS if check.name not in late] + late


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_a_judged_file_holds_its_engine_no_longer_than_its_case(world: Any, whole: bool) -> None:
    """Without the garbage collector: a validator that keeps one more policy needs twice the
    memory."""
    file = world.honest(7)
    data = file.data if whole else file.data[:-1]
    gc.collect()
    gc.disable()
    try:
        case = Case(
            data, file.signed, file.lease_digest, world.run, world.environment, world.policies,
            draw_secret=ZERO_DIGEST, submission_digest=file.lease_digest,
        )  # fmt: skip
        assert verify_file(case).reason is (Reason.NONE if whole else Reason.MALFORMED)
        gone = weakref.ref(case)
        del case
        assert gone() is None
    finally:
        gc.enable()


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=24),
    st.integers(1, 24),
    st.sampled_from([0, LEAST_TOKENS]),
    st.integers(0, 99),
)
def test_rows_are_drawn_until_they_have_enough_tokens(
    lengths: list[int], count: int, least: int, lot: int
) -> None:
    """The next row is drawn by the same order, so evidence names a draw that anyone repeats."""
    secret = encoding.sha256(bytes([lot]))
    found = draw(secret, secret, lengths, count, least)
    asked = seeds.drawn_rows(secret, secret, len(lengths), count)
    assert set(asked) <= set(found)
    assert found == seeds.drawn_rows(secret, secret, len(lengths), len(found))
    assert sum(lengths[number] for number in found) >= least or len(found) == len(lengths)
    if len(found) > len(asked):
        fewer = seeds.drawn_rows(secret, secret, len(lengths), len(found) - 1)
        assert sum(lengths[number] for number in fewer) < least
    assert draw(secret, secret, lengths, len(found), least) == found
