"""`orchestrator costs --files N`: its figures are those of the contracts' tests, its L1 data fee
that of the chain's oracle."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from devnet.deployed import Deployed, opinions_on
from prime_chain.costs import GAS_PRICE_ORACLE
from prime_core.checkpoint import PolicyStatement
from prime_core.encoding import merkle_proof, sha256
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.node import Invite
from prime_core.rollout import Submission
from prime_orchestrator.cli import costs
from prime_orchestrator.daily_costs import ACTS, Load, daily_costs

ROOT = Path(__file__).parents[2]
WEI_A_BYTE = 1000
# 1,000 wei for each byte of the size that getL1FeeUpperBound(uint256) gets:
#   PUSH1 4 CALLDATALOAD PUSH2 1000 MUL PUSH0 MSTORE PUSH1 32 PUSH0 RETURN
FJORD = "0x" + "6004" + "35" + "6103e8" + "02" + "5f" + "52" + "6020" + "5f" + "f3"
# Before Fjord: a revert for calldata of 36 bytes, else 1,000 wei for each byte of it:
#   CALLDATASIZE PUSH1 36 EQ PUSH1 18 JUMPI | CALLDATASIZE PUSH2 1000 MUL PUSH0 MSTORE
#   PUSH1 32 PUSH0 RETURN | JUMPDEST PUSH0 PUSH0 REVERT
ECOTONE = "0x3660241460125736" + "6103e8" + "02" + "5f52" + "60205ff3" + "5b5f5ffd"


def test_gas_is_what_the_contracts_tests_measure() -> None:
    snapshot = json.loads((ROOT / "tests/contracts/snapshots/Gas.json").read_text())
    assert {kind: act.gas for kind, act in ACTS.items()} == {
        "root": int(snapshot["work root"]),
        "reward_root": int(snapshot["later reward root"]),
        "propose": int(snapshot["propose"]),
        "execute": int(snapshot["execute"]),
        "policy": int(snapshot["later policy"]),
        "join": int(snapshot["join"]),
        "eject": int(snapshot["eject at 400 nodes"]),
    }
    rows = json.loads((ROOT / "bench/results/gas.json").read_text())["rows"]
    recorded = {row["name"]: row["value"] for row in rows}
    assert ACTS["root"].gas == 64 * recorded["submit_file_64"]
    slash = ACTS["propose"].gas + ACTS["execute"].gas
    assert slash == pytest.approx(recorded["propose_execute"], rel=0.001)


def test_calldata_is_as_long_as_that_of_the_calls(deployed: Deployed) -> None:
    c, node = deployed.contracts, deployed.accounts[4]
    submission = Submission(
        pool=1, lease_digest=ZERO_DIGEST, node=node.address, step=1, policy_digest=ZERO_DIGEST,
        sha256=ZERO_DIGEST, size=10, rows=64, valid_until=1,
    )  # fmt: skip
    signature = node.sign(submission, deployed.deployment.domain_of(submission))
    leaves = [Digest(sha256(b"%d" % number)) for number in range(64)]
    said = opinions_on(deployed.deployment, submission, deployed.accounts[5:7])
    policy = PolicyStatement(pool=1, version=1, manifest_digest=ZERO_DIGEST)
    invite = Invite(pool=1, node=node.address, deadline=1)
    calls = {
        "root": c.work.post_root(1, ZERO_DIGEST, 64, ZERO_DIGEST),
        "reward_root": c.rewards.post_reward_root(1, 1, ZERO_DIGEST, 1, ZERO_DIGEST),
        "propose": c.slasher.propose(submission, signature, 1, merkle_proof(leaves, 7), said),
        "execute": c.slasher.execute(ZERO_DIGEST),
        "policy": c.pools.publish_policy(policy, signature),
        "join": c.pools.join(invite, signature),
        "eject": c.pools.eject(1, node.address),
    }
    sizes = {kind: len(call.data) for kind, call in calls.items()}
    assert sizes == {kind: act.data_bytes for kind, act in ACTS.items()}


def test_the_table_of_the_docs_is_computed() -> None:
    text = (ROOT / "docs/limits.md").read_text().partition("## Gas a day")[2]
    number = r"([\d,.]+)"
    rows = re.findall(
        rf"^\| {number}, (none|\d+) \| {number}, {number}[^|]*\| {number} \| {number} \| {number} "
        rf"\| {number} \|$",
        text,
        re.MULTILINE,
    )
    assert len(rows) == 5
    for files, slashes, seconds, submissions, roots, gas, ether, data in rows:
        load = Load(
            int(files.replace(",", "")), 0 if slashes == "none" else int(slashes),
            root_seconds=int(seconds), root_submissions=int(submissions.replace(",", "")),
        )  # fmt: skip
        found = daily_costs(load, 8453, None)
        total = sum(one.gas for one in found)
        shown = [f"{found[0].transactions:,}", f"{total / 1e6:,.0f}", f"{total / 1e11:.4f}",
                 f"{sum(one.l1_bytes for one in found) / 1e6:.1f}"]  # fmt: skip
        assert [roots, gas, ether, data] == shown


@pytest.mark.parametrize("oracle", [FJORD, ECOTONE])
def test_the_l1_data_fee_is_that_of_the_chains_oracle(deployed: Deployed, oracle: str) -> None:
    client, load = deployed.client, Load(100_000, 10, policies=50, joins=20, ejections=5)
    local = daily_costs(load, 31337, client)
    assert {one.l1_wei for one in local} == {None}
    words = ["--files", "100000", "--slashes", "10", "--policies", "50", "--joins", "20",
             "--ejections", "5", "--network", "local", "--rpc", deployed.url]  # fmt: skip
    deployed.anvil.rpc("anvil_setCode", GAS_PRICE_ORACLE, oracle)
    try:
        found = daily_costs(load, 31337, client)
        said = CliRunner().invoke(costs.app, [*words, "--json"], catch_exceptions=False)
        text = CliRunner().invoke(costs.app, words, catch_exceptions=False)
    finally:
        deployed.anvil.rpc("anvil_setCode", GAS_PRICE_ORACLE, "0x")
    assert [one.transactions for one in found] == [8640, 24, 10, 10, 50, 20, 5]
    for one in found:
        size = one.l1_bytes // one.transactions
        asked = size if oracle == FJORD else 4 + 64 + (size + 31) // 32 * 32
        assert one.l1_wei == one.transactions * asked * WEI_A_BYTE
    assert said.exit_code == text.exit_code == 0, said.output + text.output
    kinds = json.loads(said.stdout)["kinds"]
    assert [int(one["l1_wei"]) for one in kinds] == [one.l1_wei for one in found]
    assert [one["gas"] for one in kinds] == [one.gas for one in found]
    assert "for data on L1" in text.stdout


def test_without_an_endpoint_there_is_gas_and_no_price() -> None:
    answer = CliRunner().invoke(costs.app, ["--files", "1000"], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    gas = sum(one.gas for one in daily_costs(Load(1000), 8453, None))
    assert f"{gas:,} gas" in answer.stdout
    assert "add --rpc" in answer.stdout
