// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @notice Merkle trees with sorted pairs; an odd node is carried up (protocol/prime_core/encoding.py).
library Tree {
    function pair(bytes32 a, bytes32 b) internal pure returns (bytes32) {
        return a < b ? keccak256(abi.encode(a, b)) : keccak256(abi.encode(b, a));
    }

    function up(bytes32[] memory level) private pure returns (bytes32[] memory next) {
        next = new bytes32[]((level.length + 1) / 2);
        for (uint256 i; i < next.length; ++i) {
            next[i] = 2 * i + 1 < level.length ? pair(level[2 * i], level[2 * i + 1]) : level[2 * i];
        }
    }

    function root(bytes32[] memory leaves) internal pure returns (bytes32) {
        while (leaves.length > 1) leaves = up(leaves);
        return leaves[0];
    }

    function proof(bytes32[] memory leaves, uint256 index)
        internal
        pure
        returns (bytes32[] memory path)
    {
        bytes32[] memory long = new bytes32[](256);
        uint256 length;
        while (leaves.length > 1) {
            uint256 sibling = index ^ 1;
            if (sibling < leaves.length) long[length++] = leaves[sibling];
            leaves = up(leaves);
            index /= 2;
        }
        path = new bytes32[](length);
        for (uint256 i; i < length; ++i) {
            path[i] = long[i];
        }
    }
}
