// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Slasher } from "../../contracts/src/Slasher.sol";
import { StakeVault } from "../../contracts/src/StakeVault.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice How a proposal ends otherwise than by its window: disputed, judged, lapsed, called off.
contract DisputesTest is Network {
    uint256 private constant SLASH = STAKE;

    function setUp() public {
        deployNetwork();
        seatNode(3 * STAKE);
    }

    function judge(bytes32 id, bool same) private {
        vm.prank(arbiter);
        if (same) slasher.confirm(id);
        else slasher.overturn(id);
    }

    // ----------------------------------------------------------------------------------- dispute

    function test_Dispute_ByTheProviderWithinTheWindowWithTheDeposit() public {
        bytes32 id = propose(1);
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
        bytes32 id = propose(1);
        dispute(id);
        judge(id, true);
        assertState(id, Slasher.State.Executed);
        assertStake(3 * STAKE - SLASH, 0);
        vm.assertEq(token.balanceOf(treasury), SLASH + DEPOSIT);
        vm.assertEq(token.balanceOf(address(slasher)), 0);
        vm.assertFalse(pools.isMember(pool, node));
    }

    /// @dev What an overturned proposal pays its provider: interest on the hold, for both windows.
    function interest() private view returns (uint256) {
        return SLASH * slasher.INTEREST() * (WINDOW + DISPUTE) / (100 * 365 days);
    }

    function test_Overturn_ReturnsTheDeposit_EachAuthorPays_TheAccusedIsCompensated() public {
        bytes32 id = propose(1);
        dispute(id);
        judge(id, false);
        assertState(id, Slasher.State.Cancelled);
        assertStake(3 * STAKE, 0);
        vm.assertTrue(interest() > 0);
        vm.assertEq(token.balanceOf(provider), DEPOSIT + interest());
        vm.assertEq(token.balanceOf(treasury), 2 * BOND - interest());
        vm.assertEq(vault.active(validator), BONDS - BOND);
        vm.assertEq(vault.active(validator2), BONDS - BOND);
        vm.assertEq(vault.accountOf(validator).pledges, 0);
        vm.assertTrue(pools.isMember(pool, node));
    }

    function test_Overturn_ReachesABondThatIsOnItsWayOut() public {
        bytes32 id = propose(1);
        vm.prank(validator);
        vault.unbond(BONDS);
        dispute(id);
        judge(id, false);
        vm.assertEq(token.balanceOf(treasury), 2 * BOND - interest());
        vm.assertEq(vault.unbonding(validator), BONDS - BOND);
    }

    function test_Judge_ByTheArbiterInTimeOnly() public {
        bytes32 id = propose(1);
        vm.expectPartialRevert(Errors.WrongState.selector);
        vm.prank(arbiter);
        slasher.confirm(id);
        dispute(id);
        address[4] memory others = [validator, manager, provider, stranger];
        for (uint256 i; i < 4; ++i) {
            expectNotAllowed(others[i]);
            vm.prank(others[i]);
            slasher.confirm(id);
            expectNotAllowed(others[i]);
            vm.prank(others[i]);
            slasher.overturn(id);
        }
        vm.warp(START + DISPUTE);
        bytes memory closed =
            abi.encodeWithSelector(Errors.WindowClosed.selector, id, START + DISPUTE);
        expect(closed);
        judge(id, true);
        expect(closed);
        judge(id, false);
    }

    // ------------------------------------------------------------------------------------ object

    function test_Object_WithoutADeposit_OnlyTheArbiterLetsItProceed() public {
        bytes32 id = propose(1);
        bytes32 second = propose(2);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        slasher.object(id);
        vm.startPrank(provider);
        slasher.object(id);
        slasher.object(second);
        vm.expectPartialRevert(Errors.WrongState.selector);
        slasher.dispute(id);
        vm.stopPrank();
        assertState(id, Slasher.State.Objected);
        vm.warp(START + WINDOW);
        vm.expectPartialRevert(Errors.WrongState.selector);
        slasher.execute(id);
        judge(id, true);
        assertState(id, Slasher.State.Executed);
        vm.assertEq(token.balanceOf(treasury), SLASH);
        expect(abi.encodeWithSelector(Errors.WindowOpen.selector, second, START + DISPUTE));
        slasher.lapse(second);
        vm.warp(START + DISPUTE);
        slasher.lapse(second);
        assertState(second, Slasher.State.Cancelled);
        assertStake(2 * STAKE, 0);
    }

    function test_Object_WithinTheWindowOnly() public {
        bytes32 id = propose(1);
        vm.warp(START + WINDOW);
        expect(abi.encodeWithSelector(Errors.WindowClosed.selector, id, START + WINDOW));
        vm.prank(provider);
        slasher.object(id);
    }

    function test_Lapse_CancelsWhatWasNotJudgedInTime() public {
        bytes32 id = propose(1);
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
        vm.assertEq(vault.active(validator), BONDS);
    }

    // ------------------------------------------------------------------------------------ cancel

    function test_Cancel_ByTheArbiterFromAnyOpenState_ForTheLifeOfTheDeployment() public {
        bytes32 id = propose(1);
        bytes32 disputed = propose(2);
        bytes32 objected = propose(3);
        dispute(disputed);
        vm.prank(provider);
        slasher.object(objected);
        expectNotAllowed(manager);
        vm.prank(manager);
        slasher.cancel(id);
        vm.warp(START + 1000 days);
        vm.startPrank(arbiter);
        slasher.cancel(id);
        slasher.cancel(disputed);
        slasher.cancel(objected);
        vm.expectPartialRevert(Errors.WrongState.selector);
        slasher.cancel(id);
        vm.stopPrank();
        assertStake(3 * STAKE, 0);
        vm.assertEq(token.balanceOf(provider), DEPOSIT);
        vm.assertEq(vault.accountOf(validator).pledges, 0);
    }

    function test_Confirm_WithoutTreasuryBurnsBoth() public {
        StakeVault burns = new StakeVault(token, periods(), address(0), CAP, NO_FEED);
        vm.etch(address(vault), address(burns).code);
        bytes32 id = propose(1);
        dispute(id);
        uint256 supply = token.totalSupply();
        judge(id, true);
        vm.assertEq(token.totalSupply(), supply - SLASH - DEPOSIT);
    }

    function test_WithoutDepositAndBond_NothingIsAsked() public {
        vm.prank(governor);
        slasher.announceTerms(0, 0);
        vm.warp(START + UNBONDING);
        slasher.applyTerms();
        vm.prank(validator);
        vault.unbond(BONDS);
        bytes32 id = propose(1);
        (address bound,) = vault.boundTo(validator);
        vm.assertEq(bound, address(0));
        vm.prank(provider);
        slasher.dispute(id);
        judge(id, false);
        assertState(id, Slasher.State.Cancelled);
        id = propose(2);
        vm.prank(provider);
        slasher.dispute(id);
        judge(id, true);
        assertState(id, Slasher.State.Executed);
        vm.assertEq(token.balanceOf(treasury), SLASH);
        vm.assertEq(vault.unbonding(validator), BONDS);
    }
}
