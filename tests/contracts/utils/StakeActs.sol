// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Slasher } from "../../../contracts/src/Slasher.sol";
import { StakeVault } from "../../../contracts/src/StakeVault.sol";
import { Unbonding } from "../../../contracts/src/libraries/Queue.sol";
import { NodeConsent, Submission } from "../../../contracts/src/libraries/Statements.sol";
import { Books } from "./Books.sol";
import { vm } from "./Vm.sol";

/// @notice Acts of providers, nodes and validators upon stake.
abstract contract StakeActs is Books {
    // ---------------------------------------------------------------------------------- providers

    function addStake(uint256 who, uint256 amount) external {
        stakeFor(pick(who), 1 + amount % (2 * STAKE));
        did("addStake");
    }

    function unbond(uint256 who, uint256 amount) public {
        address owner = pick(who);
        uint256 most = vault.unbondable(owner);
        if (most == 0 || vault.unbondings(owner).length == 8) return;
        amount = 1 + amount % most;
        vm.prank(owner);
        vault.unbond(amount);
        unbonded[owner].push(Unbonded(amount, block.timestamp));
        did("unbond");
    }

    function rebond(uint256 who, uint256 amount) external {
        address owner = pick(who);
        uint256 most = vault.unbonding(owner);
        if (most == 0) return;
        amount = 1 + amount % most;
        vm.prank(owner);
        vault.rebond(amount);
        rebonded[owner] += amount;
        did("rebond");
    }

    function withdraw(uint256 who) public {
        address owner = pick(who);
        if (vault.unbondings(owner).length > 0) {
            wait(who >> 64, vault.unbondings(owner)[0].matureAt);
        }
        uint256 before = token.balanceOf(owner);
        vm.prank(owner);
        try vault.withdraw() returns (uint256 amount) {
            vm.assertEq(token.balanceOf(owner), before + amount, "withdraw pays what it says");
            withdrawn[owner] += amount;
            did("withdraw");
            StakeVault.Account memory left = vault.accountOf(owner);
            uint256 all = uint256(left.bonded) + left.queued;
            vm.assertLe(left.pending, all, "what an open slash holds was withdrawn");
            if (left.pending > left.bonded) did("heldBack");
        } catch {
            vm.assertEq(token.balanceOf(owner), before);
        }
    }

    function takeSeat(uint256 n, uint256 where, uint8 speedClass) public {
        n = at[n % NODES];
        pool = poolIds[where % 2];
        speedClass = 1 + speedClass % 2;
        address owner = providers[providerOf[n]];
        (,,,, uint32 capacity, uint32 members, bool ended,) = pools.poolOf(pool);
        bool sits = pools.classOf(pool, nodes[n]) != 0;
        if (sits || ended || members == capacity) return;
        if (pools.seatOf(pool, nodes[n]).banned) {
            vm.prank(manager);
            pools.setBan(pool, nodes[n], false);
            did("liftBan");
        }
        uint256 spare = vault.unbondable(owner);
        uint256 needed = STAKE * speedClass;
        if (spare < needed) stakeFor(owner, needed - spare + vault.pendingSlash(owner));
        if (vault.unbondable(owner) < needed) return;
        join(nodes[n], speedClass);
        did("takeSeat");
    }

    function giveUpSeat(uint256 n, uint256 where, bool byManager) external {
        n = at[n % NODES];
        uint256 id = poolIds[where % 2];
        if (pools.classOf(id, nodes[n]) == 0) return;
        if (byManager) {
            vm.prank(manager);
            pools.eject(id, nodes[n]);
        } else {
            vm.prank(nodes[n]);
            pools.leave(id, nodes[n]);
        }
        did("giveUpSeat");
    }

    /// @dev A provider moves a node to a new key, with its seats.
    function moveNode(uint256 n, uint256 seed) external {
        n %= NODES;
        uint256 k = at[n];
        if (keys == KEYS || movedAt[k] + UNBONDING > block.timestamp) return;
        if (leftAt[k] + UNBONDING > block.timestamp) return;
        if (vault.pendingSlash(providers[providerOf[k]]) != 0) return;
        if (seed % 3 == 0) takeSeat(n, seed >> 64, uint8(seed >> 128));
        uint256[] memory seats = new uint256[](2);
        uint256 count;
        for (uint256 i; i < 2; ++i) {
            if (pools.classOf(poolIds[i], nodes[k]) == 0) continue;
            seats[count++] = poolIds[i];
            seatWent[poolIds[i]][nodes[k]] = 1 + keys;
        }
        assembly ("memory-safe") {
            mstore(seats, count)
        }
        uint256 to = keys++;
        address owner = providers[providerOf[k]];
        NodeConsent memory c = consent(owner, nodes[to]);
        bytes memory signature = signed(c, keyOf(to));
        vm.prank(owner);
        registry.moveNode(nodes[k], c, signature, seats);
        providerOf[to] = providerOf[k];
        movedAt[to] = block.timestamp;
        leftAt[k] = block.timestamp;
        at[n] = to;
        did("moveNode");
    }

    /// @dev A key that its provider moved away from is bound again and sits again, beside the new one.
    function bringBack(uint256 n, uint256 where) external {
        n %= NODES;
        for (uint256 k; k < keys; ++k) {
            if (providerOf[k] != providerOf[at[n]] || registry.providerOf(nodes[k]) != address(0)) {
                continue;
            }
            addNode(providers[providerOf[k]], keyOf(k));
            at[n] = k;
            takeSeat(n, where, uint8(where >> 8));
            did("bringBack");
            return;
        }
    }

    // --------------------------------------------------------------------------------------- work

    function work_(uint256 n, uint256 where) public {
        uint256 seat = n % NODES;
        n = at[seat];
        pool = poolIds[where % 2];
        if (pools.classOf(pool, nodes[n]) == 0) {
            takeSeat(seat, where, uint8(where >> 8));
            if (pools.classOf(pool, nodes[n]) == 0) return;
        }
        Submission memory s = submissionOf(pool, works.length);
        uint64 seq = postRoot(one(work.submissionDigest(s)));
        did("work");
        works.push(Work_(pool, works.length, n, seq, block.timestamp, false, 0, false));
    }

    function reject(uint256 which) external {
        if (which % 3 == 0) work_(which >> 64, which >> 128);
        if (works.length == 0) return;
        if (which % 3 == 0) which = works.length - 1;
        Work_ storage w = works[which % works.length];
        if (w.rejected || block.timestamp > w.postedAt + VALIDITY) return;
        bytes32 leaf = work.submissionDigest(submissionOf(w.pool, w.number));
        vm.prank(validator);
        work.reject(w.pool, w.seq, leaf, none(), 3);
        w.rejected = true;
        did("reject");
        vm.assertFalse(w.credited);
    }

    // ------------------------------------------------------------------------------------ slashes

    /// @dev A provider that works, leaves, takes all stake out, and is slashed for it on its way out.
    function runAway(uint256 n, uint256 where) external {
        uint256 before = works.length;
        work_(n, where);
        if (works.length == before) return;
        takeAllOut(providerOf[works[before].node]);
        proposeSlash(2 * works.length - 1, 4 * STAKE - 1);
        executeSlash(0);
        did("runAway");
    }

    /// @dev A provider runs away from a slash that nobody carries out, until all its stake has matured:
    /// what the slash holds of it must stay.
    function cashIn(uint256 n, uint256 where) external {
        uint256 who = providerOf[at[n % NODES]];
        address owner = providers[who];
        // While older slashes are open, a new one holds no more than they left over.
        settleAll(owner);
        Unbonding[] memory queue = vault.unbondings(owner);
        if (queue.length == 8) {
            if (block.timestamp < queue[0].matureAt) vm.warp(queue[0].matureAt);
            withdraw(who);
        }
        uint256 before = works.length;
        work_(n, where);
        if (works.length == before) return;
        stakeFor(owner, STAKE);
        takeAllOut(who);
        proposeSlash(2 * works.length - 1, 4 * STAKE - 1);
        queue = vault.unbondings(owner);
        vm.warp(queue[queue.length - 1].matureAt);
        withdraw(who);
        did("cashIn");
    }

    function settleAll(address owner) internal {
        for (uint256 i = ids.length; i > 0 && openCount[owner] > 0; --i) {
            uint256 id = ids[i - 1];
            Slasher.Proposal memory p = slasher.proposal(id);
            bool isDisputed = p.state == Slasher.State.Disputed;
            if (p.provider != owner || (p.state != Slasher.State.Proposed && !isDisputed)) {
                continue;
            }
            if (block.timestamp < p.deadline) vm.warp(p.deadline);
            if (isDisputed) {
                slasher.lapse(id);
                deposits -= depositOf[id];
                calledOff(p);
            } else {
                slasher.execute(id);
                executed(id, p);
            }
        }
    }

    function takeAllOut(uint256 who) internal {
        for (uint256 i; i < 2; ++i) {
            for (uint256 j; j < keys; ++j) {
                if (providerOf[j] != who || pools.classOf(poolIds[i], nodes[j]) == 0) continue;
                vm.prank(nodes[j]);
                pools.leave(poolIds[i], nodes[j]);
            }
        }
        uint256 most = vault.unbondable(providers[who]);
        if (most > 0) unbond(who, most - 1);
    }

    /// @dev Many slashes at once, with stake added in between: together they must not take more than
    /// was there at the first and was added since.
    function overreach(uint256 n, uint256 where) external {
        uint256 which = uint256(keccak256(abi.encode(n, where))) & ~uint256(1);
        for (uint256 i; i < 5; ++i) {
            proposeSlash(which, 4 * STAKE - 1);
            stakeFor(providers[(n % PROVIDERS + i) % PROVIDERS], STAKE);
            if (works.length > 0) {
                stakeFor(providers[providerOf[works[works.length - 1].node]], STAKE);
            }
        }
        did("overreach");
    }

    function proposeSlash(uint256 which, uint256 amount) public {
        if (which % 2 == 0) work_(which >> 64, which >> 128);
        if (works.length == 0) return;
        if (which % 2 == 0) which = works.length - 1;
        Work_ storage w = works[which % works.length];
        if (w.id != 0 || block.timestamp > w.postedAt + VALIDITY) return;
        uint256 bond = slasher.validatorBond();
        if (vault.active(validator) < bond) stakeFor(validator, bond);
        address owner = providers[providerOf[w.node]];
        if (openCount[owner] == 0) {
            snapshot[owner] = vault.slashable(owner);
            taken[owner] = 0;
        }
        uint256 before = vault.pendingSlash(owner);
        w.id = send(w, 1 + amount % (4 * STAKE));
        workOf[w.id] = which % works.length;
        ids.push(w.id);
        proposedAt[w.id] = block.timestamp;
        ++openCount[owner];
        taken[owner] += vault.pendingSlash(owner) - before;
        did("proposeSlash");
    }

    function send(Work_ memory w, uint256 amount) internal returns (uint256) {
        Submission memory s = submissionOf(w.pool, w.number);
        bytes memory signature = sign(keyOf(w.node), work.submissionDigest(s));
        vm.prank(validator);
        return slasher.propose(s, nodes[w.node], signature, w.seq, none(), EVIDENCE, 3, amount);
    }

    function executeSlash(uint256 seed) public {
        (uint256 id, Slasher.Proposal memory p) = someId(seed);
        if (p.state != Slasher.State.Proposed) return;
        wait(seed >> 64, p.deadline);
        if (block.timestamp < p.deadline) return;
        slasher.execute(id);
        did("executeSlash");
        executed(id, p);
        vm.assertTrue(block.timestamp >= proposedAt[id] + WINDOW);
    }

    function executed(uint256 id, Slasher.Proposal memory p) internal {
        slashed[p.provider] += p.amount;
        --openCount[p.provider];
        Work_ storage w = works[workOf[id]];
        ++executions[work.submissionDigest(submissionOf(w.pool, w.number))];
        vm.assertTrue(pools.classOf(p.pool, p.node) == 0);
        // Nor does that seat go on under the key that it was moved to. (A key that its provider seats
        // anew, by an invite of its own, is a new seat.)
        uint256 went = seatWent[p.pool][p.node];
        if (went != 0) vm.assertTrue(pools.classOf(p.pool, nodes[went - 1]) == 0);
    }

    function calledOff(Slasher.Proposal memory p) internal {
        --openCount[p.provider];
        taken[p.provider] -= p.amount;
    }

    function disputeSlash(uint256 seed) public {
        (uint256 id, Slasher.Proposal memory p) = someId(seed);
        if (p.state != Slasher.State.Proposed || block.timestamp >= p.deadline) return;
        uint256 deposit = slasher.disputeDeposit();
        give(p.provider, deposit);
        vm.startPrank(p.provider);
        token.approve(address(slasher), deposit);
        slasher.dispute(id);
        vm.stopPrank();
        depositOf[id] = deposit;
        deposits += deposit;
        did("disputeSlash");
    }

    function judgeSlash(uint256 seed, bool same) external {
        if (seed % 3 == 0) {
            proposeSlash(seed & ~uint256(1), seed >> 32);
            disputeSlash(0);
            seed = 0;
        }
        (uint256 id, Slasher.Proposal memory p) = someId(seed);
        if (p.state != Slasher.State.Disputed || block.timestamp >= p.deadline) return;
        deposits -= depositOf[id];
        if (same) {
            vm.prank(validator2);
            slasher.confirm(id);
            did("confirm");
            executed(id, p);
        } else {
            uint256 before = vault.slashable(validator);
            vm.prank(validator2);
            slasher.overturn(id);
            did("overturn");
            calledOff(p);
            slashed[validator] += before - vault.slashable(validator);
        }
    }

    function lapseSlash(uint256 seed) external {
        if (seed % 3 == 0) {
            proposeSlash(seed & ~uint256(1), seed >> 32);
            disputeSlash(0);
            seed = 0;
        }
        (uint256 id, Slasher.Proposal memory p) = someId(seed);
        if (p.state != Slasher.State.Disputed) return;
        wait(seed >> 64, p.deadline);
        if (block.timestamp < p.deadline) return;
        slasher.lapse(id);
        did("lapseSlash");
        deposits -= depositOf[id];
        calledOff(p);
    }

    function cancelSlash(uint256 seed) external {
        (uint256 id, Slasher.Proposal memory p) = someId(seed);
        bool isOpen = p.state == Slasher.State.Proposed || p.state == Slasher.State.Disputed;
        if (!isOpen || seed % 3 != 0) return;
        vm.prank(guardian);
        slasher.cancel(id);
        did("cancelSlash");
        if (p.state == Slasher.State.Disputed) deposits -= depositOf[id];
        calledOff(p);
    }
}
