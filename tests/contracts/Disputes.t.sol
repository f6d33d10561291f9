// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Slasher } from "../../contracts/src/Slasher.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice How a proposal ends otherwise than by its window: disputed, judged, lapsed, called off.
contract DisputesTest is Network {
    uint256 private constant SLASH = 60e18;

    function setUp() public {
        deployNetwork();
        seatNode(3 * STAKE);
    }

    function judge(uint256 id, bool same) private {
        vm.prank(validator2);
        if (same) slasher.confirm(id);
        else slasher.overturn(id);
    }

    function state(uint256 id) private view returns (Slasher.State) {
        return slasher.proposal(id).state;
    }

    function assertState(uint256 id, Slasher.State expected) private view {
        vm.assertEq(uint256(state(id)), uint256(expected), "state");
    }

    function assertStake(uint256 active, uint256 pending) private view {
        vm.assertEq(vault.active(provider), active, "active");
        vm.assertEq(vault.pendingSlash(provider), pending, "pending");
    }

    // ----------------------------------------------------------------------------------- dispute

    function test_Dispute_ByTheProviderWithinTheWindowWithTheDeposit() public {
        uint256 id = propose(1, SLASH);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        slasher.dispute(id);
        vm.expectPartialRevert(
            bytes4(keccak256("ERC20InsufficientAllowance(address,uint256,uint256)"))
        );
        vm.prank(provider);
        slasher.dispute(id);
        vm.warp(START + WINDOW);
        expect(abi.encodeWithSelector(Errors.WindowClosed.selector, id, START + WINDOW));
        vm.prank(provider);
        slasher.dispute(id);
        vm.warp(START + WINDOW - 1);
        dispute(id);
        assertState(id, Slasher.State.Disputed);
        vm.assertEq(token.balanceOf(address(slasher)), DEPOSIT);
        vm.warp(START + WINDOW);
        vm.expectPartialRevert(Errors.WrongState.selector);
        slasher.execute(id);
    }

    function test_Confirm_SlashesAndTheDepositIsLost() public {
        uint256 id = propose(1, SLASH);
        dispute(id);
        judge(id, true);
        assertState(id, Slasher.State.Executed);
        assertStake(3 * STAKE - SLASH, 0);
        vm.assertEq(token.balanceOf(treasury), SLASH + DEPOSIT);
        vm.assertEq(token.balanceOf(address(slasher)), 0);
        vm.assertEq(pools.classOf(pool, node), 0);
    }

    function test_Overturn_ReturnsTheDepositAndTheProposerPays() public {
        uint256 id = propose(1, SLASH);
        dispute(id);
        judge(id, false);
        assertState(id, Slasher.State.Cancelled);
        assertStake(3 * STAKE, 0);
        vm.assertEq(token.balanceOf(provider), DEPOSIT);
        vm.assertEq(token.balanceOf(treasury), BOND);
        vm.assertEq(vault.active(validator), 0);
        vm.assertEq(pools.classOf(pool, node), 1);
    }

    function test_Overturn_ReachesABondThatIsOnItsWayOut() public {
        uint256 id = propose(1, SLASH);
        vm.prank(validator);
        vault.unbond(BOND);
        dispute(id);
        judge(id, false);
        vm.assertEq(token.balanceOf(treasury), BOND);
        vm.assertEq(vault.unbonding(validator), 0);
    }

    function test_Judge_AnotherValidatorInTimeOnly() public {
        uint256 id = propose(1, SLASH);
        vm.expectPartialRevert(Errors.WrongState.selector);
        vm.prank(validator2);
        slasher.confirm(id);
        dispute(id);
        expect(abi.encodeWithSelector(Errors.OwnProposal.selector, id, validator));
        vm.prank(validator);
        slasher.confirm(id);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        slasher.overturn(id);
        vm.warp(START + DISPUTE);
        bytes memory closed =
            abi.encodeWithSelector(Errors.WindowClosed.selector, id, START + DISPUTE);
        expect(closed);
        judge(id, true);
        expect(closed);
        judge(id, false);
    }

    function test_Lapse_CancelsWhatNobodyJudgedInTime() public {
        uint256 id = propose(1, SLASH);
        vm.expectPartialRevert(Errors.WrongState.selector);
        slasher.lapse(id);
        dispute(id);
        vm.warp(START + DISPUTE - 1);
        expect(abi.encodeWithSelector(Errors.WindowOpen.selector, id, START + DISPUTE));
        slasher.lapse(id);
        vm.warp(START + DISPUTE);
        vm.prank(stranger);
        slasher.lapse(id);
        assertState(id, Slasher.State.Cancelled);
        assertStake(3 * STAKE, 0);
        vm.assertEq(token.balanceOf(provider), DEPOSIT);
        vm.assertEq(vault.active(validator), BOND);
    }

    // ------------------------------------------------------------------------------------ cancel

    function test_Cancel_ByTheGuardianUntilItsTermEnds() public {
        uint256 id = propose(1, SLASH);
        uint256 disputed = propose(2, SLASH);
        uint256 late = propose(3, SLASH);
        dispute(disputed);
        expectNotAllowed(manager);
        vm.prank(manager);
        slasher.cancel(id);
        vm.startPrank(guardian);
        slasher.cancel(id);
        slasher.cancel(disputed);
        vm.expectPartialRevert(Errors.WrongState.selector);
        slasher.cancel(id);
        vm.warp(GUARDIAN_ENDS);
        expect(abi.encodeWithSelector(Errors.GuardianEnded.selector, GUARDIAN_ENDS));
        slasher.cancel(late);
        vm.stopPrank();
        assertStake(3 * STAKE - SLASH, SLASH);
        vm.assertEq(token.balanceOf(provider), DEPOSIT);
        slasher.execute(late);
        assertStake(3 * STAKE - SLASH, 0);
    }

    function test_Confirm_WithoutTreasuryBurnsBoth() public {
        pool = createPool(address(0));
        vm.startPrank(manager);
        pools.setValidator(pool, validator, true);
        pools.setValidator(pool, validator2, true);
        vm.stopPrank();
        join(node, 1);
        uint256 id = propose(1, SLASH);
        dispute(id);
        uint256 supply = token.totalSupply();
        judge(id, true);
        vm.assertEq(token.totalSupply(), supply - SLASH - DEPOSIT);
    }

    function test_WithoutDepositAndBond_NothingIsAsked() public {
        Slasher.Roles memory terms = Slasher.Roles(guardian, GUARDIAN_ENDS, 0, 0, governor);
        Slasher free = new Slasher(vault, pools, work, terms);
        vm.assertEq(free.disputeDeposit(), 0);
        // The vault and the pools know the first one; put the new code in its place.
        vm.etch(address(slasher), address(free).code);
        vm.store(address(slasher), bytes32(uint256(2)), 0);
        vm.prank(validator);
        vault.unbond(BOND);
        uint256 id = propose(1, SLASH);
        vm.prank(provider);
        slasher.dispute(id);
        judge(id, false);
        assertState(id, Slasher.State.Cancelled);
        id = propose(2, SLASH);
        vm.prank(provider);
        slasher.dispute(id);
        judge(id, true);
        assertState(id, Slasher.State.Executed);
        vm.assertEq(token.balanceOf(treasury), SLASH);
        vm.assertEq(vault.unbonding(validator), BOND);
    }
}
