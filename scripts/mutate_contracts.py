"""Removes one guard of the contracts at a time and shows that a test notices.

    scripts/mutate_contracts.py [--only SUBSTRING] [--invariants] [--json]

Works on a copy; the tree is not touched. By default forge's unit tests are the judge; with
--invariants only the money suite is, and only the mutants that it is meant to catch are tried.
Exit code 1 if a mutant survives or a mutation no longer fits the sources.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """In `file` under contracts/src, `old` (found once) becomes `new`. `money`: the invariant suite
    alone must notice as well."""

    name: str
    file: str
    old: str
    new: str
    money: bool = False


MUTANTS = (
    Mutant(
        "stake can be unbonded while seats need it", "StakeVault.sol",
        "return Math.saturatingSub(active_, account.committed);", "return active_;",
    ),
    Mutant(
        "unbonding matures at once", "StakeVault.sol",
        "uint64(block.timestamp) + _unbonding;", "uint64(block.timestamp);", money=True,
    ),
    Mutant(
        "withdrawal ignores open slashes", "StakeVault.sol",
        "Math.min(queue[done].amount, available - amount);", "queue[done].amount;", money=True,
    ),
    Mutant(
        "slashes exceed the first snapshot", "StakeVault.sol",
        "account.openSlashes == 0 ? slashable_ : account.room;", "slashable_;", money=True,
    ),
    Mutant(
        "a slash forgets the queue", "StakeVault.sol",
        "if (held > fromBonded) _takeNewest(provider, account, held - fromBonded);", "", money=True,
    ),
    Mutant(
        "anyone settles slashes", "StakeVault.sol",
        "if (msg.sender != who) revert Errors.NotAllowed(msg.sender);", "", money=True,
    ),
    Mutant(
        "a fee on transfer is not noticed", "StakeVault.sol",
        "if (received != amount) revert Errors.TokenNotPlain(amount, received);", "",
    ),
    Mutant(
        "an invite admits twice", "Pools.sol",
        "if (deadline <= last.inviteDeadline) {", "if (false) {",
    ),
    Mutant(
        "a node escapes its old provider's liability", "Pools.sol",
        "if (last.provider != provider && block.timestamp < until) {", "if (false) {",
    ),
    Mutant(
        "leaving keeps the stake committed", "Pools.sol",
        "vault.release(seat.provider, uint256(p.stakePerClass) * seat.speedClass);", "", money=True,
    ),
    Mutant(
        "a slashed node is not banned", "Pools.sol",
        "_seats[pool][node].banned = true;", "",
    ),
    Mutant("class zero is admitted", "Pools.sol",
        "if (invite.speedClass == 0) revert Errors.ZeroClass();", ""),
    Mutant(
        "leaves are liable for ever", "Work.sol",
        "if (block.timestamp > until) revert Errors.ValidityOver(until, block.timestamp);", "",
    ),
    Mutant(
        "proofs are not checked", "Work.sol",
        "if (!MerkleProof.verifyCalldata(proof, r.root, leaf)) {", "if (false) {",
    ),
    Mutant(
        "anyone signs for a node", "Work.sol",
        "Statements.checkKey(node, leaf, nodeSignature);", "",
    ),
    Mutant(
        "reward roots come before validity ends", "Rewards.sol",
        "(uint256(epoch) + 1) * _epochLength + _validity;", "uint256(epoch) * _epochLength;",
    ),
    Mutant(
        "rewards are claimable at once", "Rewards.sol",
        "uint64 claimableAt = uint64(block.timestamp) + _rewardDelay;",
        "uint64 claimableAt = uint64(block.timestamp);",
    ),
    Mutant(
        "a claim is paid twice", "Rewards.sol",
        "claimed[pool][node] = cumulative;", "", money=True,
    ),
    Mutant(
        "a claim takes another pool's money", "Rewards.sol",
        "if (amount > reserved) revert Errors.ReserveExceeded(reserved, amount);",
        "if (amount > reserved) reserved = amount;",
    ),
    Mutant(
        "a disabled root keeps its reserve", "Rewards.sol",
        "f.reserved -= taken;", "", money=True,
    ),
    Mutant(
        "a voided root comes to life again", "Rewards.sol",
        "_roots[pool][voided].index = type(uint64).max;", "",
    ),
    Mutant(
        "a refund takes what is owed", "Rewards.sol",
        "uint256 amount = _funds[pool].free;",
        "uint256 amount = _funds[pool].free + _funds[pool].reserved;", money=True,
    ),
    Mutant(
        "a submission is slashed twice", "Slasher.sol",
        "if (proposalOf[leaf] != 0) revert Errors.AlreadyProposed(leaf, proposalOf[leaf]);", "",
    ),
    Mutant(
        "no window before execution", "Slasher.sol",
        "Entry memory p = _in(id, State.Proposed);\n"
        "        if (block.timestamp < p.deadline) revert Errors.WindowOpen(id, p.deadline);",
        "Entry memory p = _in(id, State.Proposed);",
    ),
    Mutant(
        "a proposal is executed twice", "Slasher.sol",
        "_entries[id].state = State.Executed;", "", money=True,
    ),
    Mutant(
        "a proposer judges itself", "Slasher.sol",
        "if (number == p.number) revert Errors.OwnProposal(id, msg.sender);", "",
    ),
    Mutant(
        "a cancelled dispute keeps the deposit", "Slasher.sol",
        "if (hasDeposit && disputeDeposit > 0)", "if (false)", money=True,
    ),
    Mutant(
        "downtime can be slashed", "Slasher.sol",
        "if (reason == 0 || reason > LAST_SLASHABLE_REASON) revert Errors.BadReason(reason);", "",
    ),
    Mutant(
        "the guardian never retires", "Slasher.sol",
        "if (block.timestamp >= guardianEnds) revert Errors.GuardianEnded(guardianEnds);", "",
    ),
)  # fmt: skip


def judge(root: Path, invariants: bool) -> tuple[bool, str]:
    """Whether forge's tests pass in `root`, and why not."""
    which = "--match-contract" if invariants else "--no-match-contract"
    done = subprocess.run(
        [str(root / "scripts" / "forge"), "test", which, "MoneyInvariant"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "Compiler run failed" in done.stdout + done.stderr:
        sys.exit(f"a mutant does not compile:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line.strip() for line in done.stdout.splitlines() if line.startswith("[FAIL")]
    return done.returncode == 0, failed[0] if failed else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only mutants whose name holds this")
    parser.add_argument("--invariants", action="store_true", help="the money suite is the judge")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [
        m for m in MUTANTS if arguments.only in m.name and (m.money or not arguments.invariants)
    ]
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for part in ("contracts/src", "tests/contracts", "tests/vectors", "scripts"):
            shutil.copytree(ROOT / part, copy / part)
        shutil.copy(ROOT / "foundry.toml", copy)
        (copy / "node_modules").symlink_to(ROOT / "node_modules")
        (copy / ".venv").symlink_to(ROOT / ".venv")
        (copy / "protocol/chain").mkdir(parents=True)
        shutil.copytree(ROOT / "protocol/chain/abi", copy / "protocol/chain/abi")
        for mutant in chosen:
            path = copy / "contracts" / "src" / mutant.file
            source = path.read_text()
            if source.count(mutant.old) != 1:
                sys.exit(f"{mutant.name}: {source.count(mutant.old)} places in {mutant.file}")
            path.write_text(source.replace(mutant.old, mutant.new))
            survived, why = judge(copy, arguments.invariants)
            path.write_text(source)
            results.append({"mutant": mutant.name, "killed": not survived, "by": why})
            if not arguments.json:
                print(f"{'SURVIVED' if survived else 'killed  '} {mutant.name}: {why}", flush=True)
    killed = sum(1 for result in results if result["killed"])
    if arguments.json:
        print(json.dumps({"killed": killed, "mutants": len(results), "results": results}))
    else:
        print(f"{killed} of {len(results)} killed")
    return int(killed < len(results))


if __name__ == "__main__":
    sys.exit(main())
