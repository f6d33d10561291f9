// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Invite, Submission } from "../../../contracts/src/libraries/Statements.sol";
import { Network } from "./Network.sol";
import { vm } from "./Vm.sol";

/// @notice Somebody with a pool of its own, whose validators are its friends.
abstract contract Crook is Network {
    uint256 internal constant CROOK_KEY = 0xE711;
    uint256 internal constant CROOK_NODE_KEY = 0xE712;
    address internal crook = vm.addr(CROOK_KEY);
    address internal accomplice = address(0xE7A1);
    address internal loot = address(0xE7EA);
    uint256 internal crooksPool;

    /// @dev A pool whose manager is the crook and whose one validator is its accomplice.
    function openCrooksPool(uint256 stakePerClass) internal {
        vm.prank(crook);
        crooksPool = pools.create(trainer, RUN, stakePerClass, 10, loot);
        vm.prank(crook);
        pools.setValidator(crooksPool, accomplice, true);
        stake(accomplice, BOND);
    }

    function invitedByCrook(address to) internal returns (Invite memory i, bytes memory signature) {
        i = invite(to, 1);
        i.pool = crooksPool;
        signature = sign(CROOK_KEY, pools.inviteDigest(i));
    }

    function joinCrooksPool(address owner, address to) internal {
        (Invite memory i, bytes memory signature) = invitedByCrook(to);
        vm.prank(owner);
        pools.join(i, signature);
    }

    /// @dev The accomplice proposes to slash `key`'s node in the crook's pool.
    function proposeInCrooksPool(uint256 number, uint256 key, uint256 amount)
        internal
        returns (uint256 id)
    {
        Submission memory s = submission(number);
        s.pool = crooksPool;
        bytes32 leaf = work.submissionDigest(s);
        vm.prank(crook);
        uint64 seq = work.postRoot(crooksPool, leaf, 1, keccak256("object"));
        bytes memory signature = sign(key, leaf);
        vm.prank(accomplice);
        id = slasher.propose(s, vm.addr(key), signature, seq, none(), EVIDENCE, 3, amount);
    }
}
