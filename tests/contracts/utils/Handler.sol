// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Pools } from "../../../contracts/src/Pools.sol";
import { Rewards } from "../../../contracts/src/Rewards.sol";
import { Slasher } from "../../../contracts/src/Slasher.sol";
import {
    Invite,
    NodeConsent,
    RewardTable,
    Statements,
    Submission
} from "../../../contracts/src/libraries/Statements.sol";
import { StakeActs } from "./StakeActs.sol";
import { Tree } from "./Tree.sol";
import { vm } from "./Vm.sol";

/// @notice Acts as providers, nodes, manager, validators, arbiter, governor, thief and clock, in any
/// order. Every act is one that must succeed, so a revert fails the run; what must not succeed is
/// tried by the thief.
contract Handler is StakeActs {
    uint256 internal constant THIEF_KEY = 0x7417EF;
    uint256 internal snarePool;

    // -------------------------------------------------------------------------------------- money

    function fundMore(uint256 where, uint256 amount) external {
        uint256 id = poolIds[where % 2];
        if (!pools.hasEnded(id)) fundPool(id, 1 + amount % (2 * PAY));
    }

    function bondMore(uint256 where, uint256 amount) external {
        uint256 id = poolIds[where % 2];
        if (pools.hasEnded(id)) return;
        pool = id;
        amount = 1 + amount % (10 * PAY);
        addBond(amount);
        bonded[id] += amount;
        did("bondMore");
    }

    /// @dev Anyone posts what the validators say that the pool owes, in the place of a silent manager.
    function postTable(uint256 where) external {
        uint256 id = poolIds[where % 2];
        uint256 silent = rewards.silentFrom(id);
        (uint256 free,) = rewards.funds(id);
        // So much work now and then that the free funds do not pay it.
        if ((where >> 65) % 2 == 0 && free < 24 * PAY && !pools.hasEnded(id)) {
            for (uint256 i; i <= free / PAY; ++i) {
                work_(i, where);
            }
            pool = id;
            addBond(24 * PAY);
            bonded[id] += 24 * PAY;
            wait(0, postable(uint64(block.timestamp / EPOCH)));
            wait(0, silent);
        }
        wait(where >> 64, silent);
        uint64 epoch = uint64((block.timestamp - VALIDITY) / EPOCH - 1);
        (uint256 total, uint64 next) = rewards.progress(id);
        if (epoch < next) return;
        uint256 sum = tabulate(id, epoch);
        bytes32 root = Tree.root(leavesOf(tables[tables.length - 1]));
        RewardTable memory t = RewardTable(id, epoch, root, sum, keccak256("t"));
        (bool done,) =
            address(rewards).call(abi.encodeCall(rewards.postTable, (t, tabled(t, bothKeys()))));
        bool covered = sum > total && sum - total <= free + bondLeft(id);
        vm.assertEq(done, block.timestamp >= silent && covered);
        if (!done) {
            tables.pop();
            return;
        }
        if (sum - total > free) {
            drawn[id] += sum - total - free;
            did("bondDrawn");
        }
        credit(id, epoch);
        did("postTable");
    }

    /// @dev What is left of a pool's bond by our own books.
    function bondLeft(uint256 id) public view returns (uint256) {
        return bonded[id] - drawn[id] - bondBack[id];
    }

    /// @dev Pays `PAY` for every work of the pool that was rooted up to `epoch` and not rejected.
    function postRewards(uint256 where) public {
        uint256 id = poolIds[where % 2];
        wait(where >> 64, postable(uint64(block.timestamp / EPOCH)));
        if (block.timestamp < START + VALIDITY + EPOCH) return;
        uint64 epoch = uint64((block.timestamp - VALIDITY) / EPOCH - 1);
        (uint256 total, uint64 next) = rewards.progress(id);
        if (epoch < next) return;
        uint256 sum = tabulate(id, epoch);
        (uint256 free,) = rewards.funds(id);
        if (sum - total > free) {
            tables.pop();
            return;
        }
        credit(id, epoch);
        bytes32 root = Tree.root(leavesOf(tables[tables.length - 1]));
        vm.prank(manager);
        rewards.postRewardRoot(id, epoch, root, sum, keccak256("t"));
        did("postRewards");
    }

    /// @dev Adds the table of all that the pool's works up to `epoch` earned; returns its sum.
    function tabulate(uint256 id, uint64 epoch) internal returns (uint256 sum) {
        Table storage t = tables.push();
        t.pool = id;
        t.epoch = epoch;
        t.claimableAt = block.timestamp + DELAY;
        for (uint256 i; i < works.length; ++i) {
            if (!earns(works[i], id, epoch)) continue;
            t.amounts[works[i].node] += PAY;
            sum += PAY;
        }
    }

    function credit(uint256 id, uint64 epoch) internal {
        for (uint256 i; i < works.length; ++i) {
            if (earns(works[i], id, epoch)) works[i].credited = true;
        }
    }

    function earns(Work_ storage w, uint256 id, uint64 epoch) internal view returns (bool) {
        return w.pool == id && !w.rejected && w.postedAt / EPOCH <= epoch;
    }

    function leavesOf(Table storage t) internal view returns (bytes32[] memory leaves) {
        leaves = new bytes32[](KEYS);
        for (uint256 i; i < KEYS; ++i) {
            leaves[i] = Statements.rewardLeaf(nodes[i], t.amounts[i]);
        }
    }

    function claim(uint256 which, uint256 n) external {
        if (tables.length == 0) return;
        Table storage t = tables[which % tables.length];
        n %= KEYS;
        if (!t.disabled) wait(which >> 64, t.claimableAt);
        if (t.disabled || block.timestamp < t.claimableAt || t.amounts[n] <= paid[t.pool][n]) {
            return;
        }
        address to = address(uint160(0xCA000 + providerOf[n]));
        uint256 before = token.balanceOf(to);
        rewards.claim(t.pool, t.epoch, nodes[n], t.amounts[n], Tree.proof(leavesOf(t), n));
        uint256 amount = token.balanceOf(to) - before;
        vm.assertEq(paid[t.pool][n] + amount, t.amounts[n], "claim pays the difference");
        paid[t.pool][n] += amount;
        did("claim");
    }

    function claimMany(uint256 which) external {
        if (tables.length == 0) return;
        Table storage t = tables[which % tables.length];
        if (!t.disabled) wait(which >> 64, t.claimableAt);
        if (t.disabled || block.timestamp < t.claimableAt) return;
        claimAll(t);
        did("claimMany");
    }

    /// @dev Everything that a table promises, in one transaction; what was paid is skipped.
    function claimAll(Table storage t) internal {
        Rewards.Claim[] memory claims = new Rewards.Claim[](KEYS);
        bytes32[] memory leaves = leavesOf(t);
        uint256 sum;
        for (uint256 n; n < KEYS; ++n) {
            claims[n] =
                Rewards.Claim(t.pool, t.epoch, nodes[n], t.amounts[n], Tree.proof(leaves, n));
            if (t.amounts[n] <= paid[t.pool][n]) continue;
            sum += t.amounts[n] - paid[t.pool][n];
            paid[t.pool][n] = t.amounts[n];
        }
        uint256 before = token.balanceOf(address(rewards));
        vm.assertEq(rewards.claimMany(claims), sum, "claimMany says what it pays");
        vm.assertEq(before - token.balanceOf(address(rewards)), sum, "claimMany");
    }

    function disableRewards(uint256 which) external {
        if (which % 3 == 0) postRewards(which >> 1);
        if (tables.length == 0) return;
        if (which % 3 == 0) which = tables.length - 1;
        Table storage t = tables[which % tables.length];
        if (t.disabled || block.timestamp >= t.claimableAt) return;
        vm.prank(arbiter);
        rewards.disable(t.pool, t.epoch);
        did("disableRewards");
        for (uint256 i; i < tables.length; ++i) {
            if (tables[i].pool == t.pool && tables[i].epoch >= t.epoch) tables[i].disabled = true;
        }
    }

    function endPool(uint256 seed) external {
        uint256 id = poolIds[1];
        if (seed % 32 != 0 && !pools.hasEnded(id)) return;
        if (!pools.hasEnded(id)) {
            vm.prank(manager);
            pools.end(id);
            return;
        }
        (uint256 free,) = rewards.funds(id);
        if (free + bondLeft(id) == 0) return;
        // The manager tries too early, always; until then the last work can be promised its pay.
        uint256 last = pools.endedAt(id) + EPOCH + VALIDITY + VALIDITY + WINDOW + DISPUTE;
        wait(seed >> 64, rewards.refundableAt(id));
        vm.prank(manager);
        (bool done,) = address(rewards).call(abi.encodeCall(rewards.refund, (id)));
        vm.assertEq(done, block.timestamp >= rewards.refundableAt(id));
        if (!done) return;
        vm.assertLt(last + EPOCH + DELAY, block.timestamp, "refunded before the last rewards");
        refunded[id] += free;
        bondBack[id] += bondLeft(id);
        did("refund");
    }

    // -------------------------------------------------------------------------------------- haste

    /// @dev What manager, validator and anybody may do, but too early, too late or twice. None of it is
    /// done; where a guard is missing it is, and is entered in the books, so that they show it.
    function haste(uint256 what, uint256 seed) external {
        did("haste");
        if (what % 4 == 0) executeEarly(seed);
        else if (what % 4 == 1) proposeAgain(seed);
        else if (what % 4 == 2) payAhead(seed);
        else rejectLate(seed);
    }

    function executeEarly(uint256 seed) internal {
        if (seed % 2 == 0) proposeSlash(seed);
        (bytes32 id, Slasher.Proposal memory p) = someId(seed % 2 == 0 ? 0 : seed);
        if (p.state != Slasher.State.Proposed || block.timestamp >= p.deadline) return;
        (bool done,) = address(slasher).call(abi.encodeCall(slasher.execute, (id)));
        vm.assertTrue(!done, "slashed before its window");
    }

    /// @dev A second proposal for one submission, in any state of the first one.
    function proposeAgain(uint256 seed) internal {
        proposeSlash(seed & ~uint256(1));
        (bytes32 id,) = someId(seed);
        if (id == 0) return;
        Work_ storage w = works[workOf[id]];
        if (block.timestamp > w.postedAt + VALIDITY) return;
        bondBoth();
        Submission memory s = submissionOf(w);
        bytes memory signature = sign(keyOf(w.node), leafOf(s));
        (bool done,) = address(slasher)
            .call(abi.encodeCall(slasher.propose, (s, signature, w.seq, none(), rejections(s))));
        vm.assertTrue(!done, "proposed twice");
    }

    /// @dev The manager promises pay for work that can still be rejected, then rejects it.
    function payAhead(uint256 seed) internal {
        uint256 before = works.length;
        work_(seed, seed >> 64);
        if (works.length == before || pools.hasEnded(pool)) return;
        (uint256 free,) = rewards.funds(pool);
        if (free < works.length * PAY) fundPool(pool, works.length * PAY - free);
        uint64 epoch = uint64(block.timestamp / EPOCH);
        uint256 sum = tabulate(pool, epoch);
        bytes32 root = Tree.root(leavesOf(tables[tables.length - 1]));
        vm.prank(manager);
        (bool done,) = address(rewards)
            .call(abi.encodeCall(rewards.postRewardRoot, (pool, epoch, root, sum, RUN)));
        if (!done) {
            tables.pop();
            return;
        }
        credit(pool, epoch);
        tryReject(works[before]);
    }

    /// @dev A validator rejects what was promised its pay.
    function rejectLate(uint256 seed) internal {
        for (uint256 i; i < works.length; ++i) {
            Work_ storage w = works[(seed % works.length + i) % works.length];
            if (!w.credited || w.rejected) continue;
            tryReject(w);
            return;
        }
    }

    function tryReject(Work_ storage w) internal {
        Submission memory s = submissionOf(w);
        (bool done,) =
            address(work).call(abi.encodeCall(work.reject, (s, w.seq, none(), rejections(s))));
        if (done) w.rejected = true;
    }

    // -------------------------------------------------------------------------------------- thief

    /// @dev Tries to move what is not the thief's; nothing of it may succeed.
    function thief(uint256 what, uint256 seed, uint256 amount) external {
        bytes memory data;
        address target;
        amount = 1 + amount % STAKE;
        address victim = pick(seed);
        what %= 21;
        // What no one could do anyway proves nothing: there is a dispute to judge, a slash to dispute.
        if (what == 11 || what == 19) proposeSlash(seed & ~uint256(1));
        if (what == 11) disputeSlash(0);
        (bytes32 id,) = someId(what == 11 || what == 19 ? 0 : seed);
        if (what < 7) target = address(vault);
        else if (what < 10) target = address(rewards);
        else if (what < 12) target = address(slasher);
        else if (what < 16) target = address(pools);
        else if (what < 17) target = address(registry);
        else target = address(slasher);

        if (what == 0) data = abi.encodeCall(vault.openSlash, (victim, amount, manager));
        if (what == 1) data = abi.encodeCall(vault.settleSlash, (victim, amount, amount, manager));
        if (what == 2) data = abi.encodeCall(vault.releaseSlash, (victim, amount));
        if (what == 3) data = abi.encodeCall(vault.release, (victim, amount));
        if (what == 4) data = abi.encodeCall(vault.unbond, (amount));
        if (what == 5) data = abi.encodeCall(vault.withdraw, ());
        if (what == 6) data = abi.encodeCall(vault.depositFor, (victim, amount, 0, 0, 0, 0));
        if (what == 7) data = abi.encodeCall(rewards.refund, (poolIds[seed % 2]));
        if (what == 8) data = abi.encodeCall(rewards.disable, (poolIds[seed % 2], uint64(amount)));
        if (what == 9) {
            data = abi.encodeCall(
                rewards.claim, (poolIds[seed % 2], uint64(amount), stranger, amount, none())
            );
        }
        if (what == 10) data = abi.encodeCall(slasher.cancel, (id));
        if (what == 11 && amount % 2 == 0) data = abi.encodeCall(slasher.overturn, (id));
        if (what == 11 && amount % 2 == 1) data = abi.encodeCall(slasher.confirm, (id));
        if (what == 12) {
            data = abi.encodeCall(pools.eject, (poolIds[seed % 2], nodes[at[seed % NODES]]));
        }
        if (what == 13) {
            data = abi.encodeCall(pools.leave, (poolIds[seed % 2], nodes[at[seed % NODES]]));
        }
        // A pool of the thief's own cannot commit a stranger's stake: its provider never agreed.
        if (what == 14) data = snare(nodes[at[seed % NODES]]);
        if (what == 15) {
            data = abi.encodeCall(pools.moveSeat, (poolIds[0], nodes[at[seed % NODES]], nodes[11]));
        }
        if (what == 16 && amount % 2 == 0) data = hijack(nodes[at[seed % NODES]]);
        if (what == 16 && amount % 2 == 1) data = pressGang(nodes[at[seed % NODES]]);
        if (what == 17 && amount % 2 == 0) {
            data = abi.encodeCall(slasher.announceTerms, (0, amount));
        }
        if (what == 17 && amount % 2 == 1) {
            data = abi.encodeCall(slasher.announceArbiter, (stranger));
        }
        if (what == 18) data = abi.encodeCall(slasher.acceptGovernor, ());
        if (what == 19) data = abi.encodeCall(slasher.dispute, (id));
        if (what == 20) (target, data) = (address(rewards), forge(poolIds[seed % 2]));
        uint256 lent = what == 19 ? depositAt[id] : 0;
        give(stranger, lent);
        vm.startPrank(stranger);
        token.approve(address(slasher), lent);
        (bool done,) = target.call(data);
        if (done) ++thefts;
        else token.transfer(address(this), lent);
        vm.stopPrank();
    }

    /// @dev A table that pays the thief, signed by one validator and the thief.
    function forge(uint256 id) internal view returns (bytes memory) {
        (uint256 total, uint64 next) = rewards.progress(id);
        bytes32 root = Statements.rewardLeaf(stranger, 1);
        RewardTable memory t = RewardTable(id, next, root, total + 1, keccak256("t"));
        uint256[] memory who = bothKeys();
        who[1] = THIEF_KEY;
        return abi.encodeCall(rewards.postTable, (t, tabled(t, who)));
    }

    /// @dev An invite to the thief's own pool, signed by its manager.
    function snare(address victim) internal returns (bytes memory) {
        (Invite memory i, bytes memory signature) = snared(victim);
        return abi.encodeCall(pools.join, (i, signature));
    }

    /// @dev The same invite, carried by the enrolment of a node of the thief's own.
    function pressGang(address victim) internal returns (bytes memory) {
        (Invite memory i, bytes memory signature) = snared(victim);
        NodeConsent memory c = consent(stranger, vm.addr(THIEF_KEY));
        bytes memory agreed = signed(c, THIEF_KEY);
        return abi.encodeCall(registry.enroll, (stranger, 0, 0, 0, 0, 0, c, agreed, i, signature));
    }

    function snared(address victim) internal returns (Invite memory i, bytes memory signature) {
        if (snarePool == 0) {
            Pools.Config memory c = config();
            c.stakePerSeat = 1;
            c.slashAmount = 1;
            vm.prank(vm.addr(THIEF_KEY));
            snarePool = pools.create(c);
        }
        i = invite(victim);
        i.pool = snarePool;
        signature = sign(THIEF_KEY, pools.inviteDigest(i));
    }

    /// @dev A victim's node moved to a key of the thief's.
    function hijack(address victim) internal returns (bytes memory) {
        NodeConsent memory c = consent(stranger, vm.addr(THIEF_KEY));
        bytes memory signature = signed(c, THIEF_KEY);
        return abi.encodeCall(registry.moveNode, (victim, c, signature, new uint256[](0)));
    }

    // ---------------------------------------------------------------------------------- governor

    /// @dev The governor announces terms; anyone puts them in force when their time has come.
    function moveTerms(uint256 seed) external {
        (,, uint64 actAt) = slasher.announced();
        if (actAt == 0) {
            vm.prank(governor);
            slasher.announceTerms(seed % (2 * DEPOSIT), (seed >> 128) % (2 * BOND));
            did("announceTerms");
            return;
        }
        wait(seed >> 64, actAt);
        if (block.timestamp < actAt) return;
        // What was proposed under the old terms is disputed under them.
        bool open = (seed >> 65) % 2 == 0;
        if (open) proposeSlash(seed & ~uint256(1));
        slasher.applyTerms();
        did("applyTerms");
        if (open) disputeSlash(0);
    }

    // -------------------------------------------------------------------------------------- drain

    /// @notice Everybody goes home: all that is open is settled, all that is owed is paid, all stake
    /// withdrawn. Nothing may be left in any contract.
    function drain() external {
        for (uint256 i; i < ids.length; ++i) {
            Slasher.Proposal memory p = slasher.proposal(ids[i]);
            bool isOpen = p.state == Slasher.State.Proposed || isStopped(p);
            if (isOpen && block.timestamp < p.deadline) vm.warp(p.deadline);
            if (p.state == Slasher.State.Proposed) slasher.execute(ids[i]);
            if (isStopped(p)) slasher.lapse(ids[i]);
        }
        for (uint256 where; where < 2; ++where) {
            drainPool(poolIds[where]);
        }
        // Stake that is bound to no manager any more is still not the thief's to commit.
        for (uint256 i; i < NODES; ++i) {
            bytes memory data = snare(nodes[at[i]]);
            vm.prank(stranger);
            (bool done,) = address(pools).call(data);
            vm.assertTrue(!done, "a stranger's stake is committed");
        }
        for (uint256 i; i < PROVIDERS + 2; ++i) {
            drainStake(pick(i));
        }
        vm.assertEq(token.balanceOf(address(vault)), 0, "stake is stuck");
        vm.assertEq(token.balanceOf(address(rewards)), 0, "funds are stuck");
        vm.assertEq(token.balanceOf(address(slasher)), 0, "deposits are stuck");
    }

    function drainPool(uint256 id) internal {
        for (uint256 i; i < keys; ++i) {
            if (!pools.isMember(id, nodes[i])) continue;
            vm.prank(nodes[i]);
            pools.leave(id, nodes[i]);
        }
        if (!pools.hasEnded(id)) {
            fundPool(id, works.length * PAY + 1);
            vm.warp(postable(uint64(block.timestamp / EPOCH)));
            postRewards(id == poolIds[0] ? 0 : 1);
            pool = id;
            addBond(1);
            ++bonded[id];
            vm.prank(manager);
            pools.end(id);
            vm.prank(manager);
            (bool early,) = address(rewards).call(abi.encodeCall(rewards.refund, (id)));
            vm.assertTrue(!early, "refunded as soon as the pool ended");
        }
        (uint256 free,) = rewards.funds(id);
        if (free + bondLeft(id) > 0) {
            if (block.timestamp < rewards.refundableAt(id)) vm.warp(rewards.refundableAt(id));
            vm.prank(manager);
            rewards.refund(id);
        }
        for (uint256 i = tables.length; i > 0; --i) {
            Table storage t = tables[i - 1];
            if (t.pool != id || t.disabled) continue;
            if (block.timestamp < t.claimableAt) vm.warp(t.claimableAt);
            claimAll(t);
            break;
        }
        (uint256 left, uint256 reserved) = rewards.funds(id);
        vm.assertEq(left + reserved, 0, "an ended pool drains to zero");
        vm.assertEq(rewards.bondOf(id), 0, "a refunded bond stays in the books");
    }

    function drainStake(address who) internal {
        for (uint256 i; i < 2; ++i) {
            vm.warp(block.timestamp + UNBONDING);
            vm.startPrank(who);
            if (vault.unbonding(who) > 0) vault.withdraw();
            uint256 most = vault.unbondable(who);
            if (most > 0) vault.unbond(most);
            vm.stopPrank();
        }
    }
}
