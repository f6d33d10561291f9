// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Slasher } from "../../contracts/src/Slasher.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Invite, Submission } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { Tree } from "./utils/Tree.sol";
import { vm } from "./utils/Vm.sol";

contract SlasherTest is Network {
    uint256 private constant SLASH = 60e18;

    function setUp() public {
        deployNetwork();
        seatNode(3 * STAKE);
    }

    function state(uint256 id) private view returns (Slasher.State) {
        return slasher.proposal(id).state;
    }

    function assertState(uint256 id, Slasher.State expected) private view {
        vm.assertEq(uint256(state(id)), uint256(expected), "state");
    }

    function assertStake(uint256 active, uint256 pending) private view {
        vm.assertEq(vault.active(provider), active, "active");
        vm.assertEq(vault.pendingSlash(provider), pending, "pending");
    }

    // ----------------------------------------------------------------------------------- propose

    function test_Propose_HoldsTheAmount() public {
        uint256 id = propose(1, SLASH);
        vm.assertEq(id, 1);
        assertStake(3 * STAKE - SLASH, SLASH);
        Slasher.Proposal memory p = slasher.proposal(id);
        vm.assertEq(p.node, node);
        vm.assertEq(p.provider, provider);
        vm.assertEq(p.validator, validator);
        vm.assertEq(p.pool, pool);
        vm.assertEq(p.amount, SLASH);
        vm.assertEq(p.reason, 3);
        vm.assertEq(p.deadline, START + WINDOW);
        assertState(id, Slasher.State.Proposed);
    }

    function test_Propose_AsksAtMostWhatTheSeatNeeds() public {
        uint256 id = propose(1, 1000 * STAKE);
        vm.assertEq(slasher.proposal(id).amount, STAKE);
    }

    function test_Propose_RefusesBlanksAndReasonsThatAreNoLies() public {
        Submission memory s = submission(1);
        vm.startPrank(validator);
        expect(abi.encodeWithSelector(Errors.ZeroDigest.selector));
        slasher.propose(s, node, "", 1, none(), 0, 3, SLASH);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        slasher.propose(s, node, "", 1, none(), EVIDENCE, 3, 0);
        uint8[4] memory reasons = [uint8(0), 50, 57, 80];
        for (uint256 i; i < 4; ++i) {
            expect(abi.encodeWithSelector(Errors.BadReason.selector, reasons[i]));
            slasher.propose(s, node, "", 1, none(), EVIDENCE, reasons[i], SLASH);
        }
        vm.stopPrank();
    }

    function test_Propose_ByABondedValidatorOfThePoolOnly() public {
        Submission memory s = submission(1);
        expectNotAllowed(manager);
        vm.prank(manager);
        slasher.propose(s, node, "", 1, none(), EVIDENCE, 3, SLASH);
        bytes32 leaf = work.submissionDigest(s);
        uint64 seq = postRoot(one(leaf));
        bytes memory signature = sign(NODE_KEY, leaf);
        vm.startPrank(validator);
        vault.unbond(1);
        expect(abi.encodeWithSelector(Errors.InsufficientStake.selector, validator, BOND - 1, BOND));
        slasher.propose(s, node, signature, seq, none(), EVIDENCE, 3, SLASH);
        vm.stopPrank();
    }

    function test_Propose_NeedsTheNodesOwnSignature() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        uint64 seq = postRoot(one(leaf));
        bytes memory wrong = sign(NODE2_KEY, leaf);
        expect(abi.encodeWithSelector(Errors.BadSignature.selector, node, leaf));
        vm.prank(validator);
        slasher.propose(s, node, wrong, seq, none(), EVIDENCE, 3, SLASH);
    }

    function test_Propose_ANodeCannotTakeItsSignatureBackByBecomingAContract() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        uint64 seq = postRoot(one(leaf));
        bytes memory signature = sign(NODE_KEY, leaf);
        vm.etch(node, hex"5f5ff3");
        vm.prank(validator);
        slasher.propose(s, node, signature, seq, none(), EVIDENCE, 3, SLASH);
        assertStake(3 * STAKE - SLASH, SLASH);
    }

    function test_Propose_NeedsTheLeafInARootOfThatPool() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        bytes memory signature = sign(NODE_KEY, leaf);
        uint64 seq = postRoot(one(keccak256("another leaf")));
        expect(abi.encodeWithSelector(Errors.NotInRoot.selector, pool, seq, leaf));
        vm.prank(validator);
        slasher.propose(s, node, signature, seq, none(), EVIDENCE, 3, SLASH);
        expect(abi.encodeWithSelector(Errors.UnknownRoot.selector, pool, 9));
        vm.prank(validator);
        slasher.propose(s, node, signature, 9, none(), EVIDENCE, 3, SLASH);
    }

    function test_Propose_WithinValidityOnly_AtTheEdge() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        bytes memory signature = sign(NODE_KEY, leaf);
        uint64 seq = postRoot(one(leaf));
        uint256 until = START + VALIDITY;
        vm.warp(until + 1);
        expect(abi.encodeWithSelector(Errors.ValidityOver.selector, until, until + 1));
        vm.prank(validator);
        slasher.propose(s, node, signature, seq, none(), EVIDENCE, 3, SLASH);
        vm.warp(until);
        vm.prank(validator);
        slasher.propose(s, node, signature, seq, none(), EVIDENCE, 3, SLASH);
    }

    function test_Propose_ARootLongAfterTheSubmissionsEndMakesNobodyAnswer() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        bytes memory signature = sign(NODE_KEY, leaf);
        uint256 until = uint256(s.validUntil) + WINDOW + DISPUTE;
        vm.warp(until);
        uint64 inTime = postRoot(one(leaf));
        vm.warp(until + 1);
        uint64 late = postRoot(one(leaf));
        expect(abi.encodeWithSelector(Errors.RootedLate.selector, until + 1, until));
        vm.prank(validator);
        slasher.propose(s, node, signature, late, none(), EVIDENCE, 3, SLASH);
        vm.prank(validator);
        slasher.propose(s, node, signature, inTime, none(), EVIDENCE, 3, SLASH);
    }

    function test_Propose_ASubmissionOnce_EvenAfterItWasCancelled() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        uint256 id = propose(1, SLASH);
        uint64 seq = postRoot(one(leaf));
        bytes memory signature = sign(NODE_KEY, leaf);
        bytes memory already = abi.encodeWithSelector(Errors.AlreadyProposed.selector, leaf, id);
        expect(already);
        vm.prank(validator2);
        slasher.propose(s, node, signature, seq, none(), EVIDENCE, 3, SLASH);
        vm.prank(guardian);
        slasher.cancel(id);
        expect(already);
        vm.prank(validator2);
        slasher.propose(s, node, signature, seq, none(), EVIDENCE, 3, SLASH);
    }

    function test_Propose_RefusesANodeThatNeverSat() public {
        Submission memory s = submission(1);
        bytes32 leaf = work.submissionDigest(s);
        uint64 seq = postRoot(one(leaf));
        bytes memory signature = sign(NODE2_KEY, leaf);
        expect(abi.encodeWithSelector(Errors.NotMember.selector, pool, node2));
        vm.prank(validator);
        slasher.propose(s, node2, signature, seq, none(), EVIDENCE, 3, SLASH);
    }

    function test_Propose_ReachesStakeOfANodeThatLeftAndWasLetGo() public {
        vm.startPrank(provider);
        pools.leave(pool, node);
        registry.removeNode(node);
        vault.unbond(3 * STAKE);
        vm.stopPrank();
        uint256 id = propose(1, SLASH);
        vm.warp(START + UNBONDING);
        vm.prank(provider);
        vm.assertEq(vault.withdraw(), 3 * STAKE - SLASH);
        slasher.execute(id);
        vm.assertEq(token.balanceOf(treasury), SLASH);
        vm.assertTrue(pools.seatOf(pool, node).banned);
    }

    // ----------------------------------------------------------------------------------- execute

    function test_Execute_AfterTheWindow_TakesStakeAndExpels() public {
        uint256 id = propose(1, SLASH);
        vm.warp(START + WINDOW - 1);
        expect(abi.encodeWithSelector(Errors.WindowOpen.selector, id, START + WINDOW));
        slasher.execute(id);
        vm.warp(START + WINDOW);
        vm.prank(stranger);
        slasher.execute(id);
        assertState(id, Slasher.State.Executed);
        assertStake(3 * STAKE - SLASH, 0);
        vm.assertEq(token.balanceOf(treasury), SLASH);
        vm.assertEq(pools.classOf(pool, node), 0);
        vm.assertEq(vault.committed(provider), 0);
        expect(
            abi.encodeWithSelector(Errors.WrongState.selector, id, uint8(Slasher.State.Executed))
        );
        slasher.execute(id);
        Invite memory i = invite(node, 1);
        bytes memory signature = signed(i);
        expect(abi.encodeWithSelector(Errors.Banned.selector, pool, node));
        pools.join(i, signature);
    }

    function test_Execute_SeveralTogetherTakeAtMostTheStake() public {
        for (uint256 i = 1; i <= 5; ++i) {
            propose(i, STAKE);
        }
        assertStake(0, 3 * STAKE);
        vm.assertEq(slasher.proposal(4).amount, 0);
        vm.warp(START + WINDOW);
        for (uint256 i = 1; i <= 5; ++i) {
            slasher.execute(i);
        }
        assertStake(0, 0);
        vm.assertEq(token.balanceOf(treasury), 3 * STAKE);
        vm.assertEq(token.balanceOf(address(vault)), 2 * BOND);
    }

    function test_Execute_UnknownProposalIsRefusedByName() public {
        bytes memory unknown = abi.encodeWithSelector(Errors.UnknownProposal.selector, 5);
        expect(unknown);
        slasher.execute(5);
        expect(unknown);
        slasher.lapse(5);
        expect(unknown);
        vm.prank(guardian);
        slasher.cancel(5);
        vm.assertEq(uint256(state(5)), uint256(Slasher.State.None));
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
        uint256 id =
            slasher.propose(submission(17), node, signature, seq, proof, EVIDENCE, 4, SLASH);
        vm.assertEq(slasher.proposalOf(leaves[17]), id);
    }
}
