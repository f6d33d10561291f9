// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { IUptimeFeed } from "../../../contracts/src/WindowTime.sol";

/// @notice A sequencer uptime feed, as Chainlink's behind its proxy: round numbers carry a phase above 64
/// bits, and a round that does not exist reverts.
contract Feed is IUptimeFeed {
    struct Round {
        int256 answer;
        uint256 startedAt;
    }

    uint80 private constant PHASE = uint80(1) << 64;
    Round[] private _rounds;
    bool private _broken;
    bool private _forgetful;

    constructor(uint256 since) {
        _rounds.push(Round(0, since));
    }

    function report(bool up, uint256 since) external {
        _rounds.push(Round(up ? int256(0) : int256(1), since));
    }

    function fail(bool latest, bool history) external {
        (_broken, _forgetful) = (latest, history);
    }

    function latestRoundData() external view returns (uint80, int256, uint256, uint256, uint80) {
        require(!_broken, "broken");
        return _round(_rounds.length);
    }

    function getRoundData(uint80 round)
        external
        view
        returns (uint80, int256, uint256, uint256, uint80)
    {
        require(!_forgetful && round > PHASE, "no data");
        return _round(round - PHASE);
    }

    function _round(uint256 number)
        private
        view
        returns (uint80, int256, uint256, uint256, uint80)
    {
        Round storage r = _rounds[number - 1];
        uint80 id = PHASE + uint80(number);
        return (id, r.answer, r.startedAt, block.timestamp, id);
    }
}
