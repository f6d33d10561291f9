// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Rewards } from "../../contracts/src/Rewards.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Submission } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice A provider asks the arbiter to have a file paid; nothing of it touches stake or deposits.
contract AppealsTest is Network {
    uint256 private constant UNTIL = START + VALIDITY + WINDOW;

    function setUp() public {
        deployNetwork();
        seatNode(3 * STAKE);
    }

    /// @dev A rooted file that the quorum found void.
    function voided() private returns (Submission memory s, uint64 seq) {
        s = submission(1);
        seq = postRoot(one(leafOf(s)));
        work.reject(s, seq, none(), opinions(s, 3, bothKeys()));
    }

    function appeal(Submission memory s, uint64 seq) private returns (bytes32 leaf) {
        vm.prank(provider);
        return rewards.appeal(s, seq, none());
    }

    function restore(bytes32 leaf, uint256 amount) private {
        vm.prank(arbiter);
        rewards.restore(leaf, amount);
    }

    function test_Appeal_ByTheProviderOnceInTime_AtTheEdge() public {
        (Submission memory s, uint64 seq) = voided();
        bytes32 leaf = leafOf(s);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        rewards.appeal(s, seq, none());
        vm.warp(UNTIL);
        expect(abi.encodeWithSelector(Errors.WindowClosed.selector, leaf, UNTIL));
        appeal(s, seq);
        vm.warp(UNTIL - 1);
        vm.expectEmit();
        emit Rewards.FileAppealed(leaf, pool, node, uint64(UNTIL - 1 + DISPUTE));
        vm.assertEq(appeal(s, seq), leaf);
        Rewards.Appeal memory a = rewards.appealOf(leaf);
        vm.assertEq(a.pool, pool);
        vm.assertEq(a.node, node);
        vm.assertEq(a.judgeBy, UNTIL - 1 + DISPUTE);
        vm.assertEq(a.step, s.step);
        vm.assertFalse(a.restored);
        expect(abi.encodeWithSelector(Errors.AlreadyAppealed.selector, leaf));
        appeal(s, seq);
    }

    function test_Appeal_ARootedFileOfThatPoolOnly() public {
        (Submission memory s, uint64 seq) = voided();
        Submission memory other = submission(2);
        expect(abi.encodeWithSelector(Errors.NotInRoot.selector, pool, seq, leafOf(other)));
        appeal(other, seq);
        expect(abi.encodeWithSelector(Errors.NotInRoot.selector, pool, seq + 1, leafOf(s)));
        appeal(s, seq + 1);
        s.pool = createPool();
        expectNotAllowed(provider);
        appeal(s, seq);
    }

    function test_Appeal_ShieldsFromNoSlash() public {
        bytes32 leaf = propose(1);
        vm.assertEq(appeal(submission(1), 1), leaf);
        vm.warp(START + WINDOW);
        slasher.execute(leaf);
        vm.assertEq(vault.active(provider), 2 * STAKE);

        Submission memory s = submission(2);
        leaf = leafOf(s);
        uint64 seq = postRoot(one(leaf));
        appeal(s, seq);
        restore(leaf, 1);
        slasher.propose(s, sign(NODE_KEY, leaf), seq, none(), rejections(s));
        vm.warp(START + 2 * WINDOW);
        slasher.execute(leaf);
        vm.assertEq(vault.active(provider), STAKE);
    }

    function test_Restore_ByTheArbiterOnceInTime_AtTheEdge() public {
        (Submission memory s, uint64 seq) = voided();
        bytes32 leaf = leafOf(s);
        expect(abi.encodeWithSelector(Errors.NoOpenAppeal.selector, leaf));
        restore(leaf, 1);
        appeal(s, seq);
        expectNotAllowed(provider);
        vm.prank(provider);
        rewards.restore(leaf, 1);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        restore(leaf, 0);
        vm.warp(START + DISPUTE);
        expect(abi.encodeWithSelector(Errors.WindowClosed.selector, leaf, START + DISPUTE));
        restore(leaf, 1);
        vm.warp(START + DISPUTE - 1);
        vm.expectEmit();
        emit Rewards.FileRestored(leaf, pool, node, s.step, 7);
        restore(leaf, 7);
        vm.assertTrue(rewards.appealOf(leaf).restored);
        expect(abi.encodeWithSelector(Errors.NoOpenAppeal.selector, leaf));
        restore(leaf, 7);
        expect(abi.encodeWithSelector(Errors.AlreadyAppealed.selector, leaf));
        appeal(s, seq);
    }

    /// @dev Settlements pay it once no slash for it is open, and not if one was carried out.
    function test_Restore_WhileASlashIsOpen_NotAfterItsExecution() public {
        bytes32 leaf = propose(1);
        appeal(submission(1), 1);
        uint256 before = vm.snapshotState();
        restore(leaf, 1);
        vm.assertTrue(rewards.appealOf(leaf).restored);
        vm.revertToState(before);
        dispute(leaf);
        before = vm.snapshotState();
        vm.startPrank(arbiter);
        slasher.overturn(leaf);
        rewards.restore(leaf, 1);
        vm.stopPrank();
        vm.assertTrue(rewards.appealOf(leaf).restored);
        vm.revertToState(before);
        vm.prank(arbiter);
        slasher.confirm(leaf);
        expect(abi.encodeWithSelector(Errors.WrongState.selector, leaf, 3));
        restore(leaf, 1);
    }

    function test_Appeal_NotOfAFileThatNoOneAnswersFor_AtTheEdge() public {
        Submission memory s = submission(1);
        bytes32 leaf = leafOf(s);
        vm.warp(s.validUntil + WINDOW + DISPUTE);
        uint256 before = vm.snapshotState();
        appeal(s, postRoot(one(leaf)));
        vm.revertToState(before);
        vm.warp(s.validUntil + WINDOW + DISPUTE + 1);
        uint64 seq = postRoot(one(leaf));
        uint256 until = s.validUntil + WINDOW + DISPUTE;
        expect(abi.encodeWithSelector(Errors.RootedLate.selector, until + 1, until));
        appeal(s, seq);
    }
}
