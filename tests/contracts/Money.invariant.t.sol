// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Pools } from "../../contracts/src/Pools.sol";
import { PrimeToken } from "../../contracts/src/PrimeToken.sol";
import { Rewards } from "../../contracts/src/Rewards.sol";
import { Slasher } from "../../contracts/src/Slasher.sol";
import { StakeVault } from "../../contracts/src/StakeVault.sol";
import { Unbonding } from "../../contracts/src/libraries/Queue.sol";
import { Handler } from "./utils/Handler.sol";
import { vm } from "./utils/Vm.sol";

/// @notice What must hold of the money after any sequence of anybody's acts.
contract MoneyInvariant {
    /// @dev forge prints it.
    event log_named_uint(string name, uint256 count);

    Handler private handler;
    PrimeToken private token;
    StakeVault private vault;
    Pools private pools;
    Rewards private rewards;
    Slasher private slasher;
    address[] private accounts;

    function setUp() public {
        handler = new Handler();
        handler.open();
        (address t, address v, address p,, address r, address s) = handler.contracts();
        token = PrimeToken(t);
        vault = StakeVault(v);
        pools = Pools(p);
        rewards = Rewards(r);
        slasher = Slasher(s);
        accounts = handler.accounts();
    }

    function targetContracts() public view returns (address[] memory list) {
        list = new address[](1);
        list[0] = address(handler);
    }

    struct FuzzSelector {
        address addr;
        bytes4[] selectors;
    }

    /// @dev The acts alone: neither `open` nor the views.
    function targetSelectors() public view returns (FuzzSelector[] memory list) {
        bytes4[] memory s = new bytes4[](33);
        s[0] = handler.clock.selector;
        s[1] = handler.addStake.selector;
        s[2] = handler.unbond.selector;
        s[3] = handler.rebond.selector;
        s[4] = handler.withdraw.selector;
        s[5] = handler.takeSeat.selector;
        s[6] = handler.giveUpSeat.selector;
        s[7] = handler.work_.selector;
        s[8] = handler.reject.selector;
        s[9] = handler.proposeSlash.selector;
        s[10] = handler.executeSlash.selector;
        s[11] = handler.disputeSlash.selector;
        s[12] = handler.judgeSlash.selector;
        s[13] = handler.lapseSlash.selector;
        s[14] = handler.cancelSlash.selector;
        s[15] = handler.fundMore.selector;
        s[16] = handler.postRewards.selector;
        s[17] = handler.claim.selector;
        s[18] = handler.disableRewards.selector;
        s[19] = handler.endPool.selector;
        s[20] = handler.thief.selector;
        s[21] = handler.moveNode.selector;
        s[22] = handler.claimMany.selector;
        s[23] = handler.moveTerms.selector;
        s[24] = handler.overreach.selector;
        s[25] = handler.runAway.selector;
        s[26] = handler.cashIn.selector;
        s[27] = handler.bringBack.selector;
        s[28] = handler.haste.selector;
        s[29] = handler.objectToSlash.selector;
        s[30] = handler.bondMore.selector;
        s[31] = handler.postTable.selector;
        s[32] = handler.moveAway.selector;
        list = new FuzzSelector[](1);
        list[0] = FuzzSelector(address(handler), s);
    }

    function invariant_Money() public view {
        vaultHoldsActiveUnbondingAndPending();
        stakeMovesByItsOwnersActOrAFinalVerdictOnly();
        nothingIsWithdrawnBeforeItsUnbondingEnds();
        openSlashesStayWithinTheFirstSnapshot();
        committedIsWhatSeatsNeed();
        slasherHoldsTheDepositsOfDisputes();
        authorsStandForEachOpenProposal();
        noSubmissionIsSlashedTwice();
        rewardsHoldFreeAndReserved();
        nothingIsBothRejectedAndPaid();
        thievesGetNothing();
    }

    /// @dev forge calls it at the end of each run.
    function afterInvariant() public {
        handler.drain();
    }

    /// @dev The invariant would be empty if the acts never took place.
    function test_ActsTakePlace() public {
        FuzzSelector memory acts = targetSelectors()[0];
        for (uint256 i; i < 2000; ++i) {
            bytes32 seed = keccak256(abi.encode("act", i));
            bytes4 act = acts.selectors[uint256(seed) % acts.selectors.length];
            bytes memory seeds =
                abi.encode(keccak256(abi.encode(seed, 1)), keccak256(abi.encode(seed, 2)));
            // The last argument is small where its type is.
            if (act == handler.takeSeat.selector || act == handler.giveUpSeat.selector) {
                seeds = abi.encodePacked(seeds, uint256(seed) % 2);
            } else if (act == handler.judgeSlash.selector) {
                seeds = abi.encode(keccak256(abi.encode(seed, 1)), (uint256(seed) >> 9) % 2);
            } else {
                seeds = abi.encodePacked(seeds, keccak256(abi.encode(seed, 3)));
            }
            (bool done, bytes memory what) = acts.addr.call(abi.encodePacked(act, seeds));
            if (!done) {
                assembly ("memory-safe") {
                    revert(add(what, 32), mload(what))
                }
            }
            if (i % 500 == 0) invariant_Money();
        }
        invariant_Money();
        handler.drain();
        bytes32[34] memory names = [
            bytes32("addStake"),
            "unbond",
            "rebond",
            "withdraw",
            "takeSeat",
            "giveUpSeat",
            "work",
            "reject",
            "proposeSlash",
            "executeSlash",
            "disputeSlash",
            "confirm",
            "overturn",
            "lapseSlash",
            "cancelSlash",
            "postRewards",
            "claim",
            "disableRewards",
            "refund",
            "moveNode",
            "claimMany",
            "announceTerms",
            "applyTerms",
            "liftBan",
            "runAway",
            "cashIn",
            "heldBack",
            "bringBack",
            "haste",
            "objectToSlash",
            "bondMore",
            "postTable",
            "bondDrawn",
            "moveAway"
        ];
        for (uint256 i; i < names.length; ++i) {
            emit log_named_uint(string(abi.encodePacked(names[i])), handler.calls(names[i]));
        }
        for (uint256 i; i < names.length; ++i) {
            vm.assertTrue(handler.calls(names[i]) > 0, string(abi.encodePacked(names[i])));
        }
    }

    function vaultHoldsActiveUnbondingAndPending() private view {
        uint256 sum;
        for (uint256 i; i < accounts.length; ++i) {
            sum += vault.active(accounts[i]) + vault.unbonding(accounts[i])
            + vault.pendingSlash(accounts[i]);
        }
        vm.assertEq(token.balanceOf(address(vault)), sum, "vault");
    }

    function stakeMovesByItsOwnersActOrAFinalVerdictOnly() private view {
        for (uint256 i; i < accounts.length; ++i) {
            address a = accounts[i];
            vm.assertEq(
                vault.slashable(a) + vault.pendingSlash(a),
                handler.deposited(a) - handler.withdrawn(a) - handler.slashed(a),
                "account"
            );
            uint256 queued;
            Unbonding[] memory queue = vault.unbondings(a);
            for (uint256 j; j < queue.length; ++j) {
                queued += queue[j].amount;
                vm.assertTrue(queue[j].amount > 0, "empty entry in the queue");
                if (j > 0) vm.assertTrue(queue[j].matureAt > queue[j - 1].matureAt, "order");
            }
            vm.assertEq(vault.accountOf(a).queued, queued, "queue");
        }
    }

    function nothingIsWithdrawnBeforeItsUnbondingEnds() private view {
        for (uint256 i; i < accounts.length; ++i) {
            vm.assertLe(
                handler.withdrawn(accounts[i]), handler.matured(accounts[i]), "withdrawn early"
            );
        }
    }

    function openSlashesStayWithinTheFirstSnapshot() private view {
        for (uint256 i; i < 3; ++i) {
            address a = accounts[i];
            if (handler.openCount(a) == 0) vm.assertEq(vault.pendingSlash(a), 0, "stuck");
            vm.assertLe(handler.taken(a), handler.snapshot(a), "snapshot");
        }
    }

    function committedIsWhatSeatsNeed() private view {
        for (uint256 i; i < 3; ++i) {
            vm.assertEq(vault.committed(accounts[i]), handler.seatsOf(i), "committed");
        }
    }

    function slasherHoldsTheDepositsOfDisputes() private view {
        vm.assertEq(token.balanceOf(address(slasher)), handler.deposits(), "deposits");
    }

    function authorsStandForEachOpenProposal() private view {
        uint256 open = handler.openProposals();
        vm.assertEq(vault.accountOf(accounts[3]).pledges, open, "pledges");
        vm.assertEq(vault.accountOf(accounts[4]).pledges, open, "pledges");
    }

    function noSubmissionIsSlashedTwice() private view {
        vm.assertLe(handler.mostExecutions(), 1, "twice");
    }

    function rewardsHoldFreeAndReserved() private view {
        uint256 sum;
        for (uint256 where; where < 2; ++where) {
            uint256 id = handler.poolIds(where);
            (uint256 free, uint256 reserved) = rewards.funds(id);
            uint256 paid;
            for (uint256 n; n < 12; ++n) {
                paid += handler.paid(id, n);
                vm.assertEq(rewards.claimed(id, handler.nodes(n)), handler.paid(id, n), "claimed");
            }
            vm.assertEq(
                free + reserved,
                handler.funded(id) + handler.drawn(id) - handler.refunded(id) - paid,
                "pool's books"
            );
            vm.assertEq(rewards.bondOf(id), handler.bondLeft(id), "bond");
            (uint256 total,) = rewards.progress(id);
            vm.assertEq(reserved, total - paid, "reserved is promised less paid");
            sum += free + reserved + rewards.bondOf(id);
        }
        vm.assertEq(token.balanceOf(address(rewards)), sum, "rewards");
    }

    function nothingIsBothRejectedAndPaid() private view {
        for (uint256 where; where < 2; ++where) {
            (uint256 good, uint256 both) = handler.credits(where);
            vm.assertEq(both, 0, "rejected and credited");
            uint256 paid;
            for (uint256 n; n < 12; ++n) {
                paid += handler.paid(handler.poolIds(where), n);
            }
            vm.assertLe(paid, good * 1e18, "paid more than was earned");
        }
    }

    function thievesGetNothing() private view {
        vm.assertEq(handler.thefts(), 0, "thefts");
        vm.assertEq(token.balanceOf(address(0x57A)), 0, "the thief has tokens");
    }
}
