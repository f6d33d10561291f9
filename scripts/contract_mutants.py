"""The guards of the contracts, each with what stands in its place once it is removed.

The material of scripts/mutate_contracts.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """In `file` under contracts/src, `old` (found once) becomes `new`. `money`: the invariant suite
    alone must notice as well."""

    name: str
    file: str
    old: str
    new: str
    money: bool = False


MUTANTS = (
    Mutant(
        "stake can be unbonded while seats need it", "StakeVault.sol",
        "return Math.saturatingSub(active_, account.committed);", "return active_;",
    ),
    Mutant(
        "an entry in the queue matures early", "libraries/Queue.sol",
        " && queue[done].matureAt <= time", "", money=True,
    ),
    Mutant(
        "unbonding matures at once", "StakeVault.sol",
        "uint64(block.timestamp) + _unbonding;", "uint64(block.timestamp);", money=True,
    ),
    Mutant(
        "withdrawal ignores open slashes", "libraries/Queue.sol",
        "Math.min(queue[done].amount, most - amount);", "queue[done].amount;", money=True,
    ),
    Mutant("slashes hold more than is there", "StakeVault.sol",
        "held = Math.min(amount, _reachable(account, manager));", "held = amount;", money=True),
    Mutant("stake answers to two managers at a time", "StakeVault.sol",
        "if (amount != 0) _bind(provider, account, manager);", "account.manager = manager;"),
    Mutant("a seat's end frees the stake for another manager at once", "StakeVault.sol",
        "if (amount != 0 && needed == 0) account.leftAt = uint40(block.timestamp);", ""),
    Mutant("another manager's pool holds the stake", "StakeVault.sol",
        "if (account.manager != manager) return 0;", ""),
    Mutant("a proposer saves its bond in a pool of its own", "StakeVault.sol",
        "_bind(validator, account, manager);", ""),
    Mutant("stake that seats need is a bond", "StakeVault.sol",
        "uint256 free = _unbondable(account);", "(uint256 free,) = _split(account);"),
    Mutant("enroll carries another node's invite", "Registry.sol",
        "if (invite.node != consent.node) revert Errors.UnknownNode(invite.node);", ""),
    Mutant(
        "a slash forgets the queue", "StakeVault.sol",
        "if (amount > fromBonded) _takeNewest(owner, account, amount - fromBonded);", "",
        money=True,
    ),
    Mutant(
        "anyone settles slashes", "StakeVault.sol",
        "if (msg.sender != who) revert Errors.NotAllowed(msg.sender);", "", money=True,
    ),
    Mutant(
        "a fee on transfer is not noticed", "StakeVault.sol",
        "if (received != amount) revert Errors.TokenNotPlain(amount, received);", "",
    ),
    Mutant(
        "an invite admits twice", "Pools.sol",
        "if (_deadline(invite) <= last.inviteDeadline) {", "if (false) {",
    ),
    Mutant(
        "a node escapes its old provider's liability", "Pools.sol",
        "if (last.provider != provider && block.timestamp < until) {", "if (false) {",
    ),
    Mutant(
        "leaving keeps the stake committed", "Pools.sol",
        "vault.release(seat.provider, uint256(p.stakePerClass) * seat.speedClass);", "", money=True,
    ),
    Mutant(
        "a slashed node is not banned", "Pools.sol",
        "seat.flags = flags | BANNED;", "",
    ),
    Mutant("class zero is admitted", "Pools.sol",
        "if (invite.speedClass == 0) revert Errors.ZeroClass();", ""),
    Mutant(
        "leaves are liable for ever", "Work.sol",
        "if (time > until) revert Errors.ValidityOver(until, time);", "",
        money=True,
    ),
    Mutant(
        "proofs are not checked", "Work.sol",
        "if (!MerkleProof.verifyCalldata(proof, r.root, leaf)) {", "if (false) {",
    ),
    Mutant(
        "anyone signs for a node", "Work.sol",
        "Statements.checkKey(submission.node, leaf, nodeSignature);\n        _checkLiable(",
        "_checkLiable(",
    ),
    Mutant(
        "reward roots come before validity ends", "Rewards.sol",
        "(uint256(epoch) + 1) * _epochLength + _validity;", "uint256(epoch) * _epochLength;",
        money=True,
    ),
    Mutant(
        "rewards are claimable at once", "Rewards.sol",
        "uint64 claimableAt = uint64(block.timestamp) + _rewardDelay;",
        "uint64 claimableAt = uint64(block.timestamp);",
    ),
    Mutant(
        "a claim is paid twice", "Rewards.sol",
        "claimed[pool][node] = cumulative;", "", money=True,
    ),
    Mutant(
        "a claim takes another pool's money", "Rewards.sol",
        "if (amount > reserved) revert Errors.ReserveExceeded(reserved, amount);",
        "if (amount > reserved) reserved = amount;",
    ),
    Mutant(
        "a disabled root keeps its reserve", "Rewards.sol",
        "f.reserved -= taken;", "", money=True,
    ),
    Mutant(
        "a voided root comes to life again", "Rewards.sol",
        "_roots[pool][voided].index = type(uint64).max;", "",
    ),
    Mutant(
        "a refund takes what is owed", "Rewards.sol",
        "uint256 amount = f.free + bondOf[pool];",
        "uint256 amount = f.free + bondOf[pool] + f.reserved;", money=True,
    ),
    Mutant(
        "a submission is slashed twice", "Slasher.sol",
        "if (_entries[leaf].state != State.None) revert Errors.AlreadyProposed(leaf);", "",
        money=True,
    ),
    Mutant(
        "no window before execution", "Slasher.sol",
        "Entry memory p = _in(leaf, State.Proposed);\n"
        "        if (windowTime() < p.deadline) revert Errors.WindowOpen(leaf, p.deadline);",
        "Entry memory p = _in(leaf, State.Proposed);",
        money=True,
    ),
    Mutant(
        "a proposal is executed twice", "Slasher.sol",
        "_entries[leaf].state = State.Executed;", "", money=True,
    ),
    Mutant(
        "a cancelled dispute keeps the deposit", "Slasher.sol",
        "if (deposit > 0) token.safeTransfer(p.provider, deposit);", "", money=True,
    ),
    Mutant(
        "what is not rejected can be slashed", "Work.sol",
        "if (opinions.outcome != REJECTED) revert Errors.WrongOutcome(opinions.outcome);", "",
    ),
    Mutant(
        "a stranger's stake is committed without its consent", "Pools.sol",
        "if (!ejected && invite.speedClass > allowedClass[provider][pool]) {", "if (false) {",
        money=True,
    ),
    Mutant(
        "a slashed seat sits on under a new key", "Pools.sol",
        "if (_expel(pool, node, provider) & MOVED != 0) {",
        "_expel(pool, node, provider);\n        if (false) {", money=True,
    ),
    Mutant(
        "a key seated again hides the seat that moved on", "Pools.sol",
        "flags: _seats[pool][node].flags & MOVED,", "flags: 0,", money=True,
    ),
    Mutant(
        "a slash expels the seat of the key's next provider", "Pools.sol",
        "if (seat.provider != provider) return flags;", "",
    ),
    Mutant(
        "anyone moves seats", "Pools.sol",
        "if (msg.sender != address(registry)) revert Errors.NotAllowed(msg.sender);", "",
    ),
    Mutant(
        "a seat moves on and on", "Pools.sol",
        "if (block.timestamp < until) revert Errors.MovedRecently(from, until);", "",
    ),
    Mutant(
        "a seat moves while a slash is open", "Pools.sol",
        "if (vault.pendingSlash(seat.provider) != 0) revert Errors.SlashOpen(seat.provider);", "",
    ),
    Mutant(
        "moving leaves the old seat taken", "Pools.sol",
        "old.leftAt = uint40(block.timestamp);", "", money=True,
    ),
    Mutant(
        "a paused pool admits", "Pools.sol",
        "if (p.paused) revert Errors.PoolIsPaused(pool);", "",
    ),
    Mutant(
        "the allow list admits all", "Pools.sol",
        "if (p.listOnly && !isListed[pool][provider]) revert Errors.NotListed(pool, provider);", "",
    ),
    Mutant(
        "a full pool admits", "Pools.sol",
        "if (p.members == p.capacity) revert Errors.PoolFull(pool, p.capacity);", "",
    ),
    Mutant(
        "anyone invites", "Pools.sol",
        "Statements.check(p.manager, inviteDigest(invite), managerSignature);", "",
    ),
    Mutant(
        "anyone moves a node to a key of its own", "Registry.sol",
        "if (providerOf[from] != msg.sender) {", "if (false) {",
        money=True,
    ),
    Mutant(
        "a consent works twice", "Registry.sol",
        "if (consentUsed[node][consent.salt]) revert Errors.ConsentUsed(node, consent.salt);", "",
    ),
    Mutant(
        "nodes are bound without their signature", "Registry.sol",
        "Statements.checkKey(node, consentDigest(consent), nodeSignature);", "",
    ),
    Mutant(
        "malleated signatures of a contract's kind are taken", "libraries/Statements.sol",
        "return problem == ECDSA.RecoverError.NoError && recovered == signer;",
        "return problem == ECDSA.RecoverError.NoError;",
    ),
    Mutant(
        "a batch pays twice", "Rewards.sol",
        "(last, owed) = (payout, 0);", "last = payout;", money=True,
    ),
    Mutant(
        "unclaimed rewards are taken back at once", "Rewards.sol",
        "if (time >= from + CLAIM_PERIOD) {", "if (true) {", money=True,
    ),
    Mutant(
        "a pool that runs is refunded", "Rewards.sol",
        "if (from == 0) revert Errors.PoolNotEnded(pool);", "",
    ),
    Mutant(
        "free funds are taken back before the last rewards", "Rewards.sol",
        "if (time < from) revert Errors.RefundNotYet(pool, from);", "", money=True,
    ),
    Mutant(
        "the refund's delay forgets the dispute", "Rewards.sol",
        "+ p.slashWindow + p.disputeWindow + 2", "+ 2", money=True,
    ),
    Mutant(
        "a node roots work that nobody answers for", "Work.sol",
        "_checkInTime(submission, uint64(block.timestamp));", "",
    ),
    Mutant(
        "a drawn reserve blocks the arbiter", "Rewards.sol",
        "uint128(Math.min(f.total - r.previousTotal, f.reserved));",
        "uint128(f.total - r.previousTotal);",
    ),
    Mutant(
        "anyone disables rewards", "Rewards.sol",
        "if (msg.sender != slasher.arbiter()) revert Errors.NotAllowed(msg.sender);", "",
    ),
    Mutant(
        "terms act at once", "Terms.sol",
        "if (windowTime() < _actAt) revert Errors.TooEarly(_actAt, block.timestamp);", "",
    ),
    Mutant(
        "anyone announces terms", "Terms.sol",
        "if (msg.sender != governor) revert Errors.NotAllowed(msg.sender);", "", money=True,
    ),
    Mutant(
        "anyone takes the governor's role", "Terms.sol",
        "if (msg.sender != pendingGovernor) revert Errors.NotAllowed(msg.sender);", "", money=True,
    ),
    Mutant(
        "new terms change an open dispute", "Slasher.sol",
        "_terms[p.terms].deposit;", "_current.deposit;", money=True,
    ),
    Mutant(
        "a deposit is paid out twice", "Slasher.sol",
        "delete depositOf[leaf];", "",
    ),
    Mutant(
        "anyone disputes", "Slasher.sol",
        "if (msg.sender != p.provider) revert Errors.NotAllowed(msg.sender);", "", money=True,
    ),
    Mutant(
        "a stranger judges", "Slasher.sol",
        "if (msg.sender != arbiter) revert Errors.NotAllowed(msg.sender);\n        if (windowTime",
        "if (windowTime", money=True,
    ),
    Mutant(
        "anyone cancels", "Slasher.sol",
        "if (msg.sender != arbiter) revert Errors.NotAllowed(msg.sender);\n        Entry memory",
        "Entry memory", money=True,
    ),
    Mutant(
        "anyone expels", "Pools.sol",
        "if (msg.sender != slasher) revert Errors.NotAllowed(msg.sender);", "",
    ),
    Mutant(
        "a released slash stays held", "StakeVault.sol",
        "_accounts[provider].pending -= held.toUint96();", "", money=True,
    ),
    Mutant(
        "unbonding need not outlast liability", "StakeVault.sol",
        "if (p.unbonding <= liability) revert Errors.UnbondingTooShort(p.unbonding, liability);",
        "",
    ),
    Mutant(
        "a root's leaves are liable without end", "Work.sol",
        "if (postedAt > until) revert Errors.RootedLate(postedAt, until);", "",
    ),
    Mutant(
        "a leaf is posted twice by its node", "Work.sol",
        "if (isPosted[leaf]) revert Errors.AlreadyPosted(leaf);", "",
    ),
    Mutant(
        "a node posts its leaf before the manager's time is up", "Work.sol",
        "if (block.timestamp < from || windowTime() > from + _validity) {", "if (false) {",
    ),
    Mutant("fewer opinions than the quorum count", "PoolState.sol",
        "if (authors.length != quorum) revert Errors.NoQuorum(authors.length, quorum);",
        "quorum = authors.length;"),
    Mutant("a stranger's opinion counts", "PoolState.sol",
        "if (!v.on) revert Errors.NotAllowed(authors[i]);", ""),
    Mutant("one key counts twice", "PoolState.sol",
        "if (v.number <= last) revert Errors.OpinionsOutOfOrder(last, v.number);", ""),
    Mutant("a validator appointed after the lease counts", "PoolState.sol",
        "if (v.countsFrom > validUntil) {", "if (false) {"),
    Mutant("an appointment keeps its first date", "Pools.sol",
        "if (on && !v.on) {\n            v.countsFrom",
        "if (on && !v.on) {\n            if (v.countsFrom == 0) v.countsFrom"),
    Mutant("a pool of quorum one appoints many", "Pools.sol",
        "p.quorum == 1 ? 1 : type(uint8).max;", "type(uint8).max;"),
    Mutant("one opinion is enough on a public chain", "Pools.sol",
        "block.chainid == LOCAL_CHAIN ? 1 : 2;", "1;"),
    Mutant("a slash takes more than a seat", "Pools.sol",
        "if (config.slashAmount > config.stakePerClass) {", "if (false) {"),
    Mutant("an opinion without evidence slashes", "Work.sol",
        "if (opinions.voices[i].evidence == 0) revert Errors.ZeroDigest();", ""),
    Mutant("one bond stands for all open proposals", "StakeVault.sol",
        "if (free < bond * open) {", "if (free < bond) {"),
    Mutant("a bond is never free again", "StakeVault.sol",
        "--_accounts[validators[i]].pledges;", "", money=True),
    Mutant("a friendly proposal shields", "StakeVault.sol",
        "if (asked > held) taken += Math.min(asked - held, _reachable(account, manager));", ""),
    Mutant("slashes know no cap", "StakeVault.sol",
        "taken = Math.min(taken, Math.saturatingSub(slashCap, lost));", ""),
    Mutant("the cap never comes back", "StakeVault.sol",
        "account.lostIn == window ? account.lost : 0;", "account.lost;"),
    Mutant("what takes nothing expels", "Slasher.sol",
        "if (taken > 0) pools.expel", "pools.expel"),
    Mutant("an objection does not stop the slash", "Slasher.sol",
        "_entries[leaf].state = state;", ""),
    Mutant("new terms change an open proposal's bond", "Slasher.sol",
        "uint256 bond = _terms[p.terms].bond;", "uint256 bond = _current.bond;"),
    Mutant("the arbiter is replaced at once", "Terms.sol",
        "if (windowTime() < _arbiterAt) revert Errors.TooEarly(_arbiterAt, block.timestamp);",
        ""),
    Mutant("anyone announces an arbiter", "Terms.sol",
        "if (msg.sender != arbiter && msg.sender != governor) "
        "revert Errors.NotAllowed(msg.sender);",
        "", money=True),
    Mutant("a root without its list is taken", "Work.sol",
        "if (root == 0 || leavesObject == 0) revert Errors.ZeroDigest();",
        "if (root == 0) revert Errors.ZeroDigest();"),
    Mutant("a reward root without its table is taken", "Rewards.sol",
        "if (root == 0 || object == 0) revert Errors.ZeroDigest();",
        "if (root == 0) revert Errors.ZeroDigest();"),
    Mutant("a table comes before the manager is silent", "Rewards.sol",
        "if (from == 0 || windowTime() < from) revert Errors.ManagerNotSilent(pool, from);",
        "if (from == 0) revert Errors.ManagerNotSilent(pool, from);", money=True),
    Mutant("a pool that never had money is silent", "Rewards.sol",
        "if (from == 0 || windowTime() < from)", "if (windowTime() < from)"),
    Mutant("a root that promises nothing ends the silence", "Rewards.sol",
        "quietSince: added == 0 ? f.quietSince : uint32(block.timestamp)",
        "quietSince: uint32(block.timestamp)"),
    Mutant("a voided root ends the silence", "Rewards.sol",
        "f.quietSince = r.previousQuietSince;", ""),
    Mutant("a table needs no signatures", "Rewards.sol",
        "pools.checkTableAuthors(pool, authors);", "", money=True),
    Mutant("a table of fewer than the quorum is taken", "PoolState.sol",
        "if (authors.length != needed) revert Errors.NoQuorum(authors.length, needed);",
        "needed = authors.length;"),
    Mutant("one key signs a table twice", "PoolState.sol",
        "if (v.number <= previous) revert Errors.OpinionsOutOfOrder(previous, v.number);", ""),
    Mutant("one that resigned signs tables", "PoolState.sol",
        "if (v.number == 0 || v.resigned) revert Errors.NotAllowed(authors[i]);",
        "if (v.number == 0) revert Errors.NotAllowed(authors[i]);"),
    Mutant("strangers sign tables", "PoolState.sol",
        "if (v.number == 0 || v.resigned) revert Errors.NotAllowed(authors[i]);",
        "if (v.resigned) revert Errors.NotAllowed(authors[i]);"),
    Mutant("a table that adds nothing is taken", "Rewards.sol",
        "if (added == 0) revert Errors.ZeroAmount();", ""),
    Mutant("a table draws more than the bond", "Rewards.sol",
        "if (missing > bonded) revert Errors.InsufficientFunds(pool, f.free + bonded, needed);\n"
        "        bondOf[pool] = bonded - missing;",
        "bondOf[pool] = bonded > missing ? bonded - missing : 0;"),
    Mutant("a table leaves the bond whole", "Rewards.sol",
        "bondOf[pool] = bonded - missing;", "", money=True),
    Mutant("a refunded bond stays in the books", "Rewards.sol",
        "bondOf[pool] = 0;", "", money=True),
    Mutant("a bond of nothing is taken", "Rewards.sol",
        "if (amount == 0) revert Errors.ZeroAmount();\n        bondOf[pool] += amount;",
        "bondOf[pool] += amount;"),
    Mutant("the refund comes before the validators' table", "Rewards.sol",
        "return Math.max(endedAt + _refundDelay, tabled);", "return endedAt + _refundDelay;"),
    Mutant("windows close while the sequencer is down", "WindowTime.sol",
        "if (answer != 0) since = Math.saturatingSub(startedAt, 1);", "if (answer != 0) { }"),
    Mutant("windows close as soon as the sequencer is up", "WindowTime.sol",
        "else if (startedAt + GRACE <= next) break;", "else if (startedAt <= next) break;"),
    Mutant("a late report opens what has closed", "WindowTime.sol",
        "Math.min(block.timestamp - REPORT_DELAY, _lastOutage());", "_lastOutage();"),
    Mutant("the grace counts from now on, for older outages too", "WindowTime.sol",
        "next = startedAt;", ""),
    Mutant("stake leaves in an outage", "StakeVault.sol",
        "account.queueLength, available, windowTime()",
        "account.queueLength, available, block.timestamp"),
    Mutant("rewards are claimed before the arbiter is back", "Rewards.sol",
        "if (windowTime() < r.claimableAt) {", "if (block.timestamp < r.claimableAt) {"),
    Mutant("pay is promised before an outage's rejections", "Rewards.sol",
        "if (windowTime() < from) revert Errors.EpochStillOpen",
        "if (block.timestamp < from) revert Errors.EpochStillOpen"),
    Mutant("a proposal executes before its outage is over", "Slasher.sol",
        "Entry memory p = _in(leaf, State.Proposed);\n"
        "        if (windowTime() < p.deadline)",
        "Entry memory p = _in(leaf, State.Proposed);\n"
        "        if (block.timestamp < p.deadline)"),
)  # fmt: skip
