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

    function takeSeat(uint256 n, uint256 where) public {
        n = at[n % NODES];
        pool = poolIds[where % 2];
        address owner = providers[providerOf[n]];
        (,,,, uint32 capacity, uint32 members, bool ended) = pools.poolOf(pool);
        bool sits = pools.isMember(pool, nodes[n]);
        if (sits || ended || members == capacity) return;
        if (pools.seatOf(pool, nodes[n]).banned) {
            vm.prank(manager);
            pools.setBan(pool, nodes[n], false);
            did("liftBan");
        }
        uint256 spare = vault.unbondable(owner);
        if (spare < STAKE) stakeFor(owner, STAKE - spare + vault.pendingSlash(owner));
        if (vault.unbondable(owner) < STAKE) return;
        join(nodes[n]);
        did("takeSeat");
    }

    function giveUpSeat(uint256 n, uint256 where, bool byManager) external {
        n = at[n % NODES];
        uint256 id = poolIds[where % 2];
        if (!pools.isMember(id, nodes[n])) return;
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
    function moveNode(uint256 n, uint256 seed) public {
        n %= NODES;
        uint256 k = at[n];
        if (keys == KEYS || movedAt[k] + UNBONDING > block.timestamp) return;
        if (leftAt[k] + UNBONDING > block.timestamp) return;
        if (vault.pendingSlash(providers[providerOf[k]]) != 0) return;
        if (seed % 3 == 0) takeSeat(n, seed >> 64);
        uint256[] memory seats = new uint256[](2);
        uint256 count;
        for (uint256 i; i < 2; ++i) {
            if (!pools.isMember(poolIds[i], nodes[k])) continue;
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

    /// @dev A key that its provider moved away from is bound again and sits again, next to the new one.
    function bringBack(uint256 n, uint256 where) public {
        n %= NODES;
        for (uint256 k; k < keys; ++k) {
            if (providerOf[k] != providerOf[at[n]] || registry.providerOf(nodes[k]) != address(0)) {
                continue;
            }
            addNode(providers[providerOf[k]], keyOf(k));
            at[n] = k;
            takeSeat(n, where);
            did("bringBack");
            return;
        }
    }

    // --------------------------------------------------------------------------------------- work

    function work_(uint256 n, uint256 where) public {
        uint256 seat = n % NODES;
        n = at[seat];
        pool = poolIds[where % 2];
        if (!pools.isMember(pool, nodes[n])) {
            takeSeat(seat, where);
            if (!pools.isMember(pool, nodes[n])) return;
        }
        Work_ memory w = Work_(pool, works.length, n, 0, block.timestamp, false, 0, false);
        w.seq = postRoot(one(leafOf(submissionOf(w))));
        did("work");
        works.push(w);
    }

    function reject(uint256 which) external {
        if (which % 3 == 0) work_(which >> 64, which >> 128);
        if (works.length == 0) return;
        if (which % 3 == 0) which = works.length - 1;
        Work_ storage w = works[which % works.length];
        if (w.rejected || block.timestamp > w.postedAt + VALIDITY) return;
        Submission memory s = submissionOf(w);
        work.reject(s, w.seq, none(), rejections(s));
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
        proposeSlash(2 * works.length - 1);
        executeSlash(0);
        did("runAway");
    }

    /// @dev A provider runs away from a slash that no one carries out, until all its stake has matured:
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
        proposeSlash(2 * works.length - 1);
        queue = vault.unbondings(owner);
        vm.warp(queue[queue.length - 1].matureAt);
        withdraw(who);
        did("cashIn");
    }

    function settleAll(address owner) internal {
        for (uint256 i = ids.length; i > 0 && openCount[owner] > 0; --i) {
            bytes32 id = ids[i - 1];
            Slasher.Proposal memory p = slasher.proposal(id);
            bool stopped = isStopped(p);
            if (p.provider != owner || (p.state != Slasher.State.Proposed && !stopped)) {
                continue;
            }
            if (block.timestamp < p.deadline) vm.warp(p.deadline);
            if (stopped) {
                slasher.lapse(id);
                calledOff(id, p);
            } else {
                carryOut(id, p);
            }
        }
    }

    /// @dev A node that works, moves to a new key with its seat, and is slashed for the work; now and then
    /// the old key sits again before that.
    function moveAway(uint256 n, uint256 where) external {
        n %= NODES;
        uint256 k = at[n];
        uint256 before = works.length;
        work_(n, where);
        if (works.length == before) return;
        moveNode(n, 1);
        if (at[n] == k) return;
        if ((where >> 64) % 2 == 0) bringBack(n, where);
        proposeSlash(2 * works.length - 1);
        executeSlash(0);
        did("moveAway");
    }

    function takeAllOut(uint256 who) internal {
        for (uint256 i; i < 2; ++i) {
            for (uint256 j; j < keys; ++j) {
                if (providerOf[j] != who || !pools.isMember(poolIds[i], nodes[j])) continue;
                vm.prank(nodes[j]);
                pools.leave(poolIds[i], nodes[j]);
            }
        }
        uint256 most = vault.unbondable(providers[who]);
        if (most > 0) unbond(who, most - 1);
    }

    /// @dev Many slashes at once, one time in two with stake added in between: together they must not
    /// take more than was there at the first and was added since.
    function overreach(uint256 n, uint256 where) external {
        uint256 which = uint256(keccak256(abi.encode(n, where))) & ~uint256(1);
        bool adds = (where >> 1) % 2 == 0;
        for (uint256 i; i < (adds ? 5 : 8); ++i) {
            proposeSlash(which);
            if (!adds) continue;
            stakeFor(providers[(n % PROVIDERS + i) % PROVIDERS], STAKE);
            if (works.length > 0) {
                stakeFor(providers[providerOf[works[works.length - 1].node]], STAKE);
            }
        }
        did("overreach");
    }

    /// @dev Both validators have a bond for one more open proposal.
    function bondBoth() internal {
        uint256 bond = slasher.validatorBond();
        for (uint256 i; i < 2; ++i) {
            address who = i == 0 ? validator : validator2;
            uint256 needed = bond * (vault.accountOf(who).pledges + 1);
            uint256 free = vault.unbondable(who);
            if (free < needed) stakeFor(who, needed - free);
        }
    }

    function proposeSlash(uint256 which) public {
        if (which % 2 == 0) work_(which >> 64, which >> 128);
        if (works.length == 0) return;
        if (which % 2 == 0) which = works.length - 1;
        Work_ storage w = works[which % works.length];
        if (w.id != 0 || block.timestamp > w.postedAt + VALIDITY) return;
        bondBoth();
        address owner = providers[providerOf[w.node]];
        if (openCount[owner] == 0) {
            snapshot[owner] = vault.slashable(owner);
            taken[owner] = 0;
        }
        uint256 before = vault.pendingSlash(owner);
        Submission memory s = submissionOf(w);
        bytes memory signature = sign(keyOf(w.node), leafOf(s));
        w.id = slasher.propose(s, signature, w.seq, none(), rejections(s));
        workOf[w.id] = which % works.length;
        ids.push(w.id);
        proposedAt[w.id] = block.timestamp;
        depositAt[w.id] = slasher.disputeDeposit();
        ++openCount[owner];
        taken[owner] += vault.pendingSlash(owner) - before;
        did("proposeSlash");
    }

    function executeSlash(uint256 seed) public {
        (bytes32 id, Slasher.Proposal memory p) = someId(seed);
        if (p.state != Slasher.State.Proposed) return;
        wait(seed >> 64, p.deadline);
        if (block.timestamp < p.deadline) return;
        carryOut(id, p);
        did("executeSlash");
        vm.assertTrue(block.timestamp >= proposedAt[id] + WINDOW);
    }

    /// @dev An undisputed proposal is executed, a stopped one confirmed.
    function carryOut(bytes32 id, Slasher.Proposal memory p) internal {
        uint256 before = wholeOf(p.provider);
        if (isStopped(p)) {
            vm.prank(arbiter);
            slasher.confirm(id);
        } else {
            slasher.execute(id);
        }
        uint256 lost = before - wholeOf(p.provider);
        vm.assertLe(lost, STAKE, "more than was asked");
        slashed[p.provider] += lost;
        taken[p.provider] = taken[p.provider] + lost - p.amount;
        --openCount[p.provider];
        deposits -= depositOf[id];
        ++executions[id];
        if (lost == 0) return;
        vm.assertFalse(pools.isMember(p.pool, p.node));
        // Nor does that seat go on under the key that it was moved to. (A key that its provider seats
        // again, by an invite of its own, is a new seat.)
        uint256 went = seatWent[p.pool][p.node];
        if (went != 0) vm.assertFalse(pools.isMember(p.pool, nodes[went - 1]));
    }

    function wholeOf(address owner) internal view returns (uint256) {
        return vault.slashable(owner) + vault.pendingSlash(owner);
    }

    function calledOff(bytes32 id, Slasher.Proposal memory p) internal {
        --openCount[p.provider];
        taken[p.provider] -= p.amount;
        deposits -= depositOf[id];
    }

    function disputeSlash(uint256 seed) public {
        (bytes32 id, Slasher.Proposal memory p) = someId(seed);
        if (p.state != Slasher.State.Proposed || block.timestamp >= p.deadline) return;
        uint256 deposit = depositAt[id];
        give(p.provider, deposit);
        vm.startPrank(p.provider);
        token.approve(address(slasher), deposit);
        slasher.dispute(id);
        vm.stopPrank();
        depositOf[id] = deposit;
        deposits += deposit;
        did("disputeSlash");
    }

    function objectToSlash(uint256 seed) public {
        (bytes32 id, Slasher.Proposal memory p) = someId(seed);
        if (p.state != Slasher.State.Proposed || block.timestamp >= p.deadline) return;
        vm.prank(p.provider);
        slasher.object(id);
        did("objectToSlash");
    }

    /// @dev Makes a stopped proposal, one time in three.
    function stopOne(uint256 seed) internal returns (uint256) {
        if (seed % 3 != 0) return seed;
        proposeSlash(seed & ~uint256(1));
        if (seed % 2 == 0) disputeSlash(0);
        else objectToSlash(0);
        return 0;
    }

    function judgeSlash(uint256 seed, bool same) external {
        (bytes32 id, Slasher.Proposal memory p) = someId(stopOne(seed));
        if (!isStopped(p) || block.timestamp >= p.deadline) return;
        if (same) {
            carryOut(id, p);
            did("confirm");
            return;
        }
        uint256[2] memory before = [wholeOf(validator), wholeOf(validator2)];
        vm.prank(arbiter);
        slasher.overturn(id);
        did("overturn");
        calledOff(id, p);
        slashed[validator] += before[0] - wholeOf(validator);
        slashed[validator2] += before[1] - wholeOf(validator2);
    }

    function lapseSlash(uint256 seed) external {
        (bytes32 id, Slasher.Proposal memory p) = someId(stopOne(seed));
        if (!isStopped(p)) return;
        wait(seed >> 64, p.deadline);
        if (block.timestamp < p.deadline) return;
        slasher.lapse(id);
        did("lapseSlash");
        calledOff(id, p);
    }

    function cancelSlash(uint256 seed) external {
        (bytes32 id, Slasher.Proposal memory p) = someId(seed);
        bool isOpen = p.state == Slasher.State.Proposed || isStopped(p);
        if (!isOpen || seed % 3 != 0) return;
        vm.prank(arbiter);
        slasher.cancel(id);
        did("cancelSlash");
        calledOff(id, p);
    }
}
