// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Slasher } from "../../contracts/src/Slasher.sol";
import { StakeVault } from "../../contracts/src/StakeVault.sol";
import { IUptimeFeed } from "../../contracts/src/WindowTime.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Statements, Submission } from "../../contracts/src/libraries/Statements.sol";
import { Feed } from "./utils/Feed.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice Windows while the sequencer of the L2 is down, and after. The feed learns of an outage late.
contract DowntimeTest is Network {
    uint256 private constant GRACE = 1 days;
    uint256 private constant LATE = 1 hours;
    uint64 private constant E = START / EPOCH;
    Feed private up;

    function feed() internal override returns (IUptimeFeed) {
        up = new Feed(START - 365 days);
        return up;
    }

    function setUp() public {
        deployNetwork();
        seatNode(3 * STAKE);
        fund(100);
    }

    function assertTime(uint256 expected) private view {
        vm.assertEq(vault.windowTime(), expected, "vault");
        vm.assertEq(work.windowTime(), expected, "work");
        vm.assertEq(slasher.windowTime(), expected, "slasher");
        vm.assertEq(rewards.windowTime(), expected, "rewards");
    }

    function execute(bytes32 id) private {
        slasher.execute(id);
    }

    function test_WindowTime_OfAnUptimeWithoutOutageIsLateByTheReport() public {
        vm.warp(START + 5);
        assertTime(START + 5 - LATE);
        vm.assertEq(address(slasher.uptimeFeed()), address(up));
    }

    function test_WindowTime_WithoutAFeedIsTheChains() public {
        StakeVault v = new StakeVault(token, periods(), treasury, CAP, NO_FEED);
        vm.assertEq(v.windowTime(), block.timestamp);
    }

    function test_WindowTime_StandsStillFromTheOutageUntilTheGraceIsOver_AtTheEdge() public {
        uint256 down = START + 10 days;
        vm.warp(down + LATE);
        assertTime(down);
        up.report(false, down); // as late as it may be reported: what has closed stays so
        assertTime(down - 1);
        vm.warp(down + 3 days);
        assertTime(down - 1);
        uint256 again = down + 3 days;
        up.report(true, again);
        vm.warp(again + GRACE - 1);
        assertTime(down - 1);
        vm.warp(again + GRACE);
        assertTime(again + GRACE - LATE);
    }

    /// @dev Two outages less than the grace apart are one; else the first has been over.
    function test_WindowTime_OutagesThatFollowOneAnotherAreOne_AtTheEdge() public {
        uint256 down = START + 10 days;
        uint256 second = down + 100 + GRACE - 1;
        up.report(false, down);
        up.report(true, down + 100);
        up.report(false, second);
        vm.warp(second + 10);
        assertTime(down - 1);
        up.report(true, second + 10);
        uint256 third = second + 10 + GRACE;
        up.report(false, third);
        vm.warp(third + LATE);
        assertTime(third - 1);
    }

    function test_WindowTime_AFeedThatFailsStopsNothing() public {
        vm.warp(START + 10 days);
        up.report(false, START + 9 days);
        up.fail(true, false);
        assertTime(START + 10 days - LATE);
        // Without history, what the latest round says counts.
        up.fail(false, true);
        assertTime(START + 9 days - 1);
    }

    /// @dev However many outages there were, the last of them are read.
    function test_WindowTime_ReadsABoundedHistory() public {
        uint256 at = START + 10 days;
        for (uint256 i; i < 40; ++i) {
            up.report(false, at + 20 * i);
            up.report(true, at + 20 * i + 10);
        }
        vm.warp(at + 800 + LATE);
        assertTime(at + 20 * 24 - 1);
    }

    function test_Constructor_RefusesWhatIsNoFeed() public {
        vm.expectRevert();
        new StakeVault(token, periods(), treasury, CAP, IUptimeFeed(address(token)));
    }

    /// @dev The window would have closed in the outage: the provider has a day to dispute.
    function test_Dispute_AfterAnOutageThatAteTheWindow_AtTheEdge() public {
        bytes32 id = propose(1);
        up.report(false, START + 1);
        vm.warp(START + 5 days);
        expect(abi.encodeWithSelector(Errors.WindowOpen.selector, id, START + WINDOW));
        this.executeIt(id);
        up.report(true, START + 5 days);
        vm.warp(START + 5 days + GRACE - 1);
        expect(abi.encodeWithSelector(Errors.WindowOpen.selector, id, START + WINDOW));
        this.executeIt(id);
        uint256 state = vm.snapshotState();
        dispute(id);
        vm.assertEq(uint256(slasher.proposal(id).state), uint256(Slasher.State.Disputed));
        vm.revertToState(state);
        vm.warp(START + 5 days + GRACE);
        expect(abi.encodeWithSelector(Errors.WindowClosed.selector, id, START + WINDOW));
        vm.prank(provider);
        slasher.dispute(id);
        execute(id);
    }

    function executeIt(bytes32 id) external {
        execute(id);
    }

    /// @dev The arbiter, too, has a day; no dispute lapses meanwhile.
    function test_Lapse_WaitsForTheArbiter() public {
        bytes32 id = propose(1);
        dispute(id);
        up.report(false, START + 1);
        up.report(true, START + 5 days);
        vm.warp(START + 5 days + GRACE - 1);
        expect(abi.encodeWithSelector(Errors.WindowOpen.selector, id, START + DISPUTE));
        slasher.lapse(id);
        vm.prank(arbiter);
        slasher.confirm(id);
    }

    /// @dev What can be rejected after an outage cannot have been promised its pay.
    function test_Reject_AndRewardRoot_NeverBothPossible() public {
        Submission memory s = submission(1);
        uint64 seq = postRoot(one(leafOf(s)));
        up.report(false, START + 1);
        up.report(true, START + 5 days);
        uint256 open = START + 5 days + GRACE;
        vm.warp(open - 1);
        uint256 from = postable(E);
        expect(abi.encodeWithSelector(Errors.EpochStillOpen.selector, E, from));
        vm.prank(manager);
        rewards.postRewardRoot(pool, E, Statements.rewardLeaf(node, 1), 1, keccak256("t"));
        uint256 state = vm.snapshotState();
        work.reject(s, seq, none(), rejections(s));
        vm.revertToState(state);
        vm.warp(open);
        expect(abi.encodeWithSelector(Errors.ValidityOver.selector, START + VALIDITY, open - LATE));
        work.reject(s, seq, none(), rejections(s));
        vm.prank(manager);
        rewards.postRewardRoot(pool, E, Statements.rewardLeaf(node, 1), 1, keccak256("t"));
    }

    /// @dev Stake does not leave before those who would slash it can act again.
    function test_Withdraw_WaitsAsWindowsDo_AtTheEdge() public {
        vm.startPrank(provider);
        vault.unbond(STAKE);
        up.report(false, START + UNBONDING);
        up.report(true, START + 5 days);
        vm.warp(START + 5 days + GRACE - 1);
        expect(abi.encodeWithSelector(Errors.NothingToWithdraw.selector, provider));
        vault.withdraw();
        vm.warp(START + 5 days + GRACE);
        vm.assertEq(vault.withdraw(), STAKE);
    }

    function test_Terms_WaitForThoseWhoWouldLeave() public {
        vm.prank(governor);
        slasher.announceTerms(1, 1);
        vm.prank(arbiter);
        slasher.announceArbiter(stranger);
        up.report(false, START + UNBONDING);
        up.report(true, START + 5 days);
        vm.warp(START + 5 days + GRACE - 1);
        vm.expectPartialRevert(Errors.TooEarly.selector);
        slasher.applyTerms();
        vm.expectPartialRevert(Errors.TooEarly.selector);
        slasher.applyArbiter();
        vm.warp(START + 5 days + GRACE);
        slasher.applyTerms();
        slasher.applyArbiter();
    }

    /// @dev The arbiter's public check of a root is a window, and so is the manager's silence.
    function test_Rewards_WaitForTheArbiterAndTheManager() public {
        vm.warp(postable(E) + LATE);
        vm.prank(manager);
        rewards.postRewardRoot(pool, E, Statements.rewardLeaf(node, 1), 1, keccak256("t"));
        uint256 now_ = vm.getBlockTimestamp();
        up.report(false, now_ + 1);
        up.report(true, now_ + 5 days);
        vm.warp(now_ + 5 days + GRACE - 1);
        expect(abi.encodeWithSelector(Errors.NotClaimableYet.selector, now_ + DELAY, now_));
        rewards.claim(pool, E, node, 1, none());
        uint256 state = vm.snapshotState();
        vm.prank(arbiter);
        rewards.disable(pool, E);
        vm.revertToState(state);
        vm.warp(now_ + 5 days + GRACE);
        rewards.claim(pool, E, node, 1, none());
    }
}
