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
import { Slasher } from "./Slasher.sol";
import { StakeVault } from "./StakeVault.sol";
import { WindowTime } from "./WindowTime.sol";
import { Work } from "./Work.sol";
import { Errors } from "./libraries/Errors.sol";
import { Law, Opinions, Statements, Submission } from "./libraries/Statements.sol";

/// @title Three jurors from a register of the whole deployment judge a disputed slash.
/// @notice
///     open (provider, before it disputes) ──▶ draw ──▶ commit ──half of the window──▶ reveal ──▶ settle
///        └─ fewer than three jurors found in 32 tries, or not drawn in time ──▶ the arbiter judges
///
/// A juror registers for a verification class with a bond, which stays here. It counts for a submission
/// if it registered before the lease was signed and was not appointed in the pool. While fewer than seven
/// count, no case can be opened and the arbiter judges. Two equal votes confirm or overturn the slash.
/// Without two equal votes the dispute lapses. A drawn juror must commit and reveal, also if the arbiter
/// cancels meanwhile. A juror that does not is struck from the register and loses a tenth of the bond.
/// A juror that cannot replay the rows abstains: its vote decides nothing, earns nothing and costs nothing.
/// Tokens held = Σ bonds + Σ pay owed + Σ pots of cases that are not settled.
contract Court is WindowTime, ReentrancyGuardTransient {
    using SafeCast for uint256;
    using SafeERC20 for IERC20;

    /// @notice An account can be drawn for disputes of this class.
    event JurorRegistered(bytes32 indexed class, address indexed juror, uint256 seat);
    /// @notice A juror is not drawn any more. It left, or it was struck.
    event JurorLeft(bytes32 indexed class, address indexed juror);
    /// @notice A juror has its bond back.
    event JurorWithdrew(bytes32 indexed class, address indexed juror, uint256 amount);
    /// @notice A provider asks for the court; jurors of this class are drawn once it disputes.
    event CaseOpened(bytes32 indexed leaf, bytes32 indexed class, address indexed provider);
    /// @notice The hash of this block will choose the jurors.
    event SeedFixed(bytes32 indexed leaf, uint256 atBlock);
    /// @notice The jurors were drawn. They commit before `revealFrom` and reveal before `revealUntil`.
    event JurorsDrawn(
        bytes32 indexed leaf,
        bytes32 indexed class,
        address[] jurors,
        uint64 revealFrom,
        uint64 revealUntil
    );
    /// @notice Too few jurors were found, or the seed's hash was lost: the arbiter judges.
    event CaseHandedOver(bytes32 indexed leaf);
    /// @notice A juror committed to its vote.
    event VoteCommitted(bytes32 indexed leaf, address indexed juror, bytes32 commitment);
    /// @notice A juror's vote; `digest` is of its own replay.
    event VoteRevealed(bytes32 indexed leaf, address indexed juror, uint8 vote, bytes32 digest);
    /// @notice A silent juror lost `penalty` of its bond.
    event JurorStruck(bytes32 indexed leaf, address indexed juror, uint256 penalty);
    /// @notice The case is over. `pot` went to the majority, `penalties` to the jurors that voted.
    event CaseSettled(bytes32 indexed leaf, uint256 pot, uint256 penalties);
    /// @notice A juror collected its pay.
    event PayCollected(address indexed juror, uint256 amount);
    /// @notice The slasher's address was set, for good.
    event CourtWired(address slasher);

    /// @notice Where a case stands.
    enum Status {
        None,
        Open,
        Drawn,
        HandedOver,
        Settled
    }

    /// @notice A seat of a class's register; `account` is zero while it is free.
    struct Seat {
        address account;
        uint40 since;
    }

    /// @param bond What it has at stake for the class.
    /// @param seat Its seat's number plus one; zero: it is not drawn.
    /// @param drawn Cases that it was drawn for and that are not settled.
    struct Juror {
        uint96 bond;
        uint32 seat;
        uint32 drawn;
    }

    /// @param class The verification class under which the authors judged.
    /// @param provider Who disputes.
    /// @param latest Jurors that registered later do not count.
    /// @param pool The pool.
    /// @param validators Accounts that the pool had appointed; none of them counts.
    /// @param status Where the case stands.
    /// @param confirming Revealed votes that find the same as the authors.
    /// @param overturning Revealed votes that find otherwise.
    /// @param seedBlock The block whose hash chooses the jurors; zero until it is fixed.
    /// @param seats Size of the class's register when the block was fixed.
    /// @param revealFrom End of the time to commit.
    /// @param revealUntil End of the dispute window.
    /// @param pot What the verdict earned.
    struct Case {
        bytes32 class;
        address provider;
        uint40 latest;
        uint32 pool;
        uint8 validators;
        Status status;
        uint8 confirming;
        uint64 seedBlock;
        uint32 seats;
        uint40 revealFrom;
        uint40 revealUntil;
        uint8 overturning;
        uint128 pot;
    }

    /// @param commitment Hash of the vote, zero before it is committed.
    /// @param vote 0 before it is revealed; else CONFIRM, OVERTURN or ABSTAIN.
    struct Ballot {
        bytes32 commitment;
        uint8 vote;
    }

    /// @notice Jurors of a case.
    uint256 public constant JURORS = 3;
    /// @notice Jurors that must count for a submission, so that the court judges it.
    uint256 public constant LEAST = 7;
    /// @notice A silent juror loses its bond divided by this.
    uint256 public constant SILENCE = 10;
    /// @dev A juror's votes: it finds the same as the authors, otherwise, or it cannot tell.
    uint8 private constant CONFIRM = 1;
    uint8 private constant OVERTURN = 2;
    uint8 private constant ABSTAIN = 3;
    /// @dev Seats that are looked at for three jurors.
    uint256 private constant TRIES = 32;

    /// @notice What bonds are counted in.
    IERC20 public immutable token;
    /// @notice Says the periods and the treasury.
    StakeVault public immutable vault;
    /// @notice The training runs.
    Pools public immutable pools;
    /// @notice Knows who signed opinions.
    Work public immutable work;
    /// @notice What a juror has at stake for a class.
    uint256 public immutable jurorBond;
    uint64 private immutable _half;
    uint64 private immutable _voting;
    address private immutable _deployer = msg.sender;

    /// @notice Carries verdicts out; set once by the deployer.
    Slasher public slasher;
    /// @notice What a juror can collect.
    mapping(address juror => uint256) public payOf;
    mapping(bytes32 class => Seat[]) private _seats;
    mapping(bytes32 class => uint32[]) private _free;
    mapping(bytes32 class => mapping(address account => Juror)) private _jurors;
    mapping(bytes32 leaf => Case) private _cases;
    mapping(bytes32 leaf => address[]) private _drawn;
    mapping(bytes32 leaf => mapping(address juror => Ballot)) private _ballots;

    /// @param vault_ Says token, periods, treasury and uptime feed.
    /// @param pools_ The training runs.
    /// @param work_ Knows who signed opinions.
    /// @param jurorBond_ What a juror has at stake for a class; not zero.
    constructor(StakeVault vault_, Pools pools_, Work work_, uint256 jurorBond_)
        WindowTime(vault_.uptimeFeed())
    {
        if (address(pools_) == address(0) || address(work_) == address(0)) {
            revert Errors.ZeroAddress();
        }
        if (jurorBond_ == 0) revert Errors.ZeroAmount();
        token = vault_.token();
        vault = vault_;
        pools = pools_;
        work = work_;
        jurorBond = jurorBond_.toUint96();
        uint64 window = vault_.periods().disputeWindow;
        _half = window / 2;
        _voting = window - window / 4;
    }

    /// @notice Sets the slasher's address, once. By the deployer.
    function wire(Slasher slasher_) external {
        if (msg.sender != _deployer) revert Errors.NotAllowed(msg.sender);
        if (address(slasher) != address(0)) revert Errors.AlreadyWired();
        if (address(slasher_) == address(0)) revert Errors.ZeroAddress();
        slasher = slasher_;
        emit CourtWired(address(slasher_));
    }

    // --------------------------------------------------------------------------------- the register

    /// @notice Takes the bond from the caller, which can be drawn for leases signed from now on.
    function register(bytes32 class) external nonReentrant {
        if (class == 0) revert Errors.ZeroDigest();
        Juror storage j = _jurors[class][msg.sender];
        if (j.bond != 0 || j.drawn != 0) revert Errors.AlreadyJuror(class, msg.sender);
        Seat[] storage seats = _seats[class];
        uint32[] storage free = _free[class];
        uint256 seat = seats.length;
        if (free.length > 0) {
            seat = free[free.length - 1];
            free.pop();
        } else {
            seats.push();
        }
        seats[seat] = Seat(msg.sender, uint40(block.timestamp));
        (j.bond, j.seat) = (uint96(jurorBond), (seat + 1).toUint32());
        emit JurorRegistered(class, msg.sender, seat);

        uint256 before = token.balanceOf(address(this));
        token.safeTransferFrom(msg.sender, address(this), jurorBond);
        uint256 received = token.balanceOf(address(this)) - before;
        if (received != jurorBond) revert Errors.TokenNotPlain(jurorBond, received);
    }

    /// @notice The caller is not drawn any more. For cases that it was drawn for it still has to vote.
    function leave(bytes32 class) external {
        if (!_vacate(class, msg.sender)) revert Errors.NotJuror(msg.sender);
    }

    /// @notice Returns the bond of a juror that left, once all its cases are settled.
    /// @return amount What is left of the bond.
    function withdraw(bytes32 class) external nonReentrant returns (uint256 amount) {
        Juror storage j = _jurors[class][msg.sender];
        if (j.seat != 0 || j.drawn != 0) revert Errors.StillJuror(class, msg.sender, j.drawn);
        amount = j.bond;
        if (amount == 0) revert Errors.NothingToWithdraw(msg.sender);
        j.bond = 0;
        emit JurorWithdrew(class, msg.sender, amount);
        _pay(msg.sender, amount);
    }

    /// @notice Pays the caller what its votes earned.
    /// @return amount The pay.
    function collect() external nonReentrant returns (uint256 amount) {
        amount = payOf[msg.sender];
        if (amount == 0) revert Errors.NothingToWithdraw(msg.sender);
        payOf[msg.sender] = 0;
        emit PayCollected(msg.sender, amount);
        _pay(msg.sender, amount);
    }

    // ------------------------------------------------------------------------------------- the case

    /// @notice Asks for the court instead of the arbiter. By the provider, before it disputes the slash.
    /// @param submission What the node signed.
    /// @param opinions What the proposal rests on.
    /// @param law The law that they name; its verification class chooses the register.
    /// @param seats Seats of seven jurors that count, in rising order.
    /// @param validators How many accounts the pool has ever appointed.
    function open(
        Submission calldata submission,
        Opinions calldata opinions,
        Law calldata law,
        uint256[] calldata seats,
        uint8 validators
    ) external {
        (bytes32 leaf, address[] memory authors) = work.signersOf(submission, opinions);
        Slasher.Proposal memory p = _proposal(leaf);
        if (p.state != Slasher.State.Proposed) revert Errors.WrongState(leaf, uint8(p.state));
        if (msg.sender != p.provider) revert Errors.NotAllowed(msg.sender);
        Case storage c = _cases[leaf];
        if (c.status != Status.None) revert Errors.AlreadyInCourt(leaf);
        if (opinions.outcome != work.REJECTED()) revert Errors.WrongOutcome(opinions.outcome);
        if (opinions.law != Statements.hash(law) || _hashOf(authors) != _hashOf(p.authors)) {
            revert Errors.OtherOpinions(leaf);
        }
        bool tooMany = validators != 0 && !_isGiven(p.pool, validators);
        bool tooFew = validators != type(uint8).max && _isGiven(p.pool, validators + 1);
        if (tooMany || tooFew) revert Errors.WrongCount(validators);

        // slither-disable-next-line unused-return
        (,, uint32 leaseSeconds) = pools.judgementOf(p.pool);
        uint256 latest = Math.saturatingSub(submission.validUntil, leaseSeconds);
        c.class = law.verificationClass;
        c.provider = p.provider;
        c.latest = uint40(Math.min(latest, type(uint40).max));
        c.pool = uint32(p.pool);
        c.validators = validators;
        c.status = Status.Open;
        _checkEnough(c, seats);
        emit CaseOpened(leaf, c.class, p.provider);
    }

    /// @notice Draws the jurors. By anyone, after the dispute, in the first quarter of the dispute window. The
    /// first call fixes the next block as the seed; a later one draws. If 256 blocks pass in between, or
    /// the quarter is over, it hands the case to the arbiter.
    function draw(bytes32 leaf) external {
        Case storage c = _in(leaf, Status.Open);
        Slasher.Proposal memory p = _proposal(leaf);
        if (p.state != Slasher.State.Disputed) revert Errors.WrongState(leaf, uint8(p.state));
        // slither-disable-next-line uninitialized-local
        address[] memory jurors;
        if (_canDraw(p.deadline)) {
            uint256 at = c.seedBlock;
            // slither-disable-next-line incorrect-equality
            if (at == 0) {
                c.seedBlock = uint64(block.number + 1);
                // Who registers or leaves once the hash is known must not change what it chooses.
                c.seats = uint32(_seats[c.class].length);
                emit SeedFixed(leaf, block.number + 1);
                return;
            }
            if (block.number <= at) revert Errors.SeedNotKnown(leaf, at);
            bytes32 hash = blockhash(at);
            // A lost hash chooses no one: with another block, the provider could try until it likes the jurors.
            if (hash != 0) jurors = _choose(c, keccak256(abi.encode(hash, leaf)));
        }
        if (jurors.length < JURORS) {
            c.status = Status.HandedOver;
            emit CaseHandedOver(leaf);
            return;
        }
        c.status = Status.Drawn;
        uint64 revealFrom = p.deadline - _half;
        (c.revealFrom, c.revealUntil) = (uint40(revealFrom), uint40(p.deadline));
        _drawn[leaf] = jurors;
        for (uint256 i; i < JURORS; ++i) {
            ++_jurors[c.class][jurors[i]].drawn;
        }
        emit JurorsDrawn(leaf, c.class, jurors, revealFrom, p.deadline);
    }

    /// @notice Commits to a vote, in the first half of the dispute window. By a drawn juror, once.
    /// @param leaf The submission.
    /// @param commitment `commitmentOf` the vote.
    function commit(bytes32 leaf, bytes32 commitment) external {
        Case storage c = _in(leaf, Status.Drawn);
        if (commitment == 0) revert Errors.ZeroDigest();
        if (windowTime() >= c.revealFrom) revert Errors.WindowClosed(leaf, c.revealFrom);
        if (!_isDrawn(leaf, msg.sender)) revert Errors.NotJuror(msg.sender);
        Ballot storage b = _ballots[leaf][msg.sender];
        if (b.commitment != 0) revert Errors.BadBallot(leaf, msg.sender);
        b.commitment = commitment;
        emit VoteCommitted(leaf, msg.sender, commitment);
    }

    /// @notice Reveals a vote, in the second half of the dispute window. The second equal vote confirms or
    /// overturns the slash.
    /// @param leaf The submission.
    /// @param vote What the juror finds: 1 the same as the authors, 2 otherwise, 3 that it cannot tell.
    /// @param digest Of the juror's own replay.
    /// @param salt What the commitment was made with.
    function reveal(bytes32 leaf, uint8 vote, bytes32 digest, bytes32 salt) external nonReentrant {
        Case storage c = _in(leaf, Status.Drawn);
        uint256 time = windowTime();
        if (time < c.revealFrom) revert Errors.WindowOpen(leaf, c.revealFrom);
        if (time >= c.revealUntil) revert Errors.WindowClosed(leaf, c.revealUntil);
        Ballot storage b = _ballots[leaf][msg.sender];
        bool fits = b.commitment == commitmentOf(leaf, msg.sender, vote, digest, salt);
        if (vote == 0 || vote > ABSTAIN || b.vote != 0 || !fits) {
            revert Errors.BadBallot(leaf, msg.sender);
        }
        b.vote = vote;
        emit VoteRevealed(leaf, msg.sender, vote, digest);
        if (vote == ABSTAIN) return;
        bool confirms = vote == CONFIRM;
        uint256 equal = confirms ? ++c.confirming : ++c.overturning;
        if (equal != 2 || _proposal(leaf).state != Slasher.State.Disputed) return;
        c.pot = (confirms ? slasher.confirm(leaf) : slasher.overturn(leaf)).toUint128();
    }

    /// @notice Ends a case once all jurors have found something or the time is over: pays those that voted with the
    /// majority, strikes those that were silent. By anyone.
    function settle(bytes32 leaf) external nonReentrant {
        Case storage c = _in(leaf, Status.Drawn);
        uint256 voted = c.confirming + c.overturning;
        if (voted < JURORS && windowTime() < c.revealUntil) {
            revert Errors.WindowOpen(leaf, c.revealUntil);
        }
        c.status = Status.Settled;
        address[] memory jurors = _drawn[leaf];
        uint256 penalties = _strikeSilent(leaf, c.class, jurors);
        emit CaseSettled(leaf, c.pot, penalties);
        if (voted == 0) return _giveAway(penalties);
        bool confirmed = c.confirming > 1;
        uint8 verdict = confirmed ? CONFIRM : OVERTURN;
        (uint256 pot, uint256 winners) = (c.pot, confirmed ? c.confirming : c.overturning);
        // In equal parts, the rest to the last.
        for (uint256 i; i < JURORS; ++i) {
            uint8 vote = _ballots[leaf][jurors[i]].vote;
            if (vote == 0 || vote == ABSTAIN) continue;
            uint256 part = penalties / voted--;
            penalties -= part;
            if (vote == verdict) {
                uint256 won = pot / winners--;
                pot -= won;
                part += won;
            }
            payOf[jurors[i]] += part;
        }
    }

    // ---------------------------------------------------------------------------------------- views

    /// @notice Whether the court judges a dispute, so that the arbiter may only cancel it. It does not if the
    /// jurors were not drawn in the first quarter of the dispute window: they need the next to vote.
    /// @param leaf The submission.
    /// @param judgeBy End of the dispute window.
    function holds(bytes32 leaf, uint256 judgeBy) external view returns (bool) {
        Status status = _cases[leaf].status;
        // slither-disable-next-line incorrect-equality
        return status == Status.Drawn || (status == Status.Open && _canDraw(judgeBy));
    }

    /// @notice The register of a class; free seats have account zero.
    function seatsOf(bytes32 class) external view returns (Seat[] memory) {
        return _seats[class];
    }

    /// @notice A juror's bond, seat plus one, and number of cases that are not settled.
    function jurorOf(bytes32 class, address account) external view returns (Juror memory) {
        return _jurors[class][account];
    }

    /// @notice A case, and who was drawn for it.
    function caseOf(bytes32 leaf) external view returns (Case memory, address[] memory jurors) {
        return (_cases[leaf], _drawn[leaf]);
    }

    /// @notice What a juror committed to and revealed.
    function ballotOf(bytes32 leaf, address juror) external view returns (Ballot memory) {
        return _ballots[leaf][juror];
    }

    /// @notice What a juror commits to. It names the juror, so a copied commitment cannot be revealed.
    function commitmentOf(bytes32 leaf, address juror, uint8 vote, bytes32 digest, bytes32 salt)
        public
        pure
        returns (bytes32)
    {
        return keccak256(abi.encode(leaf, juror, vote, digest, salt));
    }

    // -------------------------------------------------------------------------------------- private

    function _proposal(bytes32 leaf) private view returns (Slasher.Proposal memory) {
        return slasher.proposal(leaf);
    }

    /// @dev Whether the first quarter of the dispute window is not over.
    function _canDraw(uint256 judgeBy) private view returns (bool) {
        return windowTime() + _voting < judgeBy;
    }

    /// @dev Whether the pool has given this number to an account.
    function _isGiven(uint256 pool, uint8 number) private view returns (bool) {
        return pools.validatorAt(pool, number) != address(0);
    }

    function _hashOf(address[] memory accounts) private pure returns (bytes32) {
        return keccak256(abi.encode(accounts));
    }

    function _in(bytes32 leaf, Status status) private view returns (Case storage c) {
        c = _cases[leaf];
        if (c.status != status) revert Errors.NotInCourt(leaf, uint8(c.status));
    }

    function _isDrawn(bytes32 leaf, address account) private view returns (bool) {
        address[] storage jurors = _drawn[leaf];
        return account == jurors[0] || account == jurors[1] || account == jurors[2];
    }

    /// @dev Reverts unless the seats are at least seven, rise, and each holds a juror that counts.
    function _checkEnough(Case storage c, uint256[] calldata seats) private view {
        if (seats.length < LEAST) revert Errors.TooFewJurors(seats.length, LEAST);
        Seat[] storage register_ = _seats[c.class];
        for (uint256 i; i < seats.length; ++i) {
            bool rises = i == 0 || seats[i] > seats[i - 1];
            if (!rises || seats[i] >= register_.length || !_counts(c, register_[seats[i]])) {
                revert Errors.TooFewJurors(i, LEAST);
            }
        }
    }

    /// @dev Whether the juror registered before the lease and is no party to the dispute.
    function _counts(Case storage c, Seat memory seat) private view returns (bool) {
        address who = seat.account;
        if (who == address(0) || seat.since > c.latest || who == c.provider) return false;
        // slither-disable-next-line calls-loop
        if (who == pools.managerOf(c.pool)) return false;
        // slither-disable-next-line calls-loop,unused-return
        (uint8 number,,) = pools.validatorOf(c.pool, who);
        // A number above `validators` was given after the case was opened: it excludes no juror.
        return number == 0 || number > c.validators;
    }

    /// @dev Distinct jurors that count; fewer than three if not enough were found.
    function _choose(Case storage c, bytes32 seed) private view returns (address[] memory jurors) {
        jurors = new address[](JURORS);
        // slither-disable-next-line uninitialized-local
        uint256 found;
        Seat[] storage register_ = _seats[c.class];
        for (uint256 i; i < TRIES && found < JURORS; ++i) {
            // slither-disable-next-line weak-prng
            Seat memory seat = register_[uint256(keccak256(abi.encode(seed, i))) % c.seats];
            if (seat.account == jurors[0] || seat.account == jurors[1]) continue;
            if (_counts(c, seat)) jurors[found++] = seat.account;
        }
        assembly ("memory-safe") {
            mstore(jurors, found)
        }
    }

    /// @dev Frees the juror's seat. False if it has none.
    function _vacate(bytes32 class, address account) private returns (bool) {
        Juror storage j = _jurors[class][account];
        uint32 seat = j.seat;
        // slither-disable-next-line incorrect-equality
        if (seat == 0) return false;
        j.seat = 0;
        delete _seats[class][seat - 1];
        _free[class].push(seat - 1);
        emit JurorLeft(class, account);
        return true;
    }

    /// @dev The case holds its jurors' bonds no longer; the silent ones are struck.
    function _strikeSilent(bytes32 leaf, bytes32 class, address[] memory jurors)
        private
        returns (uint256 penalties)
    {
        for (uint256 i; i < JURORS; ++i) {
            Juror storage j = _jurors[class][jurors[i]];
            --j.drawn;
            if (_ballots[leaf][jurors[i]].vote != 0) continue;
            uint256 penalty = Math.min(j.bond, jurorBond / SILENCE);
            j.bond -= uint96(penalty);
            penalties += penalty;
            // slither-disable-next-line unused-return
            _vacate(class, jurors[i]);
            emit JurorStruck(leaf, jurors[i], penalty);
        }
    }

    /// @dev To where slashed stake goes.
    function _giveAway(uint256 amount) private {
        address treasury = vault.treasury();
        if (treasury == address(0)) ERC20Burnable(address(token)).burn(amount);
        else _pay(treasury, amount);
    }

    function _pay(address to, uint256 amount) private {
        token.safeTransfer(to, amount);
    }
}
