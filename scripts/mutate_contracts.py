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
        "an entry in the queue matures early", "libraries/Queue.sol",
        " && queue[done].matureAt <= block.timestamp", "", money=True,
    ),
    Mutant(
        "unbonding matures at once", "StakeVault.sol",
        "uint64(block.timestamp) + _unbonding;", "uint64(block.timestamp);", money=True,
    ),
    Mutant(
        "withdrawal ignores open slashes", "libraries/Queue.sol",
        "Math.min(queue[done].amount, most - amount);", "queue[done].amount;", money=True,
    ),
    Mutant("slashes hold more than is there", "StakeVault.sol",
        "Math.min(amount, Math.min(room, slashable_));", "Math.min(amount, room);"),
    Mutant("stake added while a slash is open is out of reach", "StakeVault.sol",
        "if (account.openSlashes != 0) account.room += amount.toUint96();", ""),
    Mutant("enroll carries another node's invite", "Registry.sol",
        "if (invite.node != consent.node) revert Errors.UnknownNode(invite.node);", "", money=True),
    Mutant("the accused judges its own dispute", "Slasher.sol",
        "if (msg.sender == p.provider) revert Errors.OwnProposal(id, msg.sender);", ""),
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
        "if (_deadline(invite) <= last.inviteDeadline) {", "if (false) {",
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
        "seat.flags = flags | BANNED;", "",
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
        "uint256 amount = f.free;", "uint256 amount = uint256(f.free) + f.reserved;", money=True,
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
        "if (deposit > 0) token.safeTransfer(p.provider, deposit);", "", money=True,
    ),
    Mutant(
        "downtime can be slashed", "Slasher.sol",
        "if (reason == 0 || reason > LAST_SLASHABLE_REASON) revert Errors.BadReason(reason);", "",
    ),
    Mutant(
        "the guardian never retires", "Slasher.sol",
        "if (block.timestamp >= guardianEnds) revert Errors.GuardianEnded(guardianEnds);", "",
    ),
    Mutant(
        "a stranger's stake is committed without its consent", "Pools.sol",
        "if (!ejected && invite.speedClass > allowedClass[provider][pool]) {", "if (false) {",
        money=True,
    ),
    Mutant(
        "a slashed seat sits on under a new key", "Pools.sol",
        "if (_expel(pool, node, provider) & MOVED != 0) {",
        "_expel(pool, node, provider);\n        if (false) {", money=True,
    ),
    Mutant(
        "a key seated again hides the seat that moved on", "Pools.sol",
        "flags: _seats[pool][node].flags & MOVED,", "flags: 0,", money=True,
    ),
    Mutant(
        "a slash expels the seat of the key's next provider", "Pools.sol",
        "if (seat.provider != provider) return flags;", "",
    ),
    Mutant(
        "anyone moves seats", "Pools.sol",
        "if (msg.sender != address(registry)) revert Errors.NotAllowed(msg.sender);", "",
    ),
    Mutant(
        "a seat moves on and on", "Pools.sol",
        "if (block.timestamp < until) revert Errors.MovedRecently(from, until);", "",
    ),
    Mutant(
        "moving leaves the old seat taken", "Pools.sol",
        "old.leftAt = uint40(block.timestamp);", "", money=True,
    ),
    Mutant(
        "a paused pool admits", "Pools.sol",
        "if (p.paused) revert Errors.PoolIsPaused(pool);", "",
    ),
    Mutant(
        "the allow list admits all", "Pools.sol",
        "if (p.listOnly && !isListed[pool][provider]) revert Errors.NotListed(pool, provider);", "",
    ),
    Mutant(
        "a full pool admits", "Pools.sol",
        "if (p.members == p.capacity) revert Errors.PoolFull(pool, p.capacity);", "",
    ),
    Mutant(
        "anyone invites", "Pools.sol",
        "Statements.check(p.manager, inviteDigest(invite), managerSignature);", "",
    ),
    Mutant(
        "anyone moves a node to a key of its own", "Registry.sol",
        "if (providerOf[from] != msg.sender) {", "if (false) {",
        money=True,
    ),
    Mutant(
        "a consent works twice", "Registry.sol",
        "if (consentUsed[node][consent.salt]) revert Errors.ConsentUsed(node, consent.salt);", "",
    ),
    Mutant(
        "nodes are bound without their signature", "Registry.sol",
        "Statements.checkKey(node, consentDigest(consent), nodeSignature);", "",
    ),
    Mutant(
        "malleated signatures of a contract's kind are taken", "libraries/Statements.sol",
        "return problem == ECDSA.RecoverError.NoError && recovered == signer;",
        "return problem == ECDSA.RecoverError.NoError;",
    ),
    Mutant(
        "a batch pays twice", "Rewards.sol",
        "(last, owed) = (payout, 0);", "last = payout;", money=True,
    ),
    Mutant(
        "unclaimed rewards are taken back at once", "Rewards.sol",
        "if (block.timestamp >= endedAt + CLAIM_PERIOD) {", "if (true) {", money=True,
    ),
    Mutant(
        "a pool that runs is refunded", "Rewards.sol",
        "if (endedAt == 0) revert Errors.PoolNotEnded(pool);", "",
    ),
    Mutant(
        "a drawn reserve blocks the guardian", "Rewards.sol",
        "uint128(Math.min(f.total - r.previousTotal, f.reserved));",
        "uint128(f.total - r.previousTotal);",
    ),
    Mutant(
        "anyone disables rewards", "Rewards.sol",
        "if (msg.sender != guardian) revert Errors.NotAllowed(msg.sender);", "",
    ),
    Mutant(
        "terms act at once", "Terms.sol",
        "if (block.timestamp < _actAt) revert Errors.TooEarly(_actAt, block.timestamp);", "",
    ),
    Mutant(
        "anyone announces terms", "Terms.sol",
        "if (msg.sender != governor) revert Errors.NotAllowed(msg.sender);", "", money=True,
    ),
    Mutant(
        "anyone takes the governor's role", "Terms.sol",
        "if (msg.sender != pendingGovernor) revert Errors.NotAllowed(msg.sender);", "", money=True,
    ),
    Mutant(
        "new terms change an open dispute", "Slasher.sol",
        "deposit = depositOf[id];", "deposit = depositOf[id] == 0 ? 0 : _terms.deposit;",
        money=True,
    ),
    Mutant(
        "a deposit is paid out twice", "Slasher.sol",
        "delete depositOf[id];", "",
    ),
    Mutant(
        "anyone disputes", "Slasher.sol",
        "if (msg.sender != p.provider) revert Errors.NotAllowed(msg.sender);", "", money=True,
    ),
    Mutant(
        "a stranger judges", "Slasher.sol",
        "if (number == 0) revert Errors.NotAllowed(msg.sender);\n        // slither", "// slither",
        money=True,
    ),
    Mutant(
        "anyone cancels", "Slasher.sol",
        "if (msg.sender != guardian) revert Errors.NotAllowed(msg.sender);", "", money=True,
    ),
    Mutant(
        "anyone expels", "Pools.sol",
        "if (msg.sender != slasher) revert Errors.NotAllowed(msg.sender);", "",
    ),
    Mutant(
        "a released slash stays held", "StakeVault.sol",
        "account.pending -= held.toUint96();\n        account.room", "account.room", money=True,
    ),
    Mutant(
        "unbonding need not outlast liability", "StakeVault.sol",
        "if (p.unbonding <= liability) revert Errors.UnbondingTooShort(p.unbonding, liability);",
        "",
    ),
    Mutant(
        "a root's leaves are liable without end", "Work.sol",
        "if (postedAt > until) revert Errors.RootedLate(postedAt, until);", "",
    ),
    Mutant(
        "a leaf is posted twice by its node", "Work.sol",
        "if (isPosted[leaf]) revert Errors.AlreadyPosted(leaf);", "",
    ),
    Mutant(
        "a node posts its leaf before the manager's time is up", "Work.sol",
        "if (block.timestamp < from || block.timestamp > from + _validity) {", "if (false) {",
    ),
)  # fmt: skip


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
