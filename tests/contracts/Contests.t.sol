// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Slasher } from "../../contracts/src/Slasher.sol";
import { Work } from "../../contracts/src/Work.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Opinions, Submission } from "../../contracts/src/libraries/Statements.sol";
import { Crook } from "./utils/Crook.sol";
import { vm } from "./utils/Vm.sol";

/// @notice A provider takes a rejection or a void to judgement.
contract ContestsTest is Crook {
    uint8 private constant REJECTED = 2;
    uint8 private constant VOID = 3;
    uint256 private constant FROM = START + VALIDITY;
    uint256 private constant QUARTER = DISPUTE / 4;

    function setUp() public {
        deployNetwork();
        seatNode(3 * STAKE);
    }

    function contested(uint8 outcome) private returns (bytes32 id) {
        return contest(rejectIt(1, outcome));
    }

    function judge(bytes32 id, bool same) private {
        vm.warp(vm.getBlockTimestamp() + QUARTER);
        vm.prank(arbiter);
        if (same) slasher.confirm(id);
        else slasher.overturn(id);
    }

    function assertState(bytes32 id, Slasher.State expected) private view {
        vm.assertEq(uint256(slasher.proposal(id).state), uint256(expected), "state");
    }

    /// @dev The provider has its deposit and all its stake, the authors all theirs; the leaf earns nothing.
    function assertNothingTaken(bytes32 id) private view {
        assertState(id, Slasher.State.Closed);
        vm.assertTrue(work.isRejected(pool, id));
        vm.assertEq(token.balanceOf(provider), DEPOSIT);
        vm.assertEq(token.balanceOf(address(slasher)), 0);
        vm.assertEq(vault.active(provider), 3 * STAKE);
        vm.assertEq(vault.active(validator), BONDS);
        vm.assertEq(vault.accountOf(validator).pledges, 0);
    }

    function wrongState(bytes32 id, Slasher.State state) private {
        expect(abi.encodeWithSelector(Errors.WrongState.selector, id, uint8(state)));
    }

    // ----------------------------------------------------------------------------------- contest

    function test_Contest_TakesTheDeposit_HoldsNoStake_NamesTheRejectionsAuthors() public {
        Submission memory s = rejectIt(1, VOID);
        give(provider, DEPOSIT);
        address[] memory authors = new address[](2);
        (authors[0], authors[1]) = (validator, validator2);
        vm.startPrank(provider);
        token.approve(address(slasher), DEPOSIT);
        vm.expectEmit();
        emit Slasher.RejectionContested(
            leafOf(s), pool, node, provider, DEPOSIT, uint64(FROM + 1 + DISPUTE), authors
        );
        bytes32 id = slasher.contest(s);
        vm.stopPrank();
        vm.assertEq(id, leafOf(s));
        Slasher.Proposal memory p = slasher.proposal(id);
        vm.assertEq(p.node, node);
        vm.assertEq(p.provider, provider);
        vm.assertEq(p.pool, pool);
        vm.assertEq(p.amount, 0);
        vm.assertEq(p.deadline, FROM + 1 + DISPUTE);
        vm.assertEq(p.authors[1], validator2);
        assertState(id, Slasher.State.Contested);
        vm.assertTrue(work.isRejected(pool, id));
        vm.assertEq(token.balanceOf(address(slasher)), DEPOSIT);
        vm.assertEq(vault.pendingSlash(provider), 0);
        wrongState(id, Slasher.State.Contested);
        slasher.execute(id);
        vm.startPrank(provider);
        wrongState(id, Slasher.State.Contested);
        slasher.dispute(id);
        wrongState(id, Slasher.State.Contested);
        slasher.object(id);
        vm.stopPrank();
    }

    function test_Contest_InTheWindowAfterAValidity_AtTheEdges() public {
        Submission memory s = rejectIt(1, REJECTED);
        bytes memory wrongTime =
            abi.encodeWithSelector(Errors.NotYourTurn.selector, FROM, FROM + WINDOW);
        vm.warp(FROM);
        vm.startPrank(provider);
        expect(wrongTime);
        slasher.contest(s);
        vm.warp(FROM + WINDOW);
        expect(wrongTime);
        slasher.contest(s);
        vm.stopPrank();
        vm.warp(FROM + WINDOW - 1);
        assertState(contest(s), Slasher.State.Contested);
    }

    /// @dev The pool's manager, a validator, another provider and a stranger.
    function test_Contest_ByTheNodesProviderOnly() public {
        Submission memory s = rejectIt(1, VOID);
        register(address(0x9000), payout);
        address[5] memory others = [manager, validator, address(0x9000), stranger, node];
        for (uint256 i; i < 5; ++i) {
            expectNotAllowed(others[i]);
            vm.prank(others[i]);
            slasher.contest(s);
        }
        assertState(leafOf(s), Slasher.State.None);
    }

    function test_Contest_OfALeafThatWasNeverRejectedIsRefused() public {
        Submission memory s = submission(2);
        postRoot(one(leafOf(s)));
        vm.warp(FROM + 1);
        expect(abi.encodeWithSelector(Errors.NotRejected.selector, pool, leafOf(s)));
        vm.prank(provider);
        slasher.contest(s);
    }

    function test_Contest_Once() public {
        Submission memory s = rejectIt(1, VOID);
        bytes32 id = contest(s);
        vm.startPrank(provider);
        wrongState(id, Slasher.State.Contested);
        slasher.contest(s);
        vm.stopPrank();
        vm.prank(arbiter);
        slasher.cancel(id);
        assertNothingTaken(id);
        wrongState(id, Slasher.State.Closed);
        vm.prank(provider);
        slasher.contest(s);
    }

    function test_Contest_NotBesideASlash_ButAfterOneThatTheArbiterCancelled() public {
        Submission memory s = submission(1);
        bytes32 id = propose(1);
        work.reject(s, 1, none(), rejections(s));
        vm.warp(FROM + 1);
        wrongState(id, Slasher.State.Proposed);
        vm.prank(provider);
        slasher.contest(s);
        vm.prank(arbiter);
        slasher.cancel(id);
        contest(s);
        assertState(id, Slasher.State.Contested);
        vm.prank(arbiter);
        slasher.cancel(id);
        assertNothingTaken(id);
    }

    /// @dev As long as the quorum can propose a slash, the provider cannot be first with a contest; also
    /// where the leaf is rejected in the last second of its validity.
    function test_Contest_KeepsNoSlashAway() public {
        Submission memory s = submission(1);
        uint64 seq = postRoot(one(leafOf(s)));
        vm.warp(FROM);
        work.reject(s, seq, none(), rejections(s));
        expect(
            abi.encodeWithSelector(
                Errors.NotYourTurn.selector, FROM + VALIDITY, FROM + VALIDITY + WINDOW
            )
        );
        vm.prank(provider);
        slasher.contest(s);
        slasher.propose(s, sign(NODE_KEY, leafOf(s)), seq, none(), rejections(s));
        assertState(leafOf(s), Slasher.State.Proposed);
    }

    /// @dev Authors of contested rejections stand for them, and can propose all the same: a liar cannot use
    /// up the validators' bonds by contests.
    function test_Contest_UsesUpNoBondThatAProposalNeeds() public {
        Submission[] memory list = new Submission[](3);
        for (uint256 i; i < 3; ++i) {
            list[i] = submission(10 + i);
            uint64 seq = postRoot(one(leafOf(list[i])));
            work.reject(list[i], seq, none(), opinions(list[i], VOID, bothKeys()));
        }
        vm.prank(validator);
        vault.unbond(BONDS - BOND);
        vm.warp(FROM + 1);
        for (uint256 i; i < 3; ++i) {
            contest(list[i]);
        }
        assertState(propose(1), Slasher.State.Proposed);
    }

    function test_Contest_OfARejectionWhoseAuthorsWereDismissed() public {
        Submission memory s = rejectIt(1, VOID);
        vm.startPrank(manager);
        pools.setValidator(pool, validator, false);
        pools.setValidator(pool, validator2, false);
        vm.stopPrank();
        judge(contest(s), false);
        vm.assertEq(token.balanceOf(treasury), 2 * BOND);
    }

    // --------------------------------------------------------------------------------------- ends

    function test_Confirm_LosesTheDepositAndNothingElse() public {
        bytes32 id = contested(REJECTED);
        judge(id, true);
        assertState(id, Slasher.State.Closed);
        vm.assertTrue(work.isRejected(pool, id));
        vm.assertEq(token.balanceOf(treasury), DEPOSIT);
        vm.assertEq(token.balanceOf(provider), 0);
        vm.assertEq(token.balanceOf(address(slasher)), 0);
        vm.assertEq(vault.active(provider), 3 * STAKE);
        vm.assertEq(vault.active(validator), BONDS);
        vm.assertTrue(pools.isMember(pool, node));
        vm.assertFalse(pools.seatOf(pool, node).banned);
    }

    function test_Overturn_RestoresTheLeaf_TheAuthorsPay_TheDepositComesBack() public {
        Submission memory s = rejectIt(1, VOID);
        bytes32 id = contest(s);
        vm.warp(FROM + 1 + QUARTER);
        vm.expectEmit();
        emit Work.LeafRestored(pool, id);
        vm.expectEmit();
        emit Slasher.SlashOverturned(id, arbiter, 2 * BOND, 0);
        vm.prank(arbiter);
        slasher.overturn(id);
        assertState(id, Slasher.State.Closed);
        vm.assertFalse(work.isRejected(pool, id));
        vm.assertTrue(work.rejectionOf(pool, id).restored);
        vm.assertEq(token.balanceOf(provider), DEPOSIT);
        vm.assertEq(token.balanceOf(treasury), 2 * BOND);
        vm.assertEq(vault.active(validator), BONDS - BOND);
        vm.assertEq(vault.active(validator2), BONDS - BOND);
        // Under a new root the leaf is liable again, but neither rejected nor slashed again.
        uint64 seq = postRoot(one(id));
        expect(abi.encodeWithSelector(Errors.AlreadyRestored.selector, pool, id));
        work.reject(s, seq, none(), rejections(s));
        expect(abi.encodeWithSelector(Errors.AlreadyProposed.selector, id));
        slasher.propose(s, sign(NODE_KEY, id), seq, none(), rejections(s));
        expect(abi.encodeWithSelector(Errors.NotRejected.selector, pool, id));
        vm.prank(provider);
        slasher.contest(s);
    }

    /// @dev An author that takes its stake out as soon as it has rejected still pays in the last second.
    function test_Overturn_ReachesStakeTakenOutAtTheRejection_AtTheEdge() public {
        Submission memory s = submission(1);
        work.reject(s, postRoot(one(leafOf(s))), none(), opinions(s, VOID, bothKeys()));
        vm.prank(validator);
        vault.unbond(BONDS);
        vm.warp(FROM + WINDOW - 1);
        bytes32 id = contest(s);
        vm.warp(FROM + WINDOW - 1 + DISPUTE - 1);
        expect(abi.encodeWithSelector(Errors.NothingToWithdraw.selector, validator));
        vm.prank(validator);
        vault.withdraw();
        vm.prank(arbiter);
        slasher.overturn(id);
        vm.assertEq(token.balanceOf(treasury), 2 * BOND);
        vm.assertEq(vault.unbonding(validator), BONDS - BOND);
    }

    /// @dev An author is bound by the contest, so it cannot move its stake out of the manager's reach; one
    /// that already answers to another manager pays nothing, and keeps no contest away.
    function test_Overturn_TakesWhatStillStands() public {
        Submission memory s = rejectIt(1, VOID);
        openCrooksPool(STAKE);
        register(validator2, payout);
        addNode(validator2, NODE2_KEY);
        joinCrooksPool(validator2, node2);
        (address bound,) = vault.boundTo(validator);
        vm.assertEq(bound, address(0));
        bytes32 id = contest(s);
        (bound,) = vault.boundTo(validator);
        vm.assertEq(bound, manager);
        (bound,) = vault.boundTo(validator2);
        vm.assertEq(bound, crook);
        judge(id, false);
        vm.assertEq(token.balanceOf(treasury), BOND);
        vm.assertEq(vault.active(validator), BONDS - BOND);
        vm.assertEq(vault.active(validator2), BONDS);
        vm.assertFalse(work.isRejected(pool, id));
    }

    function test_Lapse_AfterTheDisputeWindow_TheRejectionStands() public {
        bytes32 id = contested(VOID);
        uint256 until = FROM + 1 + DISPUTE;
        vm.warp(until - 1);
        expect(abi.encodeWithSelector(Errors.WindowOpen.selector, id, until));
        slasher.lapse(id);
        vm.warp(until);
        expect(abi.encodeWithSelector(Errors.WindowClosed.selector, id, until));
        vm.prank(arbiter);
        slasher.overturn(id);
        vm.prank(stranger);
        slasher.lapse(id);
        assertNothingTaken(id);
    }

    function test_Judge_TheArbiterLeavesTheFirstQuarterToTheCourt_AtTheEdge() public {
        bytes32 id = contested(VOID);
        uint256 from = FROM + 1 + QUARTER;
        vm.warp(from - 1);
        bytes memory open = abi.encodeWithSelector(Errors.WindowOpen.selector, id, from);
        vm.startPrank(arbiter);
        expect(open);
        slasher.confirm(id);
        expect(open);
        slasher.overturn(id);
        vm.warp(from);
        slasher.overturn(id);
        vm.stopPrank();
        vm.assertFalse(work.isRejected(pool, id));
    }

    function test_Judge_ByAStrangerIsRefused() public {
        bytes32 id = contested(VOID);
        vm.warp(FROM + 1 + QUARTER);
        address[4] memory others = [validator, manager, provider, stranger];
        for (uint256 i; i < 4; ++i) {
            vm.startPrank(others[i]);
            expectNotAllowed(others[i]);
            slasher.confirm(id);
            expectNotAllowed(others[i]);
            slasher.overturn(id);
            expectNotAllowed(others[i]);
            slasher.cancel(id);
            expectNotAllowed(others[i]);
            work.restore(pool, id);
            vm.stopPrank();
        }
        assertState(id, Slasher.State.Contested);
    }

    function test_WithoutDepositAndBond_NothingIsAsked() public {
        vm.prank(governor);
        slasher.announceTerms(0, 0);
        vm.warp(START + UNBONDING);
        slasher.applyTerms();
        Submission memory s = rejectIt(1, VOID);
        vm.prank(provider);
        bytes32 id = slasher.contest(s);
        (address bound,) = vault.boundTo(validator);
        vm.assertEq(bound, address(0));
        judge(id, false);
        vm.assertFalse(work.isRejected(pool, id));
        vm.assertEq(vault.active(validator), BONDS);
    }

    // ------------------------------------------------------------------------ an overturned slash

    function test_Overturn_OfASlashRestoresTheLeafThatWasRejectedAsWell() public {
        Submission memory s = submission(1);
        bytes32 id = propose(1);
        work.reject(s, 1, none(), rejections(s));
        dispute(id);
        vm.prank(arbiter);
        slasher.overturn(id);
        vm.assertFalse(work.isRejected(pool, id));
        vm.assertEq(work.rejectionOf(pool, id).at, START);
    }

    /// @dev The same quorum cannot strike afterwards what a judge found to be right.
    function test_Overturn_OfASlashBarsALaterRejection() public {
        Submission memory s = submission(1);
        bytes32 id = propose(1);
        dispute(id);
        vm.prank(arbiter);
        slasher.overturn(id);
        Opinions memory o = rejections(s);
        expect(abi.encodeWithSelector(Errors.AlreadyRestored.selector, pool, id));
        work.reject(s, 1, none(), o);
        vm.assertFalse(work.isRejected(pool, id));
    }
}
