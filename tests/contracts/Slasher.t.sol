// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Pools } from "../../contracts/src/Pools.sol";
import { Slasher } from "../../contracts/src/Slasher.sol";
import { StakeVault } from "../../contracts/src/StakeVault.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Invite, Opinions, Submission } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { Tree } from "./utils/Tree.sol";
import { vm } from "./utils/Vm.sol";

contract SlasherTest is Network {
    event SlashHeld(address indexed provider, uint256 amount);
    event SlashReleased(address indexed provider, uint256 amount);
    event Slashed(address indexed provider, uint256 amount, address to);

    uint256 private constant SLASH = STAKE;

    function setUp() public {
        deployNetwork();
        seatNode(3 * STAKE);
    }

    // ----------------------------------------------------------------------------------- propose

    function test_Propose_HoldsThePoolsSlashAmount() public {
        bytes32 id = propose(1);
        vm.assertEq(id, work.submissionDigest(submission(1)));
        assertStake(3 * STAKE - SLASH, SLASH);
        Slasher.Proposal memory p = slasher.proposal(id);
        vm.assertEq(p.node, node);
        vm.assertEq(p.provider, provider);
        vm.assertEq(p.authors.length, 2);
        vm.assertEq(p.authors[0], validator);
        vm.assertEq(p.authors[1], validator2);
        vm.assertEq(p.pool, pool);
        vm.assertEq(p.amount, SLASH);
        vm.assertEq(p.deadline, START + WINDOW);
        assertState(id, Slasher.State.Proposed);
    }

    function test_Propose_APoolThatSlashesNothingIsRefused() public {
        Pools.Config memory c = config();
        c.slashAmount = 0;
        vm.prank(manager);
        pool = pools.create(c);
        appoint();
        allow(provider, pool);
        join(node);
        expectOf(submission(1), abi.encodeWithSelector(Errors.ZeroAmount.selector));
    }

    // ------------------------------------------------------------------------------------ quorum

    /// @dev The submission is rooted; with these opinions its proposal is refused.
    function refused(Submission memory s, Opinions memory o, bytes memory error_) private {
        uint64 seq = postRoot(one(leafOf(s)));
        bytes memory signature = sign(NODE_KEY, leafOf(s));
        expect(error_);
        slasher.propose(s, signature, seq, none(), o);
    }

    function expectOf(Submission memory s, bytes memory error_) private {
        refused(s, rejections(s), error_);
    }

    function appoint() private {
        vm.startPrank(manager);
        pools.setValidator(pool, validator, true);
        pools.setValidator(pool, validator2, true);
        vm.stopPrank();
    }

    function test_Propose_NeedsAQuorumThatRejectsWithEvidence() public {
        Submission memory s = submission(1);
        refused(
            s,
            opinions(s, 2, oneKey(VALIDATOR_KEY)),
            abi.encodeWithSelector(Errors.NoQuorum.selector, 1, 2)
        );
        for (uint8 outcome = 1; outcome < 4; outcome += 2) {
            refused(
                s,
                opinions(s, outcome, bothKeys()),
                abi.encodeWithSelector(Errors.WrongOutcome.selector, outcome)
            );
        }
        Opinions memory o = rejections(s);
        o.voices[1].evidence = 0;
        refused(s, o, abi.encodeWithSelector(Errors.ZeroDigest.selector));
        vm.assertEq(
            slasher.propose(s, sign(NODE_KEY, leafOf(s)), 1, none(), rejections(s)), leafOf(s)
        );
    }

    function test_Propose_OneKeyNeverCountsTwice_NorInAnotherOrder() public {
        Submission memory s = submission(1);
        uint256[] memory keys_ = new uint256[](2);
        (keys_[0], keys_[1]) = (VALIDATOR_KEY, VALIDATOR_KEY);
        bytes memory twice = abi.encodeWithSelector(Errors.OpinionsOutOfOrder.selector, 1, 1);
        refused(s, opinions(s, 2, keys_), twice);
        keys_[0] = VALIDATOR2_KEY;
        bytes memory order = abi.encodeWithSelector(Errors.OpinionsOutOfOrder.selector, 2, 1);
        refused(s, opinions(s, 2, keys_), order);
    }

    function test_Propose_OpinionsOfStrangersDismissedAndAboutOtherThingsDoNotCount() public {
        Submission memory s = submission(1);
        uint256[] memory keys_ = bothKeys();
        keys_[1] = PROVIDER_KEY;
        refused(
            s, opinions(s, 2, keys_), abi.encodeWithSelector(Errors.NotAllowed.selector, provider)
        );
        // Another file, pool, law, reason: the signature is then some other account's.
        vm.expectPartialRevert(Errors.NotAllowed.selector);
        slasher.propose(s, sign(NODE_KEY, leafOf(s)), 1, none(), rejections(submission(2)));
        for (uint256 i; i < 3; ++i) {
            Opinions memory o = rejections(s);
            if (i == 0) o.law = RUN;
            if (i == 1) o.voices[1].reason = RUN;
            if (i == 2) o.voices[1].judgedAt += 1;
            vm.expectPartialRevert(Errors.NotAllowed.selector);
            slasher.propose(s, sign(NODE_KEY, leafOf(s)), 1, none(), o);
        }
        vm.prank(manager);
        pools.setValidator(pool, validator2, false);
        expectOf(s, abi.encodeWithSelector(Errors.NotAllowed.selector, validator2));
    }

    function test_Propose_AValidatorAppointedAfterTheLeaseDoesNotCount_AtTheEdge() public {
        Submission memory s = submission(1);
        vm.warp(START + 1);
        vm.startPrank(manager);
        pools.setValidator(pool, validator2, false);
        pools.setValidator(pool, validator2, true);
        vm.stopPrank();
        uint64 from = START + 1 + LEASE;
        expectOf(
            s,
            abi.encodeWithSelector(Errors.AppointedLate.selector, validator2, from, START + LEASE)
        );
        s.validUntil = from;
        uint64 seq = postRoot(one(leafOf(s)));
        bytes32 id = slasher.propose(s, sign(NODE_KEY, leafOf(s)), seq, none(), rejections(s));
        assertState(id, Slasher.State.Proposed);
    }

    function test_Propose_EachAuthorNeedsABondForEachOfItsOpenProposals() public {
        bytes32[10] memory ids;
        for (uint256 i; i < 10; ++i) {
            ids[i] = propose(i);
        }
        vm.assertEq(vault.accountOf(validator).pledges, 10);
        expectOf(
            submission(10),
            abi.encodeWithSelector(
                Errors.InsufficientStake.selector, validator, BONDS, BONDS + BOND
            )
        );
        vm.prank(arbiter);
        slasher.cancel(ids[3]);
        vm.assertEq(vault.accountOf(validator2).pledges, 9);
        propose(10);
        vm.prank(validator2);
        vault.unbond(1);
        vm.warp(START + WINDOW);
        slasher.execute(ids[4]);
        expectOf(
            submission(11),
            abi.encodeWithSelector(Errors.InsufficientStake.selector, validator2, BONDS - 1, BONDS)
        );
    }

    // ---------------------------------------------------------------------------- node and leaf

    function test_Propose_AnotherNodesSubmissionIsNotSignedAway() public {
        addNode(provider, NODE2_KEY);
        join(node2);
        Submission memory s = submission(1);
        bytes memory wrong = sign(NODE2_KEY, leafOf(s));
        uint64 seq = postRoot(one(leafOf(s)));
        expect(abi.encodeWithSelector(Errors.BadSignature.selector, node, leafOf(s)));
        slasher.propose(s, wrong, seq, none(), rejections(s));
        // Under its own name the submission is another leaf, which no root holds.
        s.node = node2;
        wrong = sign(NODE2_KEY, leafOf(s));
        expect(abi.encodeWithSelector(Errors.NotInRoot.selector, pool, seq, leafOf(s)));
        slasher.propose(s, wrong, seq, none(), rejections(s));
    }

    function test_Propose_ANodeCannotTakeItsSignatureBackByBecomingAContract() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        uint64 seq = postRoot(one(leaf));
        bytes memory signature = sign(NODE_KEY, leaf);
        vm.etch(node, hex"5f5ff3");
        slasher.propose(s, signature, seq, none(), rejections(s));
        assertStake(3 * STAKE - SLASH, SLASH);
    }

    function test_Propose_NeedsTheLeafInARootOfThatPool() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        bytes memory signature = sign(NODE_KEY, leaf);
        uint64 seq = postRoot(one(keccak256("another leaf")));
        expect(abi.encodeWithSelector(Errors.NotInRoot.selector, pool, seq, leaf));
        slasher.propose(s, signature, seq, none(), rejections(s));
        expect(abi.encodeWithSelector(Errors.UnknownRoot.selector, pool, 9));
        slasher.propose(s, signature, 9, none(), rejections(s));
    }

    function test_Propose_WithinValidityOnly_AtTheEdge() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        bytes memory signature = sign(NODE_KEY, leaf);
        uint64 seq = postRoot(one(leaf));
        uint256 until = START + VALIDITY;
        vm.warp(until + 1);
        expect(abi.encodeWithSelector(Errors.ValidityOver.selector, until, until + 1));
        slasher.propose(s, signature, seq, none(), rejections(s));
        vm.warp(until);
        slasher.propose(s, signature, seq, none(), rejections(s));
    }

    function test_Propose_ARootLongAfterTheSubmissionsEndMakesNoNodeLiable() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        bytes memory signature = sign(NODE_KEY, leaf);
        uint256 until = uint256(s.validUntil) + WINDOW + DISPUTE;
        vm.warp(until);
        uint64 inTime = postRoot(one(leaf));
        vm.warp(until + 1);
        uint64 late = postRoot(one(leaf));
        expect(abi.encodeWithSelector(Errors.RootedLate.selector, until + 1, until));
        slasher.propose(s, signature, late, none(), rejections(s));
        slasher.propose(s, signature, inTime, none(), rejections(s));
    }

    function test_Propose_ASubmissionOnce_EvenAfterItWasCancelled() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        bytes32 id = propose(1);
        uint64 seq = postRoot(one(leaf));
        bytes memory signature = sign(NODE_KEY, leaf);
        bytes memory already = abi.encodeWithSelector(Errors.AlreadyProposed.selector, leaf);
        expect(already);
        slasher.propose(s, signature, seq, none(), rejections(s));
        vm.prank(arbiter);
        slasher.cancel(id);
        expect(already);
        slasher.propose(s, signature, seq, none(), rejections(s));
    }

    function test_Propose_RefusesANodeThatNeverSat() public {
        Submission memory s = submission(1);
        s.node = node2;
        bytes32 leaf = work.submissionDigest(s);
        uint64 seq = postRoot(one(leaf));
        bytes memory signature = sign(NODE2_KEY, leaf);
        expect(abi.encodeWithSelector(Errors.NotMember.selector, pool, node2));
        slasher.propose(s, signature, seq, none(), rejections(s));
    }

    function test_Propose_ReachesStakeOfANodeThatLeftAndWasLetGo() public {
        vm.startPrank(provider);
        pools.leave(pool, node);
        registry.removeNode(node);
        vault.unbond(3 * STAKE);
        vm.stopPrank();
        bytes32 id = propose(1);
        vm.warp(START + UNBONDING);
        vm.prank(provider);
        vm.assertEq(vault.withdraw(), 3 * STAKE - SLASH);
        slasher.execute(id);
        vm.assertEq(token.balanceOf(treasury), SLASH);
        vm.assertTrue(pools.seatOf(pool, node).banned);
    }

    // ----------------------------------------------------------------------------------- execute

    function test_Execute_AfterTheWindow_TakesStakeAndExpels() public {
        bytes32 id = propose(1);
        vm.warp(START + WINDOW - 1);
        expect(abi.encodeWithSelector(Errors.WindowOpen.selector, id, START + WINDOW));
        slasher.execute(id);
        vm.warp(START + WINDOW);
        vm.prank(stranger);
        slasher.execute(id);
        assertState(id, Slasher.State.Executed);
        assertStake(3 * STAKE - SLASH, 0);
        vm.assertEq(token.balanceOf(treasury), SLASH);
        vm.assertFalse(pools.isMember(pool, node));
        vm.assertEq(vault.committed(provider), 0);
        expect(
            abi.encodeWithSelector(Errors.WrongState.selector, id, uint8(Slasher.State.Executed))
        );
        slasher.execute(id);
        Invite memory i = invite(node);
        bytes memory signature = signed(i);
        expect(abi.encodeWithSelector(Errors.Banned.selector, pool, node));
        pools.join(i, signature);
    }

    function test_Execute_SeveralTogetherTakeAtMostTheStake() public {
        bytes32[5] memory ids;
        for (uint256 i; i < 5; ++i) {
            ids[i] = propose(i);
        }
        assertStake(0, 3 * STAKE);
        vm.assertEq(slasher.proposal(ids[3]).amount, 0);
        vm.warp(START + WINDOW);
        for (uint256 i; i < 5; ++i) {
            slasher.execute(ids[i]);
        }
        assertStake(0, 0);
        vm.assertEq(token.balanceOf(treasury), 3 * STAKE);
        vm.assertEq(token.balanceOf(address(vault)), 2 * BONDS);
    }

    /// @dev A friend's proposals on honest work hold all stake; the true one takes its sum when they go.
    function test_Execute_AFriendlyProposalShieldsNothing() public {
        bytes32[3] memory friends = [propose(1), propose(2), propose(3)];
        bytes32 honest = propose(4);
        vm.assertEq(slasher.proposal(honest).amount, 0);
        vm.startPrank(arbiter);
        slasher.cancel(friends[0]);
        slasher.cancel(friends[1]);
        slasher.cancel(friends[2]);
        vm.stopPrank();
        vm.warp(START + WINDOW);
        // The vault's events say the same: held, then taken.
        vm.expectEmit();
        emit SlashHeld(provider, SLASH);
        vm.expectEmit();
        emit Slashed(provider, SLASH, treasury);
        slasher.execute(honest);
        assertStake(3 * STAKE - SLASH, 0);
        vm.assertEq(token.balanceOf(treasury), SLASH);
        vm.assertTrue(pools.seatOf(pool, node).banned);
    }

    function test_Execute_WhatTakesNothingNeitherExpelsNorBans() public {
        addNode(provider, NODE2_KEY);
        join(node2);
        Submission memory s = submission(9);
        s.node = node2;
        bytes32[3] memory ids = [propose(1), propose(2), propose(3)];
        bytes32 empty = proposeIt(s, NODE2_KEY);
        vm.warp(START + WINDOW);
        for (uint256 i; i < 3; ++i) {
            slasher.execute(ids[i]);
        }
        slasher.execute(empty);
        assertState(empty, Slasher.State.Executed);
        vm.assertTrue(pools.isMember(pool, node2));
        vm.assertFalse(pools.seatOf(pool, node2).banned);
    }

    function test_Execute_TakesAtMostTheCapInAValidityWindow() public {
        StakeVault capped = new StakeVault(token, periods(), treasury, 3 * STAKE / 2, NO_FEED);
        vm.etch(address(vault), address(capped).code);
        bytes32[3] memory ids = [propose(1), propose(2), propose(3)];
        uint256 next = (START + WINDOW) / VALIDITY * VALIDITY + VALIDITY;
        vm.warp(next - 1);
        slasher.execute(ids[0]);
        vm.expectEmit();
        emit SlashReleased(provider, STAKE / 2);
        vm.expectEmit();
        emit Slashed(provider, STAKE / 2, treasury);
        slasher.execute(ids[1]);
        assertStake(STAKE / 2, STAKE);
        vm.assertEq(token.balanceOf(treasury), 3 * STAKE / 2);
        vm.warp(next);
        slasher.execute(ids[2]);
        vm.assertEq(token.balanceOf(treasury), 5 * STAKE / 2);
        assertStake(STAKE / 2, 0);
    }

    function test_Execute_UnknownProposalIsRefusedByName() public {
        bytes memory unknown = abi.encodeWithSelector(Errors.UnknownProposal.selector, RUN);
        expect(unknown);
        slasher.execute(RUN);
        expect(unknown);
        slasher.lapse(RUN);
        expect(unknown);
        vm.prank(arbiter);
        slasher.cancel(RUN);
        assertState(RUN, Slasher.State.None);
    }

    function test_ProofsOfLongTreesWork() public {
        bytes32[] memory leaves = new bytes32[](64);
        for (uint256 i; i < 64; ++i) {
            leaves[i] = work.submissionDigest(submission(i));
        }
        uint64 seq = postRoot(leaves);
        bytes memory signature = sign(NODE_KEY, leaves[17]);
        bytes32[] memory proof = Tree.proof(leaves, 17);
        vm.prank(validator);
        bytes32 id =
            slasher.propose(submission(17), signature, seq, proof, rejections(submission(17)));
        vm.assertEq(leaves[17], id);
    }
}
