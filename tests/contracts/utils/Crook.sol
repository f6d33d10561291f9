// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Pools } from "../../../contracts/src/Pools.sol";
import { Invite, Opinions, Submission } from "../../../contracts/src/libraries/Statements.sol";
import { Network } from "./Network.sol";
import { vm } from "./Vm.sol";

/// @notice Somebody with a pool of its own, whose validators are its friends.
abstract contract Crook is Network {
    uint256 internal constant CROOK_KEY = 0xE711;
    uint256 internal constant CROOK_NODE_KEY = 0xE712;
    address internal crook = vm.addr(CROOK_KEY);
    uint256 internal accompliceKey = 0xE7A1;
    address internal accomplice = vm.addr(0xE7A1);
    uint256 internal crooksPool;

    /// @dev A pool whose manager is the crook and whose one validator is its accomplice.
    function openCrooksPool(uint256 stakePerSeat) internal {
        vm.prank(crook);
        crooksPool = pools.create(crooksConfig(stakePerSeat));
        vm.prank(crook);
        pools.setValidator(crooksPool, accomplice, true);
        stake(accomplice, BONDS);
    }

    /// @dev Another one, whose one validator is `validator_`.
    function openCrooksPoolFor(address validator_) internal {
        vm.startPrank(crook);
        crooksPool = pools.create(crooksConfig(STAKE));
        pools.setValidator(crooksPool, validator_, true);
        vm.stopPrank();
    }

    /// @dev On a local chain one validator is enough.
    function crooksConfig(uint256 stakePerSeat) internal view returns (Pools.Config memory c) {
        c = config();
        c.stakePerSeat = uint88(stakePerSeat);
        c.slashAmount = uint88(stakePerSeat);
        c.capacity = 10;
        c.quorum = 1;
    }

    function invitedByCrook(address to) internal returns (Invite memory i, bytes memory signature) {
        i = invite(to);
        i.pool = crooksPool;
        signature = sign(CROOK_KEY, pools.inviteDigest(i));
    }

    function joinCrooksPool(address owner, address to) internal {
        (Invite memory i, bytes memory signature) = invitedByCrook(to);
        vm.prank(owner);
        pools.join(i, signature);
    }

    /// @dev The accomplice proposes to slash `key`'s node in the crook's pool.
    function proposeInCrooksPool(uint256 number, uint256 key) internal returns (bytes32 id) {
        Submission memory s = submission(number);
        s.pool = crooksPool;
        s.node = vm.addr(key);
        bytes32 leaf = leafOf(s);
        vm.prank(crook);
        uint64 seq = work.postRoot(crooksPool, leaf, 1, keccak256("object"));
        Opinions memory o = opinions(s, 2, oneKey(accompliceKey));
        id = slasher.propose(s, sign(key, leaf), seq, none(), o);
    }
}
