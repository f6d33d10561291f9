// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Work } from "../../contracts/src/Work.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Lease, Opinions, Receipt, Submission } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { Tree } from "./utils/Tree.sol";
import { vm } from "./utils/Vm.sol";

contract WorkTest is Network {
    function setUp() public {
        deployNetwork();
    }

    function someLeaves(uint256 n) private view returns (bytes32[] memory leaves) {
        leaves = new bytes32[](n);
        for (uint256 i; i < n; ++i) {
            leaves[i] = work.submissionDigest(submission(i));
        }
    }

    function test_Periods_AreTheVaults() public view {
        (uint64 a, uint64 b, uint64 c, uint64 d, uint64 e, uint64 f) = work.periods();
        vm.assertEq(a, EPOCH);
        vm.assertEq(b, VALIDITY);
        vm.assertEq(c, WINDOW);
        vm.assertEq(d, DISPUTE);
        vm.assertEq(e, DELAY);
        vm.assertEq(f, UNBONDING);
        vm.assertEq(work.epochAt(EPOCH * 7 + EPOCH - 1), 7);
    }

    function test_PostRoot_NumbersFromOneForEachPool() public {
        vm.assertEq(postRoot(someLeaves(3)), 1);
        vm.assertEq(postRoot(someLeaves(2)), 2);
        (bytes32 root, uint64 postedAt, uint32 count) = work.rootOf(pool, 1);
        vm.assertEq(root, Tree.root(someLeaves(3)));
        vm.assertEq(postedAt, START);
        vm.assertEq(count, 3);
        pool = createPool();
        vm.assertEq(postRoot(someLeaves(1)), 1);
    }

    function test_PostRoot_ByTheManagerOnly_AndNeverEmpty() public {
        expectNotAllowed(stranger);
        vm.prank(stranger);
        work.postRoot(pool, RUN, 1, RUN);
        vm.startPrank(manager);
        expect(abi.encodeWithSelector(Errors.ZeroDigest.selector));
        work.postRoot(pool, RUN, 1, 0);
        expect(abi.encodeWithSelector(Errors.ZeroDigest.selector));
        work.postRoot(pool, 0, 1, RUN);
        expect(abi.encodeWithSelector(Errors.EmptyRoot.selector));
        work.postRoot(pool, RUN, 0, RUN);
        expect(abi.encodeWithSelector(Errors.UnknownPool.selector, 99));
        work.postRoot(99, RUN, 1, RUN);
        vm.stopPrank();
    }

    function testFuzz_LeafIn_HoldsForEveryLeafAndNoOther(uint8 size, uint8 place) public {
        uint256 n = uint256(size) % 40 + 1;
        uint256 index = place % n;
        bytes32[] memory leaves = someLeaves(n);
        uint64 seq = postRoot(leaves);
        bytes32[] memory proof = Tree.proof(leaves, index);
        vm.assertEq(work.rootedAt(pool, seq, leaves[index], proof), START);
        vm.assertEq(work.rootedAt(pool, seq, keccak256("other"), proof), 0);
        vm.assertEq(work.rootedAt(pool, seq + 1, leaves[index], proof), 0);
    }

    // ------------------------------------------------------------------------------------ reject

    function submissions(uint256 n) private view returns (Submission[] memory list) {
        list = new Submission[](n);
        for (uint256 i; i < n; ++i) {
            list[i] = submission(i);
        }
    }

    function test_Reject_WithinValidityOnly_AtTheEdge() public {
        Submission[] memory list = submissions(5);
        bytes32[] memory leaves = someLeaves(5);
        uint64 seq = postRoot(leaves);
        uint256 until = START + VALIDITY;
        vm.warp(until);
        work.reject(list[4], seq, Tree.proof(leaves, 4), rejections(list[4]));
        vm.assertTrue(work.isRejected(pool, leaves[4]));
        vm.warp(until + 1);
        bytes32[] memory proof = Tree.proof(leaves, 3);
        expect(abi.encodeWithSelector(Errors.ValidityOver.selector, until, until + 1));
        work.reject(list[3], seq, proof, rejections(list[3]));
    }

    function test_Reject_ByTheQuorumOnceWithAProof_RejectedOrVoid() public {
        Submission[] memory list = submissions(2);
        bytes32[] memory leaves = someLeaves(2);
        uint64 seq = postRoot(leaves);
        bytes32[] memory proof = Tree.proof(leaves, 0);
        Opinions memory o = rejections(list[0]);
        expect(abi.encodeWithSelector(Errors.WrongOutcome.selector, 1));
        work.reject(list[0], seq, proof, opinions(list[0], 1, bothKeys()));
        expect(abi.encodeWithSelector(Errors.NoQuorum.selector, 1, 2));
        work.reject(list[0], seq, proof, opinions(list[0], 3, oneKey(VALIDATOR_KEY)));
        expect(abi.encodeWithSelector(Errors.NotInRoot.selector, pool, seq, leaves[1]));
        work.reject(list[1], seq, proof, rejections(list[1]));
        expect(abi.encodeWithSelector(Errors.UnknownRoot.selector, pool, seq + 1));
        work.reject(list[0], seq + 1, proof, o);
        expectNotAllowed(manager);
        work.reject(list[0], seq, proof, opinions(list[0], 3, managerAnd()));
        vm.prank(stranger);
        work.reject(list[0], seq, proof, o);
        vm.assertTrue(work.isRejected(pool, leaves[0]));
        expect(abi.encodeWithSelector(Errors.AlreadyRejected.selector, pool, leaves[0]));
        work.reject(list[0], seq, proof, o);
        proof = Tree.proof(leaves, 1);
        work.reject(list[1], seq, proof, opinions(list[1], 3, bothKeys()));
        vm.assertTrue(work.isRejected(pool, leaves[1]));
    }

    /// @dev The manager and one validator: the manager is no judge.
    function managerAnd() private pure returns (uint256[] memory keys_) {
        keys_ = new uint256[](2);
        (keys_[0], keys_[1]) = (VALIDATOR_KEY, MANAGER_KEY);
    }

    function test_Reject_RefusesARootOfAnotherPool() public {
        bytes32[] memory leaves = someLeaves(1);
        uint64 seq = postRoot(leaves);
        Submission memory s = submission(0);
        s.pool = createPool();
        vm.startPrank(manager);
        pools.setValidator(s.pool, validator, true);
        pools.setValidator(s.pool, validator2, true);
        vm.stopPrank();
        expect(abi.encodeWithSelector(Errors.UnknownRoot.selector, s.pool, seq));
        work.reject(s, seq, none(), rejections(s));
    }

    // ---------------------------------------------------------------------------------- postLeaf

    struct Ignored {
        Lease lease;
        bytes managerSignature;
        Submission submission;
        bytes nodeSignature;
        Receipt receipt;
        bytes receiptSignature;
    }

    function ignored() private view returns (Ignored memory x) {
        x.lease =
            Lease(pool, 1, node, 0, keccak256("policy"), RUN, 1, keccak256("salt"), START + 60);
        x.submission = submission(1);
        x.submission.leaseDigest = work.leaseDigest(x.lease);
        x.receipt = Receipt(work.submissionDigest(x.submission), START + 60);
        sealIt(x);
    }

    function sealIt(Ignored memory x) private view {
        x.managerSignature = sign(MANAGER_KEY, work.leaseDigest(x.lease));
        x.nodeSignature = sign(NODE_KEY, work.submissionDigest(x.submission));
        x.receiptSignature = sign(MANAGER_KEY, work.receiptDigest(x.receipt));
    }

    function postLeaf(Ignored memory x) private returns (uint64) {
        return work.postLeaf(
            x.lease,
            x.managerSignature,
            x.submission,
            x.nodeSignature,
            x.receipt,
            x.receiptSignature
        );
    }

    function test_PostLeaf_RootsWhatTheManagerIgnoredForAnEpoch() public {
        Ignored memory x = ignored();
        uint256 from = START + 60 + EPOCH;
        vm.warp(from - 1);
        expect(abi.encodeWithSelector(Errors.NotYourTurn.selector, from, from + VALIDITY));
        postLeaf(x);
        vm.warp(from + VALIDITY + 1);
        expect(abi.encodeWithSelector(Errors.NotYourTurn.selector, from, from + VALIDITY));
        postLeaf(x);
        vm.warp(from + VALIDITY);
        uint64 seq = postLeaf(x);
        bytes32 leaf = x.receipt.submissionDigest;
        vm.assertEq(work.rootedAt(pool, seq, leaf, none()), vm.getBlockTimestamp());
        expect(abi.encodeWithSelector(Errors.AlreadyPosted.selector, leaf));
        postLeaf(x);
    }

    function test_PostLeaf_OfASubmissionWithoutALiableNodeIsRefused_AtTheEdge() public {
        Ignored memory x = ignored();
        x.submission.validUntil = START + 40;
        x.receipt.submissionDigest = work.submissionDigest(x.submission);
        sealIt(x);
        uint256 until = START + 40 + WINDOW + DISPUTE;
        vm.warp(until + 1);
        expect(abi.encodeWithSelector(Errors.RootedLate.selector, until + 1, until));
        postLeaf(x);
        vm.warp(until);
        vm.assertEq(postLeaf(x), 1);
    }

    function test_PostLeaf_RefusesALateReceipt() public {
        Ignored memory x = ignored();
        x.receipt.receivedAt += 1;
        sealIt(x);
        vm.warp(START + 200);
        expect(abi.encodeWithSelector(Errors.LateSubmission.selector, START + 61, START + 60));
        postLeaf(x);
    }

    function test_PostLeaf_RefusesPartsThatDoNotBelongTogether() public {
        vm.warp(START + 60 + EPOCH);
        for (uint256 i; i < 6; ++i) {
            Ignored memory x = ignored();
            if (i == 0) x.submission.pool += 1;
            if (i == 1) x.submission.step += 1;
            if (i == 2) x.submission.policyDigest = 0;
            if (i == 3) x.submission.leaseDigest = 0;
            if (i == 5) x.submission.node = node2;
            if (i != 4) x.receipt.submissionDigest = work.submissionDigest(x.submission);
            else x.receipt.submissionDigest = 0;
            sealIt(x);
            expect(abi.encodeWithSelector(Errors.LeafMismatch.selector));
            postLeaf(x);
        }
    }

    function test_PostLeaf_NeedsAllThreeSignatures() public {
        vm.warp(START + 60 + EPOCH);
        for (uint256 i; i < 3; ++i) {
            Ignored memory x = ignored();
            if (i == 0) x.managerSignature = sign(NODE_KEY, work.leaseDigest(x.lease));
            if (i == 1) x.nodeSignature = sign(NODE2_KEY, x.receipt.submissionDigest);
            if (i == 2) x.receiptSignature = sign(NODE_KEY, work.receiptDigest(x.receipt));
            vm.expectPartialRevert(Errors.BadSignature.selector);
            postLeaf(x);
        }
    }

    function test_AnnounceMirror_IsForTheValidatorsOfThePool() public {
        expectNotAllowed(manager);
        vm.prank(manager);
        work.announceMirror(pool, "http://mirror");
        vm.expectEmit();
        emit Work.MirrorAnnounced(pool, validator, "http://mirror");
        vm.prank(validator);
        work.announceMirror(pool, "http://mirror");
        vm.prank(manager);
        pools.setValidator(pool, validator, false);
        vm.expectEmit();
        emit Work.MirrorAnnounced(pool, validator, "");
        vm.prank(validator);
        work.announceMirror(pool, "");
    }

    function test_AnnounceMirror_TakesPrintableAsciiOfBoundedLength() public {
        string[5] memory bad = ["a b", "a\n", "\x7f", unicode"é", "!~"];
        bytes memory long = new bytes(201);
        for (uint256 i; i < long.length; ++i) {
            long[i] = "~";
        }
        vm.startPrank(validator);
        for (uint256 i; i < 4; ++i) {
            expect(abi.encodeWithSelector(Errors.BadUrl.selector, bytes(bad[i]).length));
            work.announceMirror(pool, bad[i]);
        }
        work.announceMirror(pool, bad[4]);
        expect(abi.encodeWithSelector(Errors.BadUrl.selector, 201));
        work.announceMirror(pool, string(long));
        assembly ("memory-safe") {
            mstore(long, 200)
        }
        work.announceMirror(pool, string(long));
        vm.stopPrank();
    }
}
