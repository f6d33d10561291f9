"""Removes one guard of the contracts at a time and shows that a test notices.

    scripts/mutate_contracts.py [--only SUBSTRING] [--invariants] [--check] [--json] [--out FILE]

Works on a copy; the tree is not touched. By default forge's unit tests are the judge; with
--invariants only the money suite is, and only the mutants that it is meant to catch are tried.
--check compiles nothing: it says whether every mutation still fits the sources. --out writes the
score (bench/results/mutations-contracts.json is the committed one: --out merges into it).
Exit code 1 if a mutant survives or a mutation no longer fits the sources.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from contract_mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent


def judge(root: Path, invariants: bool) -> tuple[bool, str]:
    """Whether forge's tests pass in `root`, and why not. The first failure ends the run."""
    which = "--match-contract" if invariants else "--no-match-contract"
    done = subprocess.run(
        [str(root / "scripts" / "forge"), "test", "--fail-fast", which, "MoneyInvariant"],
        cwd=root, capture_output=True, text=True, check=False,
        env={**os.environ, "FOUNDRY_FUZZ_RUNS": "32"},
    )  # fmt: skip
    if "Compiler run failed" in done.stdout + done.stderr:
        sys.exit(f"a mutant does not compile:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line.strip() for line in done.stdout.splitlines() if line.startswith("[FAIL")]
    return done.returncode == 0, failed[0][:200] if failed else ""


def copy_tree(to: Path, invariants: bool) -> None:
    """What the judge compiles, without the tests that it does not run."""
    skipped: tuple[str, ...] = ("Gas.t.sol", "Vectors.t.sol")
    if invariants:
        skipped = tuple(
            p.name for p in (ROOT / "tests/contracts").glob("*.t.sol") if "Money" not in p.name
        )
    else:
        skipped += ("Money.invariant.t.sol", "Handler.sol", "StakeActs.sol", "Books.sol")
    for part in ("contracts/src", "tests/contracts", "tests/vectors", "scripts"):
        shutil.copytree(ROOT / part, to / part, ignore=shutil.ignore_patterns(*skipped))
    shutil.copy(ROOT / "foundry.toml", to)
    (to / "node_modules").symlink_to(ROOT / "node_modules")
    if (ROOT / ".venv").exists():
        (to / ".venv").symlink_to(ROOT / ".venv")


def misfits() -> list[str]:
    """Names of the mutants whose `old` is not found exactly once."""
    return [
        f"{m.name}: {(ROOT / 'contracts/src' / m.file).read_text().count(m.old)} places in {m.file}"
        for m in MUTANTS
        if (ROOT / "contracts" / "src" / m.file).read_text().count(m.old) != 1
    ]


def write_score(path: Path, judge_name: str, results: list[dict[str, object]]) -> None:
    """Puts a score beside those of other judges."""
    before = json.loads(path.read_text()) if path.exists() else {}
    before.pop("note", None)
    before[judge_name] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "killed": sum(1 for result in results if result["killed"]),
        "mutants": len(results),
        "results": results,
    }
    path.write_text(json.dumps(before, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only mutants whose name holds this")
    parser.add_argument("--invariants", action="store_true", help="the money suite is the judge")
    parser.add_argument("--check", action="store_true", help="do the mutations fit the sources?")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="the score's file")
    arguments = parser.parse_args()
    wrong = misfits()
    if wrong or arguments.check:
        print("\n".join(wrong) or f"{len(MUTANTS)} mutations fit the sources")
        return int(bool(wrong))
    chosen = [
        m for m in MUTANTS if arguments.only in m.name and (m.money or not arguments.invariants)
    ]
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        copy_tree(copy, arguments.invariants)
        for mutant in chosen:
            path = copy / "contracts" / "src" / mutant.file
            source = path.read_text()
            path.write_text(source.replace(mutant.old, mutant.new))
            survived, why = judge(copy, arguments.invariants)
            path.write_text(source)
            results.append({"mutant": mutant.name, "killed": not survived, "by": why})
            if not arguments.json:
                print(f"{'SURVIVED' if survived else 'killed  '} {mutant.name}: {why}", flush=True)
    killed = sum(1 for result in results if result["killed"])
    if arguments.out is not None and not arguments.only:
        write_score(arguments.out, "invariants" if arguments.invariants else "tests", results)
    if arguments.json:
        print(json.dumps({"killed": killed, "mutants": len(results), "results": results}))
    else:
        print(f"{killed} of {len(results)} killed")
    return int(killed < len(results))


if __name__ == "__main__":
    sys.exit(main())
