"""Removes one guard of the contracts at a time and shows that a test notices.

    scripts/mutate_contracts.py [--only SUBSTRING] [--invariants | --both] [--check] [--json]
                                [--out FILE]

Works on a copy; the tree is not touched. By default forge's unit and fuzz tests are the judge; with
--invariants only the money suite is, and only the mutants that it is meant to catch are tried;
--both asks one after the other, which compiles each mutant once. Tests are linked to the contracts
when they run, so a mutant costs one compilation of the contract that it is in; before the first,
contracts compiled in this way must be those that forge compiles, and the judges must pass them.
--check compiles nothing: it says whether every mutation still fits the sources. --out writes the
score after each mutant (bench/results/mutations-contracts.json is the committed one: results of
mutants that are not tried now stay, those of mutants that are no more go).
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from contract_mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent


TESTS, INVARIANTS = "tests", "invariants"
SKIPPED = ("Gas.t.sol", "Vectors.t.sol")
"""What judges neither rules nor money: figures, and digests shared with Python."""
CONTRACTS = ("PrimeToken", "Registry", "StakeVault", "Pools", "Work", "Rewards", "Slasher", "Court")
PARTS = {
    "PoolState.sol": ("Pools",),
    "Terms.sol": ("Slasher",),
    "libraries/Queue.sol": ("StakeVault",),
    "WindowTime.sol": ("StakeVault", "Work", "Slasher", "Rewards", "Court"),
    "libraries/Statements.sol": CONTRACTS,
}
"""Contracts whose code a file that is none of them is part of. They know each other by call only,
so a mutant of one changes no other's code."""


class Court:
    """A copy of contracts and tests, compiled once; `root` is its folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        copy_tree(root)
        self._forge("build", "contracts/src", "--build-info", "--out", "whole")
        (info,) = (root / "whole" / "build-info").glob("*.json")
        given = json.loads(info.read_text())["input"]
        self._input = {key: given[key] for key in ("language", "sources", "settings")}
        self._forge("build")
        self._honest = self.compile("", CONTRACTS)
        for name, code in self._honest.items():
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
        """What the tests deploy from now on."""
        for name, code in codes.items():
            body = json.loads(self._artifact(name).read_text())
            body["bytecode"]["object"] = "0x" + code
            self._artifact(name).write_text(json.dumps(body))

    def mutate(self, mutant: Mutant) -> None:
        """Puts a mutant in the place of what it mutates."""
        names = PARTS.get(mutant.file, (mutant.file.removesuffix(".sol"),))
        source = (self.root / "contracts" / "src" / mutant.file).read_text()
        codes = self.compile(mutant.file, names, source.replace(mutant.old, mutant.new))
        if codes == {name: self._honest[name] for name in names}:
            sys.exit(f"{mutant.name}: it changes no code")
        self.put(self._honest | codes)

    def pardon(self) -> None:
        """Puts the contracts as they are back."""
        self.put(self._honest)

    def judge(self, judge_name: str) -> tuple[bool, str]:
        """Whether forge's tests pass, and why not. The first failure ends the run."""
        which = "--match-contract" if judge_name == INVARIANTS else "--no-match-contract"
        done = self._forge("test", "--fail-fast", which, "MoneyInvariant")
        if "Compiling" in done.stdout:
            sys.exit("forge compiled again: it did not judge the mutant")
        failed = [line.strip() for line in done.stdout.splitlines() if line.startswith("[FAIL")]
        if done.returncode and not failed:
            sys.exit(f"forge judged nothing:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.returncode == 0, failed[0][:200] if failed else ""


def copy_tree(to: Path) -> None:
    """What the judges compile, without the tests that they do not run."""
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
    """A judge's score: `new` results, and of `before` those of mutants that still are."""
    known = {mutant.name for mutant in MUTANTS}
    found = {str(r["mutant"]): r for r in [*before, *new] if r["mutant"] in known}
    results = [found[name] for name in sorted(found)]
    killed = sum(1 for result in results if result["killed"])
    return {"killed": killed, "mutants": len(results), "results": results}


def write_score(path: Path, results: dict[str, list[dict[str, object]]]) -> None:
    """Puts the results of each judge into the file."""
    score = json.loads(path.read_text()) if path.exists() else {}
    for name, new in results.items():
        if new:
            score[name] = merged(score.get(name, {}).get("results", []), new)
    path.write_text(json.dumps(score, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only mutants whose name holds this")
    parser.add_argument("--invariants", action="store_true", help="the money suite is the judge")
    parser.add_argument("--both", action="store_true", help="the tests, then the money suite")
    parser.add_argument("--check", action="store_true", help="do the mutations fit the sources?")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="the score's file")
    arguments = parser.parse_args()
    wrong = misfits()
    if wrong or arguments.check:
        print("\n".join(wrong) or f"{len(MUTANTS)} mutations fit the sources")
        return int(bool(wrong))
    judges = [INVARIANTS] if arguments.invariants else [TESTS]
    if arguments.both:
        judges = [TESTS, INVARIANTS]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    results: dict[str, list[dict[str, object]]] = {name: [] for name in judges}
    with tempfile.TemporaryDirectory() as temporary:
        court = Court(Path(temporary))
        for name in judges:
            passed, why = court.judge(name)
            if not passed:
                sys.exit(f"the contracts as they are do not pass the {name}: {why}")
        for mutant in (m for m in MUTANTS if arguments.only in m.name):
            chosen = [name for name in judges if name == TESTS or mutant.money]
            if chosen:
                court.mutate(mutant)
            for name in chosen:
                survived, why = court.judge(name)
                results[name].append(
                    {"mutant": mutant.name, "killed": not survived, "by": why, "date": today}
                )
                if not arguments.json:
                    end = "SURVIVED" if survived else "killed  "
                    print(f"{end} by {name}: {mutant.name}: {why}", flush=True)
            court.pardon()
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
