// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Slasher } from "../../../contracts/src/Slasher.sol";
import { Submission } from "../../../contracts/src/libraries/Statements.sol";
import { StakeActs } from "./StakeActs.sol";
import { vm } from "./Vm.sol";

/// @notice Acts upon rejections: a provider contests one, and the contest comes to its end.
abstract contract ContestActs is StakeActs {
    /// @dev The works that contests are about, in the order of the contests.
    uint256[] internal contests;

    /// @dev Rejects a new work and waits until it can be contested; returns its number plus one.
    function rejectedWork(uint256 seed) internal returns (uint256) {
        uint256 before = works.length;
        work_(seed, seed >> 64);
        if (works.length == before) return 0;
        Work_ storage w = works[before];
        Submission memory s = submissionOf(w);
        work.reject(s, w.seq, none(), opinions(s, seed % 2 == 0 ? 2 : 3, bothKeys()));
        w.rejected = true;
        w.rejectedAt = block.timestamp;
        vm.warp(block.timestamp + VALIDITY + 1);
        return works.length;
    }

    /// @dev The newest works' rejections as well: some were proposed for a slash that came to nothing.
    function contestOne(uint256 seed) public {
        uint256 n = seed % 3 == 0 ? rejectedWork(seed >> 8) : works.length;
        for (uint256 i; i < 4 && n > i; ++i) {
            Work_ storage w = works[n - 1 - i];
            uint256 from = w.rejectedAt + VALIDITY + 1;
            if (!w.rejected || w.rejectedAt == 0) continue;
            wait(seed >> 64, from);
            if (block.timestamp < from || block.timestamp >= from - 1 + WINDOW) continue;
            Submission memory s = submissionOf(w);
            Slasher.State state = slasher.proposal(leafOf(s)).state;
            if (state != Slasher.State.None && state != Slasher.State.Cancelled) continue;
            contestIt(w, s);
            contests.push(n - 1 - i);
            return;
        }
    }

    function contestIt(Work_ storage w, Submission memory s) private {
        address owner = providers[providerOf[w.node]];
        uint256 deposit = slasher.disputeDeposit();
        uint256 held = vault.pendingSlash(owner);
        give(owner, deposit);
        vm.startPrank(owner);
        token.approve(address(slasher), deposit);
        bytes32 id = slasher.contest(s);
        vm.stopPrank();
        vm.assertEq(vault.pendingSlash(owner), held, "a contest holds stake");
        depositOf[id] = deposit;
        deposits += deposit;
        did("contest");
    }

    /// @dev Judged, called off or lapsed. Only the authors lose stake by it.
    function endContest(uint256 seed) external {
        if (seed % 2 == 0) contestOne(3 * (seed >> 8));
        for (uint256 i; i < 3 && contests.length > i; ++i) {
            Work_ storage w = works[contests[contests.length - 1 - i]];
            bytes32 id = leafOf(submissionOf(w));
            Slasher.Proposal memory p = slasher.proposal(id);
            if (p.state != Slasher.State.Contested) continue;
            uint256 before = wholeOf(p.provider);
            uint256[2] memory bonds = [wholeOf(validator), wholeOf(validator2)];
            bool overturns = end(w, id, p, seed >> 4);
            vm.assertEq(wholeOf(p.provider), before, "a contest takes stake");
            if (!overturns) {
                vm.assertEq(wholeOf(validator), bonds[0], "an author pays");
                vm.assertEq(wholeOf(validator2), bonds[1], "an author pays");
            }
            slashed[validator] += bonds[0] - wholeOf(validator);
            slashed[validator2] += bonds[1] - wholeOf(validator2);
            return;
        }
    }

    /// @dev Waits for the contest's end of this kind; returns whether it was overturned.
    function end(Work_ storage w, bytes32 id, Slasher.Proposal memory p, uint256 seed)
        private
        returns (bool overturned)
    {
        uint256 how = seed % 4;
        uint256 from = how == 3 ? p.deadline : how == 2 ? 0 : p.deadline - DISPUTE * 3 / 4;
        wait(0, from);
        if (how < 2 && block.timestamp >= p.deadline) return false;
        if (how < 3) vm.prank(arbiter);
        if (how == 0) slasher.confirm(id);
        else if (how == 1) slasher.overturn(id);
        else if (how == 2) slasher.cancel(id);
        else slasher.lapse(id);
        deposits -= depositOf[id];
        if (how == 1) restoredIt(w);
        bytes32[4] memory names =
            [bytes32("upheldContest"), "overturnedContest", "cancelledContest", "lapsedContest"];
        did(names[how]);
        vm.assertTrue(work.isRejected(w.pool, id) == (how != 1), "restored");
        return how == 1;
    }
}
