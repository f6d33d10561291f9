"""The one form of all figures: rows with bars, one JSON object as the last line of output."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from devnet.origin import ROOT as ROOT
from devnet.origin import commit as commit
from devnet.origin import machine
from prime_core.errors import UnavailableError, UserError


@dataclass(frozen=True)
class Row:
    """One figure. `bar` None: only reported. `peer` is measured in the same run, or `peer_name`
    says where it is from."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    better: Literal["lower", "higher"] = "lower"
    peer: float | None = None
    peer_name: str = ""

    @property
    def ok(self) -> bool:
        if self.bar is None:
            return True
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


def device_of(word: str) -> str:
    """A device by the name that torch has for it: "cpu", "cuda:0". Raises UserError if it is no
    such name, UnavailableError if there is no such device here."""
    kind, _, number = word.partition(":")
    if kind not in ("cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise UserError(f"{word!r} is not a device; known are cpu and cuda:N")
    if kind == "cuda":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= count:
            raise UnavailableError(
                f"there is no CUDA device {word} here ({count} found): --device cpu, or torch "
                "with CUDA on a machine with a GPU"
            )
    return word


def result(
    name: str, rows: Sequence[Row], packages: Sequence[str], quick: bool, device: str = "cpu"
) -> dict[str, Any]:
    """The JSON object of one bench; `packages` are those whose versions matter. What was measured
    on another `device` than the CPU has another name, and says which."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "load": f"1-minute load average {os.getloadavg()[0]:.1f} at the end",
        "bench": name if device == "cpu" else f"{name}-{device.partition(':')[0]}",
        "commit": commit(),
        "quick": quick,
        "machine": {**machine(), **({} if device == "cpu" else {"device": _gpu(device)})},
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
        "rows": [{**asdict(row), "ok": row.ok} for row in rows],
        "ok": all(row.ok for row in rows),
    }


def show(found: dict[str, Any], as_json: bool) -> None:
    """One line of JSON, or a table."""
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    for row in found["rows"]:
        bar = "" if row["bar"] is None else f"  bar {row['bar']:g}"
        peer = "" if row["peer"] is None else f"  {row['peer_name']} {row['peer']:g}"
        failed = "" if row["ok"] else "  NOT MET"
        print(f"{row['name']:26} {row['value']:14.4g} {row['unit']}{bar}{peer}{failed}")


def _gpu(device: str) -> str:  # pragma: no cover - needs an accelerator
    import torch

    name: str = torch.cuda.get_device_name(torch.device(device))
    return name


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
