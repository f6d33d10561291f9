// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { ECDSA } from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import { SignatureChecker } from "@openzeppelin/contracts/utils/cryptography/SignatureChecker.sol";

import { Errors } from "./Errors.sol";

/// @notice A node agrees to belong to `provider`. `salt` is used once.
struct NodeConsent {
    address provider;
    address node;
    bytes32 salt;
    uint64 deadline;
}

/// @notice An account lets an Ed25519 key sign HTTP requests to one orchestrator. Checked off chain.
struct SessionGrant {
    address account;
    bytes32 sessionKey;
    string orchestrator;
    string scope;
    uint64 issuedAt;
    uint64 expiry;
}

/// @notice Ends every session of `account` issued before `revokedBefore`. Checked off chain.
struct SessionRevocation {
    address account;
    string orchestrator;
    uint64 revokedBefore;
}

/// @notice The manager admits `node` to `pool`.
struct Invite {
    uint256 pool;
    address node;
    uint64 deadline;
}

/// @notice The trainer publishes version `version`; `manifestDigest` is the policy's digest.
struct PolicyStatement {
    uint256 pool;
    uint64 version;
    bytes32 manifestDigest;
}

/// @notice The right and duty of `node` to make one rollout file; signed by the manager.
struct Lease {
    uint256 pool;
    uint64 step;
    address node;
    uint64 index;
    bytes32 policyDigest;
    bytes32 runDigest;
    uint32 target;
    bytes32 salt;
    uint64 deadline;
}

/// @notice The claim of `node` that file `sha256` fulfils a lease. Its digest is the Merkle leaf.
struct Submission {
    uint256 pool;
    bytes32 leaseDigest;
    address node;
    uint64 step;
    bytes32 policyDigest;
    bytes32 sha256;
    uint64 size;
    uint32 rows;
    uint64 validUntil;
}

/// @notice The manager's countersignature: the submission arrived at `receivedAt`.
struct Receipt {
    bytes32 submissionDigest;
    uint64 receivedAt;
}

/// @notice The manager's signature over a sealed batch. Checked off chain.
struct BatchStatement {
    uint256 pool;
    uint64 step;
    bytes32 manifestDigest;
}

/// @notice What a validator found about a submission. `outcome`: 1 accepted, 2 rejected, 3 void.
/// `law` is the digest of the rules that it applied; opinions count together only if it is equal.
struct Opinion {
    uint256 pool;
    bytes32 submission;
    bytes32 law;
    uint8 outcome;
    bytes32 reason;
    bytes32 table;
    bytes32 evidence;
    uint64 judgedAt;
}

/// @notice The rules under which an opinion was formed; opinions name its struct hash.
/// `verificationClass` is the digest of the calibration, `verifier` of the verifier's version, `draws` of
/// the lease's list of draws.
struct Law {
    bytes32 lease;
    bytes32 run;
    bytes32 verificationClass;
    bytes32 verifier;
    bytes32 draws;
}

/// @notice What a pool owes for its work up to an epoch, as its validators sign it when the manager does not
/// post it. The members are those of `Rewards.postRewardRoot`.
struct RewardTable {
    uint256 pool;
    uint64 epoch;
    bytes32 root;
    uint256 cumulativeTotal;
    bytes32 object;
}

/// @notice One validator's part of an opinion, with its signature.
struct Voice {
    bytes32 reason;
    bytes32 table;
    bytes32 evidence;
    uint64 judgedAt;
    bytes signature;
}

/// @notice Opinions about one submission that agree, in rising order of their validators' numbers.
struct Opinions {
    bytes32 law;
    uint8 outcome;
    Voice[] voices;
}

