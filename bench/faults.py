"""One pool of 200 nodes under 20 faults of 18 kinds, next to the same pool without faults.

The run is `python -m devnet faults` (devnet/faults.py says what it consists of). `kept_KIND` is the
rate of accepted files from the start of a fault of that kind to the next fault, as a share of the
fault-free rate. A window of 24 s has 10 to 25 files.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench.form import Row
from devnet.faults import Report, Sizes, play

PACKAGES = ("psycopg", "uvicorn", "web3", "torch")
QUICK = Sizes(
    nodes=8, quiet=10, seconds=90, lasts=3, faults=18, throttle=2, rest=0, groups=16,
    lease_seconds=60, least_kept=0,
)  # fmt: skip


def run(quick: bool) -> list[Row]:
    """Plays the run in a temporary folder."""
    sizes = QUICK if quick else Sizes()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        report = play(Path(folder), sizes, lambda words: print(words, file=sys.stderr, flush=True))
    print(report.summary(), file=sys.stderr, flush=True)
    return rows(report, sizes)


def rows(report: Report, sizes: Sizes) -> list[Row]:
    """The rows of a report. `wrong` counts the sentences about what did not hold."""
    nothing = {
        "files_lost": f"of {report.receipts} files with a receipt",
        "void": "files without pay by the pool's fault",
        "trained_twice": "groups",
        "paid_twice": "nodes",
        "stake_moved": "honest nodes",
        "false_deaths": f"of {report.nodes} honest nodes, seen silent while they ran",
    }
    return [
        Row("kept", report.kept, "of the fault-free throughput", sizes.least_kept, "higher"),
        Row("quiet_files_s", report.quiet_rate, "accepted files/s without faults"),
        Row("files_s", report.rate, "accepted files/s with faults"),
        Row("survived", report.survived, f"of {len(report.windows)} faults",
            len(report.windows), "higher"),
        *(Row(name, getattr(report, name), unit, 0) for name, unit in nothing.items()),
        Row("liars_slashed", report.liars_slashed, "of 1 that joined with the first fault", 1,
            "higher"),
        Row("liars_out_s", report.liars_out or 0.0, "s until the liar got no more leases"),
        Row("exits", sum(report.exits.values()), "programs that ended by themselves"),
        Row("wrong", len(report.wrong), "findings that do not hold", 0),
        *(Row(f"kept_{kind}", kept, "of the fault-free throughput")
          for kind, kept in report.kept_by_kind.items()),
    ]  # fmt: skip
