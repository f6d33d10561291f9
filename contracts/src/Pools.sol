// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Math } from "@openzeppelin/contracts/utils/math/Math.sol";

import { PoolState } from "./PoolState.sol";
import { Registry } from "./Registry.sol";
import { StakeVault } from "./StakeVault.sol";
import { Errors } from "./libraries/Errors.sol";
import { Invite, PolicyStatement, Statements } from "./libraries/Statements.sol";

/// @title Training runs: who manages them, who sits in them, which policies they published.
/// @notice Holds no tokens. The manager is trusted to invite, to judge and to pay; every step of it
/// is an event, and stake moves only through the slasher. No call's cost depends on a pool's size.
/// A seat commits stake of the node's provider, so it needs the provider's own consent: its
/// transaction (`join`, `Registry.enroll`), or that it allowed the pool before (`allow`).
contract Pools is PoolState {
    /// @notice What a pool fixes at its creation.
    /// @param trainer Signs the policies.
    /// @param runDigest Digest of the run definition.
    /// @param stakePerSeat Active stake that a seat needs.
    /// @param slashAmount What one slash takes, at most `stakePerSeat`; zero: nothing is slashed.
    /// @param capacity Seats.
    /// @param quorum How many validators' opinions reject or slash: 2 or 3; 1 on a local chain.
    /// @param leaseSeconds The longest lease: an opinion counts for leases that were signed after its
    /// author's appointment, and a lease ends at most so long after it was signed.
    struct Config {
        address trainer;
        bytes32 runDigest;
        uint88 stakePerSeat;
        uint88 slashAmount;
        uint32 capacity;
        uint8 quorum;
        uint32 leaseSeconds;
    }

    /// @notice Says who owns a node.
    Registry public immutable registry;
    /// @notice A pool's quorum is at most this: a proposal names its authors in three bytes.
    uint8 public constant MAX_QUORUM = 3;
    /// @notice The chain on which one validator is enough.
    uint256 public constant LOCAL_CHAIN = 31_337;
    address private immutable _deployer = msg.sender;

    /// @param registry_ Says who owns a node.
    /// @param vault_ Holds the stake.
    constructor(Registry registry_, StakeVault vault_) PoolState(vault_) {
        if (address(registry_) == address(0)) revert Errors.ZeroAddress();
        registry = registry_;
    }

    /// @notice Sets the address of the slasher, deployed later. Once, by the deployer.
    function wire(address slasher_) external {
        if (msg.sender != _deployer) revert Errors.NotAllowed(msg.sender);
        if (slasher != address(0)) revert Errors.AlreadyWired();
        if (slasher_ == address(0)) revert Errors.ZeroAddress();
        slasher = slasher_;
        emit SlasherWired(slasher_);
    }

    // ----------------------------------------------------------------------------- the manager's

    /// @notice Makes a pool whose manager is the caller.
    /// @return pool The new pool's number.
    function create(Config calldata config) external returns (uint256 pool) {
        if (config.trainer == address(0)) revert Errors.ZeroAddress();
        if (config.runDigest == 0) revert Errors.ZeroDigest();
        if (config.capacity == 0) revert Errors.ZeroCapacity();
        if (config.leaseSeconds == 0) revert Errors.ZeroPeriod();
        if (config.slashAmount > config.stakePerSeat) {
            revert Errors.SlashAboveStake(config.stakePerSeat, config.slashAmount);
        }
        uint256 least = block.chainid == LOCAL_CHAIN ? 1 : 2;
        if (config.quorum < least || config.quorum > MAX_QUORUM) {
            revert Errors.NoQuorum(config.quorum, least);
        }
        pool = ++count;
        Pool storage p = _pools[pool];
        p.manager = msg.sender;
        p.stakePerSeat = config.stakePerSeat;
        p.quorum = config.quorum;
        p.trainer = config.trainer;
        p.slashAmount = config.slashAmount;
        p.leaseSeconds = config.leaseSeconds;
        p.capacity = config.capacity;
        p.runDigest = config.runDigest;
        emit PoolCreated(pool, msg.sender, config.trainer, config.runDigest);
    }

    /// @notice Revises the run: leases of steps from `fromStep` on are given under `runDigest`. What the
    /// pool fixed at its creation (trainer, stake, seats) stays.
    function revise(uint256 pool, bytes32 runDigest, uint64 fromStep) external {
        if (_managed(pool).ended) revert Errors.PoolHasEnded(pool);
        if (runDigest == 0) revert Errors.ZeroDigest();
        Revision[] storage made = _revisions[pool];
        uint64 last = made.length == 0 ? 0 : made[made.length - 1].fromStep;
        if (fromStep <= last) revert Errors.RevisionNotLater(last, fromStep);
        made.push(Revision(runDigest, fromStep, uint64(block.timestamp)));
        emit RunRevised(pool, runDigest, fromStep);
    }

    /// @notice Appoints or dismisses a validator. Its opinions count for leases that are signed from now
    /// on. A pool whose quorum is one appoints one account.
    function setValidator(uint256 pool, address validator, bool on) external {
        Pool storage p = _managed(pool);
        if (validator == address(0)) revert Errors.ZeroAddress();
        Validator storage v = _validators[pool][validator];
        if (v.number == 0) {
            uint8 most = p.quorum == 1 ? 1 : type(uint8).max;
            if (p.validators == most) revert Errors.TooManyValidators(most);
            v.number = ++p.validators;
            validatorAt[pool][v.number] = validator;
        }
        if (on && !v.on) {
            v.countsFrom = uint40(block.timestamp + p.leaseSeconds);
            v.resigned = false;
        }
        v.on = on;
        emit ValidatorSet(pool, validator, on);
    }

    /// @notice Closes the pool to newcomers until `start`. Seats, work and pay go on.
    function pause(uint256 pool) external {
        _managed(pool).paused = true;
        emit PoolPaused(pool);
    }

    /// @notice Opens a paused pool again. A pool is open from its creation.
    function start(uint256 pool) external {
        _managed(pool).paused = false;
        emit PoolStarted(pool);
    }

    /// @notice Whether only nodes of listed providers may join from now on. Seats stay as they are.
    function setAllowList(uint256 pool, bool on) external {
        _managed(pool).listOnly = on;
        emit AllowListSet(pool, on);
    }

    /// @notice Puts a provider on the allow list or takes it off.
    function setListed(uint256 pool, address provider, bool on) external {
        _managed(pool);
        isListed[pool][provider] = on;
        emit ListedSet(pool, provider, on);
    }

    /// @notice Bars a node from coming back, or lifts the bar. It does not eject.
    function setBan(uint256 pool, address node, bool on) external {
        _managed(pool);
        _setFlag(_seats[pool][node], BANNED, on);
        emit BanSet(pool, node, on);
    }

    /// @notice Ends the run: no node joins, no policy is published. Seats can still be left, work
    /// rooted, rewards paid.
    function end(uint256 pool) external {
        Pool storage p = _managed(pool);
        if (p.ended) revert Errors.PoolHasEnded(pool);
        p.ended = true;
        endedAt[pool] = uint64(block.timestamp);
        emit PoolEnded(pool);
    }

    /// @notice Takes a node's seat away. By the manager.
    function eject(uint256 pool, address node) external {
        _managed(pool);
        if (!_vacate(pool, node, EJECTED)) revert Errors.NotMember(pool, node);
        emit NodeEjected(pool, node);
    }

    // ----------------------------------------------------------------------------- the slasher's

    /// @notice Takes the provider's seat away if the node has one, and bars the node from coming back.
    /// The same holds for the key to which the seat was moved (see `moveSeat`), even if the node has a seat
    /// again next to it. A seat of another provider, which took the key over since, stays.
    /// @param pool The pool.
    /// @param node Whose work it was.
    /// @param provider Who answers for that work.
    // slither-disable-next-line reentrancy-no-eth
    function expel(uint256 pool, address node, address provider) external {
        if (msg.sender != slasher) revert Errors.NotAllowed(msg.sender);
        if (_expel(pool, node, provider) & MOVED != 0) {
            _expel(pool, _moves[pool][node].to, provider);
        }
    }

    // ----------------------------------------------------------------------------- the registry's

    /// @notice Gives a seat to another key of the same provider: ban and stake go with it, who
    /// answers for the work done under the old key does not change. The old key's earned money stays
    /// claimable under the old key. Once per unbonding period, so that a seat cannot run away from a
    /// slash by moving on and on; nor while a slash holds stake of the provider.
    /// @param pool The pool.
    /// @param from The node that has the seat.
    /// @param to The provider's other node, which has none.
    function moveSeat(uint256 pool, address from, address to) external {
        if (msg.sender != address(registry)) revert Errors.NotAllowed(msg.sender);
        Stay storage old = _seats[pool][from];
        Stay memory seat = old;
        if (seat.provider == address(0) || seat.leftAt != 0) revert Errors.NotMember(pool, from);
        if (registry.providerOf(to) != seat.provider) revert Errors.UnknownNode(to);
        // A key that sat here before has a record of its own, which must not be overwritten.
        if (_seats[pool][to].provider != address(0)) revert Errors.AlreadyMember(pool, to);
        if (_seats[pool][to].flags & BANNED != 0) revert Errors.Banned(pool, to);
        // An old key that sits again must not forget where its first seat went.
        address went = _moves[pool][from].to;
        uint256 until = Math.max(_moves[pool][from].cameAt, _moves[pool][went].cameAt) + _unbonding;
        if (block.timestamp < until) revert Errors.MovedRecently(from, until);
        if (vault.pendingSlash(seat.provider) != 0) revert Errors.SlashOpen(seat.provider);

        old.leftAt = uint40(block.timestamp);
        old.flags |= MOVED;
        seat.flags &= ~MOVED;
        _moves[pool][from].to = to;
        _moves[pool][to].cameAt = uint64(block.timestamp);
        _seats[pool][to] = seat;
        emit NodeLeft(pool, from);
        emit NodeJoined(pool, to, seat.provider);
        emit SeatMoved(pool, from, to, seat.provider);
    }

    // ----------------------------------------------------------------------------- the provider's

    /// @notice Lets a pool seat the caller's nodes, no matter who carries the invites, or takes the
    /// consent back; taken seats stay. Each seat commits `stakePerSeat` of the caller's stake.
    function allow(uint256 pool, bool on) external {
        _known(pool);
        allows[msg.sender][pool] = on;
        emit SeatsAllowed(pool, msg.sender, on);
    }

    // ---------------------------------------------------------------------------- the validator's

    /// @notice Gives the caller's role up, as a validator whose key is no longer safe does, also a dismissed
    /// one. Its open proposals stay, and it still answers for them.
    function resign(uint256 pool) external {
        Validator storage v = _validators[pool][msg.sender];
        if (v.number == 0 || v.resigned) revert Errors.NotAllowed(msg.sender);
        v.on = false;
        v.resigned = true;
        emit ValidatorSet(pool, msg.sender, false);
    }

    // --------------------------------------------------------------------------------- anybody's

    /// @notice Seats a node. Its provider's active stake must cover all of the provider's seats, and
    /// the provider must have agreed: it is the caller (also through `Registry.enroll`), or allowed
    /// the pool, or the node was ejected. Its stake must answer to no other manager (see the vault).
    /// @param invite The manager's invite; anyone may carry it.
    /// @param managerSignature The manager's signature over it (ERC-1271 works).
    function join(Invite calldata invite, bytes calldata managerSignature) external {
        uint256 pool = invite.pool;
        address node = invite.node;
        Pool storage p = _known(pool);
        if (p.ended) revert Errors.PoolHasEnded(pool);
        if (p.paused) revert Errors.PoolIsPaused(pool);
        if (block.timestamp > invite.deadline) {
            revert Errors.Expired(invite.deadline, block.timestamp);
        }
        address provider = _checkSeat(p, invite);
        if (p.members == p.capacity) revert Errors.PoolFull(pool, p.capacity);
        Statements.check(p.manager, inviteDigest(invite), managerSignature);

        ++p.members;
        _seats[pool][node] = Stay({
            provider: provider,
            flags: _seats[pool][node].flags & MOVED,
            leftAt: 0,
            inviteDeadline: _deadline(invite)
        });
        emit NodeJoined(pool, node, provider);
        vault.commit(provider, p.stakePerSeat, p.manager);
    }

    /// @notice Gives up a seat. By the node or the provider that answers for it.
    function leave(uint256 pool, address node) external {
        if (msg.sender != node && msg.sender != _seats[pool][node].provider) {
            revert Errors.NotAllowed(msg.sender);
        }
        if (!_vacate(pool, node, 0)) revert Errors.NotMember(pool, node);
        emit NodeLeft(pool, node);
    }

    /// @notice Puts a policy's digest on chain. Versions count 0, 1, 2, …
    /// @param statement The trainer's statement; anyone may carry it.
    /// @param trainerSignature The trainer's signature over it (ERC-1271 works).
    function publishPolicy(PolicyStatement calldata statement, bytes calldata trainerSignature)
        external
    {
        uint256 pool = statement.pool;
        Pool storage p = _known(pool);
        if (p.ended) revert Errors.PoolHasEnded(pool);
        if (statement.manifestDigest == 0) revert Errors.ZeroDigest();
        if (statement.version != p.nextVersion) {
            revert Errors.WrongVersion(p.nextVersion, statement.version);
        }
        Statements.check(p.trainer, policyStatementDigest(statement), trainerSignature);

        p.nextVersion = statement.version + 1;
        policyDigest[pool][statement.version] = statement.manifestDigest;
        emit PolicyPublished(pool, statement.version, statement.manifestDigest);
    }

    // ------------------------------------------------------------------------------------ private

    /// @dev What the node's last stay and its provider say to an invite. Returns the provider.
    function _checkSeat(Pool storage p, Invite calldata invite)
        private
        view
        returns (address provider)
    {
        uint256 pool = invite.pool;
        address node = invite.node;
        Stay memory last = _seats[pool][node];
        if (last.flags & BANNED != 0) revert Errors.Banned(pool, node);
        provider = registry.providerOf(node);
        if (provider == address(0)) revert Errors.UnknownNode(node);
        if (p.listOnly && !isListed[pool][provider]) revert Errors.NotListed(pool, provider);
        if (last.provider != address(0)) {
            // slither-disable-next-line incorrect-equality
            if (last.leftAt == 0) revert Errors.AlreadyMember(pool, node);
            if (_deadline(invite) <= last.inviteDeadline) {
                revert Errors.InviteUsed(pool, node, invite.deadline);
            }
            uint256 until = uint256(last.leftAt) + _unbonding;
            if (last.provider != provider && block.timestamp < until) {
                revert Errors.StillLiable(node, last.provider, until);
            }
        }
        // `enroll` binds the node to its own caller, so the provider speaks through the registry.
        if (msg.sender == provider || msg.sender == address(registry)) return provider;
        bool ejected = last.flags & EJECTED != 0 && last.provider == provider;
        if (!ejected && !allows[provider][pool]) revert Errors.NotAgreed(pool, provider);
    }

    /// @dev An invite's deadline as a seat keeps it.
    function _deadline(Invite calldata invite) private pure returns (uint40) {
        return uint40(Math.min(invite.deadline, type(uint40).max));
    }

    function _setFlag(Stay storage seat, uint8 flag, bool on) private {
        seat.flags = on ? seat.flags | flag : seat.flags & ~flag;
    }

    /// @dev Bars the node and frees its seat, if `provider` answers for it. Returns the seat's flags.
    function _expel(uint256 pool, address node, address provider) private returns (uint8 flags) {
        Stay storage seat = _seats[pool][node];
        flags = seat.flags;
        if (seat.provider != provider) return flags;
        seat.flags = flags | BANNED;
        if (_vacate(pool, node, EJECTED)) emit NodeEjected(pool, node);
    }

    /// @dev Frees the seat and the stake that it needs. False if the node has none.
    function _vacate(uint256 pool, address node, uint8 flag) private returns (bool) {
        Stay storage seat = _seats[pool][node];
        if (seat.provider == address(0) || seat.leftAt != 0) return false;
        Pool storage p = _pools[pool];
        seat.leftAt = uint40(block.timestamp);
        seat.flags |= flag;
        --p.members;
        vault.release(seat.provider, p.stakePerSeat);
        return true;
    }
}
