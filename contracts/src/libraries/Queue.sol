// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Math } from "@openzeppelin/contracts/utils/math/Math.sol";
import { SafeCast } from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import { Errors } from "./Errors.sol";

/// @notice Stake on its way out.
/// @param amount In the token's smallest unit; never zero in a queue.
/// @param matureAt From when on it can be withdrawn.
struct Unbonding {
    uint96 amount;
    uint64 matureAt;
}

// Unbondings that one account can have at a time: bounds every loop over a queue.
uint256 constant MAX_UNBONDINGS = 8;

/// @title A bounded queue of unbondings, oldest first.
/// @notice The caller keeps the length and the sum, which share storage with what it reads anyway.
library Queue {
    using SafeCast for uint256;

    /// @notice Adds at the end; what matures in the same second is one entry.
    /// @param queue The entries.
    /// @param length How many are in use.
    /// @param amount Not zero.
    /// @param matureAt No earlier than the last entry's.
    /// @return The new length.
    function push(
        Unbonding[MAX_UNBONDINGS] storage queue,
        uint256 length,
        uint96 amount,
        uint64 matureAt
    ) internal returns (uint8) {
        if (length > 0 && queue[length - 1].matureAt == matureAt) {
            queue[length - 1].amount += amount;
            return uint8(length);
        }
        if (length == MAX_UNBONDINGS) revert Errors.TooManyUnbondings(MAX_UNBONDINGS);
        queue[length] = Unbonding(amount, matureAt);
        return uint8(length + 1);
    }

    /// @notice Takes `amount` off the newest entries; the queue holds at least that much.
    /// @param queue The entries.
    /// @param length How many are in use.
    /// @param amount What is taken.
    /// @return The new length.
    function takeNewest(Unbonding[MAX_UNBONDINGS] storage queue, uint256 length, uint256 amount)
        internal
        returns (uint8)
    {
        while (amount > 0) {
            Unbonding storage last = queue[length - 1];
            uint256 part = Math.min(last.amount, amount);
            amount -= part;
            if (part == last.amount) delete queue[--length];
            else last.amount -= part.toUint96();
        }
        return uint8(length);
    }

    /// @notice Takes up to `most` off the oldest entries, as far as they are mature.
    /// @param queue The entries.
    /// @param length How many are in use.
    /// @param most What may be taken.
    /// @param time What matured until then is mature.
    /// @return amount What was taken.
    /// @return left The new length.
    function takeMature(
        Unbonding[MAX_UNBONDINGS] storage queue,
        uint256 length,
        uint256 most,
        uint256 time
    ) internal returns (uint256 amount, uint8 left) {
        uint256 done;
        while (done < length && amount < most && queue[done].matureAt <= time) {
            uint256 part = Math.min(queue[done].amount, most - amount);
            amount += part;
            if (part < queue[done].amount) {
                queue[done].amount -= part.toUint96();
                break;
            }
            ++done;
        }
        if (done > 0) {
            for (uint256 i; i < length; ++i) {
                if (i + done < length) queue[i] = queue[i + done];
                else delete queue[i];
            }
        }
        return (amount, uint8(length - done));
    }
}
