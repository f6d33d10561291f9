// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @notice The network's periods in seconds, fixed at deployment.
/// @param epochLength Work rooted within one epoch is paid by one reward root.
/// @param validity How long after its root a leaf can be rejected, and its node slashed for it.
/// @param slashWindow How long a proposed slash waits for a dispute or the arbiter.
/// @param disputeWindow How long another validator has to judge a disputed slash.
/// @param rewardDelay How long a reward root is open to a public check before it can be claimed.
/// @param unbonding How long stake stays liable after its owner asked for it back.
struct Periods {
    uint64 epochLength;
    uint64 validity;
    uint64 slashWindow;
    uint64 disputeWindow;
    uint64 rewardDelay;
    uint64 unbonding;
}
