// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Statements, Submission } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { Tree } from "./utils/Tree.sol";
import { vm } from "./utils/Vm.sol";

contract RewardsTest is Network {
    uint64 private constant E = START / EPOCH;

    function setUp() public {
        deployNetwork();
        seatNode(3 * STAKE);
        addNode(provider, NODE2_KEY);
        join(node2);
        fund(100);
        vm.warp(postable(E));
    }

    /// @dev Leaves of the two nodes.
    function leaves(uint256 a, uint256 b) private view returns (bytes32[] memory list) {
        list = new bytes32[](2);
        list[0] = Statements.rewardLeaf(node, a);
        list[1] = Statements.rewardLeaf(node2, b);
    }

    function post(uint64 epoch, uint256 a, uint256 b) private {
        bytes32 root = Tree.root(leaves(a, b));
        vm.prank(manager);
        rewards.postRewardRoot(pool, epoch, root, a + b, keccak256("table"));
    }

    function claim(uint64 epoch, uint256 a, uint256 b) private {
        rewards.claim(pool, epoch, node, a, Tree.proof(leaves(a, b), 0));
    }

    function claimSecond(uint64 epoch, uint256 a, uint256 b) private {
        rewards.claim(pool, epoch, node2, b, Tree.proof(leaves(a, b), 1));
    }

    function disable(uint64 epoch) private {
        vm.prank(arbiter);
        rewards.disable(pool, epoch);
    }

    function assertFunds(uint256 free, uint256 reserved) private view {
        (uint256 f, uint256 r) = rewards.funds(pool);
        vm.assertEq(f, free, "free");
        vm.assertEq(r, reserved, "reserved");
        vm.assertEq(token.balanceOf(address(rewards)), free + reserved, "tokens held");
    }

    // --------------------------------------------------------------------------------- the funds

    function test_Fund_ByAnyoneWhileThePoolRuns() public {
        give(stranger, 5);
        vm.startPrank(stranger);
        token.approve(address(rewards), 5);
        rewards.fund(pool, 5);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        rewards.fund(pool, 0);
        expect(abi.encodeWithSelector(Errors.UnknownPool.selector, 99));
        rewards.fund(99, 1);
        vm.stopPrank();
        assertFunds(105, 0);
        vm.prank(manager);
        pools.end(pool);
        expect(abi.encodeWithSelector(Errors.PoolHasEnded.selector, pool));
        rewards.fund(pool, 1);
    }

    function test_Refund_OfAnEndedPoolLeavesWhatIsOwed() public {
        post(E, 30, 10);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        rewards.refund(pool);
        vm.startPrank(manager);
        expect(abi.encodeWithSelector(Errors.PoolNotEnded.selector, pool));
        rewards.refund(pool);
        vm.assertEq(rewards.refundableAt(pool), 0);
        pools.end(pool);
        vm.warp(rewards.refundableAt(pool));
        rewards.refund(pool);
        expect(abi.encodeWithSelector(Errors.NothingToRefund.selector, pool));
        rewards.refund(pool);
        vm.stopPrank();
        vm.assertEq(token.balanceOf(manager), 60);
        assertFunds(0, 40);
        claim(E, 30, 10);
        claimSecond(E, 30, 10);
        assertFunds(0, 0);
    }

    // --------------------------------------------------------------------------------- the roots

    function test_PostRewardRoot_WaitsForTheLastLeafsValidity_AtTheEdge() public {
        uint256 from = postable(E + 1);
        vm.warp(from - 1);
        bytes32 root = Tree.root(leaves(1, 1));
        expect(abi.encodeWithSelector(Errors.EpochStillOpen.selector, E + 1, from));
        vm.prank(manager);
        rewards.postRewardRoot(pool, E + 1, root, 2, EVIDENCE);
        vm.warp(from);
        post(E + 1, 1, 1);
    }

    /// @dev A leaf rooted in the epoch's last second can be rejected in the last second before the
    /// epoch's reward root can be posted, and not in that second.
    function test_NoInstantAtWhichALeafCanBeRejectedAndPaid() public {
        uint64 epoch = E + 20;
        vm.warp((uint256(epoch) + 1) * EPOCH - 1);
        Submission memory a = submission(1);
        Submission memory b = submission(2);
        uint64 first = postRoot(one(leafOf(a)));
        uint64 second = postRoot(one(leafOf(b)));
        bytes32 root = Tree.root(leaves(1, 1));
        vm.warp(postable(epoch) - 1);
        vm.startPrank(manager);
        work.reject(a, first, none(), rejections(a));
        vm.expectPartialRevert(Errors.EpochStillOpen.selector);
        rewards.postRewardRoot(pool, epoch, root, 2, EVIDENCE);
        vm.warp(postable(epoch));
        vm.expectPartialRevert(Errors.ValidityOver.selector);
        work.reject(b, second, none(), rejections(b));
        rewards.postRewardRoot(pool, epoch, root, 2, EVIDENCE);
        vm.stopPrank();
    }

    function test_PostRewardRoot_ByTheManagerInOrderWithinTheFunds() public {
        bytes32 root = Tree.root(leaves(1, 1));
        expectNotAllowed(stranger);
        vm.prank(stranger);
        rewards.postRewardRoot(pool, E, root, 2, EVIDENCE);
        vm.startPrank(manager);
        expect(abi.encodeWithSelector(Errors.ZeroDigest.selector));
        rewards.postRewardRoot(pool, E, 0, 2, EVIDENCE);
        expect(abi.encodeWithSelector(Errors.ZeroDigest.selector));
        rewards.postRewardRoot(pool, E, root, 2, 0);
        expect(abi.encodeWithSelector(Errors.InsufficientFunds.selector, pool, 100, 101));
        rewards.postRewardRoot(pool, E, root, 101, EVIDENCE);
        rewards.postRewardRoot(pool, E, root, 100, EVIDENCE);
        assertFunds(0, 100);
        expect(abi.encodeWithSelector(Errors.EpochNotNext.selector, E, E + 1));
        rewards.postRewardRoot(pool, E, root, 100, EVIDENCE);
        vm.warp(postable(E + 1));
        expect(abi.encodeWithSelector(Errors.TotalShrank.selector, 100, 99));
        rewards.postRewardRoot(pool, E + 1, root, 99, EVIDENCE);
        rewards.postRewardRoot(pool, E + 1, root, 100, EVIDENCE);
        vm.stopPrank();
        (uint256 total, uint64 next) = rewards.progress(pool);
        vm.assertEq(total, 100);
        vm.assertEq(next, E + 2);
    }

    function test_PostRewardRoot_OfTheFarFutureIsRefused() public {
        vm.expectPartialRevert(Errors.EpochStillOpen.selector);
        vm.prank(manager);
        rewards.postRewardRoot(pool, type(uint64).max, RUN, 0, EVIDENCE);
    }

    // ------------------------------------------------------------------------------------- claims

    function test_Claim_PaysThePayoutAccountAfterTheCheck_ForAnyCaller() public {
        post(E, 30, 10);
        uint256 from = postable(E) + DELAY;
        (bytes32 root, uint64 claimableAt, bool disabled) = rewards.rewardRoot(pool, E);
        vm.assertEq(root, Tree.root(leaves(30, 10)));
        vm.assertEq(claimableAt, from);
        vm.assertFalse(disabled);
        vm.warp(from - 1);
        bytes32[] memory proof = Tree.proof(leaves(30, 10), 0);
        expect(abi.encodeWithSelector(Errors.NotClaimableYet.selector, from, from - 1));
        rewards.claim(pool, E, node, 30, proof);
        vm.warp(from);
        vm.prank(stranger);
        rewards.claim(pool, E, node, 30, proof);
        vm.assertEq(token.balanceOf(payout), 30);
        vm.assertEq(rewards.claimed(pool, node), 30);
        assertFunds(60, 10);
        expect(abi.encodeWithSelector(Errors.NothingToClaim.selector, node, 30));
        rewards.claim(pool, E, node, 30, proof);
    }

    function test_Claim_IsCumulative_AndOldRootsStayGood() public {
        post(E, 30, 10);
        vm.warp(postable(E + 1));
        post(E + 1, 50, 10);
        vm.warp(postable(E + 1) + DELAY);
        claim(E + 1, 50, 10);
        vm.assertEq(token.balanceOf(payout), 50);
        bytes32[] memory proof = Tree.proof(leaves(30, 10), 0);
        expect(abi.encodeWithSelector(Errors.NothingToClaim.selector, node, 50));
        rewards.claim(pool, E, node, 30, proof);
        claimSecond(E, 30, 10);
        assertFunds(40, 0);
    }

    function testFuzz_Claim_RefusesAnotherAmountNodeOrRoot(uint256 amount, bool other) public {
        vm.assume(amount != 30);
        post(E, 30, 10);
        vm.warp(postable(E) + DELAY);
        bytes32[] memory proof = Tree.proof(leaves(30, 10), 0);
        address who = other ? node2 : node;
        expect(abi.encodeWithSelector(Errors.BadRewardProof.selector, who, amount));
        rewards.claim(pool, E, who, amount, proof);
        expect(abi.encodeWithSelector(Errors.UnknownRewardRoot.selector, pool, E + 1));
        rewards.claim(pool, E + 1, node, 30, proof);
    }

    function test_Claim_ALyingTotalCannotTouchAnotherPoolsMoney() public {
        uint256 first = pool;
        pool = createPool();
        bytes32 root = Tree.root(leaves(90, 10));
        vm.prank(manager);
        rewards.postRewardRoot(pool, E, root, 0, EVIDENCE);
        vm.warp(postable(E) + DELAY);
        bytes32[] memory proof = Tree.proof(leaves(90, 10), 0);
        expect(abi.encodeWithSelector(Errors.ReserveExceeded.selector, 0, 90));
        rewards.claim(pool, E, node, 90, proof);
        (uint256 free,) = rewards.funds(first);
        vm.assertEq(free, 100);
    }

    function test_Claim_StillPaysWhoAnsweredForANodeThatWasLetGo() public {
        post(E, 30, 10);
        vm.startPrank(provider);
        pools.leave(pool, node);
        registry.removeNode(node);
        vm.stopPrank();
        vm.warp(postable(E) + DELAY);
        claim(E, 30, 10);
        vm.assertEq(token.balanceOf(payout), 30);
    }

    function postFor(uint64 epoch, address who, uint256 amount) private {
        vm.prank(manager);
        rewards.postRewardRoot(pool, epoch, Statements.rewardLeaf(who, amount), amount, EVIDENCE);
    }

    function test_Claim_PaysAValidatorItself_AlsoAfterItsDismissal() public {
        postFor(E, validator, 5);
        vm.warp(postable(E) + DELAY);
        vm.prank(manager);
        pools.setValidator(pool, validator, false);
        vm.prank(stranger);
        rewards.claim(pool, E, validator, 5, none());
        vm.assertEq(token.balanceOf(validator), 5);
        vm.assertEq(rewards.claimed(pool, validator), 5);
        assertFunds(95, 0);
    }

    /// @dev A manager must not turn a provider's pay away to the node's own key by appointing it.
    function test_Claim_OfANodeThatIsAppointedStillPaysItsProvider() public {
        vm.prank(manager);
        pools.setValidator(pool, node, true);
        postFor(E, node, 5);
        vm.warp(postable(E) + DELAY);
        rewards.claim(pool, E, node, 5, none());
        vm.assertEq(token.balanceOf(payout), 5);
        vm.assertEq(token.balanceOf(node), 0);
    }

    /// @dev Nor does an appointment in another pool count.
    function test_Claim_RefusesAValidatorOfAnotherPool() public {
        vm.prank(manager);
        uint256 other = pools.create(config());
        vm.prank(manager);
        pools.setValidator(other, stranger, true);
        postFor(E, stranger, 5);
        vm.warp(postable(E) + DELAY);
        expect(abi.encodeWithSelector(Errors.UnknownNode.selector, stranger));
        rewards.claim(pool, E, stranger, 5, none());
    }

    function test_Claim_RefusesANodeThatNeverSat() public {
        bytes32 leaf = Statements.rewardLeaf(stranger, 5);
        vm.prank(manager);
        rewards.postRewardRoot(pool, E, leaf, 5, EVIDENCE);
        vm.warp(postable(E) + DELAY);
        expect(abi.encodeWithSelector(Errors.UnknownNode.selector, stranger));
        rewards.claim(pool, E, stranger, 5, none());
    }

    // ----------------------------------------------------------------------------------- disable

    function test_Disable_GivesTheReserveBack_AndTheEpochCanBePostedAgain() public {
        post(E, 30, 10);
        disable(E);
        assertFunds(100, 0);
        (,, bool disabled) = rewards.rewardRoot(pool, E);
        vm.assertTrue(disabled);
        bytes32[] memory proof = Tree.proof(leaves(30, 10), 0);
        vm.warp(postable(E) + DELAY);
        expect(abi.encodeWithSelector(Errors.UnknownRewardRoot.selector, pool, E));
        rewards.claim(pool, E, node, 30, proof);
        post(E, 20, 10);
        assertFunds(70, 30);
        vm.warp(postable(E) + 2 * DELAY);
        claim(E, 20, 10);
        vm.assertEq(token.balanceOf(payout), 20);
    }

    function test_Disable_VoidsLaterRootsToo_AndKeepsEarlierOnes() public {
        post(E, 10, 10);
        vm.warp(postable(E + 3));
        post(E + 1, 20, 10);
        post(E + 2, 30, 10);
        disable(E + 1);
        assertFunds(80, 20);
        (,, bool disabled) = rewards.rewardRoot(pool, E + 2);
        vm.assertTrue(disabled);
        (,, disabled) = rewards.rewardRoot(pool, E);
        vm.assertFalse(disabled);
        expect(abi.encodeWithSelector(Errors.UnknownRewardRoot.selector, pool, E + 2));
        disable(E + 2);
        // A root of a later epoch takes the place of a voided one; the voided ones stay void.
        post(E + 3, 15, 10);
        (,, disabled) = rewards.rewardRoot(pool, E + 1);
        vm.assertTrue(disabled);
        (,, disabled) = rewards.rewardRoot(pool, E + 2);
        vm.assertTrue(disabled);
        vm.warp(postable(E + 3) + DELAY);
        claim(E + 3, 15, 10);
        claimSecond(E, 10, 10);
        assertFunds(75, 0);
    }

    function test_Disable_TakingAVoidedRootsPlaceKillsNoLiveOne() public {
        post(E, 10, 10);
        vm.warp(postable(E + 4));
        post(E + 1, 20, 10);
        post(E + 2, 30, 10);
        disable(E + 1);
        post(E + 2, 12, 10);
        post(E + 3, 14, 10);
        vm.warp(postable(E + 4) + DELAY);
        claim(E + 2, 12, 10);
        claimSecond(E + 3, 14, 10);
        claim(E + 3, 14, 10);
        (,, bool disabled) = rewards.rewardRoot(pool, E + 1);
        vm.assertTrue(disabled);
        assertFunds(76, 0);
    }

    function test_Disable_ByTheArbiterWithinTheCheck() public {
        post(E, 30, 10);
        expectNotAllowed(manager);
        vm.prank(manager);
        rewards.disable(pool, E);
        uint256 until = postable(E) + DELAY;
        vm.warp(until);
        expect(abi.encodeWithSelector(Errors.CheckOver.selector, until, until));
        disable(E);
    }
}
