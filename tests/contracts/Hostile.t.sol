// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { IERC1271 } from "@openzeppelin/contracts/interfaces/IERC1271.sol";
import { SafeERC20 } from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {
    ReentrancyGuardTransient
} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";

import { Pools } from "../../contracts/src/Pools.sol";
import { PrimeToken } from "../../contracts/src/PrimeToken.sol";
import { Rewards } from "../../contracts/src/Rewards.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Invite, NodeConsent, Statements } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @dev A token that calls back in the middle of a transfer, and keeps a fee, or lies, if set to. It
/// is a provider, a manager and a payout account as well, so that it re-enters as the one concerned.
contract HostileToken is PrimeToken {
    address private target;
    bytes private data;
    bool public tried;
    bool public succeeded;
    bytes public answer;
    uint256 private fee;
    bool private lies;

    constructor() PrimeToken(true, msg.sender, 1_000_000e18) { }

    function arm(address target_, bytes calldata data_) external {
        (target, data, tried, succeeded) = (target_, data_, false, false);
    }

    function setFee(uint256 fee_) external {
        fee = fee_;
    }

    function setLies(bool lies_) external {
        lies = lies_;
    }

    function act(address to, bytes calldata what) external {
        (bool done, bytes memory result) = to.call(what);
        if (!done) {
            assembly ("memory-safe") {
                revert(add(result, 32), mload(result))
            }
        }
    }

    function transfer(address to, uint256 value) public override returns (bool) {
        if (lies) return false;
        return super.transfer(to, value);
    }

    function transferFrom(address from, address to, uint256 value) public override returns (bool) {
        if (lies) return false;
        return super.transferFrom(from, to, value);
    }

    function _update(address from, address to, uint256 value) internal override {
        if (target != address(0) && !tried) {
            tried = true;
            (succeeded, answer) = target.call(data);
        }
        if (fee > 0 && from != address(0) && to != address(0)) {
            super._update(from, address(0xFEE), fee);
            value -= fee;
        }
        super._update(from, to, value);
    }
}

/// @dev A manager's contract that does what it can from within a signature check.
contract HostileOwner is IERC1271 {
    enum How {
        Reenter,
        Revert,
        Bomb,
        Wrong
    }

    Pools private pools;
    How private how;
    uint256 public calls;

    function create(Pools pools_, How how_, bytes32 run) external returns (uint256) {
        (pools, how) = (pools_, how_);
        return pools.create(Pools.Config(address(this), run, 1, 1, 2, 2, 1));
    }

    /// @dev Declared without `view`: the caller's staticcall must be what stops it.
    function touch() external {
        ++calls;
        pools.end(1);
    }

    function isValidSignature(bytes32, bytes calldata) external view returns (bytes4) {
        if (how == How.Wrong) return 0xdeadbeef;
        if (how == How.Revert) revert("no");
        if (how == How.Bomb) {
            assembly {
                return(0, 200000)
            }
        }
        (bool done,) = address(this).staticcall(abi.encodeCall(this.touch, ()));
        return done ? IERC1271.isValidSignature.selector : bytes4(0);
    }
}

