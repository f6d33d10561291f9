// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { EIP712 } from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";

import { StakeVault } from "./StakeVault.sol";
import { Errors } from "./libraries/Errors.sol";
import { Invite, PolicyStatement, Statements } from "./libraries/Statements.sol";

/// @title What the pools remember, and what anybody can read of it.
abstract contract PoolState is EIP712 {
    /// @notice A pool was made by its manager.
    event PoolCreated(
        uint256 indexed pool, address indexed manager, address trainer, bytes32 runDigest
    );
    /// @notice The manager appointed or dismissed a validator.
    event ValidatorSet(uint256 indexed pool, address indexed validator, bool on);
    /// @notice A node took a seat.
    event NodeJoined(uint256 indexed pool, address indexed node, address indexed provider);
    /// @notice A node gave up its seat.
    event NodeLeft(uint256 indexed pool, address indexed node);
    /// @notice A node lost its seat.
    event NodeEjected(uint256 indexed pool, address indexed node);
    /// @notice A node may not come back, or may again. A slash bans as well: see `Slasher.SlashExecuted`.
    event BanSet(uint256 indexed pool, address indexed node, bool on);
    /// @notice The trainer published a policy.
    event PolicyPublished(uint256 indexed pool, uint64 indexed version, bytes32 manifestDigest);
    /// @notice The run is over.
    event PoolEnded(uint256 indexed pool);
    /// @notice Leases of steps from `fromStep` on are given under another run definition.
    event RunRevised(uint256 indexed pool, bytes32 runDigest, uint64 fromStep);
    /// @notice The slasher's address was set, for good.
    event SlasherWired(address slasher);

    /// @notice A provider lets a pool seat its nodes, or takes that back.
    event SeatsAllowed(uint256 indexed pool, address indexed provider, bool on);
    /// @notice No node joins until the pool is started again.
    event PoolPaused(uint256 indexed pool);
    /// @notice Nodes may join again.
    event PoolStarted(uint256 indexed pool);
    /// @notice Whether only listed providers' nodes may join.
    event AllowListSet(uint256 indexed pool, bool on);
    /// @notice A provider was put on the pool's allow list or taken off it.
    event ListedSet(uint256 indexed pool, address indexed provider, bool on);
    /// @notice A seat went to another key of the same provider.
    event SeatMoved(
        uint256 indexed pool, address indexed from, address indexed to, address provider
    );

    /// @param paused Whether joining is closed now.
    /// @param listOnly Whether only listed providers' nodes may join.
    /// @param nextVersion The policy version to be published next.
    /// @param validators Number of accounts ever appointed.
    struct Pool {
        address manager;
        uint88 stakePerSeat;
        uint8 quorum;
        address trainer;
        uint64 nextVersion;
        uint8 validators;
        uint88 slashAmount;
        uint32 leaseSeconds;
        uint32 capacity;
        uint32 members;
        bool ended;
        bool paused;
        bool listOnly;
        bytes32 runDigest;
    }

    /// @param runDigest Digest of the run definition.
    /// @param fromStep The first step whose leases are given under it.
    /// @param at When it was published (Unix time).
    struct Revision {
        bytes32 runDigest;
        uint64 fromStep;
        uint64 at;
    }

    /// @param number Given at the first appointment, never again to another account.
    /// @param on Whether its opinions count now.
    /// @param countsFrom Submissions that are valid until then or longer are of leases signed after
    /// the present appointment.
    /// @param resigned Whether it gave the role up itself and was not appointed since.
    struct Validator {
        uint8 number;
        bool on;
        uint40 countsFrom;
        bool resigned;
    }

    /// @notice A node's seat. It stays on record when given up: who answered for the node's work
    /// answers for it until the liability has ended.
    /// @param provider Who answers for the node, zero if it never joined.
    /// @param banned Whether it may not come back.
    /// @param leftAt When the seat was given up, zero while it is taken.
    /// @param inviteDeadline Deadline of the last used invite; a later one is needed to come back.
    struct Seat {
        address provider;
        bool banned;
        uint40 leftAt;
        uint40 inviteDeadline;
    }

    /// @dev A seat as stored: one slot. `flags`: BANNED, EJECTED, MOVED.
    struct Stay {
        address provider;
        uint8 flags;
        uint40 leftAt;
        uint40 inviteDeadline;
    }

    /// @dev Where a seat went, and when the seat of this node came from another key.
    struct Move {
        address to;
        uint64 cameAt;
    }

    /// @dev The node may not come back.
    uint8 internal constant BANNED = 1;
    /// @dev The seat was taken away, not given up: the provider's consent stands.
    uint8 internal constant EJECTED = 2;
    /// @dev A seat of this node went to another key (`_moves`); kept for good.
    uint8 internal constant MOVED = 4;

    /// @notice Holds the stake that seats need.
    StakeVault public immutable vault;
    uint64 internal immutable _unbonding;

    /// @notice May expel nodes; set once by the deployer.
    address public slasher;
    /// @notice Number of pools; they are numbered from 1.
    uint256 public count;
    /// @notice Digest of each published policy.
    mapping(uint256 pool => mapping(uint64 version => bytes32)) public policyDigest;
    /// @notice The account that got a validator's number in a pool, from 1.
    mapping(uint256 pool => mapping(uint8 number => address)) public validatorAt;
    /// @notice Whether a provider lets a pool seat its nodes.
    mapping(address provider => mapping(uint256 pool => bool)) public allows;
    /// @notice Whether a provider is on a pool's allow list.
    mapping(uint256 pool => mapping(address provider => bool)) public isListed;
    mapping(uint256 pool => mapping(address account => Validator)) internal _validators;
    mapping(uint256 pool => Pool) internal _pools;
    mapping(uint256 pool => mapping(address node => Stay)) internal _seats;
    mapping(uint256 pool => mapping(address node => Move)) internal _moves;
    /// @notice When a pool ended (Unix time), zero while it runs.
    mapping(uint256 pool => uint64) public endedAt;
    // slither-disable-next-line uninitialized-state
    mapping(uint256 pool => Revision[]) internal _revisions;

    /// @param vault_ Holds the stake.
    constructor(StakeVault vault_) EIP712("Prime", "1") {
        vault = vault_;
        _unbonding = vault_.periods().unbonding;
    }

    /// @notice Who may join a pool now, and when it ended (Unix time, zero while it runs).
    function rulesOf(uint256 pool)
        external
        view
        returns (bool paused, bool listOnly, uint64 ended)
    {
        Pool storage p = _known(pool);
        return (p.paused, p.listOnly, endedAt[pool]);
    }

    /// @notice A pool's facts. Reverts if there is no such pool.
    function poolOf(uint256 pool)
        external
        view
        returns (
            address manager,
            address trainer,
            bytes32 runDigest,
            uint256 stakePerSeat,
            uint32 capacity,
            uint32 members,
            bool ended
        )
    {
        Pool storage p = _known(pool);
        return (p.manager, p.trainer, p.runDigest, p.stakePerSeat, p.capacity, p.members, p.ended);
    }

    /// @notice The revisions of a pool's run after its first definition, which `poolOf` names, in the
    /// order of their steps.
    function revisionsOf(uint256 pool) external view returns (Revision[] memory) {
        return _revisions[pool];
    }

    /// @notice What a pool's judgement rests on: the number of opinions, what a slash takes, the longest
    /// lease. Reverts if there is no such pool.
    function judgementOf(uint256 pool)
        external
        view
        returns (uint8 quorum, uint256 slashAmount, uint32 leaseSeconds)
    {
        Pool storage p = _known(pool);
        return (p.quorum, p.slashAmount, p.leaseSeconds);
    }

    /// @notice Reverts unless the accounts are as many as the pool's quorum asks for, in rising order of
    /// their numbers, appointed now, and appointed before a lease was signed that ends at `validUntil`.
    /// @param pool The pool.
    /// @param authors Who signed.
    /// @param validUntil End of the submission that they judge.
    /// @return numbers Their numbers, one byte each, the first in the lowest.
    function quorumOf(uint256 pool, address[] calldata authors, uint64 validUntil)
        external
        view
        returns (uint24 numbers)
    {
        uint256 quorum = _known(pool).quorum;
        if (authors.length != quorum) revert Errors.NoQuorum(authors.length, quorum);
        // slither-disable-next-line uninitialized-local
        uint8 last;
        for (uint256 i; i < quorum; ++i) {
            Validator memory v = _validators[pool][authors[i]];
            if (!v.on) revert Errors.NotAllowed(authors[i]);
            if (v.number <= last) revert Errors.OpinionsOutOfOrder(last, v.number);
            if (v.countsFrom > validUntil) {
                revert Errors.AppointedLate(authors[i], v.countsFrom, validUntil);
            }
            last = v.number;
            numbers |= uint24(last) << uint24(8 * i);
        }
    }

    /// @notice Reverts unless the accounts are as many as the pool's quorum asks for, in rising order of
    /// their numbers, and none of them resigned. Dismissed ones count: a manager that does not pay must not
    /// silence those who say what it owes.
    function checkTableAuthors(uint256 pool, address[] calldata authors) external view {
        uint256 needed = _known(pool).quorum;
        if (authors.length != needed) revert Errors.NoQuorum(authors.length, needed);
        // slither-disable-next-line uninitialized-local
        uint8 previous;
        for (uint256 i; i < needed; ++i) {
            Validator memory v = _validators[pool][authors[i]];
            if (v.number == 0 || v.resigned) revert Errors.NotAllowed(authors[i]);
            if (v.number <= previous) revert Errors.OpinionsOutOfOrder(previous, v.number);
            previous = v.number;
        }
    }

    /// @notice The accounts of the numbers that `quorumOf` returned.
    function authorsOf(uint256 pool, uint24 numbers)
        external
        view
        returns (address[] memory authors)
    {
        uint256 length = numbers > type(uint16).max ? 3 : numbers > type(uint8).max ? 2 : 1;
        authors = new address[](length);
        for (uint256 i; i < length; ++i) {
            authors[i] = validatorAt[pool][uint8(numbers >> (8 * i))];
        }
    }

    /// @notice A validator's number in a pool (zero if it never was one), whether its opinions count
    /// now, and from which submission's end on.
    function validatorOf(uint256 pool, address account)
        external
        view
        returns (uint8 number, bool on, uint40 countsFrom)
    {
        Validator memory v = _validators[pool][account];
        return (v.number, v.on, v.countsFrom);
    }

    /// @notice Whether an account's opinions count in a pool.
    function isValidator(uint256 pool, address account) external view returns (bool) {
        return _validators[pool][account].on;
    }

    /// @notice A pool's manager. Reverts if there is no such pool.
    function managerOf(uint256 pool) external view returns (address) {
        return _known(pool).manager;
    }

    /// @notice Whether a pool has ended.
    function hasEnded(uint256 pool) external view returns (bool) {
        return _known(pool).ended;
    }

    /// @notice The policy version that the trainer publishes next.
    function nextVersion(uint256 pool) external view returns (uint64) {
        return _known(pool).nextVersion;
    }

    /// @notice Whether a node has a seat in a pool now.
    function isMember(uint256 pool, address node) external view returns (bool) {
        Stay storage seat = _seats[pool][node];
        return seat.provider != address(0) && seat.leftAt == 0;
    }

    /// @notice A node's present or last seat.
    function seatOf(uint256 pool, address node) external view returns (Seat memory) {
        Stay memory s = _seats[pool][node];
        bool banned = s.flags & BANNED != 0;
        return Seat(s.provider, banned, s.leftAt, s.inviteDeadline);
    }

    /// @notice Who answers for a node's work in a pool; it outlasts the seat.
    function liableFor(uint256 pool, address node) external view returns (address provider) {
        return _seats[pool][node].provider;
    }

    /// @notice Who answers for a node's work in a pool, with how much for each submission, and to whom.
    /// @return provider Zero if the node never joined.
    /// @return amount What one slash takes.
    /// @return manager The pool's.
    function liabilityOf(uint256 pool, address node)
        external
        view
        returns (address provider, uint256 amount, address manager)
    {
        Pool storage p = _pools[pool];
        return (_seats[pool][node].provider, p.slashAmount, p.manager);
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

    function _known(uint256 pool) internal view returns (Pool storage p) {
        p = _pools[pool];
        if (p.manager == address(0)) revert Errors.UnknownPool(pool);
    }

    function _managed(uint256 pool) internal view returns (Pool storage p) {
        p = _known(pool);
        if (p.manager != msg.sender) revert Errors.NotAllowed(msg.sender);
    }
}
