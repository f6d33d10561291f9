// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { IERC1271 } from "@openzeppelin/contracts/interfaces/IERC1271.sol";

import { PoolState } from "../../contracts/src/PoolState.sol";
import { Pools } from "../../contracts/src/Pools.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Invite, PolicyStatement } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @dev A contract account that approves digests one by one.
contract Safe is IERC1271 {
    mapping(bytes32 => bool) public approved;

    function approve(bytes32 digest) external {
        approved[digest] = true;
    }

    function create(Pools pools, bytes32 run) external returns (uint256) {
        return pools.create(Pools.Config(address(this), run, 0, 0, 2, 2, 1));
    }

    function isValidSignature(bytes32 digest, bytes calldata) external view returns (bytes4) {
        return approved[digest] ? IERC1271.isValidSignature.selector : bytes4(0);
    }
}

contract PoolsTest is Network {
    function setUp() public {
        deployNetwork();
        register(provider, payout);
        stake(provider, 3 * STAKE);
        addNode(provider, NODE_KEY);
        addNode(provider, NODE2_KEY);
    }

    function policy(uint64 version) private view returns (PolicyStatement memory s, bytes memory) {
        s = PolicyStatement(pool, version, keccak256(abi.encode(version)));
        return (s, sign(TRAINER_KEY, pools.policyStatementDigest(s)));
    }

    function test_Create_KeepsWhatWasAsked() public view {
        (
            address manager_,
            address trainer_,
            bytes32 run,
            uint256 stakePerSeat,
            uint32 capacity,
            uint32 members,
            bool ended
        ) = pools.poolOf(pool);
        vm.assertEq(manager_, manager);
        vm.assertEq(trainer_, trainer);
        vm.assertEq(run, RUN);
        vm.assertEq(stakePerSeat, STAKE);
        vm.assertEq(capacity, CAPACITY);
        vm.assertEq(members, 0);
        vm.assertFalse(ended);
        (uint8 quorum, uint256 slashAmount, uint32 leaseSeconds) = pools.judgementOf(pool);
        vm.assertEq(quorum, 2);
        vm.assertEq(slashAmount, STAKE);
        vm.assertEq(leaseSeconds, LEASE);
        vm.assertEq(pools.nextVersion(pool), 0);
    }

    function test_Create_RefusesBlanks() public {
        bytes4[6] memory errors = [
            Errors.ZeroAddress.selector,
            Errors.ZeroDigest.selector,
            Errors.ZeroCapacity.selector,
            Errors.ZeroPeriod.selector,
            Errors.SlashAboveStake.selector,
            Errors.NoQuorum.selector
        ];
        for (uint256 i; i < 6; ++i) {
            Pools.Config memory c = config();
            if (i == 0) c.trainer = address(0);
            if (i == 1) c.runDigest = 0;
            if (i == 2) c.capacity = 0;
            if (i == 3) c.leaseSeconds = 0;
            if (i == 4) c.slashAmount = c.stakePerSeat + 1;
            if (i == 5) c.quorum = 0;
            vm.expectPartialRevert(errors[i]);
            pools.create(c);
        }
    }

    function test_Create_OneOpinionIsEnoughOnALocalChainOnly_AndFourNowhere() public {
        Pools.Config memory c = config();
        c.quorum = 4;
        expect(abi.encodeWithSelector(Errors.NoQuorum.selector, 4, 1));
        pools.create(c);
        c.quorum = 1;
        vm.startPrank(manager);
        pool = pools.create(c);
        pools.setValidator(pool, validator, true);
        expect(abi.encodeWithSelector(Errors.TooManyValidators.selector, 1));
        pools.setValidator(pool, validator2, true);
        vm.stopPrank();
        vm.chainId(8453);
        expect(abi.encodeWithSelector(Errors.NoQuorum.selector, 1, 2));
        pools.create(c);
        c.quorum = 3;
        vm.assertEq(pools.create(c), pool + 1);
    }

    function test_UnknownPool_IsRefusedByName() public {
        bytes memory unknown = abi.encodeWithSelector(Errors.UnknownPool.selector, 99);
        expect(unknown);
        pools.poolOf(99);
        expect(unknown);
        pools.managerOf(99);
        expect(unknown);
        pools.end(99);
        Invite memory i = invite(node);
        i.pool = 99;
        bytes memory signature = signed(i);
        expect(unknown);
        pools.join(i, signature);
    }

    function test_ManagersCalls_RefuseOthers() public {
        vm.startPrank(stranger);
        expectNotAllowed(stranger);
        pools.setValidator(pool, stranger, true);
        expectNotAllowed(stranger);
        pools.eject(pool, node);
        expectNotAllowed(stranger);
        pools.setBan(pool, node, true);
        expectNotAllowed(stranger);
        pools.end(pool);
        expectNotAllowed(stranger);
        pools.expel(pool, node, provider);
        expectNotAllowed(stranger);
        pools.wire(stranger);
        vm.stopPrank();
        expect(abi.encodeWithSelector(Errors.AlreadyWired.selector));
        pools.wire(address(1));
    }

    function test_SetValidator_NeverZero_AndDismissalTakesTheRole() public {
        vm.startPrank(manager);
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        pools.setValidator(pool, address(0), true);
        pools.setValidator(pool, validator, false);
        vm.stopPrank();
        vm.assertFalse(pools.isValidator(pool, validator));
        vm.assertTrue(pools.isValidator(pool, validator2));
    }

    function test_SetValidator_NumbersLastAndAreBounded() public {
        vm.startPrank(manager);
        assertValidator(2, true, START + LEASE);
        pools.setValidator(pool, validator2, false);
        assertValidator(2, false, START + LEASE);
        vm.assertEq(pools.validatorAt(pool, 2), validator2);
        for (uint160 i = 3; i <= 255; ++i) {
            pools.setValidator(pool, address(0xFF000 + i), true);
        }
        expect(abi.encodeWithSelector(Errors.TooManyValidators.selector, 255));
        pools.setValidator(pool, stranger, true);
        vm.warp(START + 9);
        pools.setValidator(pool, validator2, true);
        // A second appointment of one that is appointed does not move its date.
        vm.warp(START + 10);
        pools.setValidator(pool, validator2, true);
        vm.stopPrank();
        assertValidator(2, true, START + 9 + LEASE);
    }

    function assertValidator(uint256 number, bool on, uint256 from) private view {
        (uint8 number_, bool on_, uint40 from_) = pools.validatorOf(pool, validator2);
        vm.assertEq(number_, number);
        vm.assertTrue(on_ == on);
        vm.assertEq(from_, from);
    }

    // ------------------------------------------------------------------------------------- seats

    function test_Join_SeatsTheNodeAndCommitsItsStake() public {
        join(node);
        vm.assertTrue(pools.isMember(pool, node));
        vm.assertEq(vault.committed(provider), STAKE);
        (,,,,, uint32 members,) = pools.poolOf(pool);
        vm.assertEq(members, 1);
        (address liable, uint256 most,) = pools.liabilityOf(pool, node);
        vm.assertEq(liable, provider);
        vm.assertEq(most, STAKE);
    }

    function test_Join_StakeMustCoverAllSeats_InAllPools() public {
        join(node);
        join(node2);
        uint256 first = pool;
        pool = createPool();
        join(node);
        Invite memory i = invite(node2);
        bytes memory signature = signed(i);
        expect(
            abi.encodeWithSelector(
                Errors.InsufficientStake.selector, provider, 3 * STAKE, 4 * STAKE
            )
        );
        pools.join(i, signature);
        vm.assertTrue(pools.isMember(first, node));
        vm.assertTrue(pools.isMember(pool, node));
        vm.assertFalse(pools.isMember(pool, node2));
    }

    function test_Join_RefusesExpiredAndForeignInvites() public {
        Invite memory i = invite(node);
        i.deadline = uint64(block.timestamp) - 1;
        bytes memory signature = signed(i);
        expect(abi.encodeWithSelector(Errors.Expired.selector, i.deadline, block.timestamp));
        pools.join(i, signature);

        i = invite(node);
        signature = sign(NODE_KEY, pools.inviteDigest(i));
        expect(abi.encodeWithSelector(Errors.BadSignature.selector, manager, pools.inviteDigest(i)));
        pools.join(i, signature);

        i = invite(address(0xBAD));
        signature = signed(i);
        expect(abi.encodeWithSelector(Errors.UnknownNode.selector, address(0xBAD)));
        pools.join(i, signature);
    }

    function testFuzz_Join_RefusesEveryChangeOfASignedInvite(uint8 field, uint64 by) public {
        vm.assume(by != 0);
        Invite memory i = invite(node);
        bytes memory signature = signed(i);
        if (field % 2 == 0) i.node = node2;
        else i.deadline = uint64(block.timestamp) + by % (1 << 40);
        vm.expectPartialRevert(Errors.BadSignature.selector);
        pools.join(i, signature);
    }

    function testFuzz_Join_TakesNoRandomBytesForASignature(bytes memory noise) public {
        Invite memory i = invite(node);
        vm.expectPartialRevert(Errors.BadSignature.selector);
        pools.join(i, noise);
    }

    function test_Join_RefusesMembersAndAFullPool() public {
        join(node);
        Invite memory i = invite(node);
        bytes memory signature = signed(i);
        expect(abi.encodeWithSelector(Errors.AlreadyMember.selector, pool, node));
        pools.join(i, signature);

        vm.prank(manager);
        pool = pools.create(Pools.Config(trainer, RUN, 0, 0, 1, 2, LEASE));
        allow(provider, pool);
        join(node);
        i = invite(node2);
        signature = signed(i);
        expect(abi.encodeWithSelector(Errors.PoolFull.selector, pool, 1));
        pools.join(i, signature);
        vm.prank(node);
        pools.leave(pool, node);
        pools.join(i, signature);
        vm.assertTrue(pools.isMember(pool, node2));
    }

    function test_Leave_ByNodeOrProvider_FreesTheStake() public {
        join(node);
        join(node2);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        pools.leave(pool, node);
        vm.prank(node);
        pools.leave(pool, node);
        vm.prank(provider);
        pools.leave(pool, node2);
        vm.assertEq(vault.committed(provider), 0);
        vm.assertFalse(pools.isMember(pool, node));
        expect(abi.encodeWithSelector(Errors.NotMember.selector, pool, node));
        vm.prank(provider);
        pools.leave(pool, node);
    }

    function test_Join_AnInviteAdmitsOnce() public {
        Invite memory i = invite(node);
        bytes memory signature = signed(i);
        pools.join(i, signature);
        vm.prank(manager);
        pools.eject(pool, node);
        expect(abi.encodeWithSelector(Errors.InviteUsed.selector, pool, node, i.deadline));
        pools.join(i, signature);
        join(node);
        vm.assertTrue(pools.isMember(pool, node));
    }

    function test_Join_AnInviteWithoutEndAdmitsOnceAsWell() public {
        Invite memory i = invite(node);
        i.deadline = type(uint64).max;
        bytes memory signature = signed(i);
        pools.join(i, signature);
        vm.prank(node);
        pools.leave(pool, node);
        vm.expectPartialRevert(Errors.InviteUsed.selector);
        pools.join(i, signature);
    }

    function test_Eject_OnlyMembers() public {
        vm.startPrank(manager);
        expect(abi.encodeWithSelector(Errors.NotMember.selector, pool, node));
        pools.eject(pool, node);
        vm.stopPrank();
        join(node);
        vm.prank(manager);
        pools.eject(pool, node);
        vm.assertFalse(pools.isMember(pool, node));
        vm.assertEq(vault.committed(provider), 0);
    }

    function test_SetBan_BarsComingBackUntilLifted() public {
        vm.prank(manager);
        pools.setBan(pool, node, true);
        Invite memory i = invite(node);
        bytes memory signature = signed(i);
        expect(abi.encodeWithSelector(Errors.Banned.selector, pool, node));
        pools.join(i, signature);
        vm.prank(manager);
        pools.setBan(pool, node, false);
        pools.join(i, signature);
        vm.assertTrue(pools.isMember(pool, node));
    }

    function test_Expel_BarsANodeThatHasAlreadyLeft() public {
        join(node);
        vm.prank(node);
        pools.leave(pool, node);
        vm.prank(address(slasher));
        pools.expel(pool, node, provider);
        vm.assertTrue(pools.seatOf(pool, node).banned);
    }

    function test_Join_UnderANewProviderWaitsForTheOldOnesLiability() public {
        join(node);
        vm.startPrank(node);
        pools.leave(pool, node);
        registry.removeNode(node);
        vm.stopPrank();
        register(stranger, stranger);
        stake(stranger, STAKE);
        addNode(stranger, NODE_KEY);
        Invite memory i = invite(node);
        bytes memory signature = signed(i);
        uint256 until = START + UNBONDING;
        expect(abi.encodeWithSelector(Errors.StillLiable.selector, node, provider, until));
        pools.join(i, signature);
        vm.warp(until);
        pools.join(i, signature);
        vm.assertEq(pools.seatOf(pool, node).provider, stranger);
    }

    // ----------------------------------------------------------------------------------- policies

    function test_PublishPolicy_CountsFromZeroByOne() public {
        (PolicyStatement memory zero, bytes memory zeroSignature) = policy(0);
        (PolicyStatement memory first, bytes memory firstSignature) = policy(1);
        expect(abi.encodeWithSelector(Errors.WrongVersion.selector, 0, 1));
        pools.publishPolicy(first, firstSignature);
        pools.publishPolicy(zero, zeroSignature);
        expect(abi.encodeWithSelector(Errors.WrongVersion.selector, 1, 0));
        pools.publishPolicy(zero, zeroSignature);
        pools.publishPolicy(first, firstSignature);
        vm.assertEq(pools.policyDigest(pool, 1), first.manifestDigest);
        vm.assertEq(pools.nextVersion(pool), 2);
    }

    function test_PublishPolicy_NeedsTheTrainersSignatureAndADigest() public {
        (PolicyStatement memory s,) = policy(0);
        bytes memory wrong = sign(MANAGER_KEY, pools.policyStatementDigest(s));
        vm.expectPartialRevert(Errors.BadSignature.selector);
        pools.publishPolicy(s, wrong);
        s.manifestDigest = 0;
        expect(abi.encodeWithSelector(Errors.ZeroDigest.selector));
        pools.publishPolicy(s, wrong);
    }

    function test_ContractAccounts_ManageAndTrain() public {
        Safe safe = new Safe();
        pool = safe.create(pools, RUN);
        allow(provider, pool);
        Invite memory i = invite(node);
        vm.expectPartialRevert(Errors.BadSignature.selector);
        pools.join(i, "");
        safe.approve(pools.inviteDigest(i));
        pools.join(i, "");
        vm.assertTrue(pools.isMember(pool, node));
        PolicyStatement memory s = PolicyStatement(pool, 0, keccak256("p"));
        safe.approve(pools.policyStatementDigest(s));
        pools.publishPolicy(s, "");
        vm.assertEq(pools.policyDigest(pool, 0), keccak256("p"));
    }

    function test_End_ClosesJoinAndPublish_ButSeatsCanBeLeft() public {
        join(node);
        vm.startPrank(manager);
        pools.end(pool);
        expect(abi.encodeWithSelector(Errors.PoolHasEnded.selector, pool));
        pools.end(pool);
        vm.stopPrank();
        vm.assertTrue(pools.hasEnded(pool));
        Invite memory i = invite(node2);
        bytes memory signature = signed(i);
        expect(abi.encodeWithSelector(Errors.PoolHasEnded.selector, pool));
        pools.join(i, signature);
        (PolicyStatement memory s, bytes memory policySignature) = policy(0);
        expect(abi.encodeWithSelector(Errors.PoolHasEnded.selector, pool));
        pools.publishPolicy(s, policySignature);
        vm.prank(provider);
        pools.leave(pool, node);
        vm.assertEq(vault.committed(provider), 0);
    }

    function test_Revise_NamesTheRunFromALaterStepOn() public {
        expect(abi.encodeWithSelector(Errors.NotAllowed.selector, address(this)));
        pools.revise(pool, RUN, 1);
        vm.startPrank(manager);
        expect(abi.encodeWithSelector(Errors.ZeroDigest.selector));
        pools.revise(pool, 0, 1);
        expect(abi.encodeWithSelector(Errors.RevisionNotLater.selector, 0, 0));
        pools.revise(pool, keccak256("second"), 0);
        pools.revise(pool, keccak256("second"), 7);
        for (uint64 step = 6; step < 8; ++step) {
            expect(abi.encodeWithSelector(Errors.RevisionNotLater.selector, 7, step));
            pools.revise(pool, keccak256("third"), step);
        }
        vm.warp(block.timestamp + 5);
        pools.revise(pool, RUN, 8);
        PoolState.Revision[] memory made = pools.revisionsOf(pool);
        vm.assertEq(made.length, 2);
        vm.assertEq(made[0].runDigest, keccak256("second"));
        vm.assertEq(made[0].fromStep, 7);
        vm.assertEq(made[1].runDigest, RUN);
        vm.assertEq(made[1].fromStep, 8);
        vm.assertEq(made[1].at, made[0].at + 5);
        (,, bytes32 first,,,,) = pools.poolOf(pool);
        vm.assertEq(first, RUN);
        vm.assertEq(pools.revisionsOf(pool + 1).length, 0);
        pools.end(pool);
        expect(abi.encodeWithSelector(Errors.PoolHasEnded.selector, pool));
        pools.revise(pool, RUN, 9);
        vm.stopPrank();
    }
}
