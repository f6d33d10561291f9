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

import { Court } from "./Court.sol";
import { Pools } from "./Pools.sol";
import { StakeVault } from "./StakeVault.sol";
import { Terms } from "./Terms.sol";
import { Work } from "./Work.sol";
import { Errors } from "./libraries/Errors.sol";
import { Periods } from "./libraries/Periods.sol";
import { Opinions, Submission, Voice } from "./libraries/Statements.sol";

/// @title From the quorum's opinions to a slash, or to its end.
/// @notice
///     propose ──window──▶ execute (anyone)                     stake taken, node expelled
///        │ dispute (provider, deposit) or object (provider: the evidence is not served)
///        ▼
///     disputed, objected ──confirm (judge)──▶ executed         the deposit is lost as well
///        │     └─overturn (judge)─▶ cancelled                  deposit back, the authors pay
///        └──lapse (anyone, after the dispute window)▶ cancelled  deposit back: silence cancels
///     arbiter: cancel, from any of these                       deposit back
///
/// The judge of a dispute is the court if the provider asked for it before; else it is the arbiter, who also
/// judges objections.
/// A proposal is keyed by its submission's digest, so one submission is proposed once. It asks for the
/// pool's slash amount; what other proposals hold of the stake then is taken up when it is carried out.
/// It keeps the terms in force when it was made; each of its authors stands for it with a bond.
/// What takes nothing neither expels nor bans. Downtime has no path to stake.
/// Tokens held = Σ deposits of disputed proposals.
contract Slasher is Terms, ReentrancyGuardTransient {
    using SafeCast for uint256;
    using SafeERC20 for IERC20;

    /// @notice The quorum asks for a slash; `amount` is held. `evidence` and `reason` are the first
    /// author's. Each author stands for one more open proposal, until this one comes to its end.
    event SlashProposed(
        bytes32 indexed leaf,
        uint256 indexed pool,
        address indexed node,
        address provider,
        bytes32 evidence,
        bytes32 reason,
        uint256 amount,
        uint64 executableAt,
        address[] authors
    );
    /// @notice The provider disputes it; it lapses if it is not judged by `judgeBy`.
    event SlashDisputed(
        bytes32 indexed leaf,
        uint256 indexed pool,
        address indexed node,
        uint256 deposit,
        uint64 judgeBy
    );
    /// @notice The provider says that the evidence is not served; only the arbiter can let it proceed.
    event SlashObjected(
        bytes32 indexed leaf, uint256 indexed pool, address indexed node, uint64 judgeBy
    );
    /// @notice A judge found the same as the authors.
    event SlashConfirmed(bytes32 indexed leaf, address indexed judge);
    /// @notice A judge found otherwise; the authors paid `penalty`, of it `compensation` to the provider.
    event SlashOverturned(
        bytes32 indexed leaf, address indexed judge, uint256 penalty, uint256 compensation
    );
    /// @notice The stake was taken; if it is more than nothing, the node was expelled and banned. Final.
    event SlashExecuted(
        bytes32 indexed leaf,
        uint256 indexed pool,
        address indexed node,
        address provider,
        uint256 amount
    );
    /// @notice The slash was cancelled. Final.
    event SlashCancelled(bytes32 indexed leaf, uint256 indexed pool, address indexed node);

    /// @notice Where a proposal stands.
    enum State {
        None,
        Proposed,
        Disputed,
        Executed,
        Cancelled,
        Objected
    }

    /// @dev A proposal as stored: two slots. `authors` are numbers in the pool, a byte each; `terms` is
    /// the number of the terms that hold for it.
    struct Entry {
        address node;
        uint32 deadline;
        uint32 pool;
        State state;
        uint24 authors;
        address provider;
        uint88 held;
        uint8 terms;
    }

    /// @param node Whose submission it is.
    /// @param deadline End of the window; once disputed or objected to, end of the dispute window.
    /// @param state Where it stands.
    /// @param provider Who answers for the node.
    /// @param amount What is held.
    /// @param pool The pool.
    /// @param authors Whose opinions it rests on.
    struct Proposal {
        address node;
        uint64 deadline;
        State state;
        address provider;
        uint96 amount;
        uint96 pool;
        address[] authors;
    }

    /// @param arbiter May cancel, and judges.
    /// @param disputeDeposit What a dispute costs if it is lost.
    /// @param validatorBond Active stake that each author must have for each of its open proposals; what
    /// an overturned proposal costs each of them.
    /// @param governor May move deposit and bond, behind a delay; zero: they never move.
    struct Roles {
        address arbiter;
        uint256 disputeDeposit;
        uint256 validatorBond;
        address governor;
    }

    /// @notice Interest in per cent a year on what an overturned proposal held, for both windows, paid from
    /// the authors' penalties.
    uint256 public constant INTEREST = 10;

    /// @notice What stake and deposits are counted in.
    IERC20 public immutable token;
    /// @notice Holds the stake.
    StakeVault public immutable vault;
    /// @notice The training runs.
    Pools public immutable pools;
    /// @notice Knows the submissions.
    Work public immutable work;
    /// @notice Judges disputes for which a provider asked for jurors.
    Court public immutable court;
    uint64 private immutable _slashWindow;
    uint64 private immutable _disputeWindow;

    /// @notice What a dispute holds.
    mapping(bytes32 leaf => uint256) public depositOf;
    mapping(bytes32 leaf => Entry) private _entries;

    /// @param vault_ Holds the stake.
    /// @param pools_ The training runs.
    /// @param work_ Knows the submissions.
    /// @param court_ Judges disputes for which a provider asked for jurors.
    /// @param roles The arbiter, the governor and the sums at risk.
    constructor(StakeVault vault_, Pools pools_, Work work_, Court court_, Roles memory roles)
        Terms(
            roles.governor,
            roles.arbiter,
            roles.disputeDeposit,
            roles.validatorBond,
            vault_.periods().unbonding,
            vault_.uptimeFeed()
        )
    {
        if (
            address(pools_) == address(0) || address(work_) == address(0)
                || address(court_) == address(0)
        ) revert Errors.ZeroAddress();
        Periods memory p = vault_.periods();
        token = vault_.token();
        vault = vault_;
        pools = pools_;
        work = work_;
        court = court_;
        _slashWindow = p.slashWindow;
        _disputeWindow = p.disputeWindow;
    }

    /// @notice Asks for a slash. By anyone with the quorum's opinions, within the leaf's validity.
    /// @param submission What the node signed.
    /// @param nodeSignature Its ECDSA signature.
    /// @param rootSeq Number of the root that holds the submission.
    /// @param proof Merkle path.
    /// @param opinions Outcome rejected, each with the digest of its evidence.
    /// @return leaf The submission's digest, which names the proposal.
    function propose(
        Submission calldata submission,
        bytes calldata nodeSignature,
        uint64 rootSeq,
        bytes32[] calldata proof,
        Opinions calldata opinions
    ) external returns (bytes32 leaf) {
        uint24 numbers;
        address[] memory authors;
        (leaf, numbers, authors) =
            work.checkRejected(submission, nodeSignature, rootSeq, proof, opinions);
        if (_entries[leaf].state != State.None) revert Errors.AlreadyProposed(leaf);

        // slither-disable-next-line reentrancy-no-eth
        Entry memory p = _open(submission.pool, submission.node, authors);
        p.authors = numbers;
        _entries[leaf] = p;
        Voice calldata first = opinions.voices[0];
        emit SlashProposed(
            leaf,
            p.pool,
            p.node,
            p.provider,
            first.evidence,
            first.reason,
            p.held,
            p.deadline,
            authors
        );
    }

    /// @notice Carries out an undisputed proposal once its window has closed. By anyone.
    function execute(bytes32 leaf) external nonReentrant {
        Entry memory p = _in(leaf, State.Proposed);
        if (windowTime() < p.deadline) revert Errors.WindowOpen(leaf, p.deadline);
        _execute(leaf, p);
    }

    /// @notice Stops the proposal until it is judged. By the provider, within the window; takes the
    /// deposit, which needs an allowance.
    function dispute(bytes32 leaf) external nonReentrant {
        (Entry memory p, uint64 judgeBy) = _stop(leaf, State.Disputed);
        uint256 deposit = _terms[p.terms].deposit;
        emit SlashDisputed(leaf, p.pool, p.node, deposit, judgeBy);

        if (deposit == 0) return;
        depositOf[leaf] = deposit;
        uint256 before = token.balanceOf(address(this));
        token.safeTransferFrom(msg.sender, address(this), deposit);
        uint256 received = token.balanceOf(address(this)) - before;
        if (received != deposit) revert Errors.TokenNotPlain(deposit, received);
    }

    /// @notice Says that the evidence cannot be fetched: the proposal stops until the arbiter has judged.
    /// By the provider, within the window, without a deposit.
    function object(bytes32 leaf) external {
        (Entry memory p, uint64 judgeBy) = _stop(leaf, State.Objected);
        emit SlashObjected(leaf, p.pool, p.node, judgeBy);
    }

    /// @notice Finds the same as the authors: the slash is carried out and the deposit lost. By the judge.
    /// @return deposit What the dispute held; the court receives it if it is the judge.
    function confirm(bytes32 leaf) external nonReentrant returns (uint256 deposit) {
        Entry memory p = _judged(leaf);
        emit SlashConfirmed(leaf, msg.sender);
        _execute(leaf, p);

        deposit = _takeDeposit(leaf);
        if (deposit == 0) return 0;
        address treasury = msg.sender == address(court) ? msg.sender : vault.treasury();
        if (treasury == address(0)) ERC20Burnable(address(token)).burn(deposit);
        else token.safeTransfer(treasury, deposit);
    }

    /// @notice Finds otherwise: the deposit goes back, and each author pays its bond. The provider has
    /// interest on what was held from it. By the judge.
    /// @return pay What the court receives if it is the judge: the bonds less that interest.
    function overturn(bytes32 leaf) external nonReentrant returns (uint256 pay) {
        Entry memory p = _judged(leaf);
        address[] memory authors = pools.authorsOf(p.pool, p.authors);
        address manager = pools.managerOf(p.pool);
        uint256 bond = _terms[p.terms].bond;
        uint256 owed =
            uint256(p.held) * INTEREST * (_slashWindow + _disputeWindow) / (100 * 365 days);
        bool byCourt = msg.sender == address(court);
        // slither-disable-next-line uninitialized-local
        uint256 penalty;
        // slither-disable-next-line uninitialized-local
        uint256 compensation;
        _letGo(leaf, p, authors);
        for (uint256 i; i < authors.length && bond > 0; ++i) {
            (uint256 taken, uint256 paid) = vault.fine(
                authors[i],
                bond,
                manager,
                byCourt ? address(this) : p.provider,
                byCourt ? bond : owed - compensation
            );
            penalty += taken;
            compensation += paid;
        }
        if (byCourt) {
            compensation = Math.min(owed, penalty);
            pay = penalty - compensation;
            token.safeTransfer(p.provider, compensation);
            token.safeTransfer(msg.sender, pay);
        }
        emit SlashOverturned(leaf, msg.sender, penalty, compensation);
    }

    /// @notice Ends a dispute or objection that was not judged in time: the deposit goes back. By anyone.
    function lapse(bytes32 leaf) external nonReentrant {
        Entry memory p = _stopped(leaf);
        if (windowTime() < p.deadline) revert Errors.WindowOpen(leaf, p.deadline);
        _letGo(leaf, p, pools.authorsOf(p.pool, p.authors));
    }

    /// @notice Calls a proposal off. By the arbiter, at any time before it is carried out.
    function cancel(bytes32 leaf) external nonReentrant {
        if (msg.sender != arbiter) revert Errors.NotAllowed(msg.sender);
        Entry memory p = _entries[leaf];
        if (p.state != State.Proposed) p = _stopped(leaf);
        _letGo(leaf, p, pools.authorsOf(p.pool, p.authors));
    }

    /// @notice A proposal, zeros if there is none about this submission.
    function proposal(bytes32 leaf) external view returns (Proposal memory) {
        Entry memory p = _entries[leaf];
        address[] memory authors = new address[](0);
        if (p.state != State.None) authors = pools.authorsOf(p.pool, p.authors);
        return Proposal(p.node, p.deadline, p.state, p.provider, p.held, p.pool, authors);
    }

    // ------------------------------------------------------------------------------------ private

    function _in(bytes32 leaf, State state) private view returns (Entry memory p) {
        p = _entries[leaf];
        // slither-disable-next-line incorrect-equality
        if (p.state == State.None) revert Errors.UnknownProposal(leaf);
        if (p.state != state) revert Errors.WrongState(leaf, uint8(p.state));
    }

    /// @dev A proposal that its provider stopped.
    function _stopped(bytes32 leaf) private view returns (Entry memory) {
        // slither-disable-next-line incorrect-equality
        if (_entries[leaf].state == State.Objected) return _entries[leaf];
        return _in(leaf, State.Disputed);
    }

    /// @dev A stopped proposal that the caller may judge now.
    function _judged(bytes32 leaf) private view returns (Entry memory p) {
        p = _stopped(leaf);
        if (msg.sender != address(court) && (msg.sender != arbiter || _inCourt(leaf, p))) {
            revert Errors.NotAllowed(msg.sender);
        }
        if (windowTime() >= p.deadline) revert Errors.WindowClosed(leaf, p.deadline);
    }

    /// @dev Whether jurors judge it, so that the arbiter may only cancel.
    function _inCourt(bytes32 leaf, Entry memory p) private view returns (bool) {
        // slither-disable-next-line incorrect-equality
        return p.state == State.Disputed && court.holds(leaf, p.deadline);
    }

    /// @dev The provider stops its proposal within the window.
    function _stop(bytes32 leaf, State state) private returns (Entry memory p, uint64 judgeBy) {
        p = _in(leaf, State.Proposed);
        if (msg.sender != p.provider) revert Errors.NotAllowed(msg.sender);
        if (windowTime() >= p.deadline) revert Errors.WindowClosed(leaf, p.deadline);
        judgeBy = uint64(block.timestamp) + _disputeWindow;
        _entries[leaf].state = state;
        _entries[leaf].deadline = uint32(judgeBy);
    }

    /// @dev The authors stand for it with a bond each; holds the stake of the provider that answers for
    /// the node, as far as it is there.
    function _open(uint256 pool, address node, address[] memory authors)
        private
        returns (Entry memory)
    {
        (address provider, uint256 asked, address manager) = pools.liabilityOf(pool, node);
        if (provider == address(0)) revert Errors.NotMember(pool, node);
        if (asked == 0) revert Errors.ZeroAmount();
        Sums memory current = _current;
        vault.pledge(authors, current.bond, manager);
        return Entry({
            node: node,
            deadline: uint32(block.timestamp + _slashWindow),
            pool: pool.toUint32(),
            state: State.Proposed,
            authors: 0,
            provider: provider,
            held: vault.openSlash(provider, asked, manager).toUint88(),
            terms: current.number
        });
    }

    function _execute(bytes32 leaf, Entry memory p) private {
        _entries[leaf].state = State.Executed;
        vault.unpledge(pools.authorsOf(p.pool, p.authors));
        // slither-disable-next-line unused-return
        (, uint256 asked, address manager) = pools.liabilityOf(p.pool, p.node);
        uint256 taken = vault.settleSlash(p.provider, p.held, asked, manager);
        emit SlashExecuted(leaf, p.pool, p.node, p.provider, taken);
        if (taken > 0) pools.expel(p.pool, p.node, p.provider);
    }

    /// @dev Ends a cancelled proposal; gives stake and deposit back.
    function _letGo(bytes32 leaf, Entry memory p, address[] memory authors) private {
        _entries[leaf].state = State.Cancelled;
        emit SlashCancelled(leaf, p.pool, p.node);
        vault.unpledge(authors);
        vault.releaseSlash(p.provider, p.held);
        uint256 deposit = _takeDeposit(leaf);
        if (deposit > 0) token.safeTransfer(p.provider, deposit);
    }

    /// @dev What the dispute held; it is on its way out now.
    function _takeDeposit(bytes32 leaf) private returns (uint256 deposit) {
        deposit = depositOf[leaf];
        delete depositOf[leaf];
    }
}
