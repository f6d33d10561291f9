// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Rewards } from "../../contracts/src/Rewards.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { RewardTable, Statements } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice The manager's bond, and the tables of validators that stand in for a silent manager.
contract TablesTest is Network {
    uint64 private constant E = START / EPOCH;
    uint256 private constant SILENCE = 24 * EPOCH + VALIDITY;

    function setUp() public {
        deployNetwork();
        seatNode(STAKE);
        fund(100);
        addBond(50);
    }

    /// @dev The node alone is owed `amount` up to `epoch`.
    function table(uint64 epoch, uint256 amount) private view returns (RewardTable memory) {
        return
            RewardTable(
                pool, epoch, Statements.rewardLeaf(node, amount), amount, keccak256("table")
            );
    }

    function post(uint64 epoch, uint256 amount) private {
        RewardTable memory t = table(epoch, amount);
        rewards.postTable(t, tabled(t, bothKeys()));
    }

    function postAsManager(uint64 epoch, uint256 amount) private {
        RewardTable memory t = table(epoch, amount);
        vm.prank(manager);
        rewards.postRewardRoot(pool, epoch, t.root, amount, t.object);
    }

    function refused(bytes memory error_, RewardTable memory t, uint256[] memory keys_) private {
        bytes[] memory signatures = tabled(t, keys_);
        expect(error_);
        rewards.postTable(t, signatures);
    }

    function assertFunds(uint256 free, uint256 reserved, uint256 bond) private view {
        (uint256 f, uint256 r) = rewards.funds(pool);
        vm.assertEq(f, free, "free");
        vm.assertEq(r, reserved, "reserved");
        vm.assertEq(rewards.bondOf(pool), bond, "bond");
        vm.assertEq(token.balanceOf(address(rewards)), free + reserved + bond, "tokens held");
    }

    // ---------------------------------------------------------------------------------- the bond

    function test_Bond_ByAnyoneWhileThePoolRuns() public {
        give(stranger, 5);
        vm.startPrank(stranger);
        token.approve(address(rewards), 5);
        rewards.bond(pool, 5);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        rewards.bond(pool, 0);
        vm.stopPrank();
        assertFunds(100, 0, 55);
        vm.prank(manager);
        pools.end(pool);
        expect(abi.encodeWithSelector(Errors.PoolHasEnded.selector, pool));
        rewards.bond(pool, 1);
    }

    /// @dev No root of the manager's own draws on it.
    function test_Bond_IsNoFundOfTheManagers() public {
        vm.warp(postable(E));
        RewardTable memory t = table(E, 101);
        expect(abi.encodeWithSelector(Errors.InsufficientFunds.selector, pool, 100, 101));
        vm.prank(manager);
        rewards.postRewardRoot(pool, E, t.root, 101, t.object);
    }

    function test_Refund_GivesTheBondBackWithTheFunds() public {
        vm.startPrank(manager);
        pools.end(pool);
        vm.warp(rewards.refundableAt(pool));
        rewards.refund(pool);
        vm.stopPrank();
        vm.assertEq(token.balanceOf(manager), 150);
        assertFunds(0, 0, 0);
    }

    // -------------------------------------------------------------------------------- the tables

    function test_PostTable_PaysFromTheFundsThenFromTheBond() public {
        vm.warp(START + SILENCE);
        vm.prank(stranger);
        post(E, 130);
        assertFunds(0, 130, 20);
        vm.warp(START + SILENCE + DELAY);
        rewards.claim(pool, E, node, 130, none());
        vm.assertEq(token.balanceOf(payout), 130);
        assertFunds(0, 0, 20);
    }

    function test_PostTable_LeavesTheBondWhereTheFundsCoverIt() public {
        vm.warp(START + SILENCE);
        post(E, 100);
        assertFunds(0, 100, 50);
    }

    function test_PostTable_RefusesMoreThanFundsAndBond() public {
        vm.warp(START + SILENCE);
        refused(
            abi.encodeWithSelector(Errors.InsufficientFunds.selector, pool, 150, 151),
            table(E, 151),
            bothKeys()
        );
        post(E, 150);
        assertFunds(0, 150, 0);
    }

    function test_PostTable_WaitsForTheSilence_AtTheEdge() public {
        uint256 from = START + SILENCE;
        vm.assertEq(rewards.silentFrom(pool), from);
        vm.warp(from - 1);
        bytes memory notSilent =
            abi.encodeWithSelector(Errors.ManagerNotSilent.selector, pool, from);
        refused(notSilent, table(E, 1), bothKeys());
        postAsManager(E, 1);
        from = block.timestamp + SILENCE;
        vm.assertEq(rewards.silentFrom(pool), from);
        vm.warp(from - 1);
        notSilent = abi.encodeWithSelector(Errors.ManagerNotSilent.selector, pool, from);
        refused(notSilent, table(E + 1, 2), bothKeys());
        vm.warp(from);
        post(E + 1, 2);
        vm.assertEq(rewards.silentFrom(pool), from + SILENCE);
    }

    /// @dev A root that the arbiter voids ends no silence.
    function test_PostTable_AVoidedRootDoesNotBreakTheSilence() public {
        vm.warp(START + SILENCE - 1);
        postAsManager(E, 1);
        vm.prank(arbiter);
        rewards.disable(pool, E);
        vm.warp(START + SILENCE);
        post(E, 120);
        assertFunds(0, 120, 30);
        vm.prank(arbiter);
        rewards.disable(pool, E);
        assertFunds(120, 0, 30);
        post(E, 110);
        assertFunds(10, 110, 30);
    }

    /// @dev Nor does one that promises nothing.
    function test_PostTable_ARootThatAddsNothingDoesNotBreakTheSilence() public {
        vm.warp(START + SILENCE - 1);
        postAsManager(E, 0);
        vm.assertEq(rewards.silentFrom(pool), START + SILENCE);
        vm.warp(START + SILENCE);
        post(E + 1, 120);
        assertFunds(0, 120, 30);
    }

    function test_PostTable_OfAPoolWithoutMoneyIsRefused() public {
        pool = createPool();
        vm.warp(START + 10 * SILENCE);
        vm.assertEq(rewards.silentFrom(pool), 0);
        refused(
            abi.encodeWithSelector(Errors.ManagerNotSilent.selector, pool, 0),
            table(E, 1),
            bothKeys()
        );
    }

    function test_PostTable_NeedsTheQuorumInOrder() public {
        vm.warp(START + SILENCE);
        RewardTable memory t = table(E, 1);
        refused(abi.encodeWithSelector(Errors.NoQuorum.selector, 1, 2), t, oneKey(VALIDATOR_KEY));
        uint256[] memory keys_ = bothKeys();
        (keys_[0], keys_[1]) = (keys_[1], keys_[0]);
        refused(abi.encodeWithSelector(Errors.OpinionsOutOfOrder.selector, 2, 1), t, keys_);
        keys_[1] = keys_[0];
        refused(abi.encodeWithSelector(Errors.OpinionsOutOfOrder.selector, 2, 2), t, keys_);
        keys_[1] = NODE_KEY;
        refused(abi.encodeWithSelector(Errors.NotAllowed.selector, node), t, keys_);
        // A signature over another table.
        bytes[] memory signatures = tabled(t, bothKeys());
        t.cumulativeTotal = 2;
        vm.expectPartialRevert(Errors.NotAllowed.selector);
        rewards.postTable(t, signatures);
    }

    function test_PostTable_ASignatureForAnotherContractOrChainDoesNotCount() public {
        vm.warp(START + SILENCE);
        RewardTable memory t = table(E, 1);
        Rewards other = new Rewards(token, registry, pools, vault, slasher);
        bytes[] memory signatures = tabled(t, bothKeys());
        signatures[1] = sign(VALIDATOR2_KEY, other.rewardTableDigest(t));
        vm.expectPartialRevert(Errors.NotAllowed.selector);
        rewards.postTable(t, signatures);
        uint256 here = this.chainHere();
        vm.chainId(here + 1);
        signatures[1] = sign(VALIDATOR2_KEY, rewards.rewardTableDigest(t));
        vm.chainId(here);
        vm.expectPartialRevert(Errors.NotAllowed.selector);
        rewards.postTable(t, signatures);
        signatures[1] = sign(VALIDATOR2_KEY, rewards.rewardTableDigest(t));
        rewards.postTable(t, signatures);
    }

    /// @dev A call of its own: the optimizer takes block.chainid to be the same all through a function.
    function chainHere() external view returns (uint256) {
        return block.chainid;
    }

    /// @dev A manager cannot silence its validators; one whose key is unsafe can silence that key.
    function test_PostTable_CountsDismissedValidatorsAndNoneThatResigned() public {
        vm.startPrank(manager);
        pools.setValidator(pool, validator, false);
        pools.setValidator(pool, validator2, false);
        vm.stopPrank();
        vm.warp(START + SILENCE);
        post(E, 1);
        vm.prank(validator2);
        pools.resign(pool);
        vm.warp(START + 2 * SILENCE);
        bytes memory resigned = abi.encodeWithSelector(Errors.NotAllowed.selector, validator2);
        refused(resigned, table(E + 1, 2), bothKeys());
        vm.prank(manager);
        pools.setValidator(pool, validator2, true);
        post(E + 1, 2);
    }

    function test_PostTable_PromisesMoreThanTheLastRoot() public {
        vm.warp(START + SILENCE);
        post(E, 10);
        vm.warp(START + 2 * SILENCE);
        refused(abi.encodeWithSelector(Errors.ZeroAmount.selector), table(E + 1, 10), bothKeys());
        refused(abi.encodeWithSelector(Errors.ZeroAmount.selector), table(E + 1, 9), bothKeys());
        refused(
            abi.encodeWithSelector(Errors.EpochNotNext.selector, E, E + 1), table(E, 11), bothKeys()
        );
        RewardTable memory t = table(E + 1, 11);
        t.object = 0;
        refused(abi.encodeWithSelector(Errors.ZeroDigest.selector), t, bothKeys());
        t = table(E + 1000, 11);
        bytes[] memory signatures = tabled(t, bothKeys());
        vm.expectPartialRevert(Errors.EpochStillOpen.selector);
        rewards.postTable(t, signatures);
    }

    // ---------------------------------------------------------------------------- an ended pool's

    /// @dev The manager pays something, ends the pool and waits for its money: the table comes first.
    function test_Refund_ComesAfterTheTableOfTheLastWork() public {
        vm.startPrank(manager);
        pools.end(pool);
        vm.stopPrank();
        uint256 ended = vm.getBlockTimestamp();
        vm.warp(ended + 3 * EPOCH + 2 * VALIDITY + WINDOW + DISPUTE + 2 * DELAY - 1);
        postAsManager(E, 1); // leaves the last work out
        uint256 quiet = vm.getBlockTimestamp();
        vm.assertEq(rewards.refundableAt(pool), quiet + SILENCE + EPOCH + DELAY);
        vm.warp(quiet + SILENCE);
        expect(
            abi.encodeWithSelector(
                Errors.RefundNotYet.selector, pool, quiet + SILENCE + EPOCH + DELAY
            )
        );
        vm.prank(manager);
        rewards.refund(pool);
        post(E + 1, 140);
        assertFunds(0, 140, 10);
        vm.warp(rewards.refundableAt(pool));
        vm.prank(manager);
        rewards.refund(pool);
        vm.assertEq(token.balanceOf(manager), 10);
        rewards.claim(pool, E + 1, node, 140, none());
        assertFunds(0, 0, 0);
    }
}
