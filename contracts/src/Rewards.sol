// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { IERC20 } from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import { SafeERC20 } from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {
    ReentrancyGuardTransient
} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";
import { ECDSA } from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import { EIP712 } from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import { MerkleProof } from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";
import { Math } from "@openzeppelin/contracts/utils/math/Math.sol";
import { SafeCast } from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import { Pools } from "./Pools.sol";
import { Registry } from "./Registry.sol";
import { Slasher } from "./Slasher.sol";
import { StakeVault } from "./StakeVault.sol";
import { WindowTime } from "./WindowTime.sol";
import { Work } from "./Work.sol";
import { Errors } from "./libraries/Errors.sol";
import { Periods } from "./libraries/Periods.sol";
import { RewardTable, Statements, Submission } from "./libraries/Statements.sol";

/// @title Holds the pools' funds and pays nodes' providers and validators from them.
/// @notice A reward root promises each node and validator a cumulative amount since the pool began. It can be
/// posted once no leaf of its epoch can be rejected any more, reserves what it adds from the pool's
/// free funds, and can be claimed after a public check, in which the arbiter may disable it.
/// While the manager posts no root, anyone may post a table that the pool's quorum of validators
/// signed; it draws on the free funds, then on the manager's bond.
///
/// A provider can ask the arbiter to have an unpaid file paid. Nothing moves then: `FileRestored` is a fact
/// that reward tables must count.
///
/// Tokens held = Σ free + Σ reserved + Σ bond, over all pools.
contract Rewards is EIP712, ReentrancyGuardTransient, WindowTime {
    using SafeCast for uint256;
    using SafeERC20 for IERC20;

    /// @notice A pool received funds.
    event Funded(uint256 indexed pool, address indexed from, uint256 amount);
    /// @notice The bond that stands behind a pool's unpaid work grew.
    event BondAdded(uint256 indexed pool, address indexed from, uint256 amount);
    /// @notice A table needed more than the pool's free funds; this much of the bond was added to them.
    event BondDrawn(uint256 indexed pool, uint256 amount);
    /// @notice Free funds of an ended pool, and its bond, went back to its manager.
    event Refunded(uint256 indexed pool, address indexed to, uint256 amount);
    /// @notice A reward root was posted. `object` is the digest of the published table behind it.
    event RewardRootPosted(
        uint256 indexed pool,
        uint64 indexed epoch,
        bytes32 root,
        uint256 cumulativeTotal,
        bytes32 object,
        uint64 claimableAt
    );
    /// @notice The root of `epoch` and all that were posted on top of it, up to the one of `last`,
    /// are void; they can be posted again.
    event RewardRootDisabled(uint256 indexed pool, uint64 indexed epoch, uint64 last);
    /// @notice Rewards were paid: a node's to its provider's payout account, a validator's to itself.
    event Claimed(uint256 indexed pool, address indexed node, address payout, uint256 amount);

    /// @notice The provider asks the arbiter to have a file paid that was rejected, void or not judged. The
    /// answer comes before `judgeBy` or not at all.
    event FileAppealed(
        bytes32 indexed leaf, uint256 indexed pool, address indexed node, uint64 judgeBy
    );
    /// @notice The arbiter finds that the file is to be paid: `amount` is added to the node's rewards, at most
    /// what the run of `step` pays for the largest file. Final.
    event FileRestored(
        bytes32 indexed leaf,
        uint256 indexed pool,
        address indexed node,
        uint64 step,
        uint256 amount
    );

    /// @notice One claim of a batch.
    /// @param pool The pool.
    /// @param epoch A live reward root's epoch.
    /// @param node The node.
    /// @param cumulative Its cumulative amount in that root.
    /// @param proof Merkle path.
    struct Claim {
        uint256 pool;
        uint64 epoch;
        address node;
        uint256 cumulative;
        bytes32[] proof;
    }

    /// @param free Funds that are promised to no one.
    /// @param total Cumulative total of the last live root.
    /// @param reserved Promised by the live roots and not yet claimed.
    /// @param liveRoots Number of live roots.
    /// @param nextEpoch The earliest epoch that the next root can be for.
    /// @param quietSince When the last live root that promised something was posted; before the first,
    /// when money came first.
    struct Funds {
        uint128 free;
        uint128 total;
        uint128 reserved;
        uint32 liveRoots;
        uint64 nextEpoch;
        uint32 quietSince;
    }

    /// @param claimableAt When the public check ends.
    /// @param index Its place among the live roots; it is live while that is below `liveRoots`.
    /// @param previousNextEpoch `nextEpoch` before this root.
    /// @param previousQuietSince `quietSince` before this root.
    /// @param previousTotal Cumulative total before this root.
    struct RewardRoot {
        bytes32 root;
        uint64 claimableAt;
        uint64 index;
        uint64 previousNextEpoch;
        uint32 previousQuietSince;
        uint128 previousTotal;
    }

    /// @param pool The pool.
    /// @param judgeBy When the dispute window of the appeal ends; zero: there is no appeal.
    /// @param restored Whether the arbiter restored the file.
    /// @param node Whose file it is.
    /// @param step The step that the file was made for.
    struct Appeal {
        uint32 pool;
        uint40 judgeBy;
        bool restored;
        address node;
        uint64 step;
    }

    /// @notice How long rewards can be claimed, at least, after the pool's funds could be refunded. Afterwards
    /// the manager may take back what was not claimed: a reserve without an owner must not be stuck forever.
    uint64 public constant CLAIM_PERIOD = 365 days;
    /// @notice After so many epochs and a validity without a new root, anyone may post the validators' table.
    uint64 public constant SILENT_EPOCHS = 24;

    /// @notice What rewards are counted in.
    IERC20 public immutable token;
    /// @notice Says where a provider's rewards go.
    Registry public immutable registry;
    /// @notice The training runs.
    Pools public immutable pools;
    /// @notice Names the arbiter, who may disable a root before it can be claimed.
    Slasher public immutable slasher;
    uint64 private immutable _epochLength;
    uint64 private immutable _validity;
    uint64 private immutable _rewardDelay;
    uint64 private immutable _refundDelay;
    uint64 private immutable _silence;
    uint64 private immutable _appealWindow;
    uint64 private immutable _disputeWindow;
    uint64 private immutable _accountable;
    Work private immutable _work;

    /// @notice What stands behind a pool's unpaid work besides its funds.
    mapping(uint256 pool => uint256) public bondOf;
    /// @notice What was paid so far for a node or validator.
    mapping(uint256 pool => mapping(address node => uint256)) public claimed;
    mapping(uint256 pool => Funds) private _funds;
    mapping(uint256 pool => mapping(uint64 epoch => RewardRoot)) private _roots;
    /// @dev Epochs of the live roots; those from `liveRoots` on are of voided ones.
    mapping(uint256 pool => mapping(uint64 index => uint64)) private _epochs;
    mapping(bytes32 leaf => Appeal) private _appeals;
    mapping(uint256 pool => uint256) private _voidedAt;

    /// @param token_ A plain ERC-20.
    /// @param registry_ Says where a provider's rewards go.
    /// @param pools_ The training runs.
    /// @param vault_ Says the network's periods.
    /// @param slasher_ Names the arbiter.
    constructor(
        IERC20 token_,
        Registry registry_,
        Pools pools_,
        StakeVault vault_,
        Slasher slasher_
    ) EIP712("Prime", "1") WindowTime(vault_.uptimeFeed()) {
        if (
            address(token_) == address(0) || address(registry_) == address(0)
                || address(pools_) == address(0) || address(slasher_) == address(0)
        ) revert Errors.ZeroAddress();
        Periods memory p = vault_.periods();
        token = token_;
        registry = registry_;
        pools = pools_;
        slasher = slasher_;
        _epochLength = p.epochLength;
        _validity = p.validity;
        _rewardDelay = p.rewardDelay;
        _silence = SILENT_EPOCHS * p.epochLength + p.validity;
        _appealWindow = p.validity + p.slashWindow;
        _disputeWindow = p.disputeWindow;
        _accountable = p.slashWindow + p.disputeWindow;
        _work = slasher_.work();
        // The last work's way to its pay. A file comes up to an epoch after the end, its node roots it by
        // itself an epoch and a validity later, it is judged for a validity, its pay is held while a slash
        // or an appeal is open; the next epoch's reward root decides it, and is posted again if the
        // arbiter voids it.
        _refundDelay = 3 * p.epochLength + 2 * p.validity + p.slashWindow + p.disputeWindow + 2
            * p.rewardDelay;
    }

    /// @notice Adds to a pool's funds. By anyone, while the pool runs. Needs an allowance.
    function fund(uint256 pool, uint256 amount) external nonReentrant {
        if (pools.hasEnded(pool)) revert Errors.PoolHasEnded(pool);
        if (amount == 0) revert Errors.ZeroAmount();
        _funds[pool].free += amount.toUint128();
        emit Funded(pool, msg.sender, amount);
        _receive(pool, amount);
    }

    /// @notice Adds to the bond that pays the pool's work when its manager does not. By anyone, while the pool
    /// runs; it goes back to the manager only as the free funds do. Needs an allowance.
    function bond(uint256 pool, uint256 amount) external nonReentrant {
        if (pools.hasEnded(pool)) revert Errors.PoolHasEnded(pool);
        if (amount == 0) revert Errors.ZeroAmount();
        bondOf[pool] += amount;
        emit BondAdded(pool, msg.sender, amount);
        _receive(pool, amount);
    }

    /// @notice Takes back the bond and what is promised to no one; one `CLAIM_PERIOD` later also what was not
    /// claimed. By the manager, from `refundableAt` on: until then the last work's rewards can be promised,
    /// by it or by a table of the validators.
    function refund(uint256 pool) external nonReentrant {
        if (pools.managerOf(pool) != msg.sender) revert Errors.NotAllowed(msg.sender);
        uint256 from = refundableAt(pool);
        if (from == 0) revert Errors.PoolNotEnded(pool);
        uint256 time = windowTime();
        if (time < from) revert Errors.RefundNotYet(pool, from);
        Funds storage f = _funds[pool];
        uint256 amount = f.free + bondOf[pool];
        f.free = 0;
        bondOf[pool] = 0;
        if (time >= from + CLAIM_PERIOD) {
            amount += f.reserved;
            f.reserved = 0;
        }
        if (amount == 0) revert Errors.NothingToRefund(pool);
        emit Refunded(pool, msg.sender, amount);

        token.safeTransfer(msg.sender, amount);
    }

    /// @notice Promises rewards for the work of an epoch and all before it. By the manager.
    /// @param pool The pool.
    /// @param epoch The epoch; later than the last live root's.
    /// @param root Merkle root over `Statements.rewardLeaf(node, cumulative)`.
    /// @param cumulativeTotal Sum of the leaves' amounts.
    /// @param object Digest of the published table.
    function postRewardRoot(
        uint256 pool,
        uint64 epoch,
        bytes32 root,
        uint256 cumulativeTotal,
        bytes32 object
    ) external {
        if (pools.managerOf(pool) != msg.sender) {
            revert Errors.NotAllowed(msg.sender);
        }
        _post(pool, epoch, root, cumulativeTotal, object);
    }

    /// @notice Posts a table in the manager's place, once it has posted no root that promises more for
    /// `SILENT_EPOCHS` and a validity. By anyone. What the free funds lack is drawn from the bond. Delay and veto are those of a
    /// root of the manager's.
    /// @param table The root, as `postRewardRoot` takes it; it promises more than the last one.
    /// @param signatures ECDSA signatures over the table of as many validators of the pool as its quorum asks
    /// for, in rising order of their numbers. A dismissed validator's counts; that of one that resigned
    /// does not.
    function postTable(RewardTable calldata table, bytes[] calldata signatures) external {
        uint256 pool = table.pool;
        uint256 from = silentFrom(pool);
        if (from == 0 || windowTime() < from) revert Errors.ManagerNotSilent(pool, from);
        bytes32 digest = rewardTableDigest(table);
        address[] memory authors = new address[](signatures.length);
        for (uint256 i; i < signatures.length; ++i) {
            authors[i] = ECDSA.recoverCalldata(digest, signatures[i]);
        }
        pools.checkTableAuthors(pool, authors);

        Funds storage f = _funds[pool];
        uint256 added = Math.saturatingSub(table.cumulativeTotal, f.total);
        if (added == 0) revert Errors.ZeroAmount();
        if (added > f.free) _draw(pool, f, added);
        _post(pool, table.epoch, table.root, table.cumulativeTotal, table.object);
    }

    /// @dev Frees as much of the bond as the funds lack.
    function _draw(uint256 pool, Funds storage f, uint256 needed) private {
        uint256 missing = needed - f.free;
        uint256 bonded = bondOf[pool];
        if (missing > bonded) revert Errors.InsufficientFunds(pool, f.free + bonded, needed);
        bondOf[pool] = bonded - missing;
        f.free += missing.toUint128();
        emit BondDrawn(pool, missing);
    }

    /// @dev Takes tokens in; the silence that lets a table in counts from the first of them.
    function _receive(uint256 pool, uint256 amount) private {
        if (_funds[pool].quietSince == 0) _funds[pool].quietSince = uint32(block.timestamp);
        uint256 before = token.balanceOf(address(this));
        token.safeTransferFrom(msg.sender, address(this), amount);
        uint256 received = token.balanceOf(address(this)) - before;
        if (received != amount) revert Errors.TokenNotPlain(amount, received);
    }

    function _post(
        uint256 pool,
        uint64 epoch,
        bytes32 root,
        uint256 cumulativeTotal,
        bytes32 object
    ) private {
        if (root == 0 || object == 0) revert Errors.ZeroDigest();
        // The epoch's last leaf can be rejected up to and including (epoch + 1) · length − 1 +
        // validity.
        uint256 from = (uint256(epoch) + 1) * _epochLength + _validity;
        if (windowTime() < from) revert Errors.EpochStillOpen(epoch, from);
        Funds memory f = _funds[pool];
        if (epoch < f.nextEpoch) revert Errors.EpochNotNext(epoch, f.nextEpoch);
        if (cumulativeTotal < f.total) revert Errors.TotalShrank(f.total, cumulativeTotal);
        uint256 added = cumulativeTotal - f.total;
        if (added > f.free) revert Errors.InsufficientFunds(pool, f.free, added);

        uint64 claimableAt = uint64(block.timestamp) + _rewardDelay;
        // A voided root must not come to life again when its place is taken.
        uint64 voided = _epochs[pool][f.liveRoots];
        if (_roots[pool][voided].index == f.liveRoots) {
            _roots[pool][voided].index = type(uint64).max;
        }
        _epochs[pool][f.liveRoots] = epoch;
        _roots[pool][epoch] = RewardRoot({
            root: root,
            claimableAt: claimableAt,
            index: f.liveRoots,
            previousNextEpoch: f.nextEpoch,
            previousQuietSince: f.quietSince,
            previousTotal: f.total
        });
        // `added` is at most `free`, and `cumulativeTotal` the sum of two 128-bit numbers' parts.
        _funds[pool] = Funds({
            free: f.free - added.toUint128(),
            reserved: f.reserved + added.toUint128(),
            total: cumulativeTotal.toUint128(),
            liveRoots: f.liveRoots + 1,
            nextEpoch: epoch + 1,
            quietSince: added == 0 ? f.quietSince : uint32(block.timestamp)
        });
        emit RewardRootPosted(pool, epoch, root, cumulativeTotal, object, claimableAt);
    }

    /// @notice Voids a root that cannot be claimed yet, and with it all later ones, which build on
    /// it. By the arbiter. What they reserved is free again, also what came from the bond; the manager's
    /// silence counts as if they had not been posted.
    function disable(uint256 pool, uint64 epoch) external {
        if (msg.sender != slasher.arbiter()) revert Errors.NotAllowed(msg.sender);
        RewardRoot memory r = _live(pool, epoch);
        uint256 time = windowTime();
        if (time >= r.claimableAt) revert Errors.CheckOver(r.claimableAt, time);

        Funds storage f = _funds[pool];
        uint64 last = f.nextEpoch - 1;
        // Less than was added is left if leaves of an earlier root promised more than its total.
        uint128 taken = uint128(Math.min(f.total - r.previousTotal, f.reserved));
        f.free += taken;
        f.reserved -= taken;
        f.total = r.previousTotal;
        f.liveRoots = uint32(r.index);
        f.nextEpoch = r.previousNextEpoch;
        f.quietSince = r.previousQuietSince;
        _voidedAt[pool] = block.timestamp;
        emit RewardRootDisabled(pool, epoch, last);
    }

    /// @notice Pays what a node has earned and not yet been paid, to its provider's payout account. An
    /// account that was ever appointed a validator of the pool, and never sat in it, is paid itself.
    /// @dev Anyone may call; the money has one place to go. No guard against reentrance: the books
    /// are closed before the token is called, and all other calls are views of our own contracts.
    /// @param pool The pool.
    /// @param epoch A live reward root's epoch; the newest claimable pays most.
    /// @param node The node or validator.
    /// @param cumulative Its cumulative amount in that root.
    /// @param proof Merkle path.
    function claim(
        uint256 pool,
        uint64 epoch,
        address node,
        uint256 cumulative,
        bytes32[] calldata proof
    ) external {
        (uint256 amount, address payout) = _account(pool, epoch, node, cumulative, proof);
        if (amount == 0) revert Errors.NothingToClaim(node, claimed[pool][node]);
        token.safeTransfer(payout, amount);
    }

    /// @notice Pays many nodes in one transaction, each as `claim` would; what was paid already is
    /// skipped, so that claiming one of it first does not stop a batch.
    /// @param claims What to pay. Those that follow one another to one account are one transfer.
    /// @return paid The sum.
    function claimMany(Claim[] calldata claims) external returns (uint256 paid) {
        address last = address(0);
        uint256 owed = 0;
        for (uint256 i; i < claims.length; ++i) {
            Claim calldata c = claims[i];
            (uint256 amount, address payout) =
                _account(c.pool, c.epoch, c.node, c.cumulative, c.proof);
            if (amount == 0) continue;
            paid += amount;
            if (payout != last) {
                if (owed > 0) token.safeTransfer(last, owed);
                (last, owed) = (payout, 0);
            }
            owed += amount;
        }
        if (owed > 0) token.safeTransfer(last, owed);
    }

    /// @notice Asks the arbiter to have a rooted file paid that the pool's validators rejected or found void, or
    /// did not judge. By the provider, once a file, up to validity and slash window after the
    /// root. It holds nothing and stops nothing: a slash for the same file takes its own course.
    /// @param submission What the node signed; its digest is the leaf.
    /// @param seq The root's number.
    /// @param proof Merkle path from leaf to root.
    /// @return leaf The submission's digest, which names the appeal.
    function appeal(Submission calldata submission, uint64 seq, bytes32[] calldata proof)
        external
        returns (bytes32 leaf)
    {
        (uint256 pool, address node) = (submission.pool, submission.node);
        leaf = _work.submissionDigest(submission);
        if (_appeals[leaf].judgeBy != 0) revert Errors.AlreadyAppealed(leaf);
        if (pools.liableFor(pool, node) != msg.sender) revert Errors.NotAllowed(msg.sender);
        uint64 postedAt = _work.rootedAt(pool, seq, leaf, proof);
        if (postedAt == 0) revert Errors.NotInRoot(pool, seq, leaf);
        uint256 until = uint256(postedAt) + _appealWindow;
        if (windowTime() >= until) revert Errors.WindowClosed(leaf, until);
        until = uint256(submission.validUntil) + _accountable;
        if (postedAt > until) revert Errors.RootedLate(postedAt, until);

        uint64 judgeBy = uint64(block.timestamp) + _disputeWindow;
        _appeals[leaf] = Appeal(pool.toUint32(), uint40(judgeBy), false, node, submission.step);
        emit FileAppealed(leaf, pool, node, judgeBy);
    }

    /// @notice Has an appealed file paid: settlements add the amount to the node's rewards, unless the file is
    /// paid or was forfeited by a slash. By the arbiter, within the dispute window; not after a slash
    /// for the file was carried out.
    /// @param leaf The submission.
    /// @param amount What the file earns. Settlements add at most what its run pays for the largest file.
    function restore(bytes32 leaf, uint256 amount) external {
        if (msg.sender != slasher.arbiter()) revert Errors.NotAllowed(msg.sender);
        Appeal memory a = _appeals[leaf];
        if (a.judgeBy == 0 || a.restored) revert Errors.NoOpenAppeal(leaf);
        if (windowTime() >= a.judgeBy) revert Errors.WindowClosed(leaf, a.judgeBy);
        Slasher.State state = slasher.proposal(leaf).state;
        // slither-disable-next-line incorrect-equality
        if (state == Slasher.State.Executed) revert Errors.WrongState(leaf, uint8(state));
        if (amount == 0) revert Errors.ZeroAmount();
        _appeals[leaf].restored = true;
        emit FileRestored(leaf, a.pool, a.node, a.step, amount);
    }

    /// @notice An appeal, zeros if there is none about this submission.
    function appealOf(bytes32 leaf) external view returns (Appeal memory) {
        return _appeals[leaf];
    }

    /// @notice A pool's funds: what is promised to no one, and what is promised and not yet claimed.
    function funds(uint256 pool) external view returns (uint256 free, uint256 reserved) {
        return (_funds[pool].free, _funds[pool].reserved);
    }

    /// @notice A pool's cumulative total and the earliest epoch of its next root.
    function progress(uint256 pool) external view returns (uint256 total, uint64 nextEpoch) {
        return (_funds[pool].total, _funds[pool].nextEpoch);
    }

    /// @notice From when on the manager may take back a pool's free funds and bond (Unix time); zero while it
    /// runs. Later than the pool's end by the time in which its last work is rooted, judged and promised its
    /// pay, a dispute included; and later than its last root by the time in which the validators' table can
    /// follow, be voided once, and follow again; and later than the last root that the arbiter voided, by the same.
    function refundableAt(uint256 pool) public view returns (uint256) {
        uint256 endedAt = pools.endedAt(pool);
        if (endedAt == 0) return 0;
        uint256 tabled = Math.max(_funds[pool].quietSince + _silence, _voidedAt[pool])
            + _epochLength + _rewardDelay;
        return Math.max(endedAt + _refundDelay, tabled);
    }

    /// @notice From when on anyone may post the validators' table (Unix time); zero: the pool never had money.
    function silentFrom(uint256 pool) public view returns (uint256) {
        uint256 since = _funds[pool].quietSince;
        return since == 0 ? 0 : since + _silence;
    }

    /// @notice EIP-712 digest of a reward table under this contract's domain.
    function rewardTableDigest(RewardTable calldata table) public view returns (bytes32) {
        return _hashTypedDataV4(Statements.hash(table));
    }

    /// @notice The reward root last posted for an epoch, zeros if none was.
    function rewardRoot(uint256 pool, uint64 epoch)
        external
        view
        returns (bytes32 root, uint64 claimableAt, bool disabled)
    {
        RewardRoot storage r = _roots[pool][epoch];
        return (r.root, r.claimableAt, r.root != 0 && r.index >= _funds[pool].liveRoots);
    }

    /// @dev Enters a claim in the books. `amount` is what is to be paid now, to `payout`; zero if the
    /// node has been paid as much before.
    function _account(
        uint256 pool,
        uint64 epoch,
        address node,
        uint256 cumulative,
        bytes32[] calldata proof
    ) private returns (uint256 amount, address payout) {
        RewardRoot storage r = _live(pool, epoch);
        if (windowTime() < r.claimableAt) {
            revert Errors.NotClaimableYet(r.claimableAt, windowTime());
        }
        bytes32 leaf = Statements.rewardLeaf(node, cumulative);
        if (!MerkleProof.verifyCalldata(proof, r.root, leaf)) {
            revert Errors.BadRewardProof(node, cumulative);
        }
        uint256 paid = claimed[pool][node];
        if (cumulative <= paid) return (0, address(0));
        amount = cumulative - paid;
        claimed[pool][node] = cumulative;
        {
            Funds storage f = _funds[pool];
            uint256 reserved = f.reserved;
            if (amount > reserved) revert Errors.ReserveExceeded(reserved, amount);
            f.reserved = uint128(reserved - amount); // less than what 128 bits held
        }
        payout = registry.payoutOf(pools.liableFor(pool, node));
        if (payout == address(0)) payout = _validator(pool, node);
        emit Claimed(pool, node, payout, amount);
    }

    /// @dev Reverts unless `account` was ever appointed in the pool: then it is paid itself.
    function _validator(uint256 pool, address account) private view returns (address) {
        // slither-disable-next-line unused-return
        (uint8 number,,) = pools.validatorOf(pool, account);
        if (number == 0) revert Errors.UnknownNode(account);
        return account;
    }

    function _live(uint256 pool, uint64 epoch) private view returns (RewardRoot storage r) {
        r = _roots[pool][epoch];
        if (r.root == 0 || r.index >= _funds[pool].liveRoots) {
            revert Errors.UnknownRewardRoot(pool, epoch);
        }
    }
}