/// @title EIP-712 struct hashes of every statement, and the one check of a signature.
/// @notice The twins of the Python classes in protocol/prime_core; tests/vectors/eip712.json binds them.
library Statements {
    bytes32 internal constant NODE_CONSENT =
        keccak256("NodeConsent(address provider,address node,bytes32 salt,uint64 deadline)");
    bytes32 internal constant SESSION_GRANT = keccak256(
        "SessionGrant(address account,bytes32 sessionKey,string orchestrator,string scope,uint64 issuedAt,uint64 expiry)"
    );
    bytes32 internal constant SESSION_REVOCATION =
        keccak256("SessionRevocation(address account,string orchestrator,uint64 revokedBefore)");
    bytes32 internal constant INVITE =
        keccak256("Invite(uint256 pool,address node,uint64 deadline)");
    bytes32 internal constant POLICY_STATEMENT =
        keccak256("PolicyStatement(uint256 pool,uint64 version,bytes32 manifestDigest)");
    bytes32 internal constant LEASE = keccak256(
        "Lease(uint256 pool,uint64 step,address node,uint64 index,bytes32 policyDigest,bytes32 runDigest,uint32 target,bytes32 salt,uint64 deadline)"
    );
    bytes32 internal constant SUBMISSION = keccak256(
        "Submission(uint256 pool,bytes32 leaseDigest,address node,uint64 step,bytes32 policyDigest,bytes32 sha256,uint64 size,uint32 rows,uint64 validUntil)"
    );
    bytes32 internal constant RECEIPT =
        keccak256("Receipt(bytes32 submissionDigest,uint64 receivedAt)");
    bytes32 internal constant BATCH_STATEMENT =
        keccak256("BatchStatement(uint256 pool,uint64 step,bytes32 manifestDigest)");
    bytes32 internal constant OPINION = keccak256(
        "Opinion(uint256 pool,bytes32 submission,bytes32 law,uint8 outcome,bytes32 reason,bytes32 table,bytes32 evidence,uint64 judgedAt)"
    );

    bytes32 internal constant LAW = keccak256(
        "Law(bytes32 lease,bytes32 run,bytes32 verificationClass,bytes32 verifier,bytes32 draws)"
    );
    bytes32 internal constant REWARD_TABLE = keccak256(
        "RewardTable(uint256 pool,uint64 epoch,bytes32 root,uint256 cumulativeTotal,bytes32 object)"
    );

    /// @notice EIP-712 struct hash.
    function hash(NodeConsent memory s) internal pure returns (bytes32) {
        return keccak256(abi.encode(NODE_CONSENT, s));
    }

    /// @notice EIP-712 struct hash.
    function hash(SessionGrant memory s) internal pure returns (bytes32) {
        return keccak256(
            abi.encode(
                SESSION_GRANT,
                s.account,
                s.sessionKey,
                keccak256(bytes(s.orchestrator)),
                keccak256(bytes(s.scope)),
                s.issuedAt,
                s.expiry
            )
        );
    }

    /// @notice EIP-712 struct hash.
    function hash(SessionRevocation memory s) internal pure returns (bytes32) {
        return keccak256(
            abi.encode(
                SESSION_REVOCATION, s.account, keccak256(bytes(s.orchestrator)), s.revokedBefore
            )
        );
    }

    /// @notice EIP-712 struct hash.
    function hash(Invite memory s) internal pure returns (bytes32) {
        return keccak256(abi.encode(INVITE, s));
    }

    /// @notice EIP-712 struct hash.
    function hash(PolicyStatement memory s) internal pure returns (bytes32) {
        return keccak256(abi.encode(POLICY_STATEMENT, s));
    }

    /// @notice EIP-712 struct hash.
    function hash(Lease memory s) internal pure returns (bytes32) {
        return keccak256(abi.encode(LEASE, s));
    }

    /// @notice EIP-712 struct hash.
    function hash(Submission memory s) internal pure returns (bytes32) {
        return keccak256(abi.encode(SUBMISSION, s));
    }

    /// @notice EIP-712 struct hash.
    function hash(Receipt memory s) internal pure returns (bytes32) {
        return keccak256(abi.encode(RECEIPT, s));
    }

    /// @notice EIP-712 struct hash.
    function hash(BatchStatement memory s) internal pure returns (bytes32) {
        return keccak256(abi.encode(BATCH_STATEMENT, s));
    }

    /// @notice EIP-712 struct hash.
    function hash(Opinion memory s) internal pure returns (bytes32) {
        return keccak256(abi.encode(OPINION, s));
    }

    /// @notice EIP-712 struct hash.
    function hash(Law memory s) internal pure returns (bytes32) {
        return keccak256(abi.encode(LAW, s));
    }

    /// @notice EIP-712 struct hash.
    function hash(RewardTable memory s) internal pure returns (bytes32) {
        return keccak256(abi.encode(REWARD_TABLE, s));
    }

    /// @notice Leaf of a reward root: keccak256(keccak256(abi.encode(node, cumulative))).
    function rewardLeaf(address node, uint256 cumulative) internal pure returns (bytes32) {
        return keccak256(abi.encode(keccak256(abi.encode(node, cumulative))));
    }

    /// @notice Reverts unless `signature` over `digest` is `signer`'s: ECDSA in low-s form (also of
    /// an account that carries ERC-7702 code), or ERC-1271 of a contract such as a multisig.
    function check(address signer, bytes32 digest, bytes calldata signature) internal view {
        if (isKey(signer, digest, signature)) return;
        bool isOwner = signer.code.length > 0
            && SignatureChecker.isValidERC1271SignatureNowCalldata(signer, digest, signature);
        if (!isOwner) revert Errors.BadSignature(signer, digest);
    }

    /// @notice Reverts unless `signature` over `digest` is the ECDSA signature of key `signer`.
    /// @dev For nodes: a contract's signature can be withdrawn, and with it the liability for work.
    function checkKey(address signer, bytes32 digest, bytes calldata signature) internal pure {
        if (!isKey(signer, digest, signature)) revert Errors.BadSignature(signer, digest);
    }

    /// @notice Whether `signature` over `digest` is the ECDSA signature of key `signer`.
    function isKey(address signer, bytes32 digest, bytes calldata signature)
        internal
        pure
        returns (bool)
    {
        // slither-disable-next-line unused-return
        (address recovered, ECDSA.RecoverError problem,) =
            ECDSA.tryRecoverCalldata(digest, signature);
        return problem == ECDSA.RecoverError.NoError && recovered == signer;
    }
}
