// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { EIP712 } from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import { Math } from "@openzeppelin/contracts/utils/math/Math.sol";

import { Registry } from "./Registry.sol";
import { StakeVault } from "./StakeVault.sol";
import { Errors } from "./libraries/Errors.sol";
import { Invite, PolicyStatement, Statements } from "./libraries/Statements.sol";

/// @title Training runs: who manages them, who sits in them, which policies they published.
/// @notice Holds no tokens. The manager is trusted to invite, to judge and to pay; every step of it
/// is an event, and stake moves only through the slasher. No call's cost depends on a pool's size.
contract Pools is EIP712 {
    /// @notice A pool was made by its manager.
    event PoolCreated(
        uint256 indexed pool, address indexed manager, address trainer, bytes32 runDigest
    );
    /// @notice The manager appointed or dismissed a validator.
    event ValidatorSet(uint256 indexed pool, address indexed validator, bool on);
    /// @notice A node took a seat.
    event NodeJoined(
        uint256 indexed pool, address indexed node, address indexed provider, uint8 speedClass
    );
    /// @notice A node gave up its seat.
    event NodeLeft(uint256 indexed pool, address indexed node);
    /// @notice A node lost its seat.
    event NodeEjected(uint256 indexed pool, address indexed node);
    /// @notice A node may not come back, or may again. A slash bans as well, without this event.
    event BanSet(uint256 indexed pool, address indexed node, bool on);
    /// @notice The trainer published a policy.
    event PolicyPublished(uint256 indexed pool, uint64 indexed version, bytes32 manifestDigest);
    /// @notice The run is over.
    event PoolEnded(uint256 indexed pool);

    /// @param nextVersion The policy version to be published next.
    /// @param validators Number of accounts ever appointed.
    struct Pool {
        address manager;
        uint32 capacity;
        uint32 members;
        bool ended;
        address trainer;
        uint96 stakePerClass;
        address treasury;
        uint64 nextVersion;
        uint8 validators;
        bytes32 runDigest;
    }

    /// @param number Given at the first appointment, never again to another account.
    /// @param on Whether its verdicts count now.
    struct Validator {
        uint8 number;
        bool on;
    }

    /// @notice A node's seat. It stays on record when given up: who answered for the node's work
    /// answers for it until the liability has ended.
    /// @param provider Who answers for the node, zero if it never joined.
    /// @param speedClass The class of the present or last stay.
    /// @param banned Whether it may not come back.
    /// @param leftAt When the seat was given up, zero while it is taken.
    /// @param inviteDeadline Deadline of the last used invite; a later one is needed to come back.
    struct Seat {
        address provider;
        uint8 speedClass;
        bool banned;
        uint40 leftAt;
        uint40 inviteDeadline;
    }

    /// @notice Says who owns a node.
    Registry public immutable registry;
    /// @notice Holds the stake that seats need.
    StakeVault public immutable vault;
    uint64 private immutable _unbonding;
    address private immutable _deployer = msg.sender;

    /// @notice May expel nodes; set once by the deployer.
    address public slasher;
    /// @notice Number of pools; they are numbered from 1.
    uint256 public count;
    /// @notice Digest of each published policy.
    mapping(uint256 pool => mapping(uint64 version => bytes32)) public policyDigest;
    /// @notice The account that got a validator's number in a pool, from 1.
    mapping(uint256 pool => mapping(uint8 number => address)) public validatorAt;
    mapping(uint256 pool => mapping(address account => Validator)) private _validators;
    mapping(uint256 pool => Pool) private _pools;
    mapping(uint256 pool => mapping(address node => Seat)) private _seats;

    /// @param registry_ Says who owns a node.
    /// @param vault_ Holds the stake.
    constructor(Registry registry_, StakeVault vault_) EIP712("Prime", "1") {
        if (address(registry_) == address(0)) revert Errors.ZeroAddress();
        registry = registry_;
        vault = vault_;
        _unbonding = vault_.periods().unbonding;
    }

    /// @notice Tells of the slasher, deployed later. Once, by the deployer.
    function wire(address slasher_) external {
        if (msg.sender != _deployer) revert Errors.NotAllowed(msg.sender);
        if (slasher != address(0)) revert Errors.AlreadyWired();
        if (slasher_ == address(0)) revert Errors.ZeroAddress();
        slasher = slasher_;
    }

    // ----------------------------------------------------------------------------- the manager's

    /// @notice Makes a pool whose manager is the caller.
    /// @param trainer Signs the policies.
    /// @param runDigest Digest of the run definition.
    /// @param stakePerClass Active stake that a seat needs, times its speed class; also the most
    /// that one submission can be slashed for, times the class.
    /// @param capacity Seats.
    /// @param treasury Receives slashed stake; zero burns it.
    /// @return pool The new pool's number.
    function create(
        address trainer,
        bytes32 runDigest,
        uint256 stakePerClass,
        uint32 capacity,
        address treasury
    ) external returns (uint256 pool) {
        if (trainer == address(0)) revert Errors.ZeroAddress();
        if (runDigest == 0) revert Errors.ZeroDigest();
        if (capacity == 0) revert Errors.ZeroCapacity();
        // A class is at most 255, so a seat's stake always fits the vault's 96 bits.
        if (stakePerClass > type(uint88).max) {
            revert Errors.InsufficientStake(msg.sender, type(uint88).max, stakePerClass);
        }
        pool = ++count;
        Pool storage p = _pools[pool];
        p.manager = msg.sender;
        p.capacity = capacity;
        p.trainer = trainer;
        p.stakePerClass = uint96(stakePerClass);
        p.treasury = treasury;
        p.runDigest = runDigest;
        emit PoolCreated(pool, msg.sender, trainer, runDigest);
    }

    /// @notice Appoints or dismisses a validator.
    function setValidator(uint256 pool, address validator, bool on) external {
        Pool storage p = _managed(pool);
        if (validator == address(0)) revert Errors.ZeroAddress();
        if (on && validator == p.treasury) revert Errors.ValidatorIsTreasury(validator);
        Validator storage v = _validators[pool][validator];
        if (v.number == 0) {
            if (p.validators == type(uint8).max) revert Errors.TooManyValidators(p.validators);
            v.number = ++p.validators;
            validatorAt[pool][v.number] = validator;
        }
        v.on = on;
        emit ValidatorSet(pool, validator, on);
    }

    /// @notice Bars a node from coming back, or lifts the bar. It does not eject.
    function setBan(uint256 pool, address node, bool on) external {
        _managed(pool);
        _seats[pool][node].banned = on;
        emit BanSet(pool, node, on);
    }

    /// @notice Ends the run: nobody joins, no policy is published. Seats can still be left, work
    /// rooted, rewards paid.
    function end(uint256 pool) external {
        Pool storage p = _managed(pool);
        if (p.ended) revert Errors.PoolHasEnded(pool);
        p.ended = true;
        emit PoolEnded(pool);
    }

    /// @notice Takes a node's seat away. By the manager.
    function eject(uint256 pool, address node) external {
        _managed(pool);
        if (!_vacate(pool, node)) revert Errors.NotMember(pool, node);
        emit NodeEjected(pool, node);
    }

    // ----------------------------------------------------------------------------- the slasher's

    /// @notice Takes the seat away if there is one, and bars the node from coming back.
    /// @return treasury Where the slashed stake goes, zero if it is burned.
    function expel(uint256 pool, address node) external returns (address treasury) {
        if (msg.sender != slasher) revert Errors.NotAllowed(msg.sender);
        _seats[pool][node].banned = true;
        if (_vacate(pool, node)) emit NodeEjected(pool, node);
        return _pools[pool].treasury;
    }

    // --------------------------------------------------------------------------------- anybody's

    /// @notice Seats a node. Its provider's active stake must cover all of the provider's seats.
    /// @param invite The manager's invite; anyone may carry it.
    /// @param managerSignature The manager's signature over it (ERC-1271 works).
    function join(Invite calldata invite, bytes calldata managerSignature) external {
        uint256 pool = invite.pool;
        address node = invite.node;
        Pool storage p = _known(pool);
        Seat storage seat = _seats[pool][node];
        Seat memory last = seat;
        if (p.ended) revert Errors.PoolHasEnded(pool);
        if (invite.speedClass == 0) revert Errors.ZeroClass();
        if (block.timestamp > invite.deadline) {
            revert Errors.Expired(invite.deadline, block.timestamp);
        }
        if (last.banned) revert Errors.Banned(pool, node);
        address provider = registry.providerOf(node);
        if (provider == address(0)) revert Errors.UnknownNode(node);
        uint40 deadline = uint40(Math.min(invite.deadline, type(uint40).max));
        if (last.provider != address(0)) {
            if (last.leftAt == 0) revert Errors.AlreadyMember(pool, node);
            if (deadline <= last.inviteDeadline) {
                revert Errors.InviteUsed(pool, node, invite.deadline);
            }
            uint256 until = uint256(last.leftAt) + _unbonding;
            if (last.provider != provider && block.timestamp < until) {
                revert Errors.StillLiable(node, last.provider, until);
            }
        }
        if (p.members == p.capacity) revert Errors.PoolFull(pool, p.capacity);
        Statements.check(p.manager, inviteDigest(invite), managerSignature);

        ++p.members;
        _seats[pool][node] = Seat({
            provider: provider,
            speedClass: invite.speedClass,
            banned: false,
            leftAt: 0,
            inviteDeadline: deadline
        });
        emit NodeJoined(pool, node, provider, invite.speedClass);
        vault.commit(provider, uint256(p.stakePerClass) * invite.speedClass);
    }

    /// @notice Gives up a seat. By the node or the provider that answers for it.
    function leave(uint256 pool, address node) external {
        if (msg.sender != node && msg.sender != _seats[pool][node].provider) {
            revert Errors.NotAllowed(msg.sender);
        }
        if (!_vacate(pool, node)) revert Errors.NotMember(pool, node);
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

    // -------------------------------------------------------------------------------------- views

    /// @notice A pool's facts. Reverts if there is no such pool.
    function poolOf(uint256 pool)
        external
        view
        returns (
            address manager,
            address trainer,
            bytes32 runDigest,
            uint256 stakePerClass,
            uint32 capacity,
            uint32 members,
            bool ended,
            address treasury
        )
    {
        Pool storage p = _known(pool);
        return (
            p.manager,
            p.trainer,
            p.runDigest,
            p.stakePerClass,
            p.capacity,
            p.members,
            p.ended,
            p.treasury
        );
    }

    /// @notice Whether an account's verdicts count in a pool.
    function isValidator(uint256 pool, address account) external view returns (bool) {
        return _validators[pool][account].on;
    }

    /// @notice A validator's number in a pool, zero if its verdicts do not count.
    function validatorNumber(uint256 pool, address account) external view returns (uint8) {
        Validator memory v = _validators[pool][account];
        return v.on ? v.number : 0;
    }

    /// @notice A pool's manager. Reverts if there is no such pool.
    function managerOf(uint256 pool) external view returns (address) {
        return _known(pool).manager;
    }

    /// @notice Where a pool's slashed stake goes, zero if it is burned.
    function treasuryOf(uint256 pool) external view returns (address) {
        return _known(pool).treasury;
    }

    /// @notice Whether a pool has ended.
    function hasEnded(uint256 pool) external view returns (bool) {
        return _known(pool).ended;
    }

    /// @notice The policy version that the trainer publishes next.
    function nextVersion(uint256 pool) external view returns (uint64) {
        return _known(pool).nextVersion;
    }

    /// @notice A member's speed class, 0 if the node is no member.
    function classOf(uint256 pool, address node) external view returns (uint8) {
        Seat storage seat = _seats[pool][node];
        return seat.leftAt == 0 ? seat.speedClass : 0;
    }

    /// @notice A node's present or last seat.
    function seatOf(uint256 pool, address node) external view returns (Seat memory) {
        return _seats[pool][node];
    }

    /// @notice Who answers for a node's work in a pool; it outlasts the seat.
    function liableFor(uint256 pool, address node) external view returns (address provider) {
        return _seats[pool][node].provider;
    }

    /// @notice Who answers for a node's work in a pool, and with how much for each submission.
    /// @return provider Zero if the node never joined.
    /// @return stake Stake that its seat needs, or needed.
    function liabilityOf(uint256 pool, address node)
        external
        view
        returns (address provider, uint256 stake)
    {
        Seat storage seat = _seats[pool][node];
        return (seat.provider, uint256(_pools[pool].stakePerClass) * seat.speedClass);
    }

    /// @notice EIP-712 digest of an invite under this contract's domain.
    function inviteDigest(Invite calldata invite) public view returns (bytes32) {
        return _hashTypedDataV4(Statements.hash(invite));
    }

    /// @notice EIP-712 digest of a policy statement under this contract's domain.
    function policyStatementDigest(PolicyStatement calldata statement)
        public
        view
        returns (bytes32)
    {
        return _hashTypedDataV4(Statements.hash(statement));
    }

    // ------------------------------------------------------------------------------------ private

    function _known(uint256 pool) private view returns (Pool storage p) {
        p = _pools[pool];
        if (p.manager == address(0)) revert Errors.UnknownPool(pool);
    }

    function _managed(uint256 pool) private view returns (Pool storage p) {
        p = _known(pool);
        if (p.manager != msg.sender) revert Errors.NotAllowed(msg.sender);
    }

    /// @dev Frees the seat and the stake that it needs. False if the node has none.
    function _vacate(uint256 pool, address node) private returns (bool) {
        Seat storage seat = _seats[pool][node];
        if (seat.provider == address(0) || seat.leftAt != 0) return false;
        Pool storage p = _pools[pool];
        seat.leftAt = uint40(block.timestamp);
        --p.members;
        vault.release(seat.provider, uint256(p.stakePerClass) * seat.speedClass);
        return true;
    }
}
