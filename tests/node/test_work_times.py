"""Until when a node can root its own file, as Work.postLeaf has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prime_core.deployment import Periods
from prime_node import work

RECEIVED = 1000
SHORT = Periods(
    epoch_length=30, validity=90, slash_window=20, dispute_window=20, reward_delay=20, unbonding=180
)


def states(monkeypatch: pytest.MonkeyPatch, periods: Periods, valid_until: int, now: int) -> Any:
    """One receipted file that no one rooted, as the orchestrator says."""
    monkeypatch.setattr(work, "read_events", lambda *_, **__: [])
    monkeypatch.setattr(work, "_roots", lambda *_: {})
    link = SimpleNamespace(
        client=SimpleNamespace(agreed_block=lambda _: SimpleNamespace(time=now)),
        deployment=SimpleNamespace(periods=periods),
        pool=1,
    )
    entry = SimpleNamespace(
        submission_digest="0x01",
        receipt=SimpleNamespace(receipt=SimpleNamespace(received_at=RECEIVED)),
        body=SimpleNamespace(submission=SimpleNamespace(valid_until=valid_until)),
    )
    (found,) = work.standing(link, [entry], "http://pool")  # type: ignore[arg-type, list-item]
    return found.state, found.post_from, found.post_until


@pytest.mark.parametrize(
    ("now", "state"),
    [(1029, "waiting"), (1030, "forgotten"), (1060, "forgotten"), (1061, "too late")],
)
def test_a_file_without_a_liable_node_is_not_offered_for_rooting(
    monkeypatch: pytest.MonkeyPatch, now: int, state: str
) -> None:
    assert states(monkeypatch, SHORT, 1020, now) == (state, 1030, 1060)


@pytest.mark.parametrize(("now", "state"), [(1120, "forgotten"), (1121, "too late")])
def test_otherwise_it_can_be_rooted_for_one_validity(
    monkeypatch: pytest.MonkeyPatch, now: int, state: str
) -> None:
    assert states(monkeypatch, SHORT, 1500, now) == (state, 1030, 1120)
