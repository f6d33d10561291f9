"""Traces cost nothing unless a collector is named, and need an extra that is named if it is not."""

from __future__ import annotations

import sys

import pytest

from prime_core import tracing
from prime_core.errors import UserError
from prime_core.ids import Digest


def test_without_a_collector_nothing_is_imported_or_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tracing.start("program")
    assert not tracing.on()
    tracing.record_lease(Digest("0x" + "11" * 32), 1.0)
    tracing.record(Digest("0x" + "11" * 32), "judge", 1.0, 2.0)


def test_a_collector_without_the_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.ENDPOINTS[0], "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UserError, match="OpenTelemetry is not installed"):
        tracing.start("program")
