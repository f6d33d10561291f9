// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { IERC20 } from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import { ERC20Burnable } from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Burnable.sol";
import { IERC20Permit } from "@openzeppelin/contracts/token/ERC20/extensions/IERC20Permit.sol";
import { SafeERC20 } from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {
    ReentrancyGuardTransient
} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";
import { Math } from "@openzeppelin/contracts/utils/math/Math.sol";
import { SafeCast } from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import { IUptimeFeed, WindowTime } from "./WindowTime.sol";
import { Errors } from "./libraries/Errors.sol";
import { Periods } from "./libraries/Periods.sol";
import { MAX_UNBONDINGS, Queue, Unbonding } from "./libraries/Queue.sol";

/// @title The only contract that holds stake.
/// @notice An account's stake is bonded or in a queue of at most eight unbondings. Part of it may be
/// - committed: bonded stake that the owner's seats in pools need; it cannot be unbonded;
/// - pending: held for open slashes; it cannot leave, and counts neither as active nor as unbonding.
/// Pending is a hold, not a move: it sits on bonded stake first, then on the queue, and a slash that
/// is called off leaves everything where it was.
///
/// Tokens held = Σ active + Σ unbonding + Σ pendingSlash, over all accounts.
/// A hold is at most what no other hold has, so all slashes of an account that are open together take at
/// most what was slashable when the first of them was opened, and what was added since. A slash whose
/// hold came out smaller than it asked takes the rest when it is carried out, from what is there then.
/// Slashes take at most `slashCap` of an account within one validity window.
///
/// An account answers to one manager at a time: to the one in whose pools its seats commit stake, or it
/// proposes as a validator, and for an unbonding period after the last seat or proposal. Otherwise a
/// liar could slash its own stake in a pool of its own ahead of the pool that it lied to.
contract StakeVault is ReentrancyGuardTransient, WindowTime {
    using Queue for Unbonding[MAX_UNBONDINGS];
    using SafeCast for uint256;
    using SafeERC20 for IERC20;

    /// @notice Stake was added.
    event Deposited(address indexed provider, uint256 amount);
    /// @notice Stake will be free at `matureAt`.
    event UnbondStarted(address indexed provider, uint256 amount, uint64 matureAt);
    /// @notice Unbonding stake was bonded again.
    event Rebonded(address indexed provider, uint256 amount);
    /// @notice Matured stake went back to its owner.
    event Withdrawn(address indexed provider, uint256 amount);
    /// @notice Stake was held for an open slash.
    event SlashHeld(address indexed provider, uint256 amount);
    /// @notice A held amount was released.
    event SlashReleased(address indexed provider, uint256 amount);
    /// @notice Stake was taken by a slash; `to` zero means burned.
    event Slashed(address indexed provider, uint256 amount, address to);
    /// @notice A seat needs `amount` more of the provider's stake.
    event Committed(address indexed provider, uint256 amount);
    /// @notice A seat was given up and needs `amount` no longer.
    event Released(address indexed provider, uint256 amount);
    /// @notice From now on, an account's stake is bound to this manager.
    event Bound(address indexed account, address indexed manager);
    /// @notice The other contracts' addresses were set, for good.
    event VaultWired(address registry, address pools, address slasher);

    /// @dev A slash of a seated provider writes one slot, and none for the first time.
    /// @param bonded Stake that is not unbonding, the part held for slashes included.
    /// @param pending Sum held for open slashes.
    /// @param leftAt When it last gave up all seats, or proposed; zero if it never did.
    /// @param queueLength Number of entries in the queue.
    /// @param pledges Open proposals for which it stands as a validator.
    /// @param manager To whom it answers, or did last.
    /// @param committed What seats in pools need.
    /// @param queued Sum of the queue, the part held for slashes included; zero if it is empty.
    /// @param lost What slashes took in the validity window `lostIn`.
    /// @param lostIn Number of that window: time ÷ validity.
    struct Account {
        uint96 bonded;
        uint96 pending;
        uint40 leftAt;
        uint8 queueLength;
        uint16 pledges;
        address manager;
        uint96 committed;
        uint96 queued;
        uint96 lost;
        uint40 lostIn;
    }

    /// @notice What stake is counted in.
    IERC20 public immutable token;
    /// @notice Receives what slashes take; zero burns it.
    address public immutable treasury;
    /// @notice The most that slashes take of one account within a validity window.
    uint256 public immutable slashCap;
    uint64 private immutable _epochLength;
    uint64 private immutable _validity;
    uint64 private immutable _slashWindow;
    uint64 private immutable _disputeWindow;
    uint64 private immutable _rewardDelay;
    uint64 private immutable _unbonding;
    address private immutable _deployer = msg.sender;

    /// @notice May deposit for its caller (`Registry.enroll`).
    address public registry;
    /// @notice Commits and releases stake.
    address public pools;
    /// @notice Opens and settles slashes.
    address public slasher;

    mapping(address provider => Account) private _accounts;
    mapping(address provider => Unbonding[MAX_UNBONDINGS]) private _queues;

    /// @param token_ A plain ERC-20.
    /// @param p The network's periods; all contracts take them from here.
    /// @param treasury_ Receives what slashes take; zero burns it.
    /// @param slashCap_ The most that slashes take of one account within a validity window.
    /// @param feed Says when the sequencer was down; zero where there is none. All contracts take it from here.
    constructor(
        IERC20 token_,
        Periods memory p,
        address treasury_,
        uint256 slashCap_,
        IUptimeFeed feed
    ) WindowTime(feed) {
        if (address(token_) == address(0)) revert Errors.ZeroAddress();
        if (slashCap_ == 0) revert Errors.ZeroAmount();
        if (
            p.epochLength == 0 || p.validity == 0 || p.slashWindow == 0 || p.disputeWindow == 0
                || p.rewardDelay == 0
        ) revert Errors.ZeroPeriod();
        uint256 liability = uint256(p.validity) + p.slashWindow + p.disputeWindow;
        if (p.unbonding <= liability) revert Errors.UnbondingTooShort(p.unbonding, liability);
        token = token_;
        treasury = treasury_;
        slashCap = slashCap_;
        _epochLength = p.epochLength;
        _validity = p.validity;
        _slashWindow = p.slashWindow;
        _disputeWindow = p.disputeWindow;
        _rewardDelay = p.rewardDelay;
        _unbonding = p.unbonding;
    }

    modifier only(address who) {
        if (msg.sender != who) revert Errors.NotAllowed(msg.sender);
        _;
    }

    /// @notice Sets the addresses of the contracts deployed later. Once, by the deployer.
    function wire(address registry_, address pools_, address slasher_) external only(_deployer) {
        if (slasher != address(0)) revert Errors.AlreadyWired();
        if (registry_ == address(0) || pools_ == address(0) || slasher_ == address(0)) {
            revert Errors.ZeroAddress();
        }
        registry = registry_;
        pools = pools_;
        slasher = slasher_;
        emit VaultWired(registry_, pools_, slasher_);
    }

    // ------------------------------------------------------------------------------- the owner's

    /// @notice Adds to the caller's stake. Needs an allowance.
    function deposit(uint256 amount) external nonReentrant {
        _deposit(msg.sender, amount);
    }

    /// @notice Adds to the caller's stake with an EIP-2612 permit.
    function depositWithPermit(uint256 amount, uint256 deadline, uint8 v, bytes32 r, bytes32 s)
        external
        nonReentrant
    {
        _permit(msg.sender, amount, deadline, v, r, s);
        _deposit(msg.sender, amount);
    }

    /// @notice The same for `owner`, called by the registry with its own caller as owner.
    function depositFor(
        address owner,
        uint256 amount,
        uint256 deadline,
        uint8 v,
        bytes32 r,
        bytes32 s
    ) external nonReentrant only(registry) {
        _permit(owner, amount, deadline, v, r, s);
        _deposit(owner, amount);
    }

    /// @notice Starts to take stake out; it stays slashable until it is withdrawn.
    /// @param amount At most `unbondable(caller)`.
    function unbond(uint256 amount) external {
        if (amount == 0) revert Errors.ZeroAmount();
        Account storage account = _accounts[msg.sender];
        uint256 available = _unbondable(account);
        if (amount > available) revert Errors.StakeNotFree(available, amount);
        uint64 matureAt = uint64(block.timestamp) + _unbonding;
        uint96 amount96 = amount.toUint96();
        account.queueLength = _queues[msg.sender].push(account.queueLength, amount96, matureAt);
        account.bonded -= amount96;
        account.queued += amount96;
        emit UnbondStarted(msg.sender, amount, matureAt);
    }

    /// @notice Bonds unbonding stake again, the newest first.
    /// @param amount At most `unbonding(caller)`.
    function rebond(uint256 amount) external {
        if (amount == 0) revert Errors.ZeroAmount();
        Account storage account = _accounts[msg.sender];
        (, uint256 available) = _split(account);
        if (amount > available) revert Errors.StakeNotFree(available, amount);

        _takeNewest(msg.sender, account, amount);
        account.bonded += amount.toUint96();
        emit Rebonded(msg.sender, amount);
    }

    /// @notice Pays out what has matured and no open slash holds.
    /// @return amount What was paid.
    function withdraw() external nonReentrant returns (uint256 amount) {
        Account storage account = _accounts[msg.sender];
        (, uint256 available) = _split(account);
        uint8 left;
        (amount, left) =
            _queues[msg.sender].takeMature(account.queueLength, available, windowTime());
        // slither-disable-next-line incorrect-equality
        if (amount == 0) revert Errors.NothingToWithdraw(msg.sender);
        account.queueLength = left;
        account.queued -= amount.toUint96();
        emit Withdrawn(msg.sender, amount);

        token.safeTransfer(msg.sender, amount);
    }

    // -------------------------------------------------------------------------------- the pools'

    /// @notice A seat needs `amount` more of the provider's active stake, which answers to `manager`
    /// alone from now on. A seat that needs none binds no one.
    function commit(address provider, uint256 amount, address manager) external only(pools) {
        Account storage account = _accounts[provider];
        if (amount != 0) _bind(provider, account, manager);
        (uint256 active_,) = _split(account);
        uint256 needed = account.committed + amount;
        if (active_ < needed) revert Errors.InsufficientStake(provider, active_, needed);
        account.committed = needed.toUint96();
        emit Committed(provider, amount);
    }

    /// @notice A seat was given up. After the last one the time runs in which it is answered for.
    function release(address provider, uint256 amount) external only(pools) {
        Account storage account = _accounts[provider];
        uint96 needed = account.committed - amount.toUint96();
        account.committed = needed;
        if (amount != 0 && needed == 0) account.leftAt = uint40(block.timestamp);
        emit Released(provider, amount);
    }

    // ------------------------------------------------------------------------------ the slasher's

    /// @notice Validators stand for a proposal with their stake, which answers to the pool's manager
    /// alone for an unbonding period: longer than any dispute.
    /// @param validators Who signed for it.
    /// @param bond What each must have, for each of its open proposals, that no seat needs and no slash
    /// holds; zero: nothing is asked and no one is bound.
    /// @param manager Of the pool.
    function pledge(address[] calldata validators, uint256 bond, address manager)
        external
        only(slasher)
    {
        for (uint256 i; i < validators.length; ++i) {
            address validator = validators[i];
            Account storage account = _accounts[validator];
            uint16 open = account.pledges + 1;
            uint256 free = _unbondable(account);
            if (free < bond * open) {
                revert Errors.InsufficientStake(validator, free, bond * open);
            }
            account.pledges = open;
            if (bond == 0) continue;
            _bind(validator, account, manager);
            account.leftAt = uint40(block.timestamp);
        }
    }

    /// @notice A proposal came to its end: its validators stand for one less.
    function unpledge(address[] calldata validators) external only(slasher) {
        for (uint256 i; i < validators.length; ++i) {
            --_accounts[validators[i]].pledges;
        }
    }

    /// @notice Holds stake for a proposed slash.
    /// @param provider Whose.
    /// @param amount What is asked.
    /// @param manager Of the pool that asks.
    /// @return held What is held: no more than is there; nothing if the stake answers to another manager.
    function openSlash(address provider, uint256 amount, address manager)
        external
        only(slasher)
        returns (uint256 held)
    {
        Account storage account = _accounts[provider];
        held = Math.min(amount, _reachable(account, manager));
        if (held > 0) account.pending += held.toUint96();
        emit SlashHeld(provider, held);
    }

    /// @notice Lets go what was held for a slash that was called off.
    function releaseSlash(address provider, uint256 held) external only(slasher) {
        _accounts[provider].pending -= held.toUint96();
        emit SlashReleased(provider, held);
    }

    /// @notice Carries out a slash: takes what was held and, if that is less than was asked, as much more
    /// as is there now. Bonded stake first, then the newest of the queue. What the cap spares is let go.
    /// @param provider Whose.
    /// @param held What was held for it.
    /// @param asked What it asked for.
    /// @param manager Of the pool.
    /// @return taken What it took.
    function settleSlash(address provider, uint256 held, uint256 asked, address manager)
        external
        nonReentrant
        only(slasher)
        returns (uint256 taken)
    {
        Account storage account = _accounts[provider];
        taken = held;
        if (asked > held) taken += Math.min(asked - held, _reachable(account, manager));
        uint40 window = uint40(block.timestamp / _validity);
        // slither-disable-next-line incorrect-equality
        uint256 lost = account.lostIn == window ? account.lost : 0;
        taken = Math.min(taken, Math.saturatingSub(slashCap, lost));
        (account.lost, account.lostIn) = ((lost + taken).toUint96(), window);
        account.pending -= held.toUint96();
        _take(provider, account, taken);
        // Held less released is what is taken, in the events as well.
        if (taken > held) emit SlashHeld(provider, taken - held);
        else if (taken < held) emit SlashReleased(provider, held - taken);
        emit Slashed(provider, taken, treasury);
        _pay(treasury, taken);
    }

    /// @notice Takes a penalty from a validator: first for whom it wronged, the rest for the treasury.
    /// @param validator Whose statement was overturned.
    /// @param amount What it owes; less is taken if less is there.
    /// @param manager Of the pool.
    /// @param wronged Receives up to `interest` of it.
    /// @param interest At most this goes to `wronged`.
    /// @return taken What was taken.
    /// @return paid What of it went to `wronged`.
    function fine(
        address validator,
        uint256 amount,
        address manager,
        address wronged,
        uint256 interest
    ) external nonReentrant only(slasher) returns (uint256 taken, uint256 paid) {
        Account storage account = _accounts[validator];
        taken = Math.min(amount, _reachable(account, manager));
        paid = Math.min(taken, interest);
        _take(validator, account, taken);
        emit SlashHeld(validator, taken);
        emit Slashed(validator, taken, treasury);
        if (paid > 0) token.safeTransfer(wronged, paid);
        _pay(treasury, taken - paid);
    }

    // -------------------------------------------------------------------------------------- views

    /// @notice Bonded stake that no open slash holds.
    function active(address provider) external view returns (uint256 amount) {
        (amount,) = _split(_accounts[provider]);
    }

    /// @notice Stake on its way out that no open slash holds.
    function unbonding(address provider) external view returns (uint256 amount) {
        (, amount) = _split(_accounts[provider]);
    }

    /// @notice What a new slash could take at most: active and unbonding.
    function slashable(address provider) external view returns (uint256) {
        (uint256 active_, uint256 unbonding_) = _split(_accounts[provider]);
        return active_ + unbonding_;
    }

    /// @notice What open slashes hold.
    function pendingSlash(address provider) external view returns (uint256) {
        return _accounts[provider].pending;
    }

    /// @notice What the provider's seats in pools need.
    function committed(address provider) external view returns (uint256) {
        return _accounts[provider].committed;
    }

    /// @notice The manager in whose pools the account's stake is at risk.
    /// @return manager Zero: none.
    /// @return until Unix time from which on another manager's pool can be joined; zero as long as seats
    /// need stake.
    function boundTo(address provider) external view returns (address manager, uint256 until) {
        Account storage account = _accounts[provider];
        until = _boundUntil(account);
        if (until != 0 && windowTime() >= until) return (address(0), 0);
        return (account.manager, until);
    }

    /// @notice What can be unbonded now.
    function unbondable(address provider) external view returns (uint256) {
        return _unbondable(_accounts[provider]);
    }

    /// @notice The whole account, as stored.
    function accountOf(address provider) external view returns (Account memory) {
        return _accounts[provider];
    }

    /// @notice The queue, oldest first.
    function unbondings(address provider) external view returns (Unbonding[] memory list) {
        uint256 length = _accounts[provider].queueLength;
        list = new Unbonding[](length);
        for (uint256 i; i < length; ++i) {
            list[i] = _queues[provider][i];
        }
    }

    /// @notice The network's periods in seconds.
    function periods() external view returns (Periods memory) {
        return Periods({
            epochLength: _epochLength,
            validity: _validity,
            slashWindow: _slashWindow,
            disputeWindow: _disputeWindow,
            rewardDelay: _rewardDelay,
            unbonding: _unbonding
        });
    }

    // ------------------------------------------------------------------------------------ private

    /// @dev A permit that somebody carried ahead of us is as good: the allowance is there.
    function _permit(address owner, uint256 amount, uint256 deadline, uint8 v, bytes32 r, bytes32 s)
        private
    {
        IERC20Permit permit = IERC20Permit(address(token));
        try permit.permit(owner, address(this), amount, deadline, v, r, s) { }
        catch (bytes memory reason) {
            if (token.allowance(owner, address(this)) < amount) {
                assembly ("memory-safe") {
                    revert(add(reason, 32), mload(reason))
                }
            }
        }
    }

    function _deposit(address owner, uint256 amount) private {
        if (amount == 0) revert Errors.ZeroAmount();
        Account storage account = _accounts[owner];
        account.bonded += amount.toUint96();
        emit Deposited(owner, amount);

        uint256 before = token.balanceOf(address(this));
        token.safeTransferFrom(owner, address(this), amount);
        uint256 received = token.balanceOf(address(this)) - before;
        if (received != amount) revert Errors.TokenNotPlain(amount, received);
    }

    /// @dev From now on the account answers to `manager`, if it answers to no one else.
    function _bind(address owner, Account storage account, address manager) private {
        address bound = account.manager;
        if (bound == manager) return;
        if (bound != address(0)) {
            uint256 until = _boundUntil(account);
            if (until == 0 || windowTime() < until) {
                revert Errors.StakeBound(owner, bound, until);
            }
        }
        account.manager = manager;
        emit Bound(owner, manager);
    }

    /// @dev Stake that answers to the manager and that no open slash holds.
    function _reachable(Account storage account, address manager) private view returns (uint256) {
        if (account.manager != manager) return 0;
        return uint256(account.bonded) + _queued(account) - account.pending;
    }

    /// @dev Bonded stake first, then the newest of the queue.
    function _take(address owner, Account storage account, uint256 amount) private {
        uint256 fromBonded = Math.min(amount, account.bonded);
        account.bonded -= fromBonded.toUint96();
        if (amount > fromBonded) _takeNewest(owner, account, amount - fromBonded);
    }

    function _pay(address to, uint256 amount) private {
        if (amount == 0) return;
        if (to == address(0)) ERC20Burnable(address(token)).burn(amount);
        else token.safeTransfer(to, amount);
    }

    /// @dev When another manager's turn can come; zero as long as seats need stake.
    function _boundUntil(Account storage account) private view returns (uint256) {
        return account.committed != 0 ? 0 : uint256(account.leftAt) + _unbonding;
    }

    /// @dev Bonded and queued stake less what is held, which sits on bonded stake first.
    function _split(Account storage account) private view returns (uint256 free, uint256 leaving) {
        uint256 bonded = account.bonded;
        uint256 pending = account.pending;
        if (pending <= bonded) return (bonded - pending, _queued(account));
        return (0, _queued(account) - (pending - bonded));
    }

    /// @dev Saves a read where nothing is unbonding.
    function _queued(Account storage account) private view returns (uint256) {
        return account.queueLength == 0 ? 0 : account.queued;
    }

    function _unbondable(Account storage account) private view returns (uint256) {
        (uint256 active_,) = _split(account);
        return Math.saturatingSub(active_, account.committed);
    }

    function _takeNewest(address provider, Account storage account, uint256 amount) private {
        account.queued -= amount.toUint96();
        account.queueLength = _queues[provider].takeNewest(account.queueLength, amount);
    }
}
