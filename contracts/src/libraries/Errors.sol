// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @title Every reason for which a call is refused, by name, with what was asked and what holds.
library Errors {
    // ------------------------------------------------------------------------------------ general

    /// @notice An account that must be given is zero.
    error ZeroAddress();
    /// @notice An amount that must be positive is zero.
    error ZeroAmount();
    /// @notice A digest that must be given is zero.
    error ZeroDigest();
    /// @notice `caller` may not do this.
    error NotAllowed(address caller);
    /// @notice The statement's deadline has passed.
    error Expired(uint64 deadline, uint256 timestamp);
    /// @notice The signature over `digest` is not `signer`'s.
    error BadSignature(address signer, bytes32 digest);
    /// @notice The token delivered another amount than was sent: it is not a plain ERC-20.
    error TokenNotPlain(uint256 expected, uint256 received);
    /// @notice The contracts already know one another's addresses.
    error AlreadyWired();

    // -------------------------------------------------------------------------------------- token

    /// @notice The faucet exists on test networks only.
    error NoFaucet();

    // ----------------------------------------------------------------------------------- registry

    /// @notice `provider` is already registered.
    error AlreadyProvider(address provider);
    /// @notice `account` is not a registered provider.
    error NotProvider(address account);
    /// @notice `node` already belongs to `provider`.
    error NodeTaken(address node, address provider);
    /// @notice `node` belongs to no provider, or not to the one that this is about.
    error UnknownNode(address node);
    /// @notice The node's consent with this salt was used before.
    error ConsentUsed(address node, bytes32 salt);
    /// @notice A revocation can only move forward in time.
    error RevocationNotLater(uint64 current, uint64 asked);

    // -------------------------------------------------------------------------------------- vault

    /// @notice Unbonding (`unbonding` s) would not outlast validity + slash window + dispute window.
    error UnbondingTooShort(uint256 unbonding, uint256 liability);
    /// @notice A period that must be positive is zero.
    error ZeroPeriod();
    /// @notice `provider` has `active` stake and needs `needed`.
    error InsufficientStake(address provider, uint256 active, uint256 needed);
    /// @notice `provider`'s stake answers to `manager`'s pools until `until`; zero: as long as it sits there.
    error StakeBound(address provider, address manager, uint256 until);
    /// @notice Only `available` can be taken: the rest is needed by seats in pools or held by slashes.
    error StakeNotFree(uint256 available, uint256 asked);
    /// @notice At most `limit` unbondings run at a time; withdraw the mature ones first.
    error TooManyUnbondings(uint256 limit);
    /// @notice Nothing has matured that is not held by an open slash.
    error NothingToWithdraw(address provider);

    // -------------------------------------------------------------------------------------- pools

    /// @notice There is no such pool.
    error UnknownPool(uint256 pool);
    /// @notice The pool has ended.
    error PoolHasEnded(uint256 pool);
    /// @notice A revision starts at a later step than the one before it, which starts at `last`.
    error RevisionNotLater(uint64 last, uint64 asked);
    /// @notice The pool has not ended.
    error PoolNotEnded(uint256 pool);
    /// @notice A pool needs room for at least one node.
    error ZeroCapacity();
    /// @notice All seats are taken.
    error PoolFull(uint256 pool, uint32 capacity);
    /// @notice `node` already sits in the pool.
    error AlreadyMember(uint256 pool, address node);
    /// @notice `node` has no seat in the pool.
    error NotMember(uint256 pool, address node);
    /// @notice `node` was banned from the pool.
    error Banned(uint256 pool, address node);
    /// @notice An invite admits once: its deadline must be later than the last used one's.
    error InviteUsed(uint256 pool, address node, uint64 deadline);
    /// @notice `provider` still answers for this node's work in the pool, until `until`.
    error StillLiable(address node, address provider, uint256 until);
    /// @notice The provider has not agreed to seats in the pool (`Pools.allow`).
    error NotAgreed(uint256 pool, address provider);
    /// @notice The pool seats only nodes of listed providers.
    error NotListed(uint256 pool, address provider);
    /// @notice No node joins while the pool is paused.
    error PoolIsPaused(uint256 pool);
    /// @notice The seat came from another key a short time ago; it can be moved again from `until`.
    error MovedRecently(address node, uint256 until);
    /// @notice A slash holds stake of `provider`: no seat moves until it has come to its end.
    error SlashOpen(address provider);
    /// @notice Policies are published in order; `expected` is next.
    error WrongVersion(uint64 expected, uint64 given);
    /// @notice A pool appoints at most `limit` accounts over its life.
    error TooManyValidators(uint256 limit);
    /// @notice A mirror's address is too long, or not printable ASCII.
    error BadUrl(uint256 length);
    /// @notice A slash takes at most what one seat needs.
    error SlashAboveStake(uint256 stake, uint256 slash);
    /// @notice There are `given` opinions, or would be asked for; `needed` must agree.
    error NoQuorum(uint256 given, uint256 needed);
    /// @notice Opinions stand in rising order of their authors' numbers, each author once.
    error OpinionsOutOfOrder(uint8 previous, uint8 number);
    /// @notice The validator's opinions count for submissions that end at `countsFrom` or later: this
    /// one's lease may be older than its appointment.
    error AppointedLate(address validator, uint256 countsFrom, uint256 validUntil);

    // --------------------------------------------------------------------------------------- work

    /// @notice The pool has no such root.
    error UnknownRoot(uint256 pool, uint64 seq);
    /// @notice A root over no leaf.
    error EmptyRoot();
    /// @notice `leaf` is not in the root.
    error NotInRoot(uint256 pool, uint64 seq, bytes32 leaf);
    /// @notice The root's validity ended at `until`.
    error ValidityOver(uint256 until, uint256 timestamp);
    /// @notice The root came too late (after `until`) to make anybody answer for the submission.
    error RootedLate(uint64 postedAt, uint256 until);
    /// @notice `leaf` was rejected before.
    error AlreadyRejected(uint256 pool, bytes32 leaf);
    /// @notice `leaf` was posted by its node before.
    error AlreadyPosted(bytes32 leaf);
    /// @notice Submission, lease and receipt do not belong together.
    error LeafMismatch();
    /// @notice The submission arrived after the lease's deadline.
    error LateSubmission(uint64 receivedAt, uint64 deadline);
    /// @notice A node posts its own leaf only between `from` and `until`.
    error NotYourTurn(uint256 from, uint256 until);
    /// @notice Opinions of this outcome do not allow this.
    error WrongOutcome(uint8 outcome);

    // ------------------------------------------------------------------------------------ rewards

    /// @notice Work of this epoch can still be rejected until `from`.
    error EpochStillOpen(uint64 epoch, uint256 from);
    /// @notice Reward roots are posted in order of epochs; `next` is the earliest allowed.
    error EpochNotNext(uint64 epoch, uint64 next);
    /// @notice The cumulative total may not shrink.
    error TotalShrank(uint256 previous, uint256 total);
    /// @notice The pool has `free` funds, the root needs `needed` more.
    error InsufficientFunds(uint256 pool, uint256 free, uint256 needed);
    /// @notice The pool has no live reward root for this epoch.
    error UnknownRewardRoot(uint256 pool, uint64 epoch);
    /// @notice The reward root can be claimed from `from` on.
    error NotClaimableYet(uint256 from, uint256 timestamp);
    /// @notice The time for a public check ended at `until`.
    error CheckOver(uint256 until, uint256 timestamp);
    /// @notice The proof does not lead to the reward root.
    error BadRewardProof(address node, uint256 cumulative);
    /// @notice `node` has claimed this much already.
    error NothingToClaim(address node, uint256 claimed);
    /// @notice The root's leaves promise more than was reserved for them.
    error ReserveExceeded(uint256 reserved, uint256 asked);
    /// @notice The pool's free funds can be refunded from `from` on; its last rewards come first.
    error RefundNotYet(uint256 pool, uint256 from);
    /// @notice The manager has posted a root not long ago: anyone may post a table from `from` on; zero: the
    /// pool never had money.
    error ManagerNotSilent(uint256 pool, uint256 from);
    /// @notice Nothing is free to be refunded.
    error NothingToRefund(uint256 pool);

    // ------------------------------------------------------------------------------------ slasher

    /// @notice This submission has been proposed for a slash before.
    error AlreadyProposed(bytes32 leaf);
    /// @notice There is no proposal about this submission.
    error UnknownProposal(bytes32 leaf);
    /// @notice The proposal is in another state.
    error WrongState(bytes32 leaf, uint8 state);
    /// @notice The window is open until `until`.
    error WindowOpen(bytes32 leaf, uint256 until);
    /// @notice The window closed at `until`.
    error WindowClosed(bytes32 leaf, uint256 until);
    /// @notice The file was appealed before.
    error AlreadyAppealed(bytes32 leaf);
    /// @notice There is no appeal about the file, or the file was restored.
    error NoOpenAppeal(bytes32 leaf);
    /// @notice Nothing was announced.
    error NothingAnnounced();
    /// @notice What was announced takes effect from `from` on.
    error TooEarly(uint256 from, uint256 timestamp);
    /// @notice The deployment's terms were changed as often as their numbers allow.
    error TooManyTerms(uint256 limit);

    // -------------------------------------------------------------------------------------- court

    /// @notice The account is a juror of the class, or was one and has not withdrawn its bond.
    error AlreadyJuror(bytes32 class, address account);
    /// @notice The account is no juror of this class or case.
    error NotJuror(address account);
    /// @notice The juror has not left the register, or has cases that are not settled.
    error StillJuror(bytes32 class, address account, uint256 cases);
    /// @notice Only `given` jurors count for the submission; the court needs `needed`.
    error TooFewJurors(uint256 given, uint256 needed);
    /// @notice The provider has asked for the court before.
    error AlreadyInCourt(bytes32 leaf);
    /// @notice The case has not come to this, or is past it.
    error NotInCourt(bytes32 leaf, uint8 status);
    /// @notice The proposal does not rest on these opinions, or they name another law.
    error OtherOpinions(bytes32 leaf);
    /// @notice The pool has appointed another number of accounts.
    error WrongCount(uint256 given);
    /// @notice The block whose hash chooses the jurors is not past yet.
    error SeedNotKnown(bytes32 leaf, uint256 atBlock);
    /// @notice The juror has committed before, or this is not what it committed to.
    error BadBallot(bytes32 leaf, address juror);
}
