// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Math } from "@openzeppelin/contracts/utils/math/Math.sol";

/// @notice The part of Chainlink's L2 sequencer uptime feed that is read here. A round is a status: 0 up,
/// anything else down, since `startedAt`.
interface IUptimeFeed {
    function latestRoundData()
        external
        view
        returns (
            uint80 roundId,
            int256 answer,
            uint256 startedAt,
            uint256 updatedAt,
            uint80 answeredInRound
        );

    function getRoundData(uint80 round)
        external
        view
        returns (
            uint80 roundId,
            int256 answer,
            uint256 startedAt,
            uint256 updatedAt,
            uint80 answeredInRound
        );
}

/// @title The time by which windows close.
/// @notice While an L2's sequencer is down, no one can dispute, reject or leave in time. So windows are
/// measured by a time that stands still from the start of an outage until `GRACE` after its end; then it
/// is the chain's time again. A window that would have closed in between closes then. Without a feed it
/// is always the chain's time.
abstract contract WindowTime {
    /// @notice What remains of a window after an outage in which it would have closed.
    uint256 public constant GRACE = 1 days;
    /// @notice With a feed, windows close this much later: the feed learns of an outage with a delay, and
    /// a window that has closed must not open again.
    uint256 public constant REPORT_DELAY = 1 hours;
    /// @dev Most rounds that are read: bounds the loop. Outages less than `GRACE` apart count as one.
    uint256 private constant MOST_ROUNDS = 32;

    /// @notice Says when the sequencer was down; zero: nothing does.
    IUptimeFeed public immutable uptimeFeed;

    /// @param feed Must answer, unless zero.
    constructor(IUptimeFeed feed) {
        uptimeFeed = feed;
        // slither-disable-next-line unused-return
        if (address(feed) != address(0)) feed.latestRoundData();
    }

    /// @notice The time by which windows close; never later than the chain's.
    function windowTime() public view returns (uint256) {
        if (address(uptimeFeed) == address(0)) return block.timestamp;
        return Math.min(block.timestamp - REPORT_DELAY, _lastOutage());
    }

    /// @dev When the outage began that is not over for `GRACE`, less a second; else the present. A feed that
    /// fails reports none: money must not depend on its life.
    function _lastOutage() private view returns (uint256 since) {
        since = block.timestamp;
        // slither-disable-next-line unused-return
        try uptimeFeed.latestRoundData() returns (
            uint80 round, int256 answer, uint256 startedAt, uint256, uint80
        ) {
            uint256 next = block.timestamp;
            for (uint256 i; i < MOST_ROUNDS; ++i) {
                if (answer != 0) since = Math.saturatingSub(startedAt, 1);
                else if (startedAt + GRACE <= next) break;
                next = startedAt;
                // The low 64 bits count an aggregator's rounds from one.
                if (uint64(round) <= 1) break;
                --round;
                // slither-disable-next-line calls-loop,unused-return
                try uptimeFeed.getRoundData(round) returns (
                    uint80, int256 answer_, uint256 startedAt_, uint256, uint80
                ) {
                    (answer, startedAt) = (answer_, startedAt_);
                } catch {
                    break;
                }
            }
        } catch { }
    }
}
