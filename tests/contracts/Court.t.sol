// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Court } from "../../contracts/src/Court.sol";
import { Pools } from "../../contracts/src/Pools.sol";
import { Slasher } from "../../contracts/src/Slasher.sol";
import { StakeVault } from "../../contracts/src/StakeVault.sol";
import { Work } from "../../contracts/src/Work.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Law, Opinions, Submission } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice Jurors of a disputed slash: who may be drawn, how they vote, what they earn and lose.
contract CourtTest is Network {
    bytes32 private constant SALT = keccak256("salt");
    uint256 private constant HALF = DISPUTE / 2;
    uint256 private constant QUARTER = DISPUTE / 4;
    uint8 private constant CONFIRM = 1;
    uint8 private constant OVERTURN = 2;
    uint8 private constant ABSTAIN = 3;

    function setUp() public {
        deployNetwork();
        seatNode(3 * STAKE);
        for (uint256 i; i < 8; ++i) {
            registerJuror(juror(i));
        }
    }

    function juror(uint256 i) private pure returns (address) {
        return address(uint160(0x1000 + i));
    }

    /// @dev A disputed case whose jurors are drawn.
    function drawnCase() private returns (bytes32 leaf, address[] memory jurors) {
        leaf = disputedCase();
        court.draw(leaf);
        vm.roll(vm.getBlockNumber() + 2);
        court.draw(leaf);
        (, jurors) = court.caseOf(leaf);
    }

    function disputedCase() private returns (bytes32 leaf) {
        leaf = propose(1);
        openCase(submission(1));
        dispute(leaf);
    }

    function commit(bytes32 leaf, address who, uint8 found) private {
        bytes32 commitment = court.commitmentOf(leaf, who, found, EVIDENCE, SALT);
        vm.prank(who);
        court.commit(leaf, commitment);
    }

    function reveal(bytes32 leaf, address who, uint8 found) private {
        vm.prank(who);
        court.reveal(leaf, found, EVIDENCE, SALT);
    }

    /// @dev The drawn jurors commit and reveal these votes; None is silent.
    function vote(uint8 first, uint8 second, uint8 third)
        private
        returns (bytes32 leaf, address[] memory jurors)
    {
        (leaf, jurors) = drawnCase();
        uint8[3] memory votes = [first, second, third];
        for (uint256 i; i < 3; ++i) {
            if (votes[i] != 0) commit(leaf, jurors[i], votes[i]);
        }
        vm.warp(START + HALF);
        for (uint256 i; i < 3; ++i) {
            if (votes[i] != 0) reveal(leaf, jurors[i], votes[i]);
        }
    }

    function status(bytes32 leaf) private view returns (Court.Status) {
        (Court.Case memory c,) = court.caseOf(leaf);
        return c.status;
    }

    function bondOf(address who) private view returns (uint256) {
        return court.jurorOf(CLASS, who).bond;
    }

    // -------------------------------------------------------------------------------- the register

    function test_Register_TakesTheBondOnce() public {
        address who = juror(0);
        vm.assertEq(token.balanceOf(address(court)), 8 * JUROR_BOND);
        vm.assertEq(court.jurorOf(CLASS, who).seat, 1);
        expect(abi.encodeWithSelector(Errors.AlreadyJuror.selector, CLASS, who));
        vm.startPrank(who);
        court.register(CLASS);
        expect(abi.encodeWithSelector(Errors.ZeroDigest.selector));
        court.register(0);
        vm.stopPrank();
    }

    function test_Leave_FreesTheSeatForTheNext_AndWithdrawReturnsTheBond() public {
        address who = juror(2);
        expect(abi.encodeWithSelector(Errors.NotJuror.selector, stranger));
        vm.prank(stranger);
        court.leave(CLASS);
        expect(abi.encodeWithSelector(Errors.StillJuror.selector, CLASS, who, 0));
        vm.startPrank(who);
        court.withdraw(CLASS);
        court.leave(CLASS);
        expect(abi.encodeWithSelector(Errors.NotJuror.selector, who));
        court.leave(CLASS);
        expect(abi.encodeWithSelector(Errors.AlreadyJuror.selector, CLASS, who));
        court.register(CLASS);
        vm.assertEq(court.withdraw(CLASS), JUROR_BOND);
        expect(abi.encodeWithSelector(Errors.NothingToWithdraw.selector, who));
        court.withdraw(CLASS);
        vm.stopPrank();
        vm.assertEq(token.balanceOf(who), JUROR_BOND);
        vm.assertEq(token.balanceOf(address(court)), 7 * JUROR_BOND);
        registerJuror(stranger);
        Court.Seat[] memory seats = court.seatsOf(CLASS);
        vm.assertEq(seats.length, 8);
        vm.assertEq(seats[2].account, stranger);
    }

    function test_Wire_OnceAndByTheDeployer() public {
        Court other = new Court(vault, pools, work, JUROR_BOND);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        other.wire(slasher);
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        other.wire(Slasher(address(0)));
        expect(abi.encodeWithSelector(Errors.AlreadyWired.selector));
        court.wire(slasher);
        vm.assertEq(address(court.slasher()), address(slasher));
    }

    function test_Constructor_RefusesZero() public {
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        new Court(vault, Pools(address(0)), work, 1);
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        new Court(vault, pools, Work(address(0)), 1);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        new Court(vault, pools, work, 0);
    }

    // ---------------------------------------------------------------------------------------- open

    function test_Open_ByTheProviderOfAnOpenProposalOnce() public {
        Submission memory s = submission(1);
        Opinions memory o = rejections(s);
        expect(abi.encodeWithSelector(Errors.WrongState.selector, leafOf(s), 0));
        openCase(s);
        bytes32 leaf = propose(1);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        court.open(s, o, law(), firstSeats(7), 2);
        openCase(s);
        expect(abi.encodeWithSelector(Errors.AlreadyInCourt.selector, leaf));
        openCase(s);
        (Court.Case memory c,) = court.caseOf(leaf);
        vm.assertEq(c.class, CLASS);
        vm.assertEq(c.latest, START);
        vm.assertEq(c.provider, provider);
    }

    function test_Open_NeedsTheProposalsOwnOpinionsAndTheirLaw() public {
        Submission memory s = submission(1);
        bytes32 leaf = propose(1);
        Opinions memory o = rejections(s);
        bytes memory other = abi.encodeWithSelector(Errors.OtherOpinions.selector, leaf);
        Law memory l = law();
        l.verificationClass = EVIDENCE;
        expect(other);
        openCase(s, o, l, firstSeats(7), 2);
        uint256[] memory keys = bothKeys();
        (keys[0], keys[1]) = (VALIDATOR2_KEY, VALIDATOR_KEY);
        Opinions memory swapped = opinions(s, 2, keys);
        expect(other);
        openCase(s, swapped, law(), firstSeats(7), 2);
        keys[0] = NODE_KEY;
        Opinions memory strange = opinions(s, 2, keys);
        expect(other);
        openCase(s, strange, law(), firstSeats(7), 2);
        Opinions memory voids = opinions(s, 3, bothKeys());
        expect(abi.encodeWithSelector(Errors.WrongOutcome.selector, 3));
        openCase(s, voids, law(), firstSeats(7), 2);
    }

    function test_Open_AfterItsAuthorsWereDismissed() public {
        bytes32 leaf = propose(1);
        vm.prank(manager);
        pools.setValidator(pool, validator, false);
        openCase(submission(1));
        vm.assertEq(uint256(status(leaf)), uint256(Court.Status.Open));
    }

    function test_Open_NeedsSevenThatCount() public {
        propose(1);
        Submission memory s = submission(1);
        Opinions memory o = rejections(s);
        expect(abi.encodeWithSelector(Errors.TooFewJurors.selector, 6, 7));
        openCase(s, o, law(), firstSeats(6), 2);
        uint256[] memory seats = firstSeats(7);
        seats[6] = 5;
        expect(abi.encodeWithSelector(Errors.TooFewJurors.selector, 6, 7));
        openCase(s, o, law(), seats, 2);
        seats[6] = 8;
        expect(abi.encodeWithSelector(Errors.TooFewJurors.selector, 6, 7));
        openCase(s, o, law(), seats, 2);
        vm.prank(juror(3));
        court.leave(CLASS);
        expect(abi.encodeWithSelector(Errors.TooFewJurors.selector, 3, 7));
        openCase(s, o, law(), firstSeats(7), 2);
        seats[6] = 7;
        (seats[3], seats[4], seats[5]) = (4, 5, 6);
        openCase(s, o, law(), seats, 2);
        vm.assertEq(uint256(status(leafOf(s))), uint256(Court.Status.Open));
    }

    function test_Open_PartiesAndLateJurorsDoNotCount() public {
        propose(1);
        Submission memory s = submission(1);
        Opinions memory o = rejections(s);
        registerJuror(provider);
        registerJuror(manager);
        registerJuror(validator);
        vm.warp(START + 1);
        registerJuror(stranger);
        vm.prank(manager);
        pools.setValidator(pool, juror(7), true);
        for (uint256 seat = 7; seat < 12; ++seat) {
            uint256[] memory seats = firstSeats(7);
            seats[6] = seat;
            expect(abi.encodeWithSelector(Errors.TooFewJurors.selector, 6, 7));
            openCase(s, o, law(), seats, 3);
        }
        openCase(s, o, law(), firstSeats(7), 3);
        vm.assertEq(uint256(status(leafOf(s))), uint256(Court.Status.Open));
    }

    function test_Open_NeedsTheNumberOfThePoolsValidators() public {
        propose(1);
        Submission memory s = submission(1);
        Opinions memory o = rejections(s);
        uint8[4] memory wrong = [0, 1, 3, 255];
        for (uint256 i; i < 4; ++i) {
            expect(abi.encodeWithSelector(Errors.WrongCount.selector, wrong[i]));
            openCase(s, o, law(), firstSeats(7), wrong[i]);
        }
        openCase(s, o, law(), firstSeats(7), 2);
        vm.assertEq(uint256(status(leafOf(s))), uint256(Court.Status.Open));
    }

    // ---------------------------------------------------------------------------------------- draw

    function test_Draw_OfThreeDistinct_ByALaterBlock_Once() public {
        bytes32 leaf = propose(1);
        expect(abi.encodeWithSelector(Errors.NotInCourt.selector, leaf, 0));
        court.draw(leaf);
        openCase(submission(1));
        expect(abi.encodeWithSelector(Errors.WrongState.selector, leaf, 1));
        court.draw(leaf);
        dispute(leaf);
        court.draw(leaf);
        uint256 at = vm.getBlockNumber() + 1;
        bytes memory unknown = abi.encodeWithSelector(Errors.SeedNotKnown.selector, leaf, at);
        expect(unknown);
        court.draw(leaf);
        vm.roll(at);
        expect(unknown);
        court.draw(leaf);
        vm.roll(at + 1);
        court.draw(leaf);
        (Court.Case memory c, address[] memory jurors) = court.caseOf(leaf);
        vm.assertEq(jurors.length, 3);
        vm.assertTrue(jurors[0] != jurors[1] && jurors[1] != jurors[2] && jurors[0] != jurors[2]);
        vm.assertEq(c.revealFrom, START + HALF);
        vm.assertEq(c.revealUntil, START + DISPUTE);
        expect(abi.encodeWithSelector(Errors.NotInCourt.selector, leaf, 2));
        court.draw(leaf);
    }

    function test_Draw_AfterBlocks256TheArbiterJudges() public {
        bytes32 leaf = disputedCase();
        court.draw(leaf);
        uint256 at = vm.getBlockNumber() + 1;
        vm.roll(at + 256);
        uint256 before = vm.snapshotState();
        court.draw(leaf);
        vm.assertEq(uint256(status(leaf)), uint256(Court.Status.Drawn));
        vm.revertToState(before);
        vm.roll(at + 257);
        court.draw(leaf);
        vm.assertEq(uint256(status(leaf)), uint256(Court.Status.HandedOver));
        expect(abi.encodeWithSelector(Errors.NotInCourt.selector, leaf, 3));
        court.draw(leaf);
        vm.prank(arbiter);
        slasher.confirm(leaf);
        assertState(leaf, Slasher.State.Executed);
    }

    function test_Draw_InTheFirstQuarterOfTheWindow_ThenTheArbiterJudges() public {
        bytes32 leaf = disputedCase();
        court.draw(leaf);
        vm.roll(vm.getBlockNumber() + 2);
        vm.warp(START + QUARTER - 1);
        vm.assertTrue(court.holds(leaf, START + DISPUTE));
        expectNotAllowed(arbiter);
        vm.prank(arbiter);
        slasher.confirm(leaf);
        uint256 before = vm.snapshotState();
        court.draw(leaf);
        vm.assertEq(uint256(status(leaf)), uint256(Court.Status.Drawn));
        vm.revertToState(before);
        vm.warp(START + QUARTER);
        vm.assertFalse(court.holds(leaf, START + DISPUTE));
        before = vm.snapshotState();
        vm.expectEmit();
        emit Court.CaseHandedOver(leaf);
        court.draw(leaf);
        vm.assertEq(uint256(status(leaf)), uint256(Court.Status.HandedOver));
        vm.revertToState(before);
        vm.prank(arbiter);
        slasher.confirm(leaf);
        assertState(leaf, Slasher.State.Executed);
    }

    /// @dev Once the hash is known, neither newcomers nor appointments change what it chooses.
    function test_Draw_NothingDoneAfterTheBlockChangesTheChoice() public {
        bytes32 leaf = disputedCase();
        court.draw(leaf);
        vm.roll(vm.getBlockNumber() + 2);
        uint256 before = vm.snapshotState();
        court.draw(leaf);
        (, address[] memory expected) = court.caseOf(leaf);
        vm.revertToState(before);
        for (uint256 i; i < 20; ++i) {
            registerJuror(address(uint160(0x2000 + i)));
        }
        vm.startPrank(manager);
        for (uint256 i; i < 3; ++i) {
            pools.setValidator(pool, expected[i], true);
        }
        vm.stopPrank();
        court.draw(leaf);
        (, address[] memory jurors) = court.caseOf(leaf);
        for (uint256 i; i < 3; ++i) {
            vm.assertEq(jurors[i], expected[i]);
        }
    }

    function test_Draw_WithoutThreeTheArbiterJudges() public {
        bytes32 leaf = disputedCase();
        for (uint256 i; i < 6; ++i) {
            vm.prank(juror(i));
            court.leave(CLASS);
        }
        court.draw(leaf);
        vm.roll(vm.getBlockNumber() + 2);
        expectNotAllowed(arbiter);
        vm.prank(arbiter);
        slasher.confirm(leaf);
        court.draw(leaf);
        vm.assertEq(uint256(status(leaf)), uint256(Court.Status.HandedOver));
        vm.prank(arbiter);
        slasher.confirm(leaf);
        assertState(leaf, Slasher.State.Executed);
        vm.assertEq(token.balanceOf(treasury), STAKE + DEPOSIT);
    }

    /// @dev For any register, the drawn are distinct, in time and no party.
    function testFuzz_Draw_NeverOfAParty(uint256 seed, uint8 late, uint8 appointed) public {
        uint256 n = appointed % 5;
        for (uint256 i; i < n; ++i) {
            registerJuror(address(uint160(0x3000 + i)));
            vm.prank(manager);
            pools.setValidator(pool, address(uint160(0x3000 + i)), true);
        }
        registerJuror(provider);
        bytes32 leaf = propose(1);
        vm.warp(START + 1);
        for (uint256 i; i < late % 5; ++i) {
            registerJuror(address(uint160(0x4000 + i)));
        }
        Submission memory s = submission(1);
        s.validUntil -= 1;
        openCase(s, rejections(s), law(), firstSeats(7), uint8(2 + n));
        dispute(leaf);
        vm.roll(1 + seed % 1e9);
        court.draw(leaf);
        vm.roll(vm.getBlockNumber() + 2);
        court.draw(leaf);
        (, address[] memory jurors) = court.caseOf(leaf);
        if (jurors.length == 0) return;
        vm.assertTrue(jurors[0] != jurors[1] && jurors[1] != jurors[2] && jurors[0] != jurors[2]);
        for (uint256 i; i < 3; ++i) {
            vm.assertTrue(uint160(jurors[i]) >= 0x1000 && uint160(jurors[i]) < 0x1008);
        }
    }

    // ------------------------------------------------------------------------------ commit, reveal

    function test_Commit_ByADrawnJurorOnceInTime() public {
        expect(abi.encodeWithSelector(Errors.NotInCourt.selector, LAW, 0));
        court.commit(LAW, SALT);
        (bytes32 leaf, address[] memory jurors) = drawnCase();
        expect(abi.encodeWithSelector(Errors.NotJuror.selector, stranger));
        vm.prank(stranger);
        court.commit(leaf, SALT);
        expect(abi.encodeWithSelector(Errors.ZeroDigest.selector));
        vm.startPrank(jurors[0]);
        court.commit(leaf, 0);
        court.commit(leaf, SALT);
        expect(abi.encodeWithSelector(Errors.BadBallot.selector, leaf, jurors[0]));
        court.commit(leaf, EVIDENCE);
        vm.stopPrank();
        vm.assertEq(court.ballotOf(leaf, jurors[0]).commitment, SALT);
        vm.warp(START + HALF);
        expect(abi.encodeWithSelector(Errors.WindowClosed.selector, leaf, START + HALF));
        vm.prank(jurors[1]);
        court.commit(leaf, SALT);
    }

    function test_Reveal_OfWhatWasCommittedOnceInTime() public {
        (bytes32 leaf, address[] memory jurors) = drawnCase();
        commit(leaf, jurors[0], CONFIRM);
        expect(abi.encodeWithSelector(Errors.WindowOpen.selector, leaf, START + HALF));
        reveal(leaf, jurors[0], CONFIRM);
        vm.warp(START + HALF);
        bytes memory bad = abi.encodeWithSelector(Errors.BadBallot.selector, leaf, jurors[0]);
        expect(bad);
        reveal(leaf, jurors[0], OVERTURN);
        reveal(leaf, jurors[0], CONFIRM);
        expect(bad);
        reveal(leaf, jurors[0], CONFIRM);
        vm.assertTrue(court.ballotOf(leaf, jurors[0]).vote == CONFIRM);
        vm.warp(START + DISPUTE);
        expect(abi.encodeWithSelector(Errors.WindowClosed.selector, leaf, START + DISPUTE));
        reveal(leaf, jurors[1], CONFIRM);
    }

    function test_Reveal_ACopiedCommitmentIsWorthNothing() public {
        (bytes32 leaf, address[] memory jurors) = drawnCase();
        commit(leaf, jurors[0], CONFIRM);
        bytes32 copied = court.ballotOf(leaf, jurors[0]).commitment;
        vm.prank(jurors[1]);
        court.commit(leaf, copied);
        vm.warp(START + HALF);
        reveal(leaf, jurors[0], CONFIRM);
        expect(abi.encodeWithSelector(Errors.BadBallot.selector, leaf, jurors[1]));
        reveal(leaf, jurors[1], CONFIRM);
        assertState(leaf, Slasher.State.Disputed);
    }

    function test_Reveal_TwoConfirm_TheSlashIsCarriedOut_TheDepositPaysTheMajority() public {
        (bytes32 leaf, address[] memory jurors) = vote(CONFIRM, OVERTURN, CONFIRM);
        assertState(leaf, Slasher.State.Executed);
        vm.assertEq(token.balanceOf(treasury), STAKE);
        court.settle(leaf);
        vm.assertEq(court.payOf(jurors[0]), DEPOSIT / 2);
        vm.assertEq(court.payOf(jurors[1]), 0);
        vm.assertEq(court.payOf(jurors[2]), DEPOSIT - DEPOSIT / 2);
        vm.assertEq(bondOf(jurors[1]), JUROR_BOND);
        vm.prank(jurors[0]);
        vm.assertEq(court.collect(), DEPOSIT / 2);
        vm.assertEq(token.balanceOf(jurors[0]), DEPOSIT / 2);
        expect(abi.encodeWithSelector(Errors.NothingToWithdraw.selector, jurors[0]));
        vm.prank(jurors[0]);
        court.collect();
    }

    function test_Reveal_TwoOverturn_TheAuthorsFinesPayProviderAndMajority() public {
        (bytes32 leaf, address[] memory jurors) = vote(OVERTURN, OVERTURN, OVERTURN);
        assertState(leaf, Slasher.State.Cancelled);
        uint256 interest = STAKE * slasher.INTEREST() * (WINDOW + DISPUTE) / (100 * 365 days);
        vm.assertEq(token.balanceOf(provider), DEPOSIT + interest);
        vm.assertEq(token.balanceOf(treasury), 0);
        vm.assertEq(token.balanceOf(address(slasher)), 0);
        vm.assertEq(vault.active(validator), BONDS - BOND);
        court.settle(leaf);
        uint256 paid;
        for (uint256 i; i < 3; ++i) {
            paid += court.payOf(jurors[i]);
        }
        vm.assertEq(paid, 2 * BOND - interest);
        vm.assertEq(court.payOf(jurors[0]), (2 * BOND - interest) / 3);
    }

    function test_Reveal_AfterTheArbiterCancelled_NothingIsCarriedOut() public {
        (bytes32 leaf, address[] memory jurors) = drawnCase();
        for (uint256 i; i < 3; ++i) {
            commit(leaf, jurors[i], CONFIRM);
        }
        vm.prank(arbiter);
        slasher.cancel(leaf);
        vm.warp(START + HALF);
        for (uint256 i; i < 3; ++i) {
            reveal(leaf, jurors[i], CONFIRM);
        }
        assertState(leaf, Slasher.State.Cancelled);
        court.settle(leaf);
        vm.assertEq(court.payOf(jurors[0]), 0);
        vm.assertEq(bondOf(jurors[0]), JUROR_BOND);
    }

    // -------------------------------------------------------------------------------------- settle

    function test_Settle_Silence_TheDisputeLapses_TheSilentPayThoseThatVoted() public {
        (bytes32 leaf, address[] memory jurors) = vote(CONFIRM, 0, 0);
        expect(abi.encodeWithSelector(Errors.WindowOpen.selector, leaf, START + DISPUTE));
        court.settle(leaf);
        vm.warp(START + DISPUTE);
        slasher.lapse(leaf);
        assertState(leaf, Slasher.State.Cancelled);
        vm.assertEq(token.balanceOf(provider), DEPOSIT);
        court.settle(leaf);
        uint256 penalty = JUROR_BOND / 10;
        vm.assertEq(court.payOf(jurors[0]), 2 * penalty);
        vm.assertEq(bondOf(jurors[0]), JUROR_BOND);
        for (uint256 i = 1; i < 3; ++i) {
            vm.assertEq(bondOf(jurors[i]), JUROR_BOND - penalty);
            vm.assertEq(court.jurorOf(CLASS, jurors[i]).seat, 0);
            vm.prank(jurors[i]);
            vm.assertEq(court.withdraw(CLASS), JUROR_BOND - penalty);
        }
        expect(abi.encodeWithSelector(Errors.NotInCourt.selector, leaf, 4));
        court.settle(leaf);
    }

    function test_Settle_WhenAllAreSilentTheTreasuryHasThePenalties() public {
        (bytes32 leaf,) = vote(0, 0, 0);
        vm.warp(START + DISPUTE);
        uint256 state_ = vm.snapshotState();
        court.settle(leaf);
        vm.assertEq(token.balanceOf(treasury), 3 * (JUROR_BOND / 10));
        vm.revertToState(state_);
        StakeVault burns = new StakeVault(token, periods(), address(0), CAP, NO_FEED);
        vm.etch(address(vault), address(burns).code);
        uint256 supply = token.totalSupply();
        court.settle(leaf);
        vm.assertEq(token.totalSupply(), supply - 3 * (JUROR_BOND / 10));
    }

    function test_Settle_ASplitVoteLapses_AndTheThirdStillEarnsNothing() public {
        (bytes32 leaf, address[] memory jurors) = vote(CONFIRM, OVERTURN, 0);
        vm.warp(START + DISPUTE);
        slasher.lapse(leaf);
        court.settle(leaf);
        vm.assertEq(court.payOf(jurors[0]), JUROR_BOND / 20);
        vm.assertEq(court.payOf(jurors[1]), JUROR_BOND / 20);
        vm.assertEq(token.balanceOf(provider), DEPOSIT);
    }

    function test_Settle_AnAbstentionDecidesNothing_CostsNothing_EarnsNothing() public {
        (bytes32 leaf, address[] memory jurors) = vote(ABSTAIN, OVERTURN, OVERTURN);
        assertState(leaf, Slasher.State.Cancelled);
        uint256 pot = 2 * BOND - STAKE * slasher.INTEREST() * (WINDOW + DISPUTE) / (100 * 365 days);
        vm.warp(START + DISPUTE);
        court.settle(leaf);
        vm.assertEq(court.payOf(jurors[0]), 0);
        vm.assertEq(court.payOf(jurors[1]), pot / 2);
        vm.assertEq(court.payOf(jurors[2]), pot - pot / 2);
        vm.assertEq(bondOf(jurors[0]), JUROR_BOND);
        vm.assertTrue(court.jurorOf(CLASS, jurors[0]).seat != 0);
    }

    function test_Settle_AbstentionsLapse_AndShareNoPenalty() public {
        (bytes32 leaf, address[] memory jurors) = vote(ABSTAIN, CONFIRM, 0);
        assertState(leaf, Slasher.State.Disputed);
        vm.warp(START + DISPUTE);
        slasher.lapse(leaf);
        court.settle(leaf);
        vm.assertEq(court.payOf(jurors[0]), 0);
        vm.assertEq(court.payOf(jurors[1]), JUROR_BOND / 10);
        vm.assertEq(bondOf(jurors[0]), JUROR_BOND);
        vm.assertEq(bondOf(jurors[2]), JUROR_BOND - JUROR_BOND / 10);
    }

    function test_Reveal_NoneIsNoVote() public {
        (bytes32 leaf, address[] memory jurors) = drawnCase();
        commit(leaf, jurors[0], 0);
        vm.warp(START + HALF);
        expect(abi.encodeWithSelector(Errors.BadBallot.selector, leaf, jurors[0]));
        reveal(leaf, jurors[0], 0);
    }

    function test_Withdraw_NotWhileDrawn_AlsoAfterLeaving() public {
        (bytes32 leaf, address[] memory jurors) = drawnCase();
        vm.startPrank(jurors[0]);
        court.leave(CLASS);
        expect(abi.encodeWithSelector(Errors.StillJuror.selector, CLASS, jurors[0], 1));
        court.withdraw(CLASS);
        vm.stopPrank();
        commit(leaf, jurors[0], CONFIRM);
        vm.warp(START + HALF);
        reveal(leaf, jurors[0], CONFIRM);
        vm.warp(START + DISPUTE);
        court.settle(leaf);
        vm.prank(jurors[0]);
        vm.assertEq(court.withdraw(CLASS), JUROR_BOND);
    }

    // --------------------------------------------------------------------------------- the slasher

    function test_Judge_InCourtTheArbiterMayOnlyCancel() public {
        (bytes32 leaf,) = drawnCase();
        expectNotAllowed(arbiter);
        vm.prank(arbiter);
        slasher.confirm(leaf);
        expectNotAllowed(arbiter);
        vm.prank(arbiter);
        slasher.overturn(leaf);
        vm.prank(arbiter);
        slasher.cancel(leaf);
        assertState(leaf, Slasher.State.Cancelled);
    }

    function test_Judge_AnObjectionStaysWithTheArbiter() public {
        bytes32 leaf = propose(1);
        openCase(submission(1));
        vm.prank(provider);
        slasher.object(leaf);
        expect(abi.encodeWithSelector(Errors.WrongState.selector, leaf, 5));
        court.draw(leaf);
        vm.prank(arbiter);
        slasher.confirm(leaf);
        assertState(leaf, Slasher.State.Executed);
    }
}
