// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { SafeCast } from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import { Errors } from "./libraries/Errors.sol";

/// @title The two sums at risk in a slash, and the one role that may move them.
/// @notice Deposit and bond are counted in a token whose worth moves, so they may have to. The
/// governor announces new ones; anyone puts them in force one unbonding period later, in which every
/// provider and validator that does not like them can leave with its stake. The governor can do
/// nothing else; it can hand its role to another account, such as a multisig, or give it up for good.
abstract contract Terms {
    using SafeCast for uint256;

    /// @notice The governor offered its role.
    event GovernorOffered(address indexed governor, address indexed to);
    /// @notice The role has a new holder; zero: nobody has it, for good.
    event GovernorChanged(address indexed from, address indexed to);
    /// @notice New terms can be put in force from `actAt` on.
    event TermsAnnounced(uint256 disputeDeposit, uint256 validatorBond, uint64 actAt);
    /// @notice New terms are in force.
    event TermsChanged(uint256 disputeDeposit, uint256 validatorBond);

    /// @dev Both in one slot, in the token's smallest unit.
    struct Sums {
        uint128 deposit;
        uint128 bond;
    }

    /// @notice How long announced terms wait: one unbonding period.
    uint64 public immutable termsDelay;
    /// @notice May announce terms; zero: nobody may, the terms are final.
    address public governor;
    /// @notice To whom the governor offered its role.
    address public pendingGovernor;
    Sums internal _terms;
    Sums private _announced;
    uint64 private _actAt;

    /// @param governor_ May announce terms; zero: they never move.
    /// @param deposit What a dispute costs if it is lost.
    /// @param bond Active stake that a proposer must have.
    /// @param delay How long announced terms wait.
    constructor(address governor_, uint256 deposit, uint256 bond, uint64 delay) {
        governor = governor_;
        termsDelay = delay;
        _terms = Sums(deposit.toUint128(), bond.toUint128());
        emit GovernorChanged(address(0), governor_);
        emit TermsChanged(deposit, bond);
    }

    modifier onlyGovernor() {
        if (msg.sender != governor) revert Errors.NotAllowed(msg.sender);
        _;
    }

    /// @notice Offers the role to another account, which must accept it. Zero withdraws the offer.
    function handOver(address to) external onlyGovernor {
        pendingGovernor = to;
        emit GovernorOffered(msg.sender, to);
    }

    /// @notice Takes the role that was offered to the caller.
    function acceptGovernor() external {
        if (msg.sender != pendingGovernor) revert Errors.NotAllowed(msg.sender);
        emit GovernorChanged(governor, msg.sender);
        governor = msg.sender;
        pendingGovernor = address(0);
    }

    /// @notice Gives the role up for good: the terms in force stay, announced ones are void.
    function renounceGovernor() external onlyGovernor {
        emit GovernorChanged(governor, address(0));
        governor = address(0);
        pendingGovernor = address(0);
        _actAt = 0;
    }

    /// @notice Announces new terms, in place of any announced before. By the governor.
    /// @param deposit What a dispute costs if it is lost.
    /// @param bond Active stake that a proposer must have; what an overturned proposal costs it.
    function announceTerms(uint256 deposit, uint256 bond) external onlyGovernor {
        _announced = Sums(deposit.toUint128(), bond.toUint128());
        _actAt = uint64(block.timestamp) + termsDelay;
        emit TermsAnnounced(deposit, bond, _actAt);
    }

    /// @notice Puts the announced terms in force. By anyone, once their time has come.
    function applyTerms() external {
        // slither-disable-next-line incorrect-equality
        if (_actAt == 0) revert Errors.NothingAnnounced();
        if (block.timestamp < _actAt) revert Errors.TooEarly(_actAt, block.timestamp);
        _terms = _announced;
        _actAt = 0;
        emit TermsChanged(_terms.deposit, _terms.bond);
    }

    /// @notice What a dispute costs if it is lost.
    function disputeDeposit() external view returns (uint256) {
        return _terms.deposit;
    }

    /// @notice Active stake a proposer must have; what an overturned proposal costs it.
    function validatorBond() external view returns (uint256) {
        return _terms.bond;
    }

    /// @notice The announced terms and from when on they can be put in force; zeros if there are none.
    function announced() external view returns (uint256 deposit, uint256 bond, uint64 actAt) {
        // slither-disable-next-line incorrect-equality
        if (_actAt == 0) return (0, 0, 0);
        return (_announced.deposit, _announced.bond, _actAt);
    }
}
