// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Invite, NodeConsent } from "../../contracts/src/libraries/Statements.sol";
import { Crook } from "./utils/Crook.sol";
import { vm } from "./utils/Vm.sol";

/// @notice Ways round consent and slashes that an attacker with a pool of its own tries.
contract EscapesTest is Crook {
    function setUp() public {
        deployNetwork();
    }

    /// @dev The crook enrolls with its own node's consent and an invite that names another's node.
    function enroll(Invite memory i, bytes memory signature, bytes memory refused) private {
        NodeConsent memory c = consent(crook, vm.addr(CROOK_NODE_KEY));
        bytes memory nodeSignature = signed(c, CROOK_NODE_KEY);
        expect(refused);
        vm.prank(crook);
        registry.enroll(crook, 0, 0, 0, 0, 0, c, nodeSignature, i, signature);
    }

    // ------------------------------------------------------------------------------------ enroll

    function test_Enroll_CannotCommitAnothersStakeToTheCallersPool() public {
        seatNode(3 * STAKE);
        openCrooksPool(2 * STAKE);
        (Invite memory i, bytes memory signature) = invitedByCrook(node);
        vm.prank(crook);
        vm.expectPartialRevert(Errors.NotAgreed.selector);
        pools.join(i, signature);
        enroll(i, signature, abi.encodeWithSelector(Errors.UnknownNode.selector, node));
        vm.assertFalse(pools.isMember(crooksPool, node));
        vm.assertEq(vault.committed(provider), STAKE);
        vm.assertEq(vault.unbondable(provider), 2 * STAKE);
        vm.assertFalse(registry.isProvider(crook));
    }

    function test_Enroll_CannotCarryAnothersUnusedInvite() public {
        seatNode(STAKE);
        vm.startPrank(provider);
        pools.allow(pool, false);
        pools.leave(pool, node);
        vm.stopPrank();
        Invite memory unused = invite(node);
        bytes memory signature = signed(unused);
        enroll(unused, signature, abi.encodeWithSelector(Errors.UnknownNode.selector, node));
        vm.assertEq(vault.unbondable(provider), STAKE);
    }

    // ------------------------------------------------------------- stake added while slashes are open

    function test_Deposit_WhileASlashIsOpen_IsWithinReachOfTheNext() public {
        seatNode(STAKE);
        bytes32 first = propose(1);
        stake(provider, 2 * STAKE);
        vm.assertEq(slasher.proposal(first).amount, STAKE);
        vm.assertEq(slasher.proposal(propose(2)).amount, STAKE);
        vm.assertEq(slasher.proposal(propose(3)).amount, STAKE);
        vm.assertEq(slasher.proposal(propose(4)).amount, 0);
        vm.assertEq(vault.slashable(provider), 0);
    }

    function test_OpenSlash_APoolThatNeedsNoStakeHoldsNone() public {
        openCrooksPool(0);
        register(provider, payout);
        addNode(provider, NODE_KEY);
        joinCrooksPool(provider, node);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        this.proposes();
        stake(provider, 2 * STAKE);
        join(node);
        bytes32 honest = propose(2);
        vm.assertEq(slasher.proposal(honest).amount, STAKE);
        vm.warp(START + WINDOW);
        slasher.execute(honest);
        vm.assertEq(vault.active(provider), STAKE);
        vm.assertEq(token.balanceOf(treasury), STAKE);
    }

    /// @dev A call of its own, so that the refusal is the proposal's.
    function proposes() external {
        proposeInCrooksPool(1, NODE_KEY);
    }

    function test_OpenSlash_HoldsNoMoreThanIsThere() public {
        seatNode(3 * STAKE);
        vm.startPrank(provider);
        vault.unbond(2 * STAKE);
        vm.warp(START + UNBONDING);
        vm.stopPrank();
        propose(1);
        vm.prank(provider);
        vm.assertEq(vault.withdraw(), 2 * STAKE);
        vm.assertEq(slasher.proposal(propose(2)).amount, 0);
        vm.assertEq(vault.slashable(provider), 0);
    }

    // --------------------------------------------------------------------------------- moved seats

    function test_MoveNode_NoSeatMovesWhileASlashHoldsStake() public {
        seatNode(3 * STAKE);
        bytes32 id = propose(1);
        NodeConsent memory c = consent(provider, node2);
        bytes memory signature = signed(c, NODE2_KEY);
        uint256[] memory seats = new uint256[](1);
        seats[0] = pool;
        expect(abi.encodeWithSelector(Errors.SlashOpen.selector, provider));
        vm.prank(provider);
        registry.moveNode(node, c, signature, seats);
        vm.prank(arbiter);
        slasher.cancel(id);
        vm.prank(provider);
        registry.moveNode(node, c, signature, seats);
        vm.assertTrue(pools.isMember(pool, node2));
    }
}
