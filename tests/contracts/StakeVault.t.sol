// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { ERC20 } from "@openzeppelin/contracts/token/ERC20/ERC20.sol";
import { IERC20 } from "@openzeppelin/contracts/token/ERC20/IERC20.sol";

import { StakeVault } from "../../contracts/src/StakeVault.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Periods } from "../../contracts/src/libraries/Periods.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @dev Keeps one per cent of each transfer.
contract Taxed is ERC20 {
    constructor() ERC20("Taxed", "TAX") {
        _mint(msg.sender, 1e30);
    }

    function _update(address from, address to, uint256 value) internal override {
        if (from != address(0) && to != address(0)) {
            super._update(from, address(0xFEE), value / 100);
            value -= value / 100;
        }
        super._update(from, to, value);
    }
}

contract StakeVaultTest is Network {
    function setUp() public {
        deployNetwork();
        stake(provider, 10 * STAKE);
        // It answers to the manager.
        vm.startPrank(address(pools));
        vault.commit(provider, 1, manager);
        vault.release(provider, 1);
        vm.stopPrank();
    }

    /// @dev Acts as the slasher.
    function open(uint256 amount) private returns (uint256) {
        vm.prank(address(slasher));
        return vault.openSlash(provider, amount, manager);
    }

    function settle(uint256 amount) private {
        vm.prank(address(slasher));
        vault.settleSlash(provider, amount, amount, manager);
    }

    function letGo(uint256 amount) private {
        vm.prank(address(slasher));
        vault.releaseSlash(provider, amount);
    }

    function unbond(uint256 amount) private {
        vm.prank(provider);
        vault.unbond(amount);
    }

    function assertAccount(uint256 active, uint256 unbonding, uint256 pending) private view {
        vm.assertEq(vault.active(provider), active, "active");
        vm.assertEq(vault.unbonding(provider), unbonding, "unbonding");
        vm.assertEq(vault.pendingSlash(provider), pending, "pending");
        vm.assertEq(vault.slashable(provider), active + unbonding, "slashable");
        vm.assertEq(
            token.balanceOf(address(vault)), active + unbonding + pending + 2 * BONDS, "tokens held"
        );
    }

    // ------------------------------------------------------------------------------ construction

    function test_Constructor_UnbondingMustOutlastLiability() public {
        Periods memory p = periods();
        p.unbonding = p.validity + p.slashWindow + p.disputeWindow;
        expect(abi.encodeWithSelector(Errors.UnbondingTooShort.selector, p.unbonding, p.unbonding));
        new StakeVault(token, p, treasury, CAP, NO_FEED);
        p.unbonding += 1;
        new StakeVault(token, p, treasury, CAP, NO_FEED);
    }

    function test_Constructor_RefusesZeroPeriodsAndNoToken() public {
        for (uint256 i; i < 5; ++i) {
            Periods memory p = periods();
            if (i == 0) p.epochLength = 0;
            if (i == 1) p.validity = 0;
            if (i == 2) p.slashWindow = 0;
            if (i == 3) p.disputeWindow = 0;
            if (i == 4) p.rewardDelay = 0;
            expect(abi.encodeWithSelector(Errors.ZeroPeriod.selector));
            new StakeVault(token, p, treasury, CAP, NO_FEED);
        }
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        new StakeVault(IERC20(address(0)), periods(), treasury, CAP, NO_FEED);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        new StakeVault(token, periods(), treasury, 0, NO_FEED);
    }

    function test_Constructor_OverflowingPeriodsAreRefused() public {
        Periods memory p = periods();
        p.validity = type(uint64).max;
        vm.expectPartialRevert(Errors.UnbondingTooShort.selector);
        new StakeVault(token, p, treasury, CAP, NO_FEED);
    }

    function test_Wire_OnceAndByDeployerOnly() public {
        expect(abi.encodeWithSelector(Errors.AlreadyWired.selector));
        vault.wire(address(1), address(2), address(3));
        expectNotAllowed(stranger);
        vm.prank(stranger);
        vault.wire(address(1), address(2), address(3));
    }

    function test_RestrictedCalls_RefuseStrangers() public {
        address[] memory accounts = new address[](1);
        vm.startPrank(stranger);
        expectNotAllowed(stranger);
        vault.commit(provider, 1, manager);
        expectNotAllowed(stranger);
        vault.release(provider, 1);
        expectNotAllowed(stranger);
        vault.openSlash(provider, 1, manager);
        expectNotAllowed(stranger);
        vault.pledge(accounts, 0, stranger);
        expectNotAllowed(stranger);
        vault.unpledge(accounts);
        expectNotAllowed(stranger);
        vault.fine(provider, 1, manager, stranger, 1);
        expectNotAllowed(stranger);
        vault.releaseSlash(provider, 1);
        expectNotAllowed(stranger);
        vault.settleSlash(provider, 1, 1, stranger);
        vm.stopPrank();
    }

    // ---------------------------------------------------------------------------------- deposits

    function test_Deposit_RefusesZeroAndMoreThanTheBalance() public {
        vm.startPrank(stranger);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        vault.deposit(0);
        token.approve(address(vault), 5);
        vm.expectPartialRevert(
            bytes4(keccak256("ERC20InsufficientBalance(address,uint256,uint256)"))
        );
        vault.deposit(5);
        vm.stopPrank();
    }

    function test_Deposit_RefusesATokenThatKeepsAFee() public {
        Taxed taxed = new Taxed();
        StakeVault v = new StakeVault(taxed, periods(), treasury, CAP, NO_FEED);
        taxed.approve(address(v), 100);
        expect(abi.encodeWithSelector(Errors.TokenNotPlain.selector, 100, 99));
        v.deposit(100);
    }

    function test_DepositWithPermit_NeedsNoApproval() public {
        uint256 key = 0xBEE;
        address who = vm.addr(key);
        uint256 deadline = START;
        give(who, 7);
        bytes32 permit = keccak256(
            abi.encode(
                keccak256(
                    "Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"
                ),
                who,
                address(vault),
                7,
                0,
                deadline
            )
        );
        (uint8 v, bytes32 r, bytes32 s) = vm.sign(
            key, keccak256(abi.encodePacked("\x19\x01", token.DOMAIN_SEPARATOR(), permit))
        );

        vm.warp(deadline + 1);
        vm.startPrank(who);
        vm.expectPartialRevert(bytes4(keccak256("ERC2612ExpiredSignature(uint256)")));
        vault.depositWithPermit(7, deadline, v, r, s);
        vm.warp(deadline);
        vault.depositWithPermit(7, deadline, v, r, s);
        vm.stopPrank();
        vm.assertEq(vault.active(who), 7);
    }

    // --------------------------------------------------------------------------------- unbonding

    function test_Unbond_KeepsStakeSlashableUntilWithdrawn() public {
        unbond(3 * STAKE);
        assertAccount(7 * STAKE, 3 * STAKE, 0);
        vm.warp(START + UNBONDING - 1);
        expect(abi.encodeWithSelector(Errors.NothingToWithdraw.selector, provider));
        vm.prank(provider);
        vault.withdraw();
        vm.warp(START + UNBONDING);
        vm.prank(provider);
        vm.assertEq(vault.withdraw(), 3 * STAKE);
        assertAccount(7 * STAKE, 0, 0);
        vm.assertEq(token.balanceOf(provider), 3 * STAKE);
    }

    function test_Unbond_RefusesZeroAndMoreThanIsFree() public {
        vm.startPrank(provider);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        vault.unbond(0);
        expect(abi.encodeWithSelector(Errors.StakeNotFree.selector, 10 * STAKE, 10 * STAKE + 1));
        vault.unbond(10 * STAKE + 1);
        vm.stopPrank();
    }

    function test_Unbond_RefusesWhatSeatsNeed() public {
        vm.prank(address(pools));
        vault.commit(provider, 4 * STAKE, manager);
        vm.assertEq(vault.unbondable(provider), 6 * STAKE);
        expect(abi.encodeWithSelector(Errors.StakeNotFree.selector, 6 * STAKE, 6 * STAKE + 1));
        unbond(6 * STAKE + 1);
        unbond(6 * STAKE);
        vm.prank(address(pools));
        vault.release(provider, 4 * STAKE);
        unbond(4 * STAKE);
        assertAccount(0, 10 * STAKE, 0);
    }

    function test_Unbond_QueueIsBoundedAndMergesWithinASecond() public {
        for (uint256 i; i < 8; ++i) {
            vm.warp(START + i);
            unbond(1);
            unbond(1);
        }
        vm.assertEq(vault.unbondings(provider).length, 8);
        vm.assertEq(vault.unbondings(provider)[0].amount, 2);
        unbond(1);
        vm.warp(START + 8);
        expect(abi.encodeWithSelector(Errors.TooManyUnbondings.selector, 8));
        unbond(1);
        vm.warp(START + 3 + UNBONDING);
        vm.prank(provider);
        vm.assertEq(vault.withdraw(), 8);
        vm.assertEq(vault.unbondings(provider).length, 4);
        vm.assertEq(vault.unbondings(provider)[3].amount, 3);
        unbond(1);
        vm.warp(START + 4 * UNBONDING);
        vm.prank(provider);
        vm.assertEq(vault.withdraw(), 10);
        vm.assertEq(vault.unbondings(provider).length, 0);
    }

    function test_Rebond_TakesTheNewestBack() public {
        unbond(2 * STAKE);
        vm.warp(START + 1);
        unbond(3 * STAKE);
        vm.startPrank(provider);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        vault.rebond(0);
        expect(abi.encodeWithSelector(Errors.StakeNotFree.selector, 5 * STAKE, 5 * STAKE + 1));
        vault.rebond(5 * STAKE + 1);
        vault.rebond(4 * STAKE);
        vm.stopPrank();
        assertAccount(9 * STAKE, STAKE, 0);
        vm.assertEq(vault.unbondings(provider)[0].matureAt, START + UNBONDING);
        vm.warp(START + UNBONDING);
        vm.prank(provider);
        vm.assertEq(vault.withdraw(), STAKE);
    }

    function test_Commit_NeedsActiveStake() public {
        unbond(5 * STAKE);
        vm.startPrank(address(pools));
        expect(
            abi.encodeWithSelector(
                Errors.InsufficientStake.selector, provider, 5 * STAKE, 6 * STAKE
            )
        );
        vault.commit(provider, 6 * STAKE, manager);
        vault.commit(provider, 5 * STAKE, manager);
        vm.stopPrank();
        vm.assertEq(vault.committed(provider), 5 * STAKE);
    }

    // ------------------------------------------------------------------------------------ slashes

    function test_OpenSlash_HoldsWithoutMoving() public {
        unbond(4 * STAKE);
        vm.assertEq(open(5 * STAKE), 5 * STAKE);
        assertAccount(STAKE, 4 * STAKE, 5 * STAKE);
        vm.assertEq(open(2 * STAKE), 2 * STAKE);
        assertAccount(0, 3 * STAKE, 7 * STAKE);
        letGo(5 * STAKE);
        letGo(2 * STAKE);
        assertAccount(6 * STAKE, 4 * STAKE, 0);
    }

    function test_OpenSlash_StopsWithdrawalOfWhatItHolds() public {
        unbond(10 * STAKE);
        open(4 * STAKE);
        vm.warp(START + UNBONDING);
        vm.prank(provider);
        vm.assertEq(vault.withdraw(), 6 * STAKE);
        expect(abi.encodeWithSelector(Errors.NothingToWithdraw.selector, provider));
        vm.prank(provider);
        vault.withdraw();
        assertAccount(0, 0, 4 * STAKE);
        letGo(4 * STAKE);
        vm.prank(provider);
        vm.assertEq(vault.withdraw(), 4 * STAKE);
    }

    function test_OpenSlash_TogetherTakeAtMostTheFirstSnapshot() public {
        vm.assertEq(open(6 * STAKE), 6 * STAKE);
        vm.assertEq(open(6 * STAKE), 4 * STAKE);
        vm.assertEq(open(6 * STAKE), 0);
        settle(6 * STAKE);
        vm.assertEq(open(1), 0);
        letGo(4 * STAKE);
        vm.assertEq(open(6 * STAKE), 4 * STAKE);
        // What is added while slashes are open is within their reach, once.
        stake(provider, 3 * STAKE);
        vm.assertEq(open(2 * STAKE), 2 * STAKE);
        vm.assertEq(open(2 * STAKE), STAKE);
        vm.assertEq(open(1), 0);
        settle(4 * STAKE);
        settle(2 * STAKE);
        settle(STAKE);
        vm.assertEq(token.balanceOf(treasury), 13 * STAKE);
        for (uint256 i; i < 3; ++i) {
            settle(0);
        }
        assertAccount(0, 0, 0);
        // All are settled: the next one sees what is there now.
        stake(provider, 10 * STAKE);
        vm.assertEq(open(20 * STAKE), 10 * STAKE);
    }

    function test_SettleSlash_TakesBondedFirstThenTheNewestOfTheQueue() public {
        unbond(2 * STAKE);
        vm.warp(START + 1);
        unbond(3 * STAKE);
        open(9 * STAKE);
        settle(9 * STAKE);
        assertAccount(0, STAKE, 0);
        vm.assertEq(vault.unbondings(provider).length, 1);
        vm.assertEq(vault.unbondings(provider)[0].matureAt, START + UNBONDING);
        vm.warp(START + UNBONDING);
        vm.prank(provider);
        vm.assertEq(vault.withdraw(), STAKE);
        assertAccount(0, 0, 0);
    }

    function test_SettleSlash_WithoutTreasuryBurns() public {
        uint256 supply = token.totalSupply();
        open(STAKE);
        StakeVault burns = new StakeVault(token, periods(), address(0), CAP, NO_FEED);
        vm.etch(address(vault), address(burns).code);
        settle(STAKE);
        vm.assertEq(token.totalSupply(), supply - STAKE);
        assertAccount(9 * STAKE, 0, 0);
    }

    function testFuzz_SumsHoldThroughAnyOrder(uint96[6] memory amounts, uint8 order) public {
        uint256 held;
        for (uint256 i; i < 6; ++i) {
            uint256 amount = uint256(amounts[i]) % (4 * STAKE) + 1;
            if ((order >> i) & 1 == 0) held += open(amount);
            else if (amount <= vault.unbondable(provider)) unbond(amount);
            vm.assertEq(
                vault.active(provider) + vault.unbonding(provider) + vault.pendingSlash(provider),
                10 * STAKE
            );
        }
        vm.assertEq(vault.pendingSlash(provider), held);
        vm.warp(START + UNBONDING);
        uint256 leaving = vault.unbonding(provider);
        if (leaving > 0) {
            vm.prank(provider);
            vm.assertEq(vault.withdraw(), leaving);
        }
        uint256 active = vault.active(provider);
        if (held > 0) settle(held);
        assertAccount(active, 0, 0);
    }
}
