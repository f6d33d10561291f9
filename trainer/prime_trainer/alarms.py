"""Alarms: values of a finished step that need a person's attention. Pure.

They never change the training itself; the run continues or ends after the step (`alarm_action`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prime_trainer.config import Settings


def alarms_of(line: Mapping[str, Any], settings: Settings) -> list[str]:
    """One phrase for each limit that the step's line exceeds; a non-finite value (stored as text)
    exceeds every limit."""
    found = []
    for name, limit in (
        ("ratio_max", settings.alarm_ratio),
        ("kl_old", settings.alarm_kl),
        ("kl_mismatch", settings.alarm_kl),
        ("kl_reference", settings.alarm_kl),
    ):
        value = line.get(name)
        if value is not None and (isinstance(value, str) or value > limit):
            found.append(f"{name} {_short(value)} above {limit:g}")
    entropy = line.get("entropy")
    if entropy is not None and (isinstance(entropy, str) or entropy < settings.alarm_entropy):
        found.append(f"entropy {_short(entropy)} below {settings.alarm_entropy:g}")
    if line.get("applied") is False:
        found.append(f"no step was taken: gradient norm {_short(line.get('gradient_norm'))}")
    return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
