// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Slasher } from "../../contracts/src/Slasher.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice Deposit and bond move only by the governor's announcement, one unbonding period later.
contract TermsTest is Network {
    event TermsAnnounced(uint256 disputeDeposit, uint256 validatorBond, uint64 actAt);
    event TermsChanged(uint256 disputeDeposit, uint256 validatorBond);
    event GovernorChanged(address indexed from, address indexed to);

    function setUp() public {
        deployNetwork();
        seatNode(4 * STAKE);
    }

    function announce(uint256 deposit, uint256 bond) private {
        vm.prank(governor);
        slasher.announceTerms(deposit, bond);
    }

    function test_Announce_ShowsTermsAndTheirTime() public {
        vm.assertEq(slasher.termsDelay(), UNBONDING);
        vm.expectEmit();
        emit TermsAnnounced(7, 8, START + UNBONDING);
        announce(7, 8);
        (uint256 deposit, uint256 bond, uint64 actAt) = slasher.announced();
        vm.assertEq(deposit, 7);
        vm.assertEq(bond, 8);
        vm.assertEq(actAt, START + UNBONDING);
        vm.assertEq(slasher.disputeDeposit(), DEPOSIT);
        vm.assertEq(slasher.validatorBond(), BOND);
    }

    function test_Apply_ByAnyoneAfterTheDelay_AtTheEdge_Once() public {
        announce(7, 8);
        vm.warp(START + UNBONDING - 1);
        expect(
            abi.encodeWithSelector(
                Errors.TooEarly.selector, START + UNBONDING, START + UNBONDING - 1
            )
        );
        slasher.applyTerms();
        vm.warp(START + UNBONDING);
        vm.expectEmit();
        emit TermsChanged(7, 8);
        vm.prank(stranger);
        slasher.applyTerms();
        vm.assertEq(slasher.disputeDeposit(), 7);
        vm.assertEq(slasher.validatorBond(), 8);
        (,, uint64 actAt) = slasher.announced();
        vm.assertEq(actAt, 0);
        expect(abi.encodeWithSelector(Errors.NothingAnnounced.selector));
        slasher.applyTerms();
    }

    function test_Announce_AgainRestartsTheDelay() public {
        announce(7, 8);
        vm.warp(START + UNBONDING);
        announce(9, 10);
        vm.expectPartialRevert(Errors.TooEarly.selector);
        slasher.applyTerms();
        (uint256 deposit,,) = slasher.announced();
        vm.assertEq(deposit, 9);
    }

    function test_Announce_ByTheGovernorOnly_WithinBounds() public {
        expectNotAllowed(stranger);
        vm.prank(stranger);
        slasher.announceTerms(1, 1);
        vm.expectRevert();
        vm.prank(governor);
        slasher.announceTerms(uint256(type(uint120).max) + 1, 1);
    }

    function test_HandOver_NeedsTheOthersAcceptance() public {
        vm.prank(governor);
        slasher.handOver(stranger);
        vm.assertEq(slasher.pendingGovernor(), stranger);
        vm.assertEq(slasher.governor(), governor);
        expectNotAllowed(provider);
        vm.prank(provider);
        slasher.acceptGovernor();
        vm.expectEmit();
        emit GovernorChanged(governor, stranger);
        vm.prank(stranger);
        slasher.acceptGovernor();
        vm.assertEq(slasher.governor(), stranger);
        vm.assertEq(slasher.pendingGovernor(), address(0));
        expectNotAllowed(governor);
        vm.prank(governor);
        slasher.handOver(governor);
    }

    function test_Renounce_IsForGood_AndVoidsWhatIsAnnounced() public {
        announce(7, 8);
        vm.prank(governor);
        slasher.handOver(stranger);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        slasher.renounceGovernor();
        vm.prank(governor);
        slasher.renounceGovernor();
        vm.assertEq(slasher.governor(), address(0));
        expectNotAllowed(stranger);
        vm.prank(stranger);
        slasher.acceptGovernor();
        vm.warp(START + UNBONDING);
        expect(abi.encodeWithSelector(Errors.NothingAnnounced.selector));
        slasher.applyTerms();
        expectNotAllowed(address(this));
        slasher.announceTerms(1, 1);
        // No one has the role: the zero account sends no transactions, but a call may claim to.
        vm.assertEq(slasher.pendingGovernor(), address(0));
    }

    function test_NewTerms_DoNotTouchAnOpenDispute() public {
        bytes32 id = propose(1);
        announce(3 * DEPOSIT, 0);
        dispute(id);
        vm.assertEq(slasher.depositOf(id), DEPOSIT);
        vm.warp(START + UNBONDING);
        slasher.applyTerms();
        slasher.lapse(id);
        vm.assertEq(token.balanceOf(provider), DEPOSIT);
        vm.assertEq(token.balanceOf(address(slasher)), 0);
        vm.assertEq(slasher.depositOf(id), 0);
    }

    /// @dev The terms of a proposal are those in force when it was made.
    function test_NewTerms_DoNotTouchAnOpenProposal() public {
        announce(3 * DEPOSIT, 3 * BOND);
        vm.warp(START + UNBONDING - 1);
        bytes32 id = propose(1);
        vm.warp(START + UNBONDING);
        slasher.applyTerms();
        vm.assertEq(slasher.disputeDeposit(), 3 * DEPOSIT);
        dispute(id);
        vm.assertEq(slasher.depositOf(id), DEPOSIT);
        vm.prank(arbiter);
        slasher.overturn(id);
        vm.assertEq(vault.active(validator), BONDS - BOND);
    }

    function test_NewTerms_HoldForLaterProposals() public {
        announce(0, BONDS + BOND);
        vm.warp(START + UNBONDING);
        slasher.applyTerms();
        vm.expectPartialRevert(Errors.InsufficientStake.selector);
        this.proposeAs(1);
        stake(validator, BOND);
        stake(validator2, BOND);
        bytes32 id = propose(2);
        vm.prank(provider);
        slasher.dispute(id);
        vm.assertEq(slasher.depositOf(id), 0);
        vm.prank(arbiter);
        slasher.overturn(id);
        vm.assertEq(vault.active(validator), 0);
        vm.assertEq(vault.active(validator2), 0);
    }

    function proposeAs(uint256 number) external returns (bytes32) {
        return propose(number);
    }

    function test_Constructor_WithoutAGovernorTheTermsAreFinal() public {
        Slasher final_ =
            new Slasher(vault, pools, work, court, Slasher.Roles(arbiter, 1, 2, address(0)));
        vm.assertEq(final_.governor(), address(0));
        vm.assertEq(final_.disputeDeposit(), 1);
        vm.assertEq(final_.validatorBond(), 2);
        expectNotAllowed(governor);
        vm.prank(governor);
        final_.announceTerms(3, 4);
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        new Slasher(vault, pools, work, court, Slasher.Roles(address(0), 1, 2, governor));
    }

    function test_Apply_AtMostAsOftenAsTheTermsNumbersAllow() public {
        for (uint256 i = 1; i < 256; ++i) {
            announce(i, i);
            vm.warp(block.timestamp + UNBONDING);
            slasher.applyTerms();
        }
        announce(1, 1);
        vm.warp(block.timestamp + UNBONDING);
        expect(abi.encodeWithSelector(Errors.TooManyTerms.selector, 255));
        slasher.applyTerms();
        vm.assertEq(slasher.validatorBond(), 255);
    }

    // ----------------------------------------------------------------------------------- arbiter

    function test_Arbiter_IsReplacedBehindTheDelay_ByItselfOrTheGovernor() public {
        for (uint256 i; i < 3; ++i) {
            address by = i == 0 ? manager : i == 1 ? arbiter : governor;
            address next = address(uint160(0xA9B0 + i));
            if (i == 0) expectNotAllowed(by);
            vm.prank(by);
            slasher.announceArbiter(next);
            if (i == 0) continue;
            (address announced, uint64 actAt) = slasher.announcedArbiter();
            vm.assertEq(announced, next);
            vm.assertEq(actAt, block.timestamp + UNBONDING);
            vm.warp(actAt - 1);
            expect(abi.encodeWithSelector(Errors.TooEarly.selector, actAt, actAt - 1));
            slasher.applyArbiter();
            vm.warp(actAt);
            slasher.applyArbiter();
            vm.assertEq(slasher.arbiter(), next);
            (announced, actAt) = slasher.announcedArbiter();
            vm.assertEq(actAt, 0);
            vm.assertEq(announced, address(0));
        }
        expect(abi.encodeWithSelector(Errors.NothingAnnounced.selector));
        slasher.applyArbiter();
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        vm.prank(governor);
        slasher.announceArbiter(address(0));
        bytes32 id = propose(1);
        expectNotAllowed(arbiter);
        vm.prank(arbiter);
        slasher.cancel(id);
        vm.prank(slasher.arbiter());
        slasher.cancel(id);
    }
}
