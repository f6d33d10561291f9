// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { SafeCast } from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import { IUptimeFeed, WindowTime } from "./WindowTime.sol";
import { Errors } from "./libraries/Errors.sol";

/// @title The two sums at risk in a slash, the arbiter, and the role that may move them.
/// @notice Deposit and bond are counted in a token whose worth moves, so they may have to. The
/// governor announces new ones; anyone puts them in force one unbonding period later, in which every
/// provider and validator that does not like them can leave with its stake. A proposal keeps the terms
/// in force when it was made. The arbiter or the governor announces another arbiter in the same way.
/// The governor can do nothing else; it can hand its role to another account, or give it up for good.
abstract contract Terms is WindowTime {
    using SafeCast for uint256;

    /// @notice The governor offered its role.
    event GovernorOffered(address indexed governor, address indexed to);
    /// @notice The role has a new holder; zero: no one has it, for good.
    event GovernorChanged(address indexed from, address indexed to);
    /// @notice New terms can be put in force from `actAt` on.
    event TermsAnnounced(uint256 disputeDeposit, uint256 validatorBond, uint64 actAt);
    /// @notice New terms are in force.
    event TermsChanged(uint256 disputeDeposit, uint256 validatorBond);
    /// @notice Another arbiter can be put in force from `actAt` on.
    event ArbiterAnnounced(address indexed next, uint64 actAt);
    /// @notice The arbiter is another one.
    event ArbiterChanged(address indexed from, address indexed to);

    /// @dev In one slot; sums in the token's smallest unit. `number` counts the terms from zero.
    struct Sums {
        uint120 deposit;
        uint120 bond;
        uint8 number;
    }

    /// @notice How long announced terms wait: one unbonding period.
    uint64 public immutable termsDelay;
    /// @notice May announce terms; zero: no one may, the terms are final.
    address public governor;
    /// @notice To whom the governor offered its role.
    address public pendingGovernor;
    /// @notice May cancel proposals and void reward roots; judges disputes. There always is one.
    address public arbiter;
    /// @dev The terms in force.
    Sums internal _current;
    uint64 private _actAt;
    Sums private _announced;
    address private _nextArbiter;
    uint64 private _arbiterAt;
    /// @dev All terms that ever were in force.
    mapping(uint8 number => Sums) internal _terms;

    /// @param governor_ May announce terms; zero: they never move.
    /// @param arbiter_ Judges and cancels; not zero.
    /// @param deposit What a dispute costs if it is lost.
    /// @param bond Active stake that a proposer must have.
    /// @param delay How long announced terms wait.
    /// @param feed Says when the sequencer was down.
    constructor(
        address governor_,
        address arbiter_,
        uint256 deposit,
        uint256 bond,
        uint64 delay,
        IUptimeFeed feed
    ) WindowTime(feed) {
        if (arbiter_ == address(0)) revert Errors.ZeroAddress();
        governor = governor_;
        arbiter = arbiter_;
        termsDelay = delay;
        _current = Sums(deposit.toUint120(), bond.toUint120(), 0);
        _terms[0] = _current;
        emit GovernorChanged(address(0), governor_);
        emit ArbiterChanged(address(0), arbiter_);
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
        _announced = Sums(deposit.toUint120(), bond.toUint120(), 0);
        _actAt = uint64(block.timestamp) + termsDelay;
        emit TermsAnnounced(deposit, bond, _actAt);
    }

    /// @notice Puts the announced terms in force. By anyone, once their time has come.
    function applyTerms() external {
        // slither-disable-next-line incorrect-equality
        if (_actAt == 0) revert Errors.NothingAnnounced();
        if (windowTime() < _actAt) revert Errors.TooEarly(_actAt, block.timestamp);
        Sums memory next = _announced;
        uint8 last = _current.number;
        if (last == type(uint8).max) revert Errors.TooManyTerms(last);
        next.number = last + 1;
        _current = next;
        _terms[next.number] = next;
        _actAt = 0;
        emit TermsChanged(next.deposit, next.bond);
    }

    /// @notice Announces another arbiter, in place of any announced before. By the arbiter or the governor.
    /// @param next Who it will be; not zero.
    function announceArbiter(address next) external {
        if (msg.sender != arbiter && msg.sender != governor) revert Errors.NotAllowed(msg.sender);
        if (next == address(0)) revert Errors.ZeroAddress();
        _nextArbiter = next;
        _arbiterAt = uint64(block.timestamp) + termsDelay;
        emit ArbiterAnnounced(next, _arbiterAt);
    }

    /// @notice Puts the announced arbiter in force. By anyone, once its time has come.
    function applyArbiter() external {
        // slither-disable-next-line incorrect-equality
        if (_arbiterAt == 0) revert Errors.NothingAnnounced();
        if (windowTime() < _arbiterAt) revert Errors.TooEarly(_arbiterAt, block.timestamp);
        emit ArbiterChanged(arbiter, _nextArbiter);
        arbiter = _nextArbiter;
        _arbiterAt = 0;
    }

    /// @notice What a dispute costs if it is lost.
    function disputeDeposit() external view returns (uint256) {
        return _current.deposit;
    }

    /// @notice Active stake a proposer must have; what an overturned proposal costs it.
    function validatorBond() external view returns (uint256) {
        return _current.bond;
    }

    /// @notice The announced terms and from when on they can be put in force; zeros if there are none.
    function announced() external view returns (uint256 deposit, uint256 bond, uint64 actAt) {
        // slither-disable-next-line incorrect-equality
        if (_actAt == 0) return (0, 0, 0);
        return (_announced.deposit, _announced.bond, _actAt);
    }

    /// @notice The announced arbiter and from when on it can be put in force; zeros if there is none.
    function announcedArbiter() external view returns (address next, uint64 actAt) {
        // slither-disable-next-line incorrect-equality
        return _arbiterAt == 0 ? (address(0), 0) : (_nextArbiter, _arbiterAt);
    }
}
