"""Lines and branches of contracts/src that forge's unit and fuzz tests reach.

    scripts/coverage_contracts.py [--json] [--out FILE]

Works on a copy without the gas and invariant suites, so their luck counts for nothing. Coverage
needs the optimizer off, where the plain pipeline runs out of stack, so the IR one compiles:
minutes, not seconds. Exit code 1 under 98 % of lines or 95 % of branches.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES, BRANCHES = 0.98, 0.95
SKIPPED = (
    "Gas.t.sol",
    "Court.invariant.t.sol",
    "Money.invariant.t.sol",
    "Handler.sol",
    "StakeActs.sol",
    "Books.sol",
)


def measure(copy: Path) -> str:
    """Forge's lcov report of the tests in `copy`. Exits with forge's words if it fails."""
    for part in ("contracts/src", "tests/contracts", "tests/vectors", "scripts"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns(*SKIPPED))
    shutil.copy(ROOT / "foundry.toml", copy)
    (copy / "node_modules").symlink_to(ROOT / "node_modules")
    if (ROOT / ".venv").exists():
        (copy / ".venv").symlink_to(ROOT / ".venv")
    shutil.copytree(ROOT / "protocol/prime_chain/abi", copy / "protocol/prime_chain/abi")
    done = subprocess.run(
        [str(copy / "scripts/forge"), "coverage", "--ir-minimum", "--report", "lcov"],
        cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"forge coverage failed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    return (copy / "lcov.info").read_text()


def tally(lcov: str) -> dict[str, dict[str, int]]:
    """File under contracts/src → lines and branches, found and hit (lcov's LF, LH, BRF, BRH)."""
    names = {"LF": "lines", "LH": "linesHit", "BRF": "branches", "BRH": "branchesHit"}
    found: dict[str, dict[str, int]] = {}
    file = ""
    for line in lcov.splitlines():
        key, _, value = line.partition(":")
        if key == "SF":
            file = value
        elif key in names and file.startswith("contracts/src/"):
            found.setdefault(file, {})[names[key]] = int(value)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="where the result is written as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        files = tally(measure(Path(temporary)))
    total = {name: sum(f[name] for f in files.values()) for name in next(iter(files.values()))}
    lines = total["linesHit"] / total["lines"]
    branches = total["branchesHit"] / total["branches"]
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "lines": round(lines, 4),
        "branches": round(branches, 4),
        "total": total,
        "files": files,
    }
    text = json.dumps(result, indent=1, sort_keys=True)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    if arguments.json:
        print(text)
    else:
        for name, f in sorted(files.items()):
            line, branch = f"{f['linesHit']}/{f['lines']}", f"{f['branchesHit']}/{f['branches']}"
            print(f"{name}: lines {line}, branches {branch}")
        print(f"lines {lines:.1%}, branches {branches:.1%}")
    return int(lines < LINES or branches < BRANCHES)


if __name__ == "__main__":
    sys.exit(main())
