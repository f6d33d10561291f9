// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Court } from "../../contracts/src/Court.sol";
import { Pools } from "../../contracts/src/Pools.sol";
import { Rewards } from "../../contracts/src/Rewards.sol";
import {
    Invite,
    NodeConsent,
    Opinions,
    PolicyStatement,
    RewardTable,
    Statements,
    Submission
} from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { Tree } from "./utils/Tree.sol";
import { vm } from "./utils/Vm.sol";

/// @notice What each act costs as a transaction of its own (base cost, calldata, cold storage) in a
/// warm pool of 400 nodes, with the bar that it must stay under.
/// @dev FOUNDRY_PROFILE=gas forge test; the numbers go to tests/contracts/snapshots/.
contract GasTest is Network {
    uint256 private constant NODES = 400;
    uint256 private constant NEW_KEY = 0x2EE;
    uint64 private constant E = START / EPOCH;
    uint256[] private judges = bothKeys();

    function setUp() public {
        deployNetwork();
        Pools.Config memory c = config();
        c.capacity = 100_000;
        vm.prank(manager);
        pool = pools.create(c);
        vm.startPrank(manager);
        pools.setValidator(pool, validator, true);
        pools.setValidator(pool, validator2, true);
        vm.stopPrank();
        seatNode(10 * STAKE);
        stake(provider, NODES * STAKE);
        for (uint256 i = 1; i < NODES; ++i) {
            uint256 key = 0xA0000 + i;
            addNode(provider, key);
            join(vm.addr(key));
        }
        fund(1000e18);
        give(treasury, 1);
        give(payout, 1);
        postRoot(one(RUN));
    }

    /// @dev Records the last call's gas and holds it to its bar.
    function bar(string memory name, uint256 most) private {
        uint256 gas = vm.snapshotGasLastCall("Gas", name);
        vm.assertLe(gas, most, name);
    }

    function leavesOf(uint256 n, uint256 from) private view returns (bytes32[] memory leaves) {
        leaves = new bytes32[](n);
        for (uint256 i; i < n; ++i) {
            leaves[i] = work.submissionDigest(submission(from + i));
        }
    }

    function test_Join_WithPermitInOneTransaction() public {
        address who = vm.addr(NEW_KEY);
        give(who, STAKE);
        NodeConsent memory c = consent(who, node2);
        bytes memory nodeSignature = signed(c, NODE2_KEY);
        Invite memory i = invite(node2);
        bytes memory managerSignature = signed(i);
        (uint8 v, bytes32 r, bytes32 s) = permit(who);
        vm.prank(who);
        registry.enroll(who, STAKE, START, v, r, s, c, nodeSignature, i, managerSignature);
        bar("newcomer to member with permit", 280_000);
        vm.assertTrue(pools.isMember(pool, node2));
    }

    function permit(address who) private view returns (uint8 v, bytes32 r, bytes32 s) {
        bytes32 structHash = keccak256(
            abi.encode(
                keccak256(
                    "Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"
                ),
                who,
                address(vault),
                STAKE,
                0,
                START
            )
        );
        return vm.sign(
            NEW_KEY, keccak256(abi.encodePacked("\x19\x01", token.DOMAIN_SEPARATOR(), structHash))
        );
    }

    function test_Join_AnotherNodeOfAProvider() public {
        addNode(provider, NODE2_KEY);
        Invite memory i = invite(node2);
        bytes memory signature = signed(i);
        pools.join(i, signature);
        bar("join", 120_000);
    }

    function test_Leave() public {
        vm.prank(node);
        pools.leave(pool, node);
        bar("leave at 400 nodes", 60_000);
    }

    /// @dev The provider's last one: from then on its binding to the manager ends.
    function test_Leave_TheLastSeatOfAProvider() public {
        address other = vm.addr(NEW_KEY);
        register(other, other);
        stake(other, STAKE);
        addNode(other, NODE2_KEY);
        join(node2);
        vm.prank(node2);
        pools.leave(pool, node2);
        bar("leave of the last seat", 60_000);
    }

    function test_Eject() public {
        vm.prank(manager);
        pools.eject(pool, node);
        bar("eject at 400 nodes", 60_000);
    }

    /// @dev All that a pool keeps about its size is one counter, so a counter of 40,000 is a pool of
    /// 40,000. Slot 9 + 2 and byte 19 are those of contracts/storage-layout.json.
    function grow() private {
        bytes32 slot = bytes32(uint256(keccak256(abi.encode(pool, uint256(9)))) + 2);
        uint256 word = uint256(vm.load(address(pools), slot));
        uint256 mask = uint256(type(uint32).max) << 152;
        vm.store(address(pools), slot, bytes32((word & ~mask) | (uint256(40_000) << 152)));
        (,,,,, uint32 members,) = pools.poolOf(pool);
        vm.assertEq(members, 40_000);
    }

    function test_LeaveAndEject_At40000() public {
        grow();
        uint256 state = vm.snapshotState();
        vm.prank(node);
        pools.leave(pool, node);
        bar("leave at 40000 nodes", 60_000);
        vm.revertToState(state);
        vm.prank(manager);
        pools.eject(pool, node);
        bar("eject at 40000 nodes", 60_000);
        vm.revertToState(state);
        vm.prank(manager);
        pools.setBan(pool, node, true);
        bar("ban at 40000 nodes", 60_000);
    }

    function test_MoveNode() public {
        NodeConsent memory c = consent(provider, node2);
        bytes memory signature = signed(c, NODE2_KEY);
        uint256[] memory seats = new uint256[](1);
        seats[0] = pool;
        vm.prank(provider);
        registry.moveNode(node, c, signature, seats);
        bar("move of a node with its seat", 260_000);
    }

    function test_PostRoot() public {
        vm.prank(manager);
        work.postRoot(pool, RUN, 64, EVIDENCE);
        bar("work root", 64 * 2700);
        vm.prank(manager);
        work.postRoot(pool, RUN, 1024, EVIDENCE);
        bar("work root of 1024", 1024 * 250);
    }

    function publishPolicy(uint64 version) private {
        PolicyStatement memory s = PolicyStatement(pool, version, EVIDENCE);
        bytes memory signature = sign(TRAINER_KEY, pools.policyStatementDigest(s));
        vm.prank(manager);
        pools.publishPolicy(s, signature);
    }

    function test_PublishPolicy() public {
        publishPolicy(0);
        publishPolicy(1);
        bar("later policy", 80_000);
    }

    function test_Reject() public {
        bytes32[] memory leaves = leavesOf(64, 0);
        uint64 seq = postRoot(leaves);
        bytes32[] memory proof = Tree.proof(leaves, 7);
        work.reject(submission(7), seq, proof, rejections(submission(7)));
        bar("reject of a leaf", 100_000);
    }

    /// @dev The pool's treasury has tokens, and the provider had a slash before.
    function test_ProposeAndExecute() public {
        bytes32 id = propose(100);
        vm.warp(START + WINDOW);
        slasher.execute(id);
        vm.prank(manager);
        pools.setBan(pool, node, false);
        join(node);
        uint256 gas = proposeAndExecute("");
        vm.assertLe(gas, 300_000, "propose and execute");
    }

    function test_Dispute() public {
        bytes32 id = propose(100);
        give(provider, DEPOSIT);
        vm.prank(provider);
        token.approve(address(slasher), DEPOSIT);
        vm.prank(provider);
        slasher.dispute(id);
        bar("dispute", 120_000);
        uint256 state = vm.snapshotState();
        vm.prank(arbiter);
        slasher.confirm(id);
        bar("confirm", 155_000);
        vm.revertToState(state);
        vm.prank(arbiter);
        slasher.overturn(id);
        bar("overturn", 200_000);
    }

    /// @dev A juror's acts and the provider's, in a register of twenty seats.
    function test_Court() public {
        for (uint256 i; i < 20; ++i) {
            registerJuror(address(uint160(0x1000 + i)));
        }
        give(stranger, JUROR_BOND);
        vm.prank(stranger);
        token.approve(address(court), JUROR_BOND);
        vm.prank(stranger);
        court.register(CLASS);
        bar("court: register", 180_000);
        bytes32 id = propose(100);
        Submission memory s = submission(100);
        Opinions memory o = rejections(s);
        uint256[] memory seats = firstSeats(7);
        vm.prank(provider);
        court.open(s, o, law(), seats, 2);
        bar("court: open", 250_000);
        dispute(id);
        court.draw(id);
        bar("court: fix the block", 80_000);
        vm.roll(vm.getBlockNumber() + 2);
        court.draw(id);
        bar("court: draw", 300_000);
        vote(id);
    }

    function vote(bytes32 id) private {
        (, address[] memory jurors) = court.caseOf(id);
        for (uint256 i; i < 3; ++i) {
            bytes32 commitment = court.commitmentOf(id, jurors[i], 1, RUN, RUN);
            vm.prank(jurors[i]);
            court.commit(id, commitment);
        }
        bar("court: commit", 70_000);
        vm.warp(START + DISPUTE / 2);
        vm.prank(jurors[0]);
        court.reveal(id, 1, RUN, RUN);
        bar("court: reveal", 90_000);
        vm.prank(jurors[1]);
        court.reveal(id, 1, RUN, RUN);
        bar("court: reveal that confirms", 250_000);
        vm.prank(jurors[2]);
        court.reveal(id, 1, RUN, RUN);
        court.settle(id);
        bar("court: settle", 180_000);
    }

    /// @dev The same, where the provider's account in the vault never held a slash.
    function test_ProposeAndExecute_FirstOfAProvider() public {
        // Another provider's, so that the network has seen one.
        address other = vm.addr(NEW_KEY);
        register(other, other);
        stake(other, STAKE);
        addNode(other, NODE2_KEY);
        join(node2);
        Submission memory s = submission(9);
        s.node = node2;
        bytes32 leaf = work.submissionDigest(s);
        uint64 seq = postRoot(one(leaf));
        bytes memory signature = sign(NODE2_KEY, leaf);
        slasher.propose(s, signature, seq, none(), rejections(s));
        vm.warp(START + 1);
        uint256 gas = proposeAndExecute(", first of a provider");
        vm.assertLe(gas, 320_000, "propose and execute");
    }

    /// @dev Once in a validator's life its account is bound to the pool's manager.
    function test_Propose_FirstOfAValidator() public {
        propose(100);
        bondValidator(vm.addr(0x7A3));
        (judges[0], judges[1]) = (VALIDATOR2_KEY, 0x7A3);
        proposeAndExecute(", first of a validator");
    }

    function proposeAndExecute(string memory which) private returns (uint256 gas) {
        bytes32[] memory leaves = leavesOf(64, 0);
        uint64 seq = postRoot(leaves);
        bytes memory signature = sign(NODE_KEY, leaves[7]);
        bytes32[] memory proof = Tree.proof(leaves, 7);
        Submission memory s = submission(7);
        Opinions memory o = opinions(s, 2, judges);
        bytes32 id = slasher.propose(s, signature, seq, proof, o);
        gas = vm.snapshotGasLastCall("Gas", string.concat("propose", which));
        vm.warp(START + 2 * WINDOW);
        slasher.execute(id);
        gas += vm.snapshotGasLastCall("Gas", string.concat("execute", which));
        vm.snapshotValue("Gas", string.concat("propose and execute", which), gas);
    }

    function test_PostTable() public {
        RewardTable memory t =
            RewardTable(pool, E, Statements.rewardLeaf(node, 900e18), 900e18, EVIDENCE);
        addBond(500e18);
        vm.warp(rewards.silentFrom(pool));
        bytes[] memory signatures = tabled(t, judges);
        rewards.postTable(t, signatures);
        bar("table of two validators", 220_000);
    }

    function test_Claim() public {
        bytes32[] memory leaves = new bytes32[](NODES);
        bytes32[] memory later = new bytes32[](NODES);
        for (uint256 i; i < NODES; ++i) {
            address who = i == 5 ? node : vm.addr(0xA0000 + i);
            leaves[i] = Statements.rewardLeaf(who, 1e18);
            later[i] = Statements.rewardLeaf(who, 2e18);
        }
        bytes32 root = Tree.root(leaves);
        bytes32 laterRoot = Tree.root(later);
        vm.warp(postable(E + 1));
        vm.prank(manager);
        rewards.postRewardRoot(pool, E, root, 400e18, EVIDENCE);
        bar("reward root", 220_000);
        vm.prank(manager);
        rewards.postRewardRoot(pool, E + 1, laterRoot, 800e18, EVIDENCE);
        bar("later reward root", 160_000);
        bytes32[] memory proof = Tree.proof(leaves, 5);
        bytes32[] memory laterProof = Tree.proof(later, 5);
        vm.warp(postable(E + 1) + DELAY);
        uint256 before = vm.snapshotState();
        Rewards.Claim[] memory claims = new Rewards.Claim[](64);
        for (uint256 i; i < 64; ++i) {
            address who = i == 5 ? node : vm.addr(0xA0000 + i + (i == 0 ? 1000 : 0));
            claims[i] = Rewards.Claim(pool, E, who, 1e18, Tree.proof(leaves, i));
        }
        claims[0] = claims[5];
        rewards.claimMany(claims);
        vm.snapshotValue("Gas", "batch claim, each of 63", vm.lastCallGas().gasTotalUsed / 63);
        vm.revertToState(before);
        rewards.claim(pool, E, node, 1e18, proof);
        bar("first claim of a node", 100_000);
        uint256 state = vm.snapshotState();
        vm.prank(provider);
        registry.setPayout(address(0xF2E5));
        rewards.claim(pool, E + 1, node, 2e18, laterProof);
        bar("later claim to an empty account", 95_000);
        vm.revertToState(state);
        rewards.claim(pool, E + 1, node, 2e18, laterProof);
        bar("later claim of a node", 75_000);
    }
}
