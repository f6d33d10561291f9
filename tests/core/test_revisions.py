"""What a revision may change, and which run a step's leases are of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import RUN

from prime_core.encoding import sha256
from prime_core.errors import NotFoundError, PolicyError, UntrustedError
from prime_core.ids import ZERO_DIGEST, Address
from prime_core.revisions import REVISABLE, RunHistory, check_revision, read_history
from prime_core.run import Chat, RunDefinition
from prime_core.task import Lease

FIRST = RUN
OTHERS = [FIRST.model_copy(update={"price_per_unit": price}) for price in range(11, 19)]


def other(value: Any) -> Any:
    """A value of the same kind that is not the same."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return str(sha256(value.encode())) if value.startswith("0x") else value + "x"
    return value


def test_every_field_but_those_named_stays_for_the_pools_life() -> None:
    seen = set()
    for name, value in FIRST.model_dump().items():
        if name in REVISABLE or other(value) == value:
            continue
        with pytest.raises(PolicyError, match=name):
            check_revision(FIRST, FIRST.model_copy(update={name: other(value)}))
        seen.add(name)
    assert {"base_model", "stake_per_seat", "slash_amount", "epoch_seconds", "calibration"} <= seen
    for name in ("task", "requirements", "budgets", "environment"):
        part = getattr(FIRST, name)
        field, value = next((k, v) for k, v in dict(part).items() if other(v) != v)
        changed = part.model_copy(update={field: other(value)})
        check_revision(FIRST, FIRST.model_copy(update={name: changed}))
    check_revision(FIRST, OTHERS[0])
    chat = Chat(template=ZERO_DIGEST)
    with pytest.raises(PolicyError, match="chat"):
        check_revision(FIRST, FIRST.model_copy(update={"chat": chat}))


def lease(step: int, run: RunDefinition) -> Lease:
    values = dict.fromkeys(Lease.model_fields, 0)
    digests = {"policy_digest": ZERO_DIGEST, "salt": ZERO_DIGEST, "run_digest": run.digest()}
    return Lease(**(values | digests | {"step": step, "node": Address("0x" + "11" * 20)}))


@given(st.sets(st.integers(1, 60), max_size=8), st.integers(0, 70))
def test_a_step_has_one_run_and_a_lease_must_name_it(starts: set[int], step: int) -> None:
    revisions = tuple(zip(sorted(starts), OTHERS, strict=False))
    history = RunHistory(FIRST, revisions)
    begun = [run for start, run in revisions if start <= step]
    expected = begun[-1] if begun else FIRST
    assert history.at(step) is expected
    assert history.most_worth(step) == max(run.most_worth for run in (FIRST, *begun))
    for run in (FIRST, *OTHERS):
        if run is expected:
            assert history.of_lease(lease(step, run)) is run
        else:
            with pytest.raises(UntrustedError, match="not that of step"):
                history.of_lease(lease(step, run))


def test_a_history_is_read_by_digest_and_believes_no_other_bytes() -> None:
    files = {run.digest(): run.raw() for run in (FIRST, OTHERS[0])}
    named = [(5, OTHERS[0].digest())]
    history = read_history(FIRST.digest(), named, files.__getitem__)
    assert history == RunHistory(FIRST, ((5, OTHERS[0]),))
    assert history.of(OTHERS[0].digest()).price_per_unit == 11
    with pytest.raises(NotFoundError):
        history.of(OTHERS[1].digest())
    with pytest.raises(UntrustedError, match="is not"):
        read_history(FIRST.digest(), named, lambda _: FIRST.raw())
