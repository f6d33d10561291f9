"""Which exact classes are proven: files of exact leases in this pool, counted by class.

A class is proven by LEAST_ROWS rows of LEAST_PROVIDERS providers that validators compared bit for
bit, one of them as long as a row of the run may be, since the class's last mismatch that nothing
else explains. A mismatch is evidence only in classes that the run's calibration lists; the manager
signs that list (`orchestrator classes`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from prime_core.ids import Digest
from prime_core.run import RunDefinition
from prime_orchestrator.store import Connection, exact_classes
from prime_verify.proofs.thresholds import ProvenClass

LEAST_ROWS = 10_000
LEAST_PROVIDERS = 3


@dataclass(frozen=True)
class Standing:
    """What a pool knows of an exact class. `files` judged, `mismatched` of them; `rows` equal since
    the last unexplained mismatch, of `providers`, the `longest` in tokens."""

    key: Digest
    facts: dict[str, str]
    files: int
    mismatched: int
    rows: int
    providers: int
    longest: int

    def lacking(self, run: RunDefinition) -> list[str]:
        """Returns what the class still lacks to be proven for a run, as phrases; empty if it is
        proven."""
        found = []
        if self.rows < LEAST_ROWS:
            found.append(f"{LEAST_ROWS - self.rows} more rows")
        if self.providers < LEAST_PROVIDERS:
            found.append(f"{LEAST_PROVIDERS - self.providers} more providers")
        if self.longest < run.max_output_tokens:
            found.append(f"a row of {run.max_output_tokens} tokens")
        return found

    def proven(self) -> ProvenClass:
        """Returns the entry of a calibration. Call it only if nothing is lacking."""
        return ProvenClass(
            key=self.key, rows=self.rows, providers=self.providers, longest=self.longest
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def standings(connection: Connection) -> list[Standing]:
    """Returns every class with judged files, by key."""
    found = []
    for row in exact_classes.sums(connection):
        facts = exact_classes.facts_of(connection, row.key)
        found.append(
            Standing(
                row.key, json.loads(facts), row.files, row.mismatched, row.rows, row.providers,
                row.longest,
            )
        )  # fmt: skip
    return found
