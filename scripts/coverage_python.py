"""Lines and branches of our packages that the tests reach, child processes included.

    scripts/coverage_python.py [--out FILE] [WORD FOR PYTEST …]

Measures all tests but whole networks, `make soak` and `make gpu`, with two workers, or those that
the words name. Exits with
pytest's status if a test fails; the result is written all the same, with that status.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "var" / "coverage"
USUAL = ("-n", "2", "--dist", "loadfile", "--ignore", "tests/e2e", "-m", "not soak and not gpu")
COUNTS = {
    "lines": "num_statements",
    "linesHit": "covered_lines",
    "branches": "num_branches",
    "branchesHit": "covered_branches",
}


def coverage(*words: str) -> int:
    """Runs coverage (settings: pyproject.toml) and returns its exit status."""
    return subprocess.run(
        [sys.executable, "-m", "coverage", *words], cwd=ROOT, check=False
    ).returncode


def by_package(files: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Counts by package, from coverage's own report by file."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    for name, report in files.items():
        package = next(part for part in Path(name).parts if part.startswith("prime_"))
        for count, source in COUNTS.items():
            found[package][count] += report["summary"][source]
    return dict(sorted(found.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "coverage.json")
    arguments, words = parser.parse_known_args()
    DATA.mkdir(parents=True, exist_ok=True)
    coverage("erase")
    status = coverage("run", "-m", "pytest", "-q", *(words or USUAL))
    coverage("combine", "--quiet")
    if failed := coverage("json", "--quiet", "-o", str(DATA / "files.json")):
        return failed
    packages = by_package(json.loads((DATA / "files.json").read_text())["files"])
    total = {count: sum(one[count] for one in packages.values()) for count in COUNTS}
    result = {
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "tests": " ".join(words or USUAL),
        "pytest_status": status,
        "lines": round(total["linesHit"] / total["lines"], 4),
        "branches": round(total["branchesHit"] / total["branches"], 4),
        "total": total,
        "packages": packages,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"lines {result['lines']:.2%}, branches {result['branches']:.2%}: {arguments.out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
