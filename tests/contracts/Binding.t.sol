// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Invite } from "../../contracts/src/libraries/Statements.sol";
import { Crook } from "./utils/Crook.sol";
import { vm } from "./utils/Vm.sol";

/// @notice An account's stake answers to one manager at a time: who has a pool of its own cannot take its
/// stake there, ahead of the pool that it lied to.
contract BindingTest is Crook {
    function setUp() public {
        deployNetwork();
        register(provider, payout);
        stake(provider, STAKE);
        addNode(provider, NODE_KEY);
        openCrooksPool(STAKE);
    }

    /// @dev The honest pool's invite for `to`, refused because `owner` answers to `bound`.
    function joinRefused(address to, address owner, address bound, uint256 until) private {
        Invite memory i = invite(to);
        bytes memory signature = signed(i);
        expect(abi.encodeWithSelector(Errors.StakeBound.selector, owner, bound, until));
        pools.join(i, signature);
    }

    /// @dev The crook's invite for `to`, refused because `owner` answers to `bound`.
    function crooksRefused(address to, address owner, address bound, uint256 until) private {
        (Invite memory i, bytes memory signature) = invitedByCrook(to);
        expect(abi.encodeWithSelector(Errors.StakeBound.selector, owner, bound, until));
        vm.prank(owner);
        pools.join(i, signature);
    }

    function assertBound(address who, address to, uint256 until) private view {
        (address bound, uint256 end) = vault.boundTo(who);
        vm.assertEq(bound, to);
        vm.assertEq(end, until);
    }

    // ------------------------------------------------------------------------------------- providers

    function test_Join_ALiarsOwnPoolFirst_HoldsNothingOnceTheHonestPoolIsJoined() public {
        joinCrooksPool(provider, node);
        assertBound(provider, crook, 0);
        joinRefused(node, provider, crook, 0);
        vm.prank(node);
        pools.leave(crooksPool, node);
        uint256 until = START + UNBONDING;
        assertBound(provider, crook, until);
        vm.warp(until - 1);
        joinRefused(node, provider, crook, until);
        vm.warp(until);
        assertBound(provider, address(0), 0);
        join(node);
        assertBound(provider, manager, 0);
        // It lies, and its own validator is first.
        bytes32 own = proposeInCrooksPool(1, NODE_KEY);
        vm.assertEq(slasher.proposal(own).amount, 0);
        bytes32 honest = propose(2);
        vm.assertEq(slasher.proposal(honest).amount, STAKE);
        vm.warp(until + WINDOW);
        slasher.execute(own);
        slasher.execute(honest);
        vm.assertEq(token.balanceOf(treasury), STAKE);
    }

    function test_Join_ALiarsOwnPoolAfterTheLie_IsRefusedWhileTheHonestOneCanSlash() public {
        join(node);
        addNode(provider, CROOK_NODE_KEY);
        stake(provider, STAKE);
        address second = vm.addr(CROOK_NODE_KEY);
        crooksRefused(second, provider, manager, 0);
        vm.warp(START + 7);
        vm.prank(node);
        pools.leave(pool, node);
        crooksRefused(second, provider, manager, START + 7 + UNBONDING);
        vm.assertEq(slasher.proposal(propose(1)).amount, STAKE);
        vm.warp(START + 7 + UNBONDING);
        joinCrooksPool(provider, second);
        assertBound(provider, crook, 0);
    }

    function test_Join_TheTimeRunsFromTheLastSeat_HoweverItWasLost() public {
        stake(provider, STAKE);
        addNode(provider, CROOK_NODE_KEY);
        address second = vm.addr(CROOK_NODE_KEY);
        join(node);
        join(second);
        vm.prank(node);
        pools.leave(pool, node);
        assertBound(provider, manager, 0);
        vm.warp(START + 9);
        vm.prank(manager);
        pools.eject(pool, second);
        assertBound(provider, manager, START + 9 + UNBONDING);
        crooksRefused(node, provider, manager, START + 9 + UNBONDING);
    }

    function test_Join_SeveralPoolsOfOneManagerAtATime() public {
        uint256 first = pool;
        join(node);
        pool = createPool();
        stake(provider, STAKE);
        join(node);
        vm.assertEq(vault.committed(provider), 2 * STAKE);
        vm.prank(node);
        pools.leave(first, node);
        assertBound(provider, manager, 0);
    }

    function test_Join_ASeatWithoutStakeBindsNoProvider() public {
        openCrooksPool(0);
        joinCrooksPool(provider, node);
        assertBound(provider, address(0), 0);
        join(node);
        assertBound(provider, manager, 0);
        // Nor can anything be slashed there.
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        this.proposesAgainstItself();
    }

    function test_Join_WhatAnotherManagerHoldsBacksNoSeat() public {
        joinCrooksPool(provider, node);
        vm.prank(node);
        pools.leave(crooksPool, node);
        vm.warp(START + UNBONDING - 1);
        proposeInCrooksPool(1, NODE_KEY);
        vm.warp(START + UNBONDING);
        Invite memory i = invite(node);
        bytes memory signature = signed(i);
        expect(abi.encodeWithSelector(Errors.InsufficientStake.selector, provider, 0, STAKE));
        pools.join(i, signature);
        stake(provider, STAKE);
        pools.join(i, signature);
        vm.assertEq(slasher.proposal(propose(2)).amount, STAKE);
    }

    // ------------------------------------------------------------------------------------ validators

    function test_Propose_ByAnAccountThatSitsElsewhereIsRefused_SoNoBondPathEmptiesIt() public {
        join(node);
        // The liar has itself appointed in its own pool, to spend its stake there.
        stake(provider, BONDS);
        openCrooksPoolFor(provider);
        accompliceKey = PROVIDER_KEY;
        register(stranger, stranger);
        stake(stranger, STAKE);
        addNode(stranger, CROOK_NODE_KEY);
        joinCrooksPool(stranger, vm.addr(CROOK_NODE_KEY));
        vm.expectPartialRevert(Errors.StakeBound.selector);
        this.proposes();
        vm.assertEq(vault.slashable(provider), STAKE + BONDS);
        vm.assertEq(slasher.proposal(propose(1)).amount, STAKE);
    }

    /// @dev A call of its own, so that the refusal is the proposal's.
    function proposes() external {
        proposeInCrooksPool(9, CROOK_NODE_KEY);
    }

    function test_Propose_StakeThatSeatsNeedIsNoBond() public {
        openCrooksPoolFor(provider);
        joinCrooksPool(provider, node);
        stake(provider, BOND - 1);
        accompliceKey = PROVIDER_KEY;
        vm.expectPartialRevert(Errors.InsufficientStake.selector);
        this.proposesAgainstItself();
        stake(provider, 1);
        this.proposesAgainstItself();
    }

    function proposesAgainstItself() external {
        proposeInCrooksPool(9, NODE_KEY);
    }

    function test_Overturn_AFalseProposerCannotSaveItsBondInAPoolOfItsOwn() public {
        join(node);
        register(validator, validator);
        addNode(validator, CROOK_NODE_KEY);
        address own = vm.addr(CROOK_NODE_KEY);
        stake(validator, STAKE);
        bytes32 id = propose(1);
        assertBound(validator, manager, START + UNBONDING);
        crooksRefused(own, validator, manager, START + UNBONDING);
        vm.warp(START + WINDOW - 1);
        dispute(id);
        vm.warp(START + WINDOW + DISPUTE - 2);
        vm.prank(arbiter);
        slasher.overturn(id);
        vm.assertEq(vault.slashable(validator), BONDS + STAKE - BOND);
        vm.warp(START + UNBONDING);
        joinCrooksPool(validator, own);
    }
}
