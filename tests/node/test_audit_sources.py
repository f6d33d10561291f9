"""Whom an audit asks for a policy, and what it makes of published objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prime_core.encoding import sha256
from prime_core.errors import MalformedError
from prime_core.messages import RelayInfo
from prime_node.audit import _values, serving

RELAY = RelayInfo(url="http://relay", versions=(80, 81))
ORIGIN = RelayInfo(url="http://origin", versions=tuple(range(18, 82)))


def test_every_announcer_of_a_policy_is_asked_for_it() -> None:
    assert serving(81, [RELAY, ORIGIN]) == ["http://relay", "http://origin"]
    assert serving(20, [RELAY, ORIGIN]) == ["http://origin"]


def test_a_policy_too_old_to_be_announced_is_asked_of_everybody() -> None:
    """Announcements name the newest alone, but the origin keeps what can still be slashed for."""
    assert serving(0, [RELAY, ORIGIN]) == ["http://relay", "http://origin"]
    assert serving(0, []) == []


@pytest.mark.parametrize("data", [b"", b"<html>", b"\xff", b"[" * 10_000, b'{"a": 1} more'])
def test_a_published_object_that_is_not_json_is_malformed(data: bytes) -> None:
    """Anyone may publish evidence."""
    library: Any = SimpleNamespace(object=lambda name, limit: data)
    with pytest.raises(MalformedError, match="is not JSON"):
        _values(library, sha256(data))
