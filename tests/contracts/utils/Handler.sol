// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Slasher } from "../../../contracts/src/Slasher.sol";
import { Statements, Submission } from "../../../contracts/src/libraries/Statements.sol";
import { Network } from "./Network.sol";
import { Tree } from "./Tree.sol";
import { vm } from "./Vm.sol";

/// @notice Acts as providers, nodes, manager, validators, guardian, thief and clock, in any order.
/// Every act is one that must succeed, so a revert fails the run; what must not succeed is tried by
/// the thief. Beside the contracts it keeps its own books, written from the rules, not from the
/// contracts' state.
contract Handler is Network {
    uint256 internal constant PROVIDERS = 3;
    uint256 internal constant NODES = 6;
    uint256 internal constant PAY = 1e18;

    /// @dev A submission as the handler remembers it.
    struct Work_ {
        uint256 pool;
        uint256 number;
        uint256 node;
        uint64 seq;
        uint256 postedAt;
        bool rejected;
        uint256 id;
        bool credited;
    }

    /// @dev A reward root as the handler remembers it.
    struct Table {
        uint256 pool;
        uint64 epoch;
        uint256 claimableAt;
        uint256[NODES] amounts;
        bool disabled;
        uint256 worksUpTo;
    }

    struct Unbonded {
        uint256 amount;
        uint256 since;
    }

    uint256[2] public poolIds;
    address[PROVIDERS] public providers;
    address[NODES] public nodes;
    Work_[] internal works;
    Table[] internal tables;
    uint256 internal rooted;

    mapping(address => uint256) public deposited;
    mapping(address => uint256) public withdrawn;
    mapping(address => uint256) public slashed;
    mapping(address => Unbonded[]) internal unbonded;
    mapping(address => uint256) public rebonded;
    mapping(address => uint256) public openCount;
    mapping(address => uint256) public snapshot;
    mapping(address => uint256) public taken;
    mapping(bytes32 => uint256) public executions;
    mapping(uint256 => uint256) public proposedAt;
    mapping(uint256 => uint256) internal workOf;
    uint256 public disputed;
    uint256[] internal ids;
    mapping(uint256 => uint256) public funded;
    mapping(uint256 => uint256) public refunded;
    mapping(uint256 => mapping(uint256 => uint256)) public paid;
    uint256 public thefts;
    mapping(bytes32 => uint256) public calls;

    constructor() {
        deployNetwork();
    }

    /// @dev Called by the test once the token's supply is here.
    function open() external {
        poolIds[0] = pool;
        poolIds[1] = createPool(address(0));
        vm.startPrank(manager);
        pools.setValidator(poolIds[1], validator, true);
        pools.setValidator(poolIds[1], validator2, true);
        vm.stopPrank();
        deposited[validator] = BOND;
        deposited[validator2] = BOND;
        for (uint256 i; i < PROVIDERS; ++i) {
            providers[i] = address(uint160(0x9000 + i));
            register(providers[i], address(uint160(0xCA000 + i)));
            stakeFor(providers[i], 4 * STAKE);
        }
        for (uint256 i; i < NODES; ++i) {
            nodes[i] = vm.addr(keyOf(i));
            addNode(providers[i / 2], keyOf(i));
        }
        for (uint256 i; i < 4; ++i) {
            join(nodes[i], 1);
        }
        for (uint256 i; i < 2; ++i) {
            fundPool(poolIds[i], 100 * PAY);
        }
        give(guardian, DEPOSIT);
    }

    function keyOf(uint256 i) internal pure returns (uint256) {
        return 0x40DE00 + i;
    }

    function stakeFor(address who, uint256 amount) internal {
        stake(who, amount);
        deposited[who] += amount;
    }

    function fundPool(uint256 id, uint256 amount) internal {
        pool = id;
        fund(amount);
        funded[id] += amount;
    }

    function pick(uint256 seed) internal view returns (address) {
        uint256 i = seed % (PROVIDERS + 2);
        if (i < PROVIDERS) return providers[i];
        return i == PROVIDERS ? validator : validator2;
    }

    /// @dev An act that took place; the suite asserts that all of them do.
    function did(bytes32 what) internal {
        ++calls[what];
    }

    // -------------------------------------------------------------------------------------- clock

    function clock(uint256 seed) external {
        vm.warp(block.timestamp + 1 + seed % 45);
    }

    /// @dev Half of the acts that have a time of their own wait for it first.
    function wait(uint256 seed, uint256 until) internal {
        if (seed % 2 == 0 && block.timestamp < until) vm.warp(until);
    }

    // ---------------------------------------------------------------------------------- providers

    function addStake(uint256 who, uint256 amount) external {
        stakeFor(pick(who), 1 + amount % (2 * STAKE));
        did("addStake");
    }

    function unbond(uint256 who, uint256 amount) external {
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

    function withdraw(uint256 who) external {
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
        } catch {
            vm.assertEq(token.balanceOf(owner), before);
        }
    }

    function takeSeat(uint256 n, uint256 where, uint8 speedClass) public {
        n %= NODES;
        pool = poolIds[where % 2];
        speedClass = 1 + speedClass % 2;
        address owner = providers[n / 2];
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
        n %= NODES;
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

    // --------------------------------------------------------------------------------------- work

    function work_(uint256 n, uint256 where) public {
        n %= NODES;
        pool = poolIds[where % 2];
        if (pools.classOf(pool, nodes[n]) == 0) {
            takeSeat(n, where, uint8(where >> 8));
            if (pools.classOf(pool, nodes[n]) == 0) return;
        }
        Submission memory s = submissionOf(pool, works.length);
        uint64 seq = postRoot(one(work.submissionDigest(s)));
        did("work");
        works.push(Work_(pool, works.length, n, seq, block.timestamp, false, 0, false));
    }

    function submissionOf(uint256 id, uint256 number) internal pure returns (Submission memory) {
        return Submission(
            id, keccak256(abi.encode(number)), 1, 0, keccak256("f"), 1, 1, type(uint64).max
        );
    }

    function reject(uint256 which) external {
        if (works.length == 0) return;
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

    function proposeSlash(uint256 which, uint256 amount) external {
        if (which % 2 == 0) work_(which >> 64, which >> 128);
        if (works.length == 0) return;
        if (which % 2 == 0) which = works.length - 1;
        Work_ storage w = works[which % works.length];
        if (w.id != 0 || block.timestamp > w.postedAt + VALIDITY) return;
        if (vault.active(validator) < BOND) stakeFor(validator, BOND);
        address owner = providers[w.node / 2];
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

    function someId(uint256 seed) internal view returns (uint256 id, Slasher.Proposal memory p) {
        if (ids.length == 0) return (0, p);
        // Mostly one of the last: the others are settled.
        uint256 back = seed % (seed % 5 == 0 || ids.length < 3 ? ids.length : 3);
        id = ids[ids.length - 1 - back];
        p = slasher.proposal(id);
    }

    function executeSlash(uint256 seed) external {
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
    }

    function calledOff(Slasher.Proposal memory p) internal {
        --openCount[p.provider];
        taken[p.provider] -= p.amount;
    }

    function disputeSlash(uint256 seed) public {
        (uint256 id, Slasher.Proposal memory p) = someId(seed);
        if (p.state != Slasher.State.Proposed || block.timestamp >= p.deadline) return;
        give(p.provider, DEPOSIT);
        vm.startPrank(p.provider);
        token.approve(address(slasher), DEPOSIT);
        slasher.dispute(id);
        vm.stopPrank();
        ++disputed;
        did("disputeSlash");
    }

    function judgeSlash(uint256 seed, bool same) external {
        if (seed % 3 == 0) disputeSlash(seed);
        (uint256 id, Slasher.Proposal memory p) = someId(seed);
        if (p.state != Slasher.State.Disputed || block.timestamp >= p.deadline) return;
        --disputed;
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
        (uint256 id, Slasher.Proposal memory p) = someId(seed);
        if (p.state != Slasher.State.Disputed) return;
        wait(seed >> 64, p.deadline);
        if (block.timestamp < p.deadline) return;
        slasher.lapse(id);
        did("lapseSlash");
        --disputed;
        calledOff(p);
    }

    function cancelSlash(uint256 seed) external {
        (uint256 id, Slasher.Proposal memory p) = someId(seed);
        bool isOpen = p.state == Slasher.State.Proposed || p.state == Slasher.State.Disputed;
        if (!isOpen || seed % 3 != 0) return;
        vm.prank(guardian);
        slasher.cancel(id);
        did("cancelSlash");
        if (p.state == Slasher.State.Disputed) --disputed;
        calledOff(p);
    }

    // -------------------------------------------------------------------------------------- money

    function fundMore(uint256 where, uint256 amount) external {
        uint256 id = poolIds[where % 2];
        if (!pools.hasEnded(id)) fundPool(id, 1 + amount % (10 * PAY));
    }

    /// @dev Pays `PAY` for every work of the pool that was rooted up to `epoch` and not rejected.
    function postRewards(uint256 where) external {
        uint256 id = poolIds[where % 2];
        wait(where >> 64, postable(uint64(block.timestamp / EPOCH)));
        if (block.timestamp < START + VALIDITY + EPOCH) return;
        uint64 epoch = uint64((block.timestamp - VALIDITY) / EPOCH - 1);
        (uint256 total, uint64 next) = rewards.progress(id);
        if (epoch < next) return;
        Table storage t = tables.push();
        t.pool = id;
        t.epoch = epoch;
        t.claimableAt = block.timestamp + DELAY;
        uint256 sum;
        for (uint256 i; i < works.length; ++i) {
            Work_ storage w = works[i];
            if (w.pool != id || w.rejected || w.postedAt / EPOCH > epoch) continue;
            t.amounts[w.node] += PAY;
            w.credited = true;
            sum += PAY;
        }
        (uint256 free,) = rewards.funds(id);
        if (sum - total > free) {
            tables.pop();
            return;
        }
        bytes32 root = Tree.root(leavesOf(t));
        vm.prank(manager);
        rewards.postRewardRoot(id, epoch, root, sum, keccak256("t"));
        did("postRewards");
    }

    function leavesOf(Table storage t) internal view returns (bytes32[] memory leaves) {
        leaves = new bytes32[](NODES);
        for (uint256 i; i < NODES; ++i) {
            leaves[i] = Statements.rewardLeaf(nodes[i], t.amounts[i]);
        }
    }

    function claim(uint256 which, uint256 n) external {
        if (tables.length == 0) return;
        Table storage t = tables[which % tables.length];
        n %= NODES;
        if (!t.disabled) wait(which >> 64, t.claimableAt);
        if (t.disabled || block.timestamp < t.claimableAt || t.amounts[n] <= paid[t.pool][n]) {
            return;
        }
        address to = address(uint160(0xCA000 + n / 2));
        uint256 before = token.balanceOf(to);
        rewards.claim(t.pool, t.epoch, nodes[n], t.amounts[n], Tree.proof(leavesOf(t), n));
        uint256 amount = token.balanceOf(to) - before;
        vm.assertEq(paid[t.pool][n] + amount, t.amounts[n], "claim pays the difference");
        paid[t.pool][n] += amount;
        did("claim");
    }

    function disableRewards(uint256 which) external {
        if (tables.length == 0) return;
        Table storage t = tables[which % tables.length];
        if (t.disabled || block.timestamp >= t.claimableAt) return;
        vm.prank(guardian);
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
        if (free == 0) return;
        vm.prank(manager);
        rewards.refund(id);
        refunded[id] += free;
        did("refund");
    }

    // -------------------------------------------------------------------------------------- thief

    /// @dev Tries to move what is not the thief's; nothing of it may succeed.
    function thief(uint256 what, uint256 seed, uint256 amount) external {
        bytes memory data;
        address target;
        amount = 1 + amount % STAKE;
        address victim = pick(seed);
        (uint256 id,) = someId(seed);
        what %= 14;
        if (what < 7) target = address(vault);
        else if (what < 10) target = address(rewards);
        else if (what < 12) target = address(slasher);
        else target = address(pools);

        if (what == 0) data = abi.encodeCall(vault.openSlash, (victim, amount));
        if (what == 1) data = abi.encodeCall(vault.settleSlash, (victim, amount, stranger));
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
        if (what == 11) data = abi.encodeCall(slasher.overturn, (id));
        if (what == 12) data = abi.encodeCall(pools.eject, (poolIds[seed % 2], nodes[seed % 6]));
        if (what == 13) data = abi.encodeCall(pools.leave, (poolIds[seed % 2], nodes[seed % 6]));
        vm.prank(stranger);
        (bool done,) = target.call(data);
        if (done) ++thefts;
    }

    // -------------------------------------------------------------------------------------- views

    function accounts() external view returns (address[] memory list) {
        list = new address[](PROVIDERS + 2);
        for (uint256 i; i < list.length; ++i) {
            list[i] = pick(i);
        }
    }

    function contracts()
        external
        view
        returns (address, address, address, address, address, address)
    {
        return (
            address(token),
            address(vault),
            address(pools),
            address(work),
            address(rewards),
            address(slasher)
        );
    }

    /// @notice What an account may have withdrawn by now: what it unbonded long enough ago.
    function matured(address owner) external view returns (uint256 sum) {
        for (uint256 i; i < unbonded[owner].length; ++i) {
            if (unbonded[owner][i].since + UNBONDING <= block.timestamp) {
                sum += unbonded[owner][i].amount;
            }
        }
    }

    /// @notice Sum of what the provider's seats need.
    function seatsOf(uint256 p) external view returns (uint256 sum) {
        for (uint256 where; where < 2; ++where) {
            for (uint256 n = 2 * p; n < 2 * p + 2; ++n) {
                sum += STAKE * pools.classOf(poolIds[where], nodes[n]);
            }
        }
    }

    /// @notice Works of a pool that were accepted, and the number that are rejected and credited.
    function credits(uint256 where) external view returns (uint256 good, uint256 both) {
        for (uint256 i; i < works.length; ++i) {
            if (works[i].pool != poolIds[where]) continue;
            if (!works[i].rejected) ++good;
            else if (works[i].credited) ++both;
        }
    }

    /// @notice Most times that one submission was slashed.
    function mostExecutions() external view returns (uint256 most) {
        for (uint256 i; i < works.length; ++i) {
            bytes32 leaf = work.submissionDigest(submissionOf(works[i].pool, works[i].number));
            if (executions[leaf] > most) most = executions[leaf];
        }
    }
}
