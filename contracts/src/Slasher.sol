// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { IERC20 } from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import { ERC20Burnable } from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Burnable.sol";
import { SafeERC20 } from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {
    ReentrancyGuardTransient
} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";
import { Math } from "@openzeppelin/contracts/utils/math/Math.sol";
import { SafeCast } from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import { Pools } from "./Pools.sol";
import { StakeVault } from "./StakeVault.sol";
import { Terms } from "./Terms.sol";
import { Work } from "./Work.sol";
import { Errors } from "./libraries/Errors.sol";
import { Periods } from "./libraries/Periods.sol";
import { Submission } from "./libraries/Statements.sol";

/// @title From a validator's proposal to a slash, or to its end.
/// @notice
///     propose ──window──▶ execute (anyone)                     stake to the treasury, node expelled
///        │ dispute (provider, deposit)
///        ▼
///     disputed ──confirm (another validator)──▶ executed       the deposit to the treasury as well
///        │     └─overturn (another validator)─▶ cancelled      deposit back, the proposer pays
///        └──lapse (anyone, after the dispute window)▶ cancelled  deposit back
///     guardian: cancel, from either, until its power ends      deposit back
///
/// One submission is proposed once. A proposal takes at most what the node's seat needs, and all of
/// a provider's open ones together at most what was slashable when the first was opened (see the
/// vault). Only reasons that are a lie in the work can be proposed: downtime has no path to stake.
/// Tokens held = Σ deposits of disputed proposals.
contract Slasher is Terms, ReentrancyGuardTransient {
    using SafeCast for uint256;
    using SafeERC20 for IERC20;

    /// @notice A validator asks for a slash; `amount` is held.
    event SlashProposed(
        uint256 indexed id,
        uint256 indexed pool,
        address indexed node,
        address provider,
        bytes32 leaf,
        bytes32 evidence,
        uint8 reason,
        uint256 amount,
        uint64 executableAt
    );
    /// @notice The provider disputes it; another validator has until `judgeBy`.
    event SlashDisputed(
        uint256 indexed id,
        uint256 indexed pool,
        address indexed node,
        uint256 deposit,
        uint64 judgeBy
    );
    /// @notice Another validator found the same.
    event SlashConfirmed(uint256 indexed id, address indexed validator);
    /// @notice Another validator found otherwise; the proposer paid `penalty`.
    event SlashOverturned(uint256 indexed id, address indexed validator, uint256 penalty);
    /// @notice The stake was taken and the node expelled. Final.
    event SlashExecuted(
        uint256 indexed id,
        uint256 indexed pool,
        address indexed node,
        address provider,
        uint256 amount
    );
    /// @notice The proposal came to nothing. Final.
    event SlashCancelled(uint256 indexed id, uint256 indexed pool, address indexed node);

    /// @notice Where a proposal stands.
    enum State {
        None,
        Proposed,
        Disputed,
        Executed,
        Cancelled
    }

    /// @dev A proposal as stored: two slots. `number` is the proposer's in the pool.
    struct Entry {
        address node;
        uint40 deadline;
        uint32 pool;
        uint8 reason;
        State state;
        uint8 number;
        address provider;
        uint96 amount;
    }

    /// @param node Whose submission it is.
    /// @param deadline End of the window; once disputed, end of the dispute window.
    /// @param reason Why (protocol/core/verdict.py).
    /// @param state Where it stands.
    /// @param provider Who answers for the node.
    /// @param amount What is held.
    /// @param validator Who proposed it.
    /// @param pool The pool.
    struct Proposal {
        address node;
        uint64 deadline;
        uint8 reason;
        State state;
        address provider;
        uint96 amount;
        address validator;
        uint96 pool;
    }

    /// @param guardian May cancel.
    /// @param guardianEnds From when on it may not.
    /// @param disputeDeposit What a dispute costs if it is lost.
    /// @param validatorBond Active stake a proposer must have; what an overturned proposal costs it.
    /// @param governor May move deposit and bond, behind a delay; zero: they never move.
    struct Roles {
        address guardian;
        uint64 guardianEnds;
        uint256 disputeDeposit;
        uint256 validatorBond;
        address governor;
    }

    /// @notice Reasons from 1 to this one are lies that evidence shows; others cannot be proposed.
    uint8 public constant LAST_SLASHABLE_REASON = 49;

    /// @notice What stake and deposits are counted in.
    IERC20 public immutable token;
    /// @notice Holds the stake.
    StakeVault public immutable vault;
    /// @notice The training runs.
    Pools public immutable pools;
    /// @notice Knows the submissions.
    Work public immutable work;
    /// @notice May cancel.
    address public immutable guardian;
    /// @notice From when on it may not.
    uint64 public immutable guardianEnds;
    uint64 private immutable _slashWindow;
    uint64 private immutable _disputeWindow;

    /// @notice Number of proposals; they are numbered from 1.
    uint256 public count;
    /// @notice The proposal about a submission, zero if there is none.
    mapping(bytes32 leaf => uint256) public proposalOf;
    /// @notice What a dispute holds; later terms do not change it.
    mapping(uint256 id => uint256) public depositOf;
    mapping(uint256 id => Entry) private _entries;

    /// @param vault_ Holds the stake.
    /// @param pools_ The training runs.
    /// @param work_ Knows the submissions.
    /// @param roles The guardian, the governor and the sums at risk.
    constructor(StakeVault vault_, Pools pools_, Work work_, Roles memory roles)
        Terms(roles.governor, roles.disputeDeposit, roles.validatorBond, vault_.periods().unbonding)
    {
        if (address(pools_) == address(0) || address(work_) == address(0)) {
            revert Errors.ZeroAddress();
        }
        Periods memory p = vault_.periods();
        token = vault_.token();
        vault = vault_;
        pools = pools_;
        work = work_;
        guardian = roles.guardian;
        guardianEnds = roles.guardianEnds;
        _slashWindow = p.slashWindow;
        _disputeWindow = p.disputeWindow;
    }

    /// @notice Asks for a slash. By a validator of the submission's pool, within the leaf's validity.
    /// @param submission What the node signed.
    /// @param node The node.
    /// @param nodeSignature Its ECDSA signature.
    /// @param rootSeq Number of the root that holds the submission.
    /// @param proof Merkle path.
    /// @param evidence Digest of the published evidence.
    /// @param reason Why, from 1 to `LAST_SLASHABLE_REASON`.
    /// @param amount What is asked; what is held may be less.
    /// @return id The proposal's number.
    function propose(
        Submission calldata submission,
        address node,
        bytes calldata nodeSignature,
        uint64 rootSeq,
        bytes32[] calldata proof,
        bytes32 evidence,
        uint8 reason,
        uint256 amount
    ) external returns (uint256 id) {
        if (evidence == 0) revert Errors.ZeroDigest();
        if (reason == 0 || reason > LAST_SLASHABLE_REASON) revert Errors.BadReason(reason);
        if (amount == 0) revert Errors.ZeroAmount();
        uint8 number = pools.validatorNumber(submission.pool, msg.sender);
        if (number == 0) revert Errors.NotAllowed(msg.sender);
        bytes32 leaf = work.checkSubmission(submission, node, nodeSignature, rootSeq, proof);
        if (proposalOf[leaf] != 0) revert Errors.AlreadyProposed(leaf, proposalOf[leaf]);

        id = ++count;
        proposalOf[leaf] = id;
        Entry memory p = _open(submission.pool, node, reason, amount);
        p.number = number;
        _entries[id] = p;
        emit SlashProposed(
            id, p.pool, node, p.provider, leaf, evidence, reason, p.amount, p.deadline
        );
    }

    /// @notice Carries out an undisputed proposal once its window has closed. By anyone.
    function execute(uint256 id) external nonReentrant {
        Entry memory p = _in(id, State.Proposed);
        if (block.timestamp < p.deadline) revert Errors.WindowOpen(id, p.deadline);
        _execute(id, p);
    }

    /// @notice Stops the proposal until another validator has judged. By the provider, within the
    /// window; takes the deposit, which needs an allowance.
    function dispute(uint256 id) external nonReentrant {
        Entry memory p = _in(id, State.Proposed);
        if (msg.sender != p.provider) revert Errors.NotAllowed(msg.sender);
        if (block.timestamp >= p.deadline) revert Errors.WindowClosed(id, p.deadline);

        uint64 judgeBy = uint64(block.timestamp) + _disputeWindow;
        _entries[id].state = State.Disputed;
        _entries[id].deadline = uint40(judgeBy);
        uint256 deposit = _terms.deposit;
        emit SlashDisputed(id, p.pool, p.node, deposit, judgeBy);

        if (deposit == 0) return;
        depositOf[id] = deposit;
        uint256 before = token.balanceOf(address(this));
        token.safeTransferFrom(msg.sender, address(this), deposit);
        uint256 received = token.balanceOf(address(this)) - before;
        if (received != deposit) revert Errors.TokenNotPlain(deposit, received);
    }

    /// @notice Finds the same as the proposer: the slash is carried out and the deposit lost.
    function confirm(uint256 id) external nonReentrant {
        Entry memory p = _judged(id);
        emit SlashConfirmed(id, msg.sender);
        _execute(id, p);

        uint256 deposit = _takeDeposit(id);
        if (deposit == 0) return;
        address treasury = pools.treasuryOf(p.pool);
        if (treasury == address(0)) ERC20Burnable(address(token)).burn(deposit);
        else token.safeTransfer(treasury, deposit);
    }

    /// @notice Finds otherwise: the deposit goes back and the proposer pays from its stake.
    function overturn(uint256 id) external nonReentrant {
        Entry memory p = _judged(id);
        address proposer = pools.validatorAt(p.pool, p.number);
        uint256 bond = _terms.bond;
        uint256 deposit = _close(id);
        uint256 penalty = bond == 0 ? 0 : vault.openSlash(proposer, bond, pools.managerOf(p.pool));
        emit SlashOverturned(id, msg.sender, penalty);
        _letGo(id, p, deposit);
        if (bond > 0) vault.settleSlash(proposer, penalty, pools.treasuryOf(p.pool));
    }

    /// @notice Ends a dispute that nobody judged in time: the deposit goes back. By anyone.
    function lapse(uint256 id) external nonReentrant {
        Entry memory p = _in(id, State.Disputed);
        if (block.timestamp < p.deadline) revert Errors.WindowOpen(id, p.deadline);
        _letGo(id, p, _close(id));
    }

    /// @notice Calls a proposal off. By the guardian, until its power ends.
    function cancel(uint256 id) external nonReentrant {
        if (msg.sender != guardian) revert Errors.NotAllowed(msg.sender);
        if (block.timestamp >= guardianEnds) revert Errors.GuardianEnded(guardianEnds);
        Entry memory p = _entries[id];
        if (p.state == State.None) revert Errors.UnknownProposal(id);
        if (p.state != State.Proposed && p.state != State.Disputed) {
            revert Errors.WrongState(id, uint8(p.state));
        }
        _letGo(id, p, _close(id));
    }

    /// @notice A proposal, zeros if there is none of this number.
    function proposal(uint256 id) external view returns (Proposal memory) {
        Entry memory p = _entries[id];
        return Proposal({
            node: p.node,
            deadline: p.deadline,
            reason: p.reason,
            state: p.state,
            provider: p.provider,
            amount: p.amount,
            validator: pools.validatorAt(p.pool, p.number),
            pool: p.pool
        });
    }

    // ------------------------------------------------------------------------------------ private

    function _in(uint256 id, State state) private view returns (Entry memory p) {
        p = _entries[id];
        // slither-disable-next-line incorrect-equality
        if (p.state == State.None) revert Errors.UnknownProposal(id);
        if (p.state != state) revert Errors.WrongState(id, uint8(p.state));
    }

    /// @dev A disputed proposal that the caller may judge now: neither proposer nor accused.
    function _judged(uint256 id) private view returns (Entry memory p) {
        p = _in(id, State.Disputed);
        if (msg.sender == p.provider) revert Errors.OwnProposal(id, msg.sender);
        uint8 number = pools.validatorNumber(p.pool, msg.sender);
        // slither-disable-next-line incorrect-equality
        if (number == 0) revert Errors.NotAllowed(msg.sender);
        // slither-disable-next-line incorrect-equality
        if (number == p.number) revert Errors.OwnProposal(id, msg.sender);
        if (block.timestamp >= p.deadline) revert Errors.WindowClosed(id, p.deadline);
    }

    /// @dev The caller stands for it with its bond; holds the stake of whoever answers for the node, at
    /// most what its seat needs.
    function _open(uint256 pool, address node, uint8 reason, uint256 amount)
        private
        returns (Entry memory)
    {
        (address provider, uint256 most, address manager) = pools.liabilityOf(pool, node);
        if (provider == address(0)) revert Errors.NotMember(pool, node);
        uint256 bond = _terms.bond;
        if (bond != 0) vault.pledge(msg.sender, bond, manager);
        uint256 held = vault.openSlash(provider, Math.min(amount, most), manager);
        return Entry({
            node: node,
            deadline: uint40(block.timestamp + _slashWindow),
            pool: pool.toUint32(),
            reason: reason,
            state: State.Proposed,
            number: 0,
            provider: provider,
            amount: held.toUint96()
        });
    }

    function _execute(uint256 id, Entry memory p) private {
        _entries[id].state = State.Executed;
        emit SlashExecuted(id, p.pool, p.node, p.provider, p.amount);
        address treasury = pools.expel(p.pool, p.node, p.provider);
        vault.settleSlash(p.provider, p.amount, treasury);
    }

    /// @dev Enters the end of a proposal that came to nothing; what its dispute held is to be returned.
    function _close(uint256 id) private returns (uint256 deposit) {
        _entries[id].state = State.Cancelled;
        return _takeDeposit(id);
    }

    /// @dev Gives stake and deposit back.
    function _letGo(uint256 id, Entry memory p, uint256 deposit) private {
        emit SlashCancelled(id, p.pool, p.node);
        vault.releaseSlash(p.provider, p.amount);
        if (deposit > 0) token.safeTransfer(p.provider, deposit);
    }

    /// @dev What the dispute held; it is on its way out now.
    function _takeDeposit(uint256 id) private returns (uint256 deposit) {
        deposit = depositOf[id];
        delete depositOf[id];
    }
}
