"""Whole demos from a clean checkout, as a newcomer runs them: nine whole ones, and a short one.

    rest      both cores free: three whole demos, and one of five steps
    busy      as many busy loops as there are cores run as well
    one-core  the demo is bound to one core, with a time limit of its own

`--only rest|busy|one-core` runs one kind; every run is kept in `var/demo-runs/record.json`, and one
that the record has of the same commit is not made again. The checkout is a clone of this repository
at its commit, set up by `make setup`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.form import ROOT, Row, commit
from prime_core.errors import UnavailableError, UserError

PACKAGES = ("torch", "transformers")
KINDS = ("rest", "busy", "one-core")
RUNS = 3
LIMITS = {"rest": 900.0, "busy": 1500.0, "one-core": 2400.0}
"""Seconds after which a demo of each kind is ended and counts as failed."""
FOLDER = ROOT / "var" / "demo-runs"
RECORD = FOLDER / "record.json"
PAGE_MARK = "page: http"


@dataclass(frozen=True)
class Demo:
    """One `make demo`. `page_s`, `whole_s`: from its start, after setup; `findings` by name."""

    name: str
    ok: bool
    exit_code: int
    page_s: float | None
    whole_s: float
    findings: dict[str, bool]
    words: list[str]
    """What the findings say, and the last line of a run that failed."""


def run(quick: bool, only: str | None = None) -> list[Row]:
    """The rows, from all runs of this commit that the record has in the end. `quick`: the short
    demo alone. Raises UserError for an unknown kind or sources that are not committed."""
    if only is not None and only not in KINDS:
        raise UserError(f"--only {only!r} is none of {', '.join(KINDS)}")
    if commit().endswith("-dirty"):
        raise UserError("the checkout is a clone: commit the sources first")
    record = load()
    checkout = FOLDER / commit()
    if "setup_warm_s" not in record:
        record["setup_warm_s"] = set_up(checkout)
        save(record)
    wanted = ["five-steps"] if quick else []
    for kind in KINDS if not quick else ():
        if only in (None, kind):
            wanted += [f"{kind}-{number + 1}" for number in range(RUNS)]
            wanted += ["five-steps"] if kind == "rest" else []
    for name in wanted:
        if name not in record["runs"]:
            print(f"demo {name} …", file=sys.stderr, flush=True)
            record["runs"][name] = asdict(demo(checkout, name))
            save(record)
    return rows(record)


def rows(record: dict[str, Any]) -> list[Row]:
    """The figures of a record."""
    whole = {name: one for name, one in record["runs"].items() if name != "five-steps"}
    rest = [one for name, one in whole.items() if name.startswith("rest")]
    short = record["runs"].get("five-steps")
    found = [
        Row("runs_ok", sum(one["ok"] for one in whole.values()), f"of {len(whole)} run",
            RUNS * len(KINDS), "higher"),
        Row("setup_warm_s", record["setup_warm_s"], "s", 60),
    ]  # fmt: skip
    pages = [one["page_s"] for one in rest if one["page_s"] is not None]
    if pages:
        found.append(Row("page_s", max(pages), "s, longest at rest", 15))
    if rest:
        found.append(Row("whole_s", max(one["whole_s"] for one in rest), "s, longest at rest", 720))
    if short is not None:
        found.append(Row("five_steps_s", short["whole_s"], "s", 300))
        found.append(Row("five_steps_ok", float(short["ok"]), "", 1, "higher"))
    for kind in KINDS:
        if times := [one["whole_s"] for name, one in whole.items() if name.startswith(kind)]:
            name = kind.replace("-", "_")
            found.append(Row(f"{name}_median_s", statistics.median(times), f"s, {len(times)} runs"))
            ok = sum(one["ok"] for name, one in whole.items() if name.startswith(kind))
            found.append(Row(f"{name}_ok", ok, f"of {len(times)}"))
    return found


def load() -> dict[str, Any]:
    """The record of this commit's runs; an empty one if the record is of another commit."""
    if RECORD.is_file():
        record: dict[str, Any] = json.loads(RECORD.read_text())
        if record["commit"] == commit():
            return record
    return {"commit": commit(), "runs": {}}


def save(record: dict[str, Any]) -> None:
    """Writes the record."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1))


def set_up(checkout: Path) -> float:
    """Clones the commit and sets it up; returns how many seconds the setup took, with the
    packages that pip and npm have in their caches. Raises UnavailableError."""
    if checkout.exists():
        shutil.rmtree(checkout)
    checkout.parent.mkdir(parents=True, exist_ok=True)
    for words in (["git", "clone", "--quiet", str(ROOT), str(checkout)],
                  ["git", "-C", str(checkout), "checkout", "--quiet", _full_commit()]):  # fmt: skip
        subprocess.run(words, check=True)
    started = time.monotonic()
    done = subprocess.run(["make", "setup"], cwd=checkout, capture_output=True, check=False)
    if done.returncode != 0:
        raise UnavailableError(f"make setup failed: {done.stderr.decode(errors='replace')[-500:]}")
    return time.monotonic() - started


def demo(checkout: Path, name: str) -> Demo:
    """One `make demo` in the checkout, under the conditions that its name says."""
    kind = name.rpartition("-")[0]
    words = "--plain" + (" --steps 5" if name == "five-steps" else "")
    log = FOLDER / f"{name}.log"
    cores = sorted(os.sched_getaffinity(0))
    with _busy(len(cores) if kind == "busy" else 0), log.open("wb") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            ["make", "demo", f"ARGS={words}"],
            cwd=checkout, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        if kind == "one-core":  # its children inherit it
            os.sched_setaffinity(process.pid, cores[:1])
        page: float | None = None
        try:
            while process.poll() is None:
                seconds = time.monotonic() - started
                if page is None and PAGE_MARK in log.read_text(errors="replace"):
                    page = seconds
                if seconds > LIMITS.get(kind, LIMITS["rest"]):
                    break
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.wait(120)
        whole = time.monotonic() - started
    findings, said = {}, []
    written = checkout / "var" / "devnet" / "findings.json"
    if written.is_file():
        for row in json.loads(written.read_text())["findings"]:
            findings[row["name"]] = bool(row["ok"])
            said.append(f"{row['name']}: {row['because']}")
    ok = process.returncode == 0 and len(findings) == 6 and all(findings.values())
    if not ok:
        said += log.read_text(errors="replace").splitlines()[-3:]
    return Demo(name, ok, process.returncode, page, whole, findings, said)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """`count` processes that do nothing but use a core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _full_commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
