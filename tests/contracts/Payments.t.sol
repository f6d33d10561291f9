// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Rewards } from "../../contracts/src/Rewards.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Statements } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { Tree } from "./utils/Tree.sol";
import { vm } from "./utils/Vm.sol";

/// @notice Batches of claims, lying totals, and what becomes of money that is not claimed.
contract PaymentsTest is Network {
    uint64 private constant E = START / EPOCH;
    address private other = address(0x0712E2);

    function setUp() public {
        deployNetwork();
        seatNode(4 * STAKE);
        vm.prank(address(0x9));
        registry.registerProvider(other);
        stake(address(0x9), STAKE);
        allow(address(0x9), pool);
        addNode(address(0x9), NODE2_KEY);
        join(node2);
        fund(100);
    }

    function leaves(uint256 a, uint256 b) private view returns (bytes32[] memory list) {
        list = new bytes32[](2);
        list[0] = Statements.rewardLeaf(node, a);
        list[1] = Statements.rewardLeaf(node2, b);
    }

    function post(uint64 epoch, uint256 a, uint256 b, uint256 total) private {
        bytes32 root = Tree.root(leaves(a, b));
        if (block.timestamp < postable(epoch)) vm.warp(postable(epoch));
        vm.prank(manager);
        rewards.postRewardRoot(pool, epoch, root, total, keccak256("t"));
    }

    function both(uint64 epoch, uint256 a, uint256 b)
        private
        view
        returns (Rewards.Claim[] memory c)
    {
        c = new Rewards.Claim[](2);
        c[0] = Rewards.Claim(pool, epoch, node, a, Tree.proof(leaves(a, b), 0));
        c[1] = Rewards.Claim(pool, epoch, node2, b, Tree.proof(leaves(a, b), 1));
    }

    function test_ClaimMany_PaysEachToItsOwnAccount() public {
        post(E, 30, 10, 40);
        vm.warp(postable(E) + DELAY);
        vm.assertEq(rewards.claimMany(both(E, 30, 10)), 40);
        vm.assertEq(token.balanceOf(payout), 30);
        vm.assertEq(token.balanceOf(other), 10);
        vm.assertEq(rewards.claimMany(both(E, 30, 10)), 0);
    }

    function test_ClaimMany_SkipsWhatWasPaidAhead() public {
        post(E, 30, 10, 40);
        vm.warp(postable(E) + DELAY);
        rewards.claim(pool, E, node, 30, Tree.proof(leaves(30, 10), 0));
        vm.assertEq(rewards.claimMany(both(E, 30, 10)), 10);
    }

    function test_ClaimMany_SeveralToOneAccountAreOneTransfer() public {
        post(E, 30, 10, 40);
        vm.prank(address(0x9));
        registry.setPayout(payout);
        vm.warp(postable(E) + DELAY);
        vm.recordLogs();
        rewards.claimMany(both(E, 30, 10));
        // Two Claimed, one Transfer.
        vm.assertEq(vm.getRecordedLogs().length, 3);
        vm.assertEq(token.balanceOf(payout), 40);
    }

    function test_ClaimMany_OfNothingPaysNothing() public {
        vm.assertEq(rewards.claimMany(new Rewards.Claim[](0)), 0);
    }

    function test_ClaimMany_OneFalseClaimRefusesTheBatch() public {
        post(E, 30, 10, 40);
        vm.warp(postable(E) + DELAY);
        Rewards.Claim[] memory c = both(E, 30, 10);
        c[1].cumulative = 11;
        expect(abi.encodeWithSelector(Errors.BadRewardProof.selector, node2, 11));
        rewards.claimMany(c);
        c = both(E, 30, 10);
        c[1].epoch = E + 1;
        expect(abi.encodeWithSelector(Errors.UnknownRewardRoot.selector, pool, E + 1));
        rewards.claimMany(c);
        vm.assertEq(token.balanceOf(payout), 0);
    }

    function test_Disable_IsNotBlockedByAReserveThatIsDrawn() public {
        post(E, 25, 25, 40); // its leaves sum to 50
        post(E + 1, 40, 30, 50);
        vm.warp(postable(E) + DELAY);
        rewards.claimMany(both(E, 25, 25)); // takes what the later root reserved as well
        (uint256 free, uint256 reserved) = rewards.funds(pool);
        vm.assertEq(free, 50);
        vm.assertEq(reserved, 0);
        vm.prank(arbiter);
        rewards.disable(pool, E + 1);
        (free, reserved) = rewards.funds(pool);
        vm.assertEq(free, 50);
        vm.assertEq(reserved, 0);
        (uint256 total,) = rewards.progress(pool);
        vm.assertEq(total, 40);
    }

    function end() private returns (uint256 refundableAt) {
        vm.prank(manager);
        pools.end(pool);
        return rewards.refundableAt(pool);
    }

    function refund() private {
        vm.prank(manager);
        rewards.refund(pool);
    }

    function test_Refund_WaitsForTheLastWorksRewards_AtTheEdge() public {
        uint256 from = end();
        // The funds came just now: a table of the validators can follow later than the last work's root.
        uint256 silence = rewards.SILENT_EPOCHS() * EPOCH + VALIDITY;
        vm.assertEq(from, START + silence + EPOCH + DELAY);
        vm.assertLt(START + 3 * EPOCH + 2 * VALIDITY + WINDOW + DISPUTE + 2 * DELAY, from, "later");
        expect(abi.encodeWithSelector(Errors.RefundNotYet.selector, pool, from));
        refund();
        vm.warp(from - 1);
        expect(abi.encodeWithSelector(Errors.RefundNotYet.selector, pool, from));
        refund();
        vm.warp(from);
        refund();
        vm.assertEq(token.balanceOf(manager), 100);
    }

    /// @dev The slowest way: a file comes an epoch after the end and its node roots it in the last second
    /// that is its own; a slash of another file of its is proposed in the last second of the validity,
    /// disputed in the window's last and lapses; the reward root that pays is voided in its last second.
    function test_Refund_NeverComesBeforeTheSlowestWorkIsPromisedItsPay() public {
        vm.warp(START + 100 days); // no root for long: the last work's way alone decides
        uint256 refundableAt = end();
        uint256 received = block.timestamp + EPOCH;
        uint256 rooted = received + EPOCH + VALIDITY;
        uint256 decided = rooted + VALIDITY + WINDOW + DISPUTE;
        uint64 epoch = uint64((decided - VALIDITY) / EPOCH);
        vm.assertLt(rooted / EPOCH, epoch, "a later epoch decides it");
        post(epoch, 30, 10, 40);
        vm.assertLe(block.timestamp, decided + EPOCH);
        vm.warp(block.timestamp + DELAY - 1);
        vm.prank(arbiter);
        rewards.disable(pool, epoch);
        vm.warp(block.timestamp + DELAY);
        vm.assertLt(block.timestamp, refundableAt, "time to post it again");
        refundableAt = rewards.refundableAt(pool);
        expect(abi.encodeWithSelector(Errors.RefundNotYet.selector, pool, refundableAt));
        refund();
        post(epoch, 30, 10, 40);
        refundableAt = rewards.refundableAt(pool);
        vm.warp(refundableAt);
        refund();
        vm.assertEq(token.balanceOf(manager), 60);
        vm.warp(refundableAt + DELAY);
        rewards.claimMany(both(epoch, 30, 10));
        vm.assertEq(token.balanceOf(address(rewards)), 0);
    }

    /// @dev Its quiet time counts as if the root had not been posted: that alone would free the money at once.
    function test_Refund_WaitsForATableAfterTheArbiterVoidedARoot() public {
        vm.warp(START + 100 days);
        vm.warp(end() - 1);
        uint64 epoch = uint64((block.timestamp - VALIDITY) / EPOCH - 1);
        post(epoch, 1, 0, 1);
        vm.warp(block.timestamp + DELAY - 1);
        vm.prank(arbiter);
        rewards.disable(pool, epoch);
        uint256 from = block.timestamp + EPOCH + DELAY;
        vm.assertEq(rewards.refundableAt(pool), from);
        vm.warp(from - 1);
        expect(abi.encodeWithSelector(Errors.RefundNotYet.selector, pool, from));
        refund();
        vm.warp(from);
        refund();
    }

    /// @dev Without a root for long, the last work's way alone decides.
    function test_Refund_OfAPoolThatWasSilentForLong() public {
        vm.warp(START + 100 days);
        uint256 from = end();
        vm.assertEq(from, block.timestamp + 3 * EPOCH + 2 * VALIDITY + WINDOW + DISPUTE + 2 * DELAY);
    }

    function test_Refund_AnEndedPoolNeverRunsAgain_SoItsRefundDoesNotMove() public {
        uint256 from = end();
        vm.startPrank(manager);
        pools.pause(pool);
        pools.start(pool);
        vm.warp(block.timestamp + 1);
        expect(abi.encodeWithSelector(Errors.PoolHasEnded.selector, pool));
        pools.end(pool);
        vm.stopPrank();
        vm.assertTrue(pools.hasEnded(pool));
        vm.assertEq(rewards.refundableAt(pool), from);
    }

    function test_Refund_OfUnclaimedRewardsOnlyAYearLater_AtTheEdge() public {
        post(E, 30, 10, 60); // 20 are promised to no one
        uint256 from = end();
        vm.warp(from);
        refund();
        vm.assertEq(token.balanceOf(manager), 40);
        vm.warp(from + rewards.CLAIM_PERIOD() - 1);
        expect(abi.encodeWithSelector(Errors.NothingToRefund.selector, pool));
        refund();
        rewards.claimMany(both(E, 30, 10));
        vm.warp(from + rewards.CLAIM_PERIOD());
        refund();
        vm.assertEq(token.balanceOf(manager), 60);
        vm.assertEq(token.balanceOf(address(rewards)), 0);
    }

    function test_Claim_AfterTheReserveWasTakenBackIsRefusedByName() public {
        post(E, 30, 10, 40);
        vm.warp(end() + rewards.CLAIM_PERIOD());
        refund();
        vm.assertEq(token.balanceOf(manager), 100);
        bytes32[] memory proof = Tree.proof(leaves(30, 10), 0);
        expect(abi.encodeWithSelector(Errors.ReserveExceeded.selector, 0, 30));
        rewards.claim(pool, E, node, 30, proof);
    }
}
