// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Pools } from "../../contracts/src/Pools.sol";
import { Registry } from "../../contracts/src/Registry.sol";
import { Work } from "../../contracts/src/Work.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import {
    Invite,
    Lease,
    NodeConsent,
    PolicyStatement,
    Receipt,
    Submission
} from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice Every signed statement that a contract takes, with every wrong signature: of another key,
/// malleated, cut, for another chain, for another contract, expired, used before.
contract SignaturesTest is Network {
    /// @dev The curve's order: (r, n − s, v ^ 1) verifies wherever (r, s, v) does.
    uint256 private constant N = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141;
    uint256 private constant KINDS = 6;
    uint64 private receivedAt;

    function setUp() public {
        deployNetwork();
        seatNode(4 * STAKE);
        allow(provider, pool);
        receivedAt = uint64(block.timestamp);
        vm.warp(block.timestamp + EPOCH);
    }

    /// @dev What each statement is signed with, and the call that takes it.
    function keyOf(uint256 kind) private pure returns (uint256) {
        if (kind == 0) return NODE2_KEY;
        if (kind == 1) return MANAGER_KEY;
        if (kind == 2) return TRAINER_KEY;
        return kind == 4 ? NODE_KEY : MANAGER_KEY;
    }

    function lease() private view returns (Lease memory) {
        return
            Lease(
                pool, 1, node, 7, keccak256("policy"), RUN, 1, keccak256("salt"), receivedAt + 600
            );
    }

    function claim(Work work_) private view returns (Submission memory) {
        return Submission(
            pool,
            work_.leaseDigest(lease()),
            node,
            1,
            keccak256("policy"),
            keccak256("f"),
            9,
            9,
            START
        );
    }

    function receipt(Work work_) private view returns (Receipt memory) {
        return Receipt(work_.submissionDigest(claim(work_)), receivedAt);
    }

    function agreed() private view returns (NodeConsent memory) {
        return NodeConsent(provider, node2, keccak256("once"), START + 1 hours);
    }

    function invited() private view returns (Invite memory) {
        return Invite(pool, node2, START + 1 hours);
    }

    function published() private view returns (PolicyStatement memory) {
        return PolicyStatement(pool, 0, keccak256("manifest"));
    }

    function digestOf(uint256 kind, Registry r, Pools p, Work w) private view returns (bytes32) {
        if (kind == 0) return r.consentDigest(agreed());
        if (kind == 1) return p.inviteDigest(invited());
        if (kind == 2) return p.policyStatementDigest(published());
        if (kind == 3) return w.leaseDigest(lease());
        if (kind == 4) return w.submissionDigest(claim(work));
        return w.receiptDigest(receipt(work));
    }

    function good(uint256 kind) private view returns (bytes memory) {
        return sign(keyOf(kind), digestOf(kind, registry, pools, work));
    }

    /// @dev Sends the statement with this signature; the other two of a lease are good ones.
    function send(uint256 kind, bytes memory signature) external {
        if (kind == 0) {
            vm.prank(provider);
            registry.addNode(agreed(), signature);
        } else if (kind == 1) {
            pools.join(invited(), signature);
        } else if (kind == 2) {
            pools.publishPolicy(published(), signature);
        } else {
            work.postLeaf(
                lease(),
                kind == 3 ? signature : good(3),
                claim(work),
                kind == 4 ? signature : good(4),
                receipt(work),
                kind == 5 ? signature : good(5)
            );
        }
    }

    function ready(uint256 kind) private {
        if (kind == 1) addNode(provider, NODE2_KEY);
    }

    function refused(uint256 kind, bytes memory signature) private {
        vm.expectPartialRevert(Errors.BadSignature.selector);
        this.send(kind, signature);
    }

    function test_EveryStatementIsTakenWithItsOwnSignature() public {
        for (uint256 kind; kind < 4; ++kind) {
            uint256 state = vm.snapshotState();
            ready(kind);
            this.send(kind, good(kind));
            vm.revertToState(state);
        }
    }

    function testFuzz_AnotherKeysSignatureIsRefused(uint256 kind, uint256 key) public {
        kind %= KINDS;
        key = 1 + key % (N - 1);
        vm.assume(key != keyOf(kind));
        ready(kind);
        refused(kind, sign(key, digestOf(kind, registry, pools, work)));
    }

    function testFuzz_TheMalleatedSignatureIsRefused(uint256 kind) public {
        kind %= KINDS;
        ready(kind);
        (uint8 v, bytes32 r, bytes32 s) =
            vm.sign(keyOf(kind), digestOf(kind, registry, pools, work));
        refused(kind, abi.encodePacked(r, bytes32(N - uint256(s)), v ^ 1));
    }

    function testFuzz_AChangedOrCutSignatureIsRefused(uint256 kind, uint8 at, uint8 by, bool cut)
        public
    {
        kind %= KINDS;
        ready(kind);
        bytes memory signature = good(kind);
        if (cut) {
            uint256 length = at % 65;
            assembly ("memory-safe") {
                mstore(signature, length)
            }
        } else {
            signature[at % 65] = bytes1(uint8(signature[at % 65]) ^ (by == 0 ? 1 : by));
        }
        refused(kind, signature);
    }

    /// A call of its own: the IR optimizer takes block.chainid to be the same all through a function.
    function chainHere() external view returns (uint256) {
        return block.chainid;
    }

    function testFuzz_ASignatureForAnotherChainIsRefused(uint256 kind, uint32 chain) public {
        kind %= KINDS;
        vm.assume(chain != 0 && chain != block.chainid);
        ready(kind);
        uint256 here = this.chainHere();
        vm.chainId(chain);
        bytes memory signature = good(kind);
        vm.chainId(here);
        refused(kind, signature);
    }

    function testFuzz_ASignatureForAnotherContractIsRefused(uint256 kind) public {
        kind %= KINDS;
        ready(kind);
        Registry r = new Registry();
        Pools p = new Pools(r, vault);
        Work w = new Work(p, vault);
        refused(kind, sign(keyOf(kind), digestOf(kind, r, p, w)));
    }

    function testFuzz_AStatementIsTakenOnce(uint256 kind) public {
        kind %= 4;
        ready(kind);
        bytes memory signature = good(kind);
        this.send(kind, signature);
        // Where the state alone would let it through again, its own mark must stop it.
        if (kind == 0) {
            vm.prank(provider);
            registry.removeNode(node2);
            vm.expectPartialRevert(Errors.ConsentUsed.selector);
        } else if (kind == 1) {
            vm.prank(node2);
            pools.leave(pool, node2);
            vm.expectPartialRevert(Errors.InviteUsed.selector);
        } else if (kind == 2) {
            vm.expectPartialRevert(Errors.WrongVersion.selector);
        } else {
            vm.expectPartialRevert(Errors.AlreadyPosted.selector);
        }
        this.send(kind, signature);
    }

    function testFuzz_AStatementPastItsEndIsRefused(uint256 kind, uint32 late) public {
        kind %= 2;
        ready(kind);
        bytes memory signature = good(kind);
        vm.warp(uint256(START) + 1 hours + 1 + late);
        vm.expectPartialRevert(Errors.Expired.selector);
        this.send(kind, signature);
    }

    function test_AStatementInItsLastSecondIsTaken() public {
        bytes memory signature = good(0);
        bytes memory invitation = good(1);
        vm.warp(uint256(START) + 1 hours);
        this.send(0, signature);
        this.send(1, invitation);
        vm.assertTrue(pools.isMember(pool, node2));
    }
}
