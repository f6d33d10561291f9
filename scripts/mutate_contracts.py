"""Removes one guard of the contracts at a time, and checks that a test fails.

    scripts/mutate_contracts.py [--only TEXT]... [--missing] [--invariants | --both] [--check]
                                [--json] [--out FILE]

The mutants are in scripts/contract_mutants.py. The script works on a copy; the tree is not changed.
By default it runs forge's unit and fuzz tests against each mutant. --invariants runs the money
invariants instead, against the mutants that they must find (`money`); --both runs both, and
compiles each mutant once.

--only takes the mutants whose name contains TEXT; repeat it for more. --out writes the results into
FILE after each mutant (the committed one is bench/results/mutations-contracts.json). It keeps the
results of mutants that are not tried now, and removes those of mutants that no longer exist. With
--missing, only mutants without a result in FILE are tried, so an interrupted run can continue.
--check only tests whether each mutation still fits the sources.

Tests link the contracts when they run, so a mutant costs one compilation of its contract. First,
the script checks that it compiles the unchanged contracts as forge does, and that they pass.
Exit code 1 if a mutant passes the tests, or if a mutation no longer fits the sources.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from contract_mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent


TESTS, INVARIANTS = "tests", "invariants"
SKIPPED = ("Gas.t.sol", "Vectors.t.sol")
"""Tests of gas figures and of digests shared with Python, which are not run."""
CONTRACTS = ("PrimeToken", "Registry", "StakeVault", "Pools", "Work", "Rewards", "Slasher", "Court")
PARTS = {
    "PoolState.sol": ("Pools",),
    "Terms.sol": ("Slasher",),
    "libraries/Queue.sol": ("StakeVault",),
    "WindowTime.sol": ("StakeVault", "Work", "Slasher", "Rewards", "Court"),
    "libraries/Statements.sol": CONTRACTS,
}
"""Contracts that contain the code of a file which is not a contract of its own. Contracts do not
contain each other's code, so a mutant of one changes only that one."""


class CompiledCopy:
    """A copy of contracts and tests in the folder `root`, compiled once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        copy_tree(root)
        self._forge("build", "contracts/src", "--build-info", "--out", "whole")
        (info,) = (root / "whole" / "build-info").glob("*.json")
        given = json.loads(info.read_text())["input"]
        self._input = {key: given[key] for key in ("language", "sources", "settings")}
        self._forge("build")
        self._unchanged = self.compile("", CONTRACTS)
        for name, code in self._unchanged.items():
            if json.loads(self._artifact(name).read_text())["bytecode"]["object"] != "0x" + code:
                sys.exit(f"{name} is compiled to other code than forge's")

    def _forge(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.root / "scripts" / "forge"), *words],
            cwd=self.root, capture_output=True, text=True, check=False,
            env={**os.environ, "FOUNDRY_FUZZ_RUNS": "32", "FOUNDRY_DYNAMIC_TEST_LINKING": "true"},
        )  # fmt: skip
        if words[0] == "build" and done.returncode:
            sys.exit(f"forge does not compile:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done

    def _artifact(self, name: str) -> Path:
        return self.root / "contracts" / "out" / f"{name}.sol" / f"{name}.json"

    def compile(self, file: str, names: Sequence[str], source: str = "") -> dict[str, str]:
        """Creation code (hex) of contracts, with `source` in place of contracts/src/`file`."""
        task = json.loads(json.dumps(self._input))
        if file:
            task["sources"][f"contracts/src/{file}"] = {"content": source}
        task["settings"]["outputSelection"] = {
            f"contracts/src/{name}.sol": {name: ["evm.bytecode.object"]} for name in names
        }
        done = subprocess.run(
            [str(self.root / "scripts" / "solc-shim"), "--standard-json"],
            input=json.dumps(task), capture_output=True, text=True, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        wrong = [e for e in answer.get("errors", ()) if e["severity"] == "error"]
        if wrong:
            sys.exit(f"a mutant does not compile: {wrong[0]['formattedMessage']}")
        files = answer["contracts"]
        return {
            name: files[f"contracts/src/{name}.sol"][name]["evm"]["bytecode"]["object"]
            for name in names
        }

    def put(self, codes: Mapping[str, str]) -> None:
        """Makes the tests deploy these codes (hex, by contract)."""
        for name, code in codes.items():
            body = json.loads(self._artifact(name).read_text())
            body["bytecode"]["object"] = "0x" + code
            self._artifact(name).write_text(json.dumps(body))

    def mutate(self, mutant: Mutant) -> None:
        """Makes the tests deploy the mutant."""
        names = PARTS.get(mutant.file, (mutant.file.removesuffix(".sol"),))
        source = (self.root / "contracts" / "src" / mutant.file).read_text()
        codes = self.compile(mutant.file, names, source.replace(mutant.old, mutant.new))
        if codes == {name: self._unchanged[name] for name in names}:
            sys.exit(f"{mutant.name}: it changes no code")
        self.put(self._unchanged | codes)

    def restore(self) -> None:
        """Makes the tests deploy the unchanged contracts again."""
        self.put(self._unchanged)

    def run(self, suite: str) -> tuple[bool, str]:
        """Returns whether the suite passes, and its first failure, which ends the run."""
        which = "--match-contract" if suite == INVARIANTS else "--no-match-contract"
        done = self._forge("test", "--fail-fast", which, "MoneyInvariant")
        if "Compiling" in done.stdout:
            sys.exit("forge compiled again, so it did not test the mutant")
        failed = [line.strip() for line in done.stdout.splitlines() if line.startswith("[FAIL")]
        if done.returncode and not failed:
            sys.exit(f"forge ran no test:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.returncode == 0, failed[0][:200] if failed else ""


def copy_tree(to: Path) -> None:
    """Copies what the tests need into the folder `to`, without the tests that are not run."""
    for part in ("contracts/src", "tests/contracts", "tests/vectors", "scripts"):
        shutil.copytree(ROOT / part, to / part, ignore=shutil.ignore_patterns(*SKIPPED))
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


def merged(before: list[dict[str, object]], new: list[dict[str, object]]) -> dict[str, object]:
    """Returns a suite's `new` results, with those of `before` whose mutants still exist."""
    known = {mutant.name for mutant in MUTANTS}
    found = {str(r["mutant"]): r for r in [*before, *new] if r["mutant"] in known}
    results = [found[name] for name in sorted(found)]
    killed = sum(1 for result in results if result["killed"])
    return {"killed": killed, "mutants": len(results), "results": results}


