"""Gas of each act, one transaction each in a warm pool of 400 nodes: forge runs it now and compares
with the committed snapshot; the ancestor's figures were measured on its own contracts (solc 0.8.28
via-IR)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from bench.form import ROOT, Row
from prime_core.errors import UnavailableError

PACKAGES = ("web3",)
SNAPSHOT = ROOT / "tests" / "contracts" / "snapshots" / "Gas.json"
FILES_64, FILES_1024 = 64, 1024
ANCESTOR = "PrimeIntellect protocol, measured"


def run(quick: bool) -> list[Row]:
    """Rows as docs name them. `quick` reads the committed snapshot without running forge.

    Raises UnavailableError if forge does not run or its figures are not the snapshot's.
    """
    if not quick:
        remeasure()
    gas = {name: int(value) for name, value in json.loads(SNAPSHOT.read_text()).items()}
    first_slash = gas["propose and execute, first of a provider"]
    return [
        Row("submit_file_64", gas["work root"] / FILES_64, "gas", 2700, peer=274_000,
            peer_name=ANCESTOR),
        Row("submit_file_1024", gas["work root of 1024"] / FILES_1024, "gas", 250, peer=274_000,
            peer_name=ANCESTOR),
        Row("node_to_member", gas["newcomer to member with permit"], "gas", 280_000, peer=742_000,
            peer_name=ANCESTOR),
        Row("leave_400", gas["leave at 400 nodes"], "gas", 60_000, peer=7_260_000,
            peer_name=ANCESTOR),
        Row("leave_40000", gas["leave at 40000 nodes"], "gas", 60_000),
        Row("eject_40000", gas["eject at 40000 nodes"], "gas", 60_000),
        Row("eject_400", gas["eject at 400 nodes"], "gas", 60_000, peer=7_260_000,
            peer_name=ANCESTOR),
        Row("propose_execute", gas["propose and execute"], "gas", 300_000),
        # Once in an account's life its record of losses takes a slot of its own.
        Row("propose_execute_first", first_slash, "gas", 320_000),
        # Once in a validator's life its account is bound to the manager: no pool is warm for that.
        Row("propose_execute_newcomer", gas["propose and execute, first of a validator"], "gas"),
        Row("claim", gas["later claim of a node"], "gas", 75_000, peer=156_000, peer_name=ANCESTOR),
        Row("claim_first", gas["first claim of a node"], "gas", 100_000, peer=156_000,
            peer_name=ANCESTOR),
        Row("claim_empty_account", gas["later claim to an empty account"], "gas", 100_000),
        Row("claim_in_batch", gas["batch claim, each of 63"], "gas", 75_000),
        Row("post_table", gas["table of two validators"], "gas", 220_000),
        Row("court_open", gas["court: open"], "gas", 250_000),
        Row("court_draw", gas["court: draw"], "gas", 300_000),
        Row("court_vote", gas["court: commit"] + gas["court: reveal"], "gas", 160_000),
        Row("court_settle", gas["court: settle"], "gas", 180_000),
        Row("reject_leaf", gas["reject of a leaf"], "gas", 100_000, peer=216_000,
            peer_name=ANCESTOR),
    ]  # fmt: skip


def remeasure(snapshots: Path = SNAPSHOT.parent) -> int:
    """Runs forge and compares with the figures in `snapshots`, which it leaves as they are.

    Returns the number of tests that passed. Raises UnavailableError if the figures differ, or if
    forge does not run.
    """
    options = {
        "FOUNDRY_PROFILE": "gas",
        "FOUNDRY_SNAPSHOTS": str(snapshots),
        "FORGE_SNAPSHOT_CHECK": "true",
        "FORGE_SNAPSHOT_EMIT": "false",
    }
    done = subprocess.run(
        [str(ROOT / "scripts" / "forge"), "test"],
        cwd=ROOT, env={**os.environ, **options}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    passed = re.search(r"(\d+) tests passed, 0 failed", done.stdout)
    if done.returncode != 0 or passed is None:
        said = f"{done.stdout[-800:]}{done.stderr[-400:]}"
        raise UnavailableError(f"forge's figures are not the snapshot's, or it did not run: {said}")
    return int(passed[1])
