// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { ECDSA } from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import { EIP712 } from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import { MerkleProof } from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";

import { Pools } from "./Pools.sol";
import { StakeVault } from "./StakeVault.sol";
import { WindowTime } from "./WindowTime.sol";
import { Errors } from "./libraries/Errors.sol";
import { Periods } from "./libraries/Periods.sol";
import {
    Lease,
    Opinion,
    Opinions,
    Receipt,
    Statements,
    Submission,
    Voice
} from "./libraries/Statements.sol";

/// @title Which submissions count for pay.
/// @notice Holds no tokens. A leaf is a submission's EIP-712 digest, which names its pool and its
/// node. The manager roots leaves in batches; a node that is ignored roots its own. A leaf can be
/// rejected, and its node slashed for it, up to and including `postedAt + validity`, by as many
/// opinions of the pool's validators as its quorum asks for.
contract Work is EIP712, WindowTime {
    /// @notice A batch of leaves was rooted. `leavesObject` is the digest of the object that lists
    /// them; it is zero for a leaf that its node posted: there, the root is the leaf.
    event RootPosted(
        uint256 indexed pool,
        uint64 indexed seq,
        bytes32 root,
        uint32 count,
        bytes32 leavesObject,
        uint64 epoch
    );
    /// @notice A node rooted its own leaf.
    event LeafPosted(
        uint256 indexed pool, address indexed node, uint64 seq, bytes32 leaf, bytes32 sha256
    );
    /// @notice A leaf earns nothing.
    event LeafRejected(uint256 indexed pool, bytes32 indexed leaf, bytes32 reason);
    /// @notice Where a validator serves its copy of the pool's evidence and tables; empty takes it back.
    event MirrorAnnounced(uint256 indexed pool, address indexed validator, string url);

    /// @param root Merkle root with sorted pairs.
    /// @param postedAt Block time.
    /// @param count Number of leaves.
    struct Root {
        bytes32 root;
        uint64 postedAt;
        uint32 count;
    }

    /// @notice An opinion's outcome: the file is a lie.
    uint8 public constant REJECTED = 2;
    /// @notice An opinion's outcome: the file earns nothing, and no one is accused.
    uint8 public constant VOID = 3;
    /// @notice The longest URL of a mirror, in bytes.
    uint256 public constant MAX_URL = 200;

    /// @notice The training runs.
    Pools public immutable pools;
    uint64 private immutable _epochLength;
    uint64 private immutable _validity;
    uint64 private immutable _accountable;
    StakeVault private immutable _vault;

    /// @notice Number of roots of a pool; they are numbered from 1.
    mapping(uint256 pool => uint64) public rootCount;
    /// @notice Whether a leaf was rejected.
    mapping(uint256 pool => mapping(bytes32 leaf => bool)) public isRejected;
    /// @notice Whether a leaf was posted by its node.
    mapping(bytes32 leaf => bool) public isPosted;
    mapping(uint256 pool => mapping(uint64 seq => Root)) private _roots;

    /// @param pools_ The training runs.
    /// @param vault_ Says the network's periods.
    constructor(Pools pools_, StakeVault vault_)
        EIP712("Prime", "1")
        WindowTime(vault_.uptimeFeed())
    {
        if (address(pools_) == address(0)) revert Errors.ZeroAddress();
        Periods memory p = vault_.periods();
        pools = pools_;
        _vault = vault_;
        _epochLength = p.epochLength;
        _validity = p.validity;
        _accountable = p.slashWindow + p.disputeWindow;
    }

    /// @notice Roots a batch of submissions. By the manager.
    /// @param pool The pool.
    /// @param root Merkle root over the submissions' digests.
    /// @param count_ Number of leaves.
    /// @param leavesObject Digest of the published object that lists them.
    /// @return seq The root's number in the pool, from 1.
    function postRoot(uint256 pool, bytes32 root, uint32 count_, bytes32 leavesObject)
        external
        returns (uint64 seq)
    {
        if (pools.managerOf(pool) != msg.sender) revert Errors.NotAllowed(msg.sender);
        if (root == 0 || leavesObject == 0) revert Errors.ZeroDigest();
        if (count_ == 0) revert Errors.EmptyRoot();
        return _post(pool, root, count_, leavesObject);
    }

    /// @notice Roots one leaf that the manager countersigned and then ignored for an epoch.
    /// @dev Anyone may carry it. From an epoch after the receipt on, for one validity; not once no
    /// stake answers for it any more.
    /// @param lease The lease.
    /// @param managerSignature The manager's signature over the lease.
    /// @param submission The submission.
    /// @param nodeSignature The node's signature over the submission.
    /// @param receipt The receipt.
    /// @param receiptSignature The manager's signature over the receipt.
    /// @return seq The root's number in the pool.
    function postLeaf(
        Lease calldata lease,
        bytes calldata managerSignature,
        Submission calldata submission,
        bytes calldata nodeSignature,
        Receipt calldata receipt,
        bytes calldata receiptSignature
    ) external returns (uint64 seq) {
        bytes32 leaf = submissionDigest(submission);
        _checkBelong(lease, submission, receipt, leaf);
        if (isPosted[leaf]) revert Errors.AlreadyPosted(leaf);
        uint256 from = uint256(receipt.receivedAt) + _epochLength;
        if (block.timestamp < from || windowTime() > from + _validity) {
            revert Errors.NotYourTurn(from, from + _validity);
        }
        _checkInTime(submission, uint64(block.timestamp));
        address manager = pools.managerOf(lease.pool);
        Statements.check(manager, leaseDigest(lease), managerSignature);
        Statements.check(manager, receiptDigest(receipt), receiptSignature);
        Statements.checkKey(submission.node, leaf, nodeSignature);

        isPosted[leaf] = true;
        seq = _post(lease.pool, leaf, 1, 0);
        emit LeafPosted(lease.pool, lease.node, seq, leaf, submission.sha256);
    }

    /// @notice Strikes a leaf from pay, within its validity. By anyone with the quorum's opinions.
    /// @param submission What the node signed; its digest is the leaf.
    /// @param seq The root's number.
    /// @param proof Merkle path from leaf to root.
    /// @param opinions Outcome rejected or void.
    function reject(
        Submission calldata submission,
        uint64 seq,
        bytes32[] calldata proof,
        Opinions calldata opinions
    ) external {
        if (opinions.outcome != REJECTED && opinions.outcome != VOID) {
            revert Errors.WrongOutcome(opinions.outcome);
        }
        bytes32 leaf = submissionDigest(submission);
        if (isRejected[submission.pool][leaf]) {
            revert Errors.AlreadyRejected(submission.pool, leaf);
        }
        _checkLiable(submission.pool, seq, leaf, proof);
        // slither-disable-next-line unused-return
        _authors(submission, leaf, opinions);

        isRejected[submission.pool][leaf] = true;
        emit LeafRejected(submission.pool, leaf, opinions.voices[0].reason);
    }

    /// @notice Reverts unless the node signed the submission, its leaf is in the root and valid, the
    /// root was posted at most slash window + dispute window after the submission's own end, and the
    /// quorum rejects it, each opinion with evidence. So a submission can be proposed for a slash
    /// until `validUntil` + slash window + dispute window + validity at the latest: less than an
    /// unbonding period, by the vault's constructor, so a provider that unbonds after its last
    /// lease's end cannot have its stake back before that.
    /// @return leaf The submission's digest.
    /// @return numbers The authors' numbers in the pool, one byte each, the first in the lowest.
    /// @return authors The authors.
    function checkRejected(
        Submission calldata submission,
        bytes calldata nodeSignature,
        uint64 seq,
        bytes32[] calldata proof,
        Opinions calldata opinions
    ) external view returns (bytes32 leaf, uint24 numbers, address[] memory authors) {
        if (opinions.outcome != REJECTED) revert Errors.WrongOutcome(opinions.outcome);
        for (uint256 i; i < opinions.voices.length; ++i) {
            if (opinions.voices[i].evidence == 0) revert Errors.ZeroDigest();
        }
        leaf = submissionDigest(submission);
        Statements.checkKey(submission.node, leaf, nodeSignature);
        _checkLiable(submission.pool, seq, leaf, proof);
        // Rooting the same leaf again and again must not keep its node liable for ever.
        _checkInTime(submission, _roots[submission.pool][seq].postedAt);
        (numbers, authors) = _authors(submission, leaf, opinions);
    }

    /// @notice Says where the caller serves a copy of the bytes that its opinions name by digest. A dismissed
    /// validator may: what it judged is still to be checked.
    /// @param url Printable ASCII without spaces, at most 200 bytes; empty takes the last one back.
    function announceMirror(uint256 pool, string calldata url) external {
        // slither-disable-next-line unused-return
        (uint8 number,,) = pools.validatorOf(pool, msg.sender);
        if (number == 0) revert Errors.NotAllowed(msg.sender);
        bytes calldata text = bytes(url);
        if (text.length > MAX_URL) revert Errors.BadUrl(text.length);
        for (uint256 i; i < text.length; ++i) {
            if (text[i] < 0x21 || text[i] > 0x7e) revert Errors.BadUrl(text.length);
        }
        emit MirrorAnnounced(pool, msg.sender, url);
    }

    /// @notice The submission's digest, and who signed the opinions about it, appointed or not.
    function signersOf(Submission calldata submission, Opinions calldata opinions)
        external
        view
        returns (bytes32 leaf, address[] memory signers)
    {
        leaf = submissionDigest(submission);
        signers = _signers(submission.pool, leaf, opinions);
    }

    /// @notice A root, zeros if there is none of this number.
    function rootOf(uint256 pool, uint64 seq)
        external
        view
        returns (bytes32 root, uint64 postedAt, uint32 count)
    {
        Root storage r = _roots[pool][seq];
        return (r.root, r.postedAt, r.count);
    }

    /// @notice When the root was posted in which the proof places the leaf (Unix time); zero: it is not there.
    function rootedAt(uint256 pool, uint64 seq, bytes32 leaf, bytes32[] calldata proof)
        external
        view
        returns (uint64)
    {
        Root memory r = _roots[pool][seq];
        bool there = r.root != 0 && MerkleProof.verifyCalldata(proof, r.root, leaf);
        return there ? r.postedAt : 0;
    }

    /// @notice The epoch that holds `timestamp`.
    function epochAt(uint256 timestamp) external view returns (uint64) {
        return uint64(timestamp / _epochLength);
    }

    /// @notice The network's periods in seconds.
    function periods()
        external
        view
        returns (
            uint64 epochLength,
            uint64 validity,
            uint64 slashWindow,
            uint64 disputeWindow,
            uint64 rewardDelay,
            uint64 unbonding
        )
    {
        Periods memory p = _vault.periods();
        return
            (p.epochLength, p.validity, p.slashWindow, p.disputeWindow, p.rewardDelay, p.unbonding);
    }

    /// @notice EIP-712 digest of a lease under this contract's domain.
    function leaseDigest(Lease calldata lease) public view returns (bytes32) {
        return _hashTypedDataV4(Statements.hash(lease));
    }

    /// @notice EIP-712 digest of a submission under this contract's domain: the leaf.
    function submissionDigest(Submission calldata submission) public view returns (bytes32) {
        return _hashTypedDataV4(Statements.hash(submission));
    }

    /// @notice EIP-712 digest of a receipt under this contract's domain.
    function receiptDigest(Receipt calldata receipt) public view returns (bytes32) {
        return _hashTypedDataV4(Statements.hash(receipt));
    }

    /// @notice EIP-712 digest of an opinion under this contract's domain.
    function opinionDigest(Opinion memory opinion) public view returns (bytes32) {
        return _hashTypedDataV4(Statements.hash(opinion));
    }

    function _post(uint256 pool, bytes32 root, uint32 count_, bytes32 leavesObject)
        private
        returns (uint64 seq)
    {
        seq = ++rootCount[pool];
        _roots[pool][seq] = Root(root, uint64(block.timestamp), count_);
        uint64 epoch = uint64(block.timestamp / _epochLength);
        emit RootPosted(pool, seq, root, count_, leavesObject, epoch);
    }

    function _checkBelong(
        Lease calldata lease,
        Submission calldata submission,
        Receipt calldata receipt,
        bytes32 leaf
    ) private view {
        if (
            submission.pool != lease.pool || submission.node != lease.node
                || submission.step != lease.step || submission.policyDigest != lease.policyDigest
                || submission.leaseDigest != leaseDigest(lease) || receipt.submissionDigest != leaf
        ) revert Errors.LeafMismatch();
        if (receipt.receivedAt > lease.deadline) {
            revert Errors.LateSubmission(receipt.receivedAt, lease.deadline);
        }
    }

    /// @dev Who signed the opinions; reverts unless they are the pool's quorum for this submission.
    function _authors(Submission calldata submission, bytes32 leaf, Opinions calldata opinions)
        private
        view
        returns (uint24 numbers, address[] memory authors)
    {
        authors = _signers(submission.pool, leaf, opinions);
        numbers = pools.quorumOf(submission.pool, authors, submission.validUntil);
    }

    function _signers(uint256 pool, bytes32 leaf, Opinions calldata opinions)
        private
        view
        returns (address[] memory signers)
    {
        uint256 length = opinions.voices.length;
        signers = new address[](length);
        for (uint256 i; i < length; ++i) {
            Voice calldata voice = opinions.voices[i];
            bytes32 digest = opinionDigest(
                Opinion(
                    pool,
                    leaf,
                    opinions.law,
                    opinions.outcome,
                    voice.reason,
                    voice.table,
                    voice.evidence,
                    voice.judgedAt
                )
            );
            signers[i] = ECDSA.recoverCalldata(digest, voice.signature);
        }
    }

    /// @dev Somebody answers for work that is rooted up to slash window + dispute window after its own end.
    function _checkInTime(Submission calldata submission, uint64 postedAt) private view {
        uint256 until = uint256(submission.validUntil) + _accountable;
        if (postedAt > until) revert Errors.RootedLate(postedAt, until);
    }

    function _checkLiable(uint256 pool, uint64 seq, bytes32 leaf, bytes32[] calldata proof)
        private
        view
    {
        Root memory r = _roots[pool][seq];
        if (r.root == 0) revert Errors.UnknownRoot(pool, seq);
        uint256 until = uint256(r.postedAt) + _validity;
        uint256 time = windowTime();
        if (time > until) revert Errors.ValidityOver(until, time);
        if (!MerkleProof.verifyCalldata(proof, r.root, leaf)) {
            revert Errors.NotInRoot(pool, seq, leaf);
        }
    }
}