contract HostileTest is Network {
    HostileToken private bad;
    uint64 private constant E = START / EPOCH;

    function setUp() public {
        bad = new HostileToken();
        deployNetwork(bad);
        bad.transfer(address(bad), 1000 * STAKE);
        act(address(bad), abi.encodeCall(bad.approve, (address(vault), type(uint256).max)));
        act(address(bad), abi.encodeCall(bad.approve, (address(rewards), type(uint256).max)));
        act(address(bad), abi.encodeCall(bad.approve, (address(slasher), type(uint256).max)));
        act(address(vault), abi.encodeCall(vault.deposit, (10 * STAKE)));
        act(address(registry), abi.encodeCall(registry.registerProvider, (address(bad))));
    }

    function act(address to, bytes memory what) private {
        bad.act(to, what);
    }

    function refusedReentry() private view {
        vm.assertTrue(bad.tried());
        vm.assertFalse(bad.succeeded());
        vm.assertEq(
            keccak256(bad.answer()),
            keccak256(
                abi.encodeWithSelector(
                    ReentrancyGuardTransient.ReentrancyGuardReentrantCall.selector
                )
            )
        );
    }

    function vaultIsWhole() private view {
        uint256 sum = vault.slashable(address(bad)) + vault.pendingSlash(address(bad)) + 2 * BONDS
            + vault.slashable(provider) + vault.pendingSlash(provider);
        vm.assertEq(bad.balanceOf(address(vault)), sum, "vault");
    }

    // ------------------------------------------------------------------------------- re-entrance

    function test_Deposit_CannotBeReentered() public {
        bad.arm(address(vault), abi.encodeCall(vault.deposit, (STAKE)));
        act(address(vault), abi.encodeCall(vault.deposit, (STAKE)));
        refusedReentry();
        vm.assertEq(vault.active(address(bad)), 11 * STAKE);
        vaultIsWhole();
    }

    function test_Withdraw_CannotBeReentered_NorPaidTwice() public {
        act(address(vault), abi.encodeCall(vault.unbond, (STAKE)));
        vm.warp(START + UNBONDING);
        bad.arm(address(vault), abi.encodeCall(vault.withdraw, ()));
        act(address(vault), abi.encodeCall(vault.withdraw, ()));
        refusedReentry();
        vaultIsWhole();
    }

    function test_Withdraw_OtherActsInTheMiddleOfItFindClosedBooks() public {
        act(address(vault), abi.encodeCall(vault.unbond, (STAKE)));
        vm.warp(START + UNBONDING);
        bad.arm(address(vault), abi.encodeCall(vault.rebond, (STAKE)));
        act(address(vault), abi.encodeCall(vault.withdraw, ()));
        vm.assertTrue(bad.tried());
        vm.assertFalse(bad.succeeded());
        bad.arm(address(vault), abi.encodeCall(vault.unbond, (9 * STAKE)));
        act(address(vault), abi.encodeCall(vault.deposit, (STAKE)));
        vaultIsWhole();
    }

    function hostilePool() private {
        Pools.Config memory c = Pools.Config(trainer, RUN, 0, 0, 4, 2, 1);
        act(address(pools), abi.encodeCall(pools.create, (c)));
        pool = pools.count();
        act(address(rewards), abi.encodeCall(rewards.fund, (pool, 100)));
    }

    function test_Fund_CannotBeReentered() public {
        hostilePool();
        bad.arm(address(rewards), abi.encodeCall(rewards.fund, (pool, 100)));
        act(address(rewards), abi.encodeCall(rewards.fund, (pool, 100)));
        refusedReentry();
        (uint256 free,) = rewards.funds(pool);
        vm.assertEq(free, 200);
    }

    function test_Refund_CannotBeReentered_NorPaidTwice() public {
        hostilePool();
        act(address(pools), abi.encodeCall(pools.end, (pool)));
        vm.warp(rewards.refundableAt(pool));
        bad.arm(address(rewards), abi.encodeCall(rewards.refund, (pool)));
        act(address(rewards), abi.encodeCall(rewards.refund, (pool)));
        refusedReentry();
        vm.assertEq(bad.balanceOf(address(rewards)), 0);
    }

    /// @dev The token itself is the provider and payout account of a node to which 60 are owed.
    function owe60() private {
        fund(1000);
        pool = createPool();
        fund(100);
        act(address(pools), abi.encodeCall(pools.allow, (pool, true)));
        NodeConsent memory c = consent(address(bad), node);
        bytes memory signature = signed(c, NODE_KEY);
        act(address(registry), abi.encodeCall(registry.addNode, (c, signature)));
        join(node);
        vm.warp(postable(E));
        vm.prank(manager);
        rewards.postRewardRoot(pool, E, Statements.rewardLeaf(node, 60), 100, keccak256("t"));
        vm.warp(postable(E) + DELAY);
    }

    function test_Claim_ReenteredPaysOnce() public {
        owe60();
        bytes memory claim = abi.encodeCall(rewards.claim, (pool, E, node, 60, none()));
        bad.arm(address(rewards), claim);
        uint256 before = bad.balanceOf(address(bad));
        act(address(rewards), claim);
        vm.assertTrue(bad.tried());
        vm.assertFalse(bad.succeeded());
        vm.assertEq(bad.balanceOf(address(bad)), before + 60);
        vm.assertEq(bad.balanceOf(address(rewards)), 1040);
    }

    function test_ClaimMany_ReenteredPaysOnce() public {
        owe60();
        Rewards.Claim[] memory claims = new Rewards.Claim[](2);
        claims[0] = Rewards.Claim(pool, E, node, 60, none());
        claims[1] = claims[0];
        bad.arm(address(rewards), abi.encodeCall(rewards.claimMany, (claims)));
        act(address(rewards), abi.encodeCall(rewards.claimMany, (claims)));
        vm.assertTrue(bad.tried());
        vm.assertEq(bad.balanceOf(address(rewards)), 1040);
        vm.assertEq(rewards.claimed(pool, node), 60);
    }

    function test_Dispute_CannotBeReentered() public {
        bytes32 id = stakeAndPropose();
        give(provider, 2 * DEPOSIT);
        vm.startPrank(provider);
        bad.approve(address(slasher), 2 * DEPOSIT);
        vm.stopPrank();
        bad.arm(address(slasher), abi.encodeCall(slasher.dispute, (id)));
        vm.prank(provider);
        slasher.dispute(id);
        refusedReentry();
    }

    function stakeAndPropose() private returns (bytes32 id) {
        register(provider, payout);
        stake(provider, 4 * STAKE);
        addNode(provider, NODE_KEY);
        join(node);
        id = propose(1);
    }

    function test_Execute_CannotBeReentered_NorDoneTwice() public {
        bytes32 id = stakeAndPropose();
        vm.warp(START + WINDOW);
        bad.arm(address(slasher), abi.encodeCall(slasher.execute, (id)));
        slasher.execute(id);
        refusedReentry();
        vm.assertEq(bad.balanceOf(treasury), STAKE);
        vaultIsWhole();
    }

    function test_Judgements_CannotBeReentered() public {
        bytes32 id = stakeAndPropose();
        dispute(id);
        uint256 state = vm.snapshotState();
        bad.arm(address(slasher), abi.encodeCall(slasher.execute, (id)));
        vm.prank(arbiter);
        slasher.confirm(id);
        refusedReentry();
        vm.revertToState(state);
        bad.arm(address(slasher), abi.encodeCall(slasher.lapse, (id)));
        vm.prank(arbiter);
        slasher.overturn(id);
        refusedReentry();
        vm.revertToState(state);
        bad.arm(address(slasher), abi.encodeCall(slasher.lapse, (id)));
        vm.prank(arbiter);
        slasher.cancel(id);
        refusedReentry();
        vm.revertToState(state);
        vm.warp(START + DISPUTE);
        bad.arm(address(slasher), abi.encodeCall(slasher.lapse, (id)));
        slasher.lapse(id);
        refusedReentry();
        vm.assertEq(bad.balanceOf(address(slasher)), 0);
    }

    // --------------------------------------------------------------------------- strange tokens

    function test_FeeOnTransfer_IsRefusedWhereverTokensComeIn() public {
        bytes32 id = stakeAndPropose();
        give(provider, DEPOSIT);
        vm.prank(provider);
        bad.approve(address(slasher), DEPOSIT);
        bad.setFee(1);
        expect(abi.encodeWithSelector(Errors.TokenNotPlain.selector, STAKE, STAKE - 1));
        act(address(vault), abi.encodeCall(vault.deposit, (STAKE)));
        expect(abi.encodeWithSelector(Errors.TokenNotPlain.selector, 100, 99));
        act(address(rewards), abi.encodeCall(rewards.fund, (pool, 100)));
        expect(abi.encodeWithSelector(Errors.TokenNotPlain.selector, DEPOSIT, DEPOSIT - 1));
        vm.prank(provider);
        slasher.dispute(id);
        bad.setFee(0);
        give(stranger, JUROR_BOND);
        bad.setFee(1);
        vm.startPrank(stranger);
        bad.approve(address(court), JUROR_BOND);
        expect(abi.encodeWithSelector(Errors.TokenNotPlain.selector, JUROR_BOND, JUROR_BOND - 1));
        court.register(CLASS);
        vm.stopPrank();
        vm.assertEq(vault.active(address(bad)), 10 * STAKE);
    }

    function test_ATokenThatAnswersFalseIsRefused() public {
        act(address(vault), abi.encodeCall(vault.unbond, (STAKE)));
        vm.warp(START + UNBONDING);
        bad.setLies(true);
        vm.expectPartialRevert(SafeERC20.SafeERC20FailedOperation.selector);
        act(address(vault), abi.encodeCall(vault.deposit, (STAKE)));
        vm.expectPartialRevert(SafeERC20.SafeERC20FailedOperation.selector);
        act(address(vault), abi.encodeCall(vault.withdraw, ()));
        vm.assertEq(vault.unbonding(address(bad)), STAKE);
    }

    // ------------------------------------------------------------------------------ hostile owner

    function test_AHostileOwnerContractAdmitsNoNodeAndChangesNothing() public {
        register(provider, payout);
        stake(provider, STAKE);
        addNode(provider, NODE_KEY);
        for (uint256 i; i < 4; ++i) {
            HostileOwner owner = new HostileOwner();
            pool = owner.create(pools, HostileOwner.How(i), RUN);
            allow(provider, pool);
            Invite memory inv = invite(node);
            bytes memory signature = signed(inv);
            vm.expectPartialRevert(Errors.BadSignature.selector);
            pools.join{ gas: 3_000_000 }(inv, signature);
            vm.assertEq(owner.calls(), 0);
            vm.assertFalse(pools.hasEnded(pool));
        }
        vm.assertEq(vault.committed(provider), 0);
    }
}
