// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { MerkleProof } from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";
import { MessageHashUtils } from "@openzeppelin/contracts/utils/cryptography/MessageHashUtils.sol";

import { Pools } from "../../contracts/src/Pools.sol";
import { Registry } from "../../contracts/src/Registry.sol";
import { Rewards } from "../../contracts/src/Rewards.sol";
import { Work } from "../../contracts/src/Work.sol";
import {
    BatchStatement,
    Invite,
    Law,
    Lease,
    NodeConsent,
    Opinion,
    PolicyStatement,
    Receipt,
    RewardTable,
    SessionGrant,
    SessionRevocation,
    Statements,
    Submission
} from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { Tree } from "./utils/Tree.sol";
import { vm } from "./utils/Vm.sol";

/// @notice The contracts give the digests that prime_core gives (scripts/make_vectors.py).
contract VectorsTest is Network {
    string private json;
    address private signer;
    Registry private registryThere;
    Pools private poolsThere;
    Work private workThere;
    Rewards private rewardsThere;

    function setUp() public {
        deployNetwork();
        json = vm.readFile("tests/vectors/eip712.json");
        signer = vm.parseJsonAddress(json, ".signer");
        vm.chainId(vm.parseJsonUint(json, ".chainId"));
        // The contracts' code at the vectors' addresses: the domain follows.
        registryThere = Registry(there("registry", address(registry)));
        poolsThere = Pools(there("pools", address(pools)));
        workThere = Work(there("work", address(work)));
        rewardsThere = Rewards(there("rewards", address(rewards)));
    }

    function there(string memory name, address here) private returns (address at_) {
        at_ = vm.parseJsonAddress(json, string.concat(".contracts.", name));
        vm.etch(at_, here.code);
    }

    /// @dev A statement's entry in the file, and its members.
    function entry(string memory name, uint256 i) private pure returns (string memory) {
        return string.concat(".statements.", name, "[", vm.toString(i), "]");
    }

    function num(string memory at_, string memory member) private view returns (uint256) {
        return vm.parseJsonUint(json, string.concat(at_, ".message.", member));
    }

    function word(string memory at_, string memory member) private view returns (bytes32) {
        return vm.parseJsonBytes32(json, string.concat(at_, ".message.", member));
    }

    function who(string memory at_, string memory member) private view returns (address) {
        return vm.parseJsonAddress(json, string.concat(at_, ".message.", member));
    }

    function words(string memory at_, string memory member) private view returns (string memory) {
        return vm.parseJsonString(json, string.concat(at_, ".message.", member));
    }

    function assertDigest(string memory at_, bytes32 digest) private view {
        vm.assertEq(digest, vm.parseJsonBytes32(json, string.concat(at_, ".digest")), at_);
        this.checkSignature(digest, vm.parseJsonBytes(json, string.concat(at_, ".signature")));
    }

    function checkSignature(bytes32 digest, bytes calldata signature) external view {
        Statements.checkKey(signer, digest, signature);
        Statements.check(signer, digest, signature);
    }

    /// @dev Digest of a statement that no contract checks, under its contract's domain.
    function offChain(string memory contract_, bytes32 structHash) private view returns (bytes32) {
        bytes32 domain = keccak256(
            abi.encode(
                keccak256(
                    "EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
                ),
                keccak256("Prime"),
                keccak256("1"),
                block.chainid,
                vm.parseJsonAddress(json, string.concat(".contracts.", contract_))
            )
        );
        return MessageHashUtils.toTypedDataHash(domain, structHash);
    }

    function test_NodeConsent() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("NodeConsent", i);
            NodeConsent memory s = NodeConsent(
                who(a, "provider"), who(a, "node"), word(a, "salt"), uint64(num(a, "deadline"))
            );
            assertDigest(a, registryThere.consentDigest(s));
        }
    }

    function test_Invite() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("Invite", i);
            Invite memory s = Invite(num(a, "pool"), who(a, "node"), uint64(num(a, "deadline")));
            assertDigest(a, poolsThere.inviteDigest(s));
        }
    }

    function test_PolicyStatement() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("PolicyStatement", i);
            PolicyStatement memory s = PolicyStatement(
                num(a, "pool"), uint64(num(a, "version")), word(a, "manifestDigest")
            );
            assertDigest(a, poolsThere.policyStatementDigest(s));
        }
    }

    function test_Lease() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("Lease", i);
            Lease memory s;
            s.pool = num(a, "pool");
            s.step = uint64(num(a, "step"));
            s.node = who(a, "node");
            s.index = uint64(num(a, "index"));
            s.policyDigest = word(a, "policyDigest");
            s.runDigest = word(a, "runDigest");
            s.target = uint32(num(a, "target"));
            s.salt = word(a, "salt");
            s.deadline = uint64(num(a, "deadline"));
            assertDigest(a, workThere.leaseDigest(s));
        }
    }

    function test_Submission() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("Submission", i);
            Submission memory s;
            s.pool = num(a, "pool");
            s.leaseDigest = word(a, "leaseDigest");
            s.node = who(a, "node");
            s.step = uint64(num(a, "step"));
            s.policyDigest = word(a, "policyDigest");
            s.sha256 = word(a, "sha256");
            s.size = uint64(num(a, "size"));
            s.rows = uint32(num(a, "rows"));
            s.validUntil = uint64(num(a, "validUntil"));
            assertDigest(a, workThere.submissionDigest(s));
        }
    }

    function test_Receipt() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("Receipt", i);
            Receipt memory s = Receipt(word(a, "submissionDigest"), uint64(num(a, "receivedAt")));
            assertDigest(a, workThere.receiptDigest(s));
        }
    }

    function test_SessionGrant() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("SessionGrant", i);
            SessionGrant memory s;
            s.account = who(a, "account");
            s.sessionKey = word(a, "sessionKey");
            s.orchestrator = words(a, "orchestrator");
            s.scope = words(a, "scope");
            s.issuedAt = uint64(num(a, "issuedAt"));
            s.expiry = uint64(num(a, "expiry"));
            assertDigest(a, offChain("registry", Statements.hash(s)));
        }
    }

    function test_SessionRevocation() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("SessionRevocation", i);
            SessionRevocation memory s = SessionRevocation(
                who(a, "account"), words(a, "orchestrator"), uint64(num(a, "revokedBefore"))
            );
            assertDigest(a, offChain("registry", Statements.hash(s)));
        }
    }

    function test_BatchStatement() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("BatchStatement", i);
            BatchStatement memory s =
                BatchStatement(num(a, "pool"), uint64(num(a, "step")), word(a, "manifestDigest"));
            assertDigest(a, offChain("work", Statements.hash(s)));
        }
    }

    function test_Opinion() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("Opinion", i);
            Opinion memory s;
            s.pool = num(a, "pool");
            s.submission = word(a, "submission");
            s.law = word(a, "law");
            s.outcome = uint8(num(a, "outcome"));
            s.reason = word(a, "reason");
            s.table = word(a, "table");
            s.evidence = word(a, "evidence");
            s.judgedAt = uint64(num(a, "judgedAt"));
            assertDigest(a, workThere.opinionDigest(s));
        }
    }

    function test_Law() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("Law", i);
            Law memory s = Law(
                word(a, "lease"),
                word(a, "run"),
                word(a, "verificationClass"),
                word(a, "verifier"),
                word(a, "draws")
            );
            assertDigest(a, offChain("work", Statements.hash(s)));
        }
    }

    function test_RewardTable() public view {
        for (uint256 i; i < 2; ++i) {
            string memory a = entry("RewardTable", i);
            RewardTable memory s = RewardTable(
                num(a, "pool"),
                uint64(num(a, "epoch")),
                word(a, "root"),
                num(a, "cumulativeTotal"),
                word(a, "object")
            );
            assertDigest(a, rewardsThere.rewardTableDigest(s));
        }
    }

    function test_Trees() public view {
        for (uint256 t; t < 8; ++t) {
            string memory a = string.concat(".trees[", vm.toString(t), "]");
            bytes32[] memory leaves = vm.parseJsonBytes32Array(json, string.concat(a, ".leaves"));
            bytes32 root = vm.parseJsonBytes32(json, string.concat(a, ".root"));
            vm.assertEq(Tree.root(leaves), root, a);
            for (uint256 i; i < leaves.length; ++i) {
                bytes32[] memory proof = vm.parseJsonBytes32Array(
                    json, string.concat(a, ".proofs[", vm.toString(i), "]")
                );
                vm.assertTrue(MerkleProof.verify(proof, root, leaves[i]), a);
                vm.assertEq(
                    keccak256(abi.encode(proof)), keccak256(abi.encode(Tree.proof(leaves, i))), a
                );
            }
        }
    }

    function test_RewardLeaves() public view {
        for (uint256 i; i < 5; ++i) {
            string memory a = string.concat(".rewards[", vm.toString(i), "]");
            bytes32 leaf = Statements.rewardLeaf(
                vm.parseJsonAddress(json, string.concat(a, ".node")),
                vm.parseJsonUint(json, string.concat(a, ".cumulative"))
            );
            vm.assertEq(leaf, vm.parseJsonBytes32(json, string.concat(a, ".leaf")), a);
        }
    }
}
