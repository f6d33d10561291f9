// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Pools } from "../../contracts/src/Pools.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Invite, NodeConsent } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice Whose consent a seat needs, who may ask for more, and how a seat goes to another key.
contract SeatsTest is Network {
    uint256 private constant NODE3_KEY = 0x40E0;
    address private node3 = vm.addr(NODE3_KEY);

    function setUp() public {
        deployNetwork();
        vm.prank(provider);
        registry.registerProvider(payout);
        vm.prank(provider);
        pools.allow(pool, false);
        stake(provider, 4 * STAKE);
        addNode(provider, NODE_KEY);
    }

    function refused(address caller, Invite memory i, bytes memory error_) private {
        bytes memory signature = signed(i);
        expect(error_);
        vm.prank(caller);
        pools.join(i, signature);
    }

    function notAgreed() private view returns (bytes memory) {
        return abi.encodeWithSelector(Errors.NotAgreed.selector, pool, provider);
    }

    // -------------------------------------------------------------------------------- the consent

    function test_Join_WithoutTheProvidersConsentNoAccountCommitsItsStake() public {
        uint256 trap = STAKE * 3;
        vm.prank(vm.addr(0xBAD));
        pool = pools.create(Pools.Config(trainer, RUN, uint88(trap), 0, 1, 2, LEASE));
        Invite memory i = invite(node);
        bytes memory signature = sign(0xBAD, pools.inviteDigest(i));
        expect(notAgreed());
        vm.prank(stranger);
        pools.join(i, signature);
        vm.assertEq(vault.committed(provider), 0);
        // Nor does the node's own key: it is a hot one.
        expect(notAgreed());
        vm.prank(node);
        pools.join(i, signature);
    }

    function test_Join_ByTheProviderItselfIsItsConsent() public {
        Invite memory i = invite(node);
        bytes memory signature = signed(i);
        vm.prank(provider);
        pools.join(i, signature);
        vm.assertTrue(pools.isMember(pool, node));
    }

    function test_Allow_LetsAnyoneCarryInvites() public {
        vm.expectEmit();
        emit SeatsAllowed(pool, provider, true);
        vm.prank(provider);
        pools.allow(pool, true);
        vm.assertTrue(pools.allows(provider, pool));
        join(node);
        vm.assertEq(vault.committed(provider), STAKE);
    }

    event SeatsAllowed(uint256 indexed pool, address indexed provider, bool on);

    function test_Allow_TakenBackStopsNewSeatsAndKeepsTakenOnes() public {
        vm.startPrank(provider);
        pools.allow(pool, true);
        vm.stopPrank();
        join(node);
        vm.prank(provider);
        pools.allow(pool, false);
        vm.assertTrue(pools.isMember(pool, node));
        vm.prank(node);
        pools.leave(pool, node);
        refused(stranger, invite(node), notAgreed());
    }

    function test_Allow_RefusesAnUnknownPool() public {
        expect(abi.encodeWithSelector(Errors.UnknownPool.selector, 99));
        pools.allow(99, true);
    }

    function test_Join_AnEjectedNodeComesBackWithoutConsent_OneThatLeftDoesNot() public {
        Invite memory i = invite(node);
        bytes memory signature = signed(i);
        vm.prank(provider);
        pools.join(i, signature);
        vm.prank(manager);
        pools.eject(pool, node);
        join(node);
        vm.assertTrue(pools.isMember(pool, node));
        vm.prank(node);
        pools.leave(pool, node);
        refused(stranger, invite(node), notAgreed());
    }

    function test_Join_AnEjectedNodeOfAnotherProviderNeedsThatOnesConsent() public {
        vm.prank(provider);
        pools.allow(pool, true);
        join(node);
        vm.prank(manager);
        pools.eject(pool, node);
        vm.prank(provider);
        registry.removeNode(node);
        vm.prank(stranger);
        registry.registerProvider(stranger);
        stake(stranger, STAKE);
        addNode(stranger, NODE_KEY);
        vm.warp(START + UNBONDING);
        refused(
            node, invite(node), abi.encodeWithSelector(Errors.NotAgreed.selector, pool, stranger)
        );
    }

    // ------------------------------------------------------------------------- the pool's own say

    function test_Pause_ClosesThePoolUntilStart() public {
        vm.prank(manager);
        pools.pause(pool);
        (bool paused,,) = pools.rulesOf(pool);
        vm.assertTrue(paused);
        refused(provider, invite(node), abi.encodeWithSelector(Errors.PoolIsPaused.selector, pool));
        vm.prank(manager);
        pools.start(pool);
        vm.prank(provider);
        pools.allow(pool, true);
        join(node);
        (paused,,) = pools.rulesOf(pool);
        vm.assertFalse(paused);
    }

    function test_AllowList_SeatsOnlyListedProviders() public {
        vm.startPrank(provider);
        pools.allow(pool, true);
        vm.stopPrank();
        vm.prank(manager);
        pools.setAllowList(pool, true);
        (, bool listOnly, uint64 endedAt) = pools.rulesOf(pool);
        vm.assertTrue(listOnly);
        vm.assertEq(endedAt, 0);
        refused(
            stranger,
            invite(node),
            abi.encodeWithSelector(Errors.NotListed.selector, pool, provider)
        );
        vm.prank(manager);
        pools.setListed(pool, provider, true);
        vm.assertTrue(pools.isListed(pool, provider));
        join(node);
        vm.prank(manager);
        pools.setListed(pool, provider, false);
        vm.assertTrue(pools.isMember(pool, node));
    }

    function test_NewManagersCalls_RefuseOthers() public {
        vm.startPrank(stranger);
        expectNotAllowed(stranger);
        pools.pause(pool);
        expectNotAllowed(stranger);
        pools.start(pool);
        expectNotAllowed(stranger);
        pools.setAllowList(pool, true);
        expectNotAllowed(stranger);
        pools.setListed(pool, provider, true);
        vm.stopPrank();
        expect(abi.encodeWithSelector(Errors.UnknownPool.selector, 99));
        pools.rulesOf(99);
    }

    function test_Resign_EndsAValidatorsRoleByItsOwnAct() public {
        vm.prank(validator);
        pools.resign(pool);
        vm.assertFalse(pools.isValidator(pool, validator));
        vm.assertEq(pools.validatorAt(pool, 1), validator);
        expectNotAllowed(validator);
        vm.prank(validator);
        pools.resign(pool);
        vm.prank(manager);
        pools.setValidator(pool, validator, true);
        (uint8 number, bool on,) = pools.validatorOf(pool, validator);
        vm.assertEq(number, 1);
        vm.assertTrue(on);
    }

    // ---------------------------------------------------------------------------------- the moves

    function move(uint256 toKey) private {
        uint256[] memory seats = new uint256[](1);
        seats[0] = pool;
        move(node, toKey, seats);
    }

    function move(address from, uint256 toKey, uint256[] memory seats) private {
        NodeConsent memory c = consent(provider, vm.addr(toKey));
        bytes memory signature = signed(c, toKey);
        vm.prank(provider);
        registry.moveNode(from, c, signature, seats);
    }

    /// @dev The same, refused with `error_`.
    function moveRefused(address from, uint256 toKey, bytes memory error_) private {
        uint256[] memory seats = new uint256[](1);
        seats[0] = pool;
        NodeConsent memory c = consent(provider, vm.addr(toKey));
        bytes memory signature = signed(c, toKey);
        expect(error_);
        vm.prank(provider);
        registry.moveNode(from, c, signature, seats);
    }

    function seat(address who) private {
        vm.prank(provider);
        pools.allow(pool, true);
        join(who);
    }

    function test_MoveNode_TakesTheSeatAlong() public {
        seat(node);
        move(NODE2_KEY);
        vm.assertEq(registry.providerOf(node), address(0));
        vm.assertEq(registry.providerOf(node2), provider);
        vm.assertEq(registry.movedTo(node), node2);
        vm.assertFalse(pools.isMember(pool, node));
        vm.assertTrue(pools.isMember(pool, node2));
        vm.assertEq(vault.committed(provider), STAKE);
        (,,,,, uint32 members,) = pools.poolOf(pool);
        vm.assertEq(members, 1);
        // Who answers for the old key's work does not change, and its seat is on record.
        vm.assertEq(pools.liableFor(pool, node), provider);
        vm.assertEq(pools.seatOf(pool, node).leftAt, START);
    }

    function test_MoveNode_TheOldKeysWorkIsStillSlashed_AndTheNewKeyExpelled() public {
        seat(node);
        move(NODE2_KEY);
        bytes32 id = propose(1);
        vm.warp(START + WINDOW);
        slasher.execute(id);
        vm.assertEq(token.balanceOf(treasury), STAKE);
        vm.assertFalse(pools.isMember(pool, node2));
        vm.assertTrue(pools.seatOf(pool, node2).banned);
        vm.assertTrue(pools.seatOf(pool, node).banned);
        vm.assertEq(vault.committed(provider), 0);
    }

    /// @dev The old key bound and seated again, next to the seat that moved on.
    function comeBack() private {
        addNode(provider, NODE_KEY);
        seat(node);
    }

    function test_MoveNode_AnOldKeySeatedAgainDoesNotHideTheSeatThatMovedOn() public {
        seat(node);
        move(NODE2_KEY);
        comeBack();
        bytes32 id = propose(1);
        vm.warp(START + WINDOW);
        slasher.execute(id);
        vm.assertFalse(pools.isMember(pool, node));
        vm.assertFalse(pools.isMember(pool, node2));
        vm.assertTrue(pools.seatOf(pool, node).banned);
        vm.assertTrue(pools.seatOf(pool, node2).banned);
        vm.assertEq(vault.committed(provider), 0);
    }

    function test_MoveNode_AnOldKeySeatedAgainMovesOnAfterAnUnbondingPeriodOnly() public {
        seat(node);
        move(NODE2_KEY);
        comeBack();
        moveRefused(
            node,
            NODE3_KEY,
            abi.encodeWithSelector(Errors.MovedRecently.selector, node, START + UNBONDING)
        );
        vm.warp(START + UNBONDING);
        move(NODE3_KEY);
        vm.assertTrue(pools.isMember(pool, node2));
        vm.assertTrue(pools.isMember(pool, node3));
    }

    function test_Expel_LeavesTheSeatOfTheProviderThatTookTheKeyOver() public {
        seat(node);
        bytes32 id = propose(1);
        vm.startPrank(provider);
        pools.leave(pool, node);
        registry.removeNode(node);
        vm.stopPrank();
        register(stranger, stranger);
        stake(stranger, STAKE);
        addNode(stranger, NODE_KEY);
        vm.warp(START + UNBONDING);
        join(node);
        slasher.execute(id);
        vm.assertEq(token.balanceOf(treasury), STAKE);
        vm.assertEq(pools.liableFor(pool, node), stranger);
        vm.assertTrue(pools.isMember(pool, node));
        vm.assertFalse(pools.seatOf(pool, node).banned);
    }

    function test_MoveNode_OnceAnUnbondingPeriod_AtTheEdge() public {
        seat(node);
        move(NODE2_KEY);
        vm.warp(START + UNBONDING - 1);
        moveRefused(
            node2,
            NODE3_KEY,
            abi.encodeWithSelector(Errors.MovedRecently.selector, node2, START + UNBONDING)
        );
        vm.warp(START + UNBONDING);
        uint256[] memory seats = new uint256[](1);
        seats[0] = pool;
        move(node2, NODE3_KEY, seats);
        vm.assertTrue(pools.isMember(pool, node3));
    }

    function test_MoveNode_ABanGoesAlong() public {
        seat(node);
        vm.prank(manager);
        pools.setBan(pool, node, true);
        move(NODE2_KEY);
        vm.assertTrue(pools.seatOf(pool, node2).banned);
    }

    function test_MoveNode_RefusesABannedOrSeatedKey() public {
        seat(node);
        vm.prank(manager);
        pools.setBan(pool, node2, true);
        moveRefused(node, NODE2_KEY, abi.encodeWithSelector(Errors.Banned.selector, pool, node2));
        addNode(provider, NODE3_KEY);
        seat(node3);
        vm.prank(provider);
        registry.removeNode(node3);
        moveRefused(
            node, NODE3_KEY, abi.encodeWithSelector(Errors.AlreadyMember.selector, pool, node3)
        );
    }

    function test_MoveNode_RefusesASeatThatIsNotThere() public {
        moveRefused(node, NODE2_KEY, abi.encodeWithSelector(Errors.NotMember.selector, pool, node));
        seat(node);
        vm.prank(node);
        pools.leave(pool, node);
        moveRefused(node, NODE2_KEY, abi.encodeWithSelector(Errors.NotMember.selector, pool, node));
    }

    function test_MoveNode_RefusesASeatOfAnotherProvider() public {
        seat(node);
        vm.prank(provider);
        registry.removeNode(node);
        vm.prank(stranger);
        registry.registerProvider(stranger);
        addNode(stranger, NODE_KEY);
        NodeConsent memory c = consent(stranger, node2);
        bytes memory signature = signed(c, NODE2_KEY);
        uint256[] memory seats = new uint256[](1);
        seats[0] = pool;
        expect(abi.encodeWithSelector(Errors.UnknownNode.selector, node2));
        vm.prank(stranger);
        registry.moveNode(node, c, signature, seats);
    }

    function test_MoveNode_ByTheNodesProviderOnly_WithTheNewKeysConsent() public {
        NodeConsent memory c = consent(stranger, node2);
        bytes memory signature = signed(c, NODE2_KEY);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        registry.moveNode(node, c, signature, new uint256[](0));
        c = consent(provider, node2);
        signature = signed(c, NODE3_KEY);
        vm.expectPartialRevert(Errors.BadSignature.selector);
        vm.prank(provider);
        registry.moveNode(node, c, signature, new uint256[](0));
        vm.assertEq(registry.providerOf(node), provider);
    }

    function test_MoveSeat_ByTheRegistryOnly() public {
        seat(node);
        expectNotAllowed(provider);
        vm.prank(provider);
        pools.moveSeat(pool, node, node2);
    }
}
