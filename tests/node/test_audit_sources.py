"""Whom an audit asks for a policy."""

from __future__ import annotations

from prime_core.messages import RelayInfo
from prime_node.audit import serving

RELAY = RelayInfo(url="http://relay", versions=(80, 81))
ORIGIN = RelayInfo(url="http://origin", versions=tuple(range(18, 82)))


def test_every_announcer_of_a_policy_is_asked_for_it() -> None:
    assert serving(81, [RELAY, ORIGIN]) == ["http://relay", "http://origin"]
    assert serving(20, [RELAY, ORIGIN]) == ["http://origin"]


def test_a_policy_too_old_to_be_announced_is_asked_of_everybody() -> None:
    """Announcements name the newest alone, but the origin keeps what can still be slashed for."""
    assert serving(0, [RELAY, ORIGIN]) == ["http://relay", "http://origin"]
    assert serving(0, []) == []