def scored(path: Path | None, suite: str) -> set[str]:
    """Names of the mutants that have a result of this suite in the file; empty without a file."""
    if path is None or not path.exists():
        return set()
    results = json.loads(path.read_text()).get(suite, {}).get("results", ())
    return {result["mutant"] for result in results}


def write_score(path: Path, results: dict[str, list[dict[str, object]]]) -> None:
    """Writes the results of each suite into the file."""
    score = json.loads(path.read_text()) if path.exists() else {}
    for name, new in results.items():
        if new:
            score[name] = merged(score.get(name, {}).get("results", []), new)
    path.write_text(json.dumps(score, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="only mutants whose name contains this")
    parser.add_argument(
        "--missing", action="store_true", help="only mutants that have no result in --out"
    )
    parser.add_argument(
        "--invariants", action="store_true", help="run the money invariants instead"
    )
    parser.add_argument(
        "--both", action="store_true", help="run the tests, then the money invariants"
    )
    parser.add_argument(
        "--check", action="store_true", help="only test whether the mutations fit the sources"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="file of results")
    arguments = parser.parse_args()
    wrong = misfits()
    if wrong or arguments.check:
        print("\n".join(wrong) or f"{len(MUTANTS)} mutations fit the sources")
        return int(bool(wrong))
    suites = [INVARIANTS] if arguments.invariants else [TESTS]
    if arguments.both:
        suites = [TESTS, INVARIANTS]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    results: dict[str, list[dict[str, object]]] = {name: [] for name in suites}
    with tempfile.TemporaryDirectory() as temporary:
        copy = CompiledCopy(Path(temporary))
        for name in suites:
            passed, why = copy.run(name)
            if not passed:
                sys.exit(f"the contracts as they are do not pass the {name}: {why}")
        done = {
            name: scored(arguments.out, name) if arguments.missing else set() for name in suites
        }
        for mutant in MUTANTS:
            if not any(text in mutant.name for text in arguments.only or [""]):
                continue
            chosen = [
                name
                for name in suites
                if (name == TESTS or mutant.money) and mutant.name not in done[name]
            ]
            if not chosen:
                continue
            copy.mutate(mutant)
            for name in chosen:
                survived, why = copy.run(name)
                results[name].append(
                    {"mutant": mutant.name, "killed": not survived, "by": why, "date": today}
                )
                if not arguments.json:
                    end = "SURVIVED" if survived else "killed  "
                    print(f"{end} by {name}: {mutant.name}: {why}", flush=True)
            copy.restore()
            if arguments.out is not None:
                write_score(arguments.out, results)
    found = [result for new in results.values() for result in new]
    killed = sum(1 for result in found if result["killed"])
    if arguments.json:
        print(json.dumps({"killed": killed, "mutants": len(found), "results": results}))
    else:
        print(f"{killed} of {len(found)} killed")
    return int(killed < len(found))


if __name__ == "__main__":
    sys.exit(main())
