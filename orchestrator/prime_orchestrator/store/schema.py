"""Tables of the orchestrator's store, for both SQLite and PostgreSQL.

The store owns leases, verdicts, credits and batches, and keeps a read copy of chain facts that only
the indexer writes. Digests and addresses are text as in prime_core.ids; wei amounts are decimal
text; times are Unix seconds by the orchestrator's clock.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

from prime_orchestrator.store.packed import Packed

metadata = MetaData()

nodes = Table(
    "nodes",
    metadata,
    Column("address", Text, primary_key=True),
    Column("provider", Text),
    Column("status", Text, nullable=False),  # NodeStatus
    Column("speed_class", Integer, nullable=False),  # see prime_orchestrator/manager/speed.py
    Column("token_rate", Float),  # accepted tokens/s, lease to submission; None: too few
    Column("challenge_rate", Float),  # million multiply-adds/s, best of the latest
    Column("hardware", Text, nullable=False),  # JSON of Hardware
    Column("runtime", Text, nullable=False),
    Column("last_heartbeat", Float, nullable=False),
    Column("policy_version", BigInteger),
    Column("tokens_per_second", Integer, nullable=False, default=0),
    Column("created_at", Float, nullable=False),
    Column("kept", Float, nullable=False, server_default=text("0")),  # see manager/standing.py
    Column("missed", Float, nullable=False, server_default=text("0")),
    Column("misses", Integer, nullable=False, server_default=text("0")),  # since the last kept one
    Column("rests_until", Float, nullable=False, server_default=text("0")),
    Column("instance", Text, nullable=False, server_default=text("''")),  # Heartbeat.instance
    Index("nodes_provider", "provider"),
    Index("nodes_status_kept", "status", "kept"),
)

runs = Table(  # revisions of the pool's run; its first definition comes with the process
    "runs",
    metadata,
    Column("from_step", BigInteger, primary_key=True, autoincrement=False),
    Column("digest", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),  # the file's exact bytes
    Column("final", Boolean, nullable=False),  # its digest is in a final block
    Column("announced_at", Float, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("key_id", Text, primary_key=True),  # Ed25519 public key, as a Digest
    Column("account", Text, nullable=False),
    Column("scope", Text, nullable=False),
    Column("issued_at", BigInteger, nullable=False),
    Column("expiry", BigInteger, nullable=False),
    Column("revoked", Boolean, nullable=False, default=False),
    Index("sessions_account", "account"),
    Index("sessions_expiry", "expiry"),
)

revocations = Table(
    "revocations",
    metadata,
    Column("account", Text, primary_key=True),
    Column("revoked_before", BigInteger, nullable=False),  # its older grants are void
    Index("revocations_time", "revoked_before"),
)

nonces = Table(
    "nonces",
    metadata,
    Column("key_id", Text, nullable=False),
    Column("nonce", Text, nullable=False),
    Column("expires", BigInteger, nullable=False),
    PrimaryKeyConstraint("key_id", "nonce"),
    Index("nonces_expires", "expires"),
)

challenges = Table(
    "challenges",
    metadata,
    Column("id", Text, primary_key=True),
    Column("node", Text, nullable=False),
    Column("seed", Text, nullable=False),
    Column("size", Integer, nullable=False),
    Column("rounds", Integer, nullable=False),
    Column("issued_at", Float, nullable=False),
    Column("deadline", BigInteger, nullable=False),
    Column("hardware", Text, nullable=False),
    Column("runtime", Text, nullable=False),
    Column("used", Boolean, nullable=False, default=False),
    Column("shadow", Boolean, nullable=False, default=False),  # asked for shadow work
    Column("rate", Float),  # of a correct answer, in million multiply-adds/s
    Column("place", Text),  # address (an IPv6 /64) that asked for shadow work; None: not limited
    Column("site", Text),  # the same by IPv6 /48
    Column("cards", Text),  # JSON of api.cards.State, of a proof of cards
    Index("challenges_node", "node", "issued_at"),
    Index("challenges_place", "place", "issued_at"),
    Index("challenges_site", "site", "issued_at"),
    Index("challenges_deadline", "deadline"),
)

passports = Table(
    "passports",
    metadata,
    Column("node", Text, primary_key=True),
    Column("cards", Text, nullable=False),  # such as "8 x h200"
    Column("body", Text, nullable=False),  # JSON of SignedPassport
    Column("measured_at", BigInteger, nullable=False, server_default=text("0")),
    Column("claimed_memory_mb", BigInteger, nullable=False, server_default=text("0")),
    Column("proved_memory_mb", BigInteger, nullable=False, server_default=text("0")),
    Column("memory", Text),  # JSON of SignedMemory; None: it is only claimed
)

measurements = Table(
    "measurements",
    metadata,
    Column("node", Text, primary_key=True),
    Column("asked_at", Float),  # None: not under way
    Column("again_at", Float),  # None: when it is drawn
    Column("knows", Integer, nullable=False, default=0),  # 1: it has said that it proves again
    Column("failures", Integer, nullable=False, default=0),  # in a row
    Column("trouble", Text, nullable=False, default=""),  # why it gets no lease
    Column("passed", Integer, nullable=False, default=0),
    Column("refused", Integer, nullable=False, default=0),
    Column("unanswered", Integer, nullable=False, default=0),
    Column("ignored", Integer, nullable=False, default=0),
)

leases = Table(
    "leases",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("node", Text, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("lease_index", BigInteger, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("status", Text, nullable=False),  # LeaseStatus
    Column("deadline", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("upload_sha256", Text),
    Column("upload_size", BigInteger),
    Column("uploads", Integer, nullable=False, default=0),  # distinct files announced so far
    Column("body", Packed, nullable=False),  # JSON of SignedLease
    Column("shadow", Boolean, nullable=False, default=False),  # see Lease.shadow
    Column("target", BigInteger, nullable=False),  # length in tokens that its groups ask for
    Column("tries", Integer, nullable=False, server_default=text("0")),  # expired before it
    Column("issued_again", Integer, nullable=False, server_default=text("0")),  # 1: by a later one
    Column("excused", Integer, nullable=False, server_default=text("0")),  # 1: not its node's fault
    Column("evaluation", Integer),  # evaluations.id; None: the lease asks problems to train on
    Column("heldout", BigInteger),  # its first held-out problem
    UniqueConstraint("step", "lease_index"),
    Index("leases_node_status", "node", "status"),
    Index("leases_created", "shadow", "created_at"),
    Index("leases_status_deadline", "status", "deadline"),
    Index(
        "leases_evaluation",
        "evaluation",
        sqlite_where=text("evaluation IS NOT NULL"),
        postgresql_where=text("evaluation IS NOT NULL"),
    ),
)

submissions = Table(
    "submissions",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("lease_digest", Text, nullable=False, unique=True),
    Column("node", Text, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("body", Packed, nullable=False),  # JSON of SignedSubmission
    Column("receipt", Packed, nullable=False),  # JSON of ReceiptAnswer
    Column("received_at", Float, nullable=False),
    Column("status", Text, nullable=False),  # SubmissionStatus
    Column("reason", Integer, nullable=False, default=0),
    Column("units", BigInteger, nullable=False, default=0),
    Column("prompt_units", BigInteger, nullable=False, default=0, server_default=text("0")),
    Column("verdict", Text),  # SHA-256 of the Verdict object
    Column("verdict_table", Text),
    Column("evidence", Text),
    Column("validator", Text),
    Column("judged_at", Float),
    Column("root_id", Integer),  # roots.id once taken into a root
    Column("leaf_index", Integer),
    Column("shadow", Boolean, nullable=False, default=False),  # shadow files are only judged
    Column("compute_share", Float),  # replay compute as a share of making the file
    Column("repeated_rows", Integer),  # also in earlier files; None: not checked
    Index("submissions_status", "status"),
    Index("submissions_root", "root_id"),
    Index(
        "submissions_unrooted",
        "shadow",
        "received_at",
        sqlite_where=text("root_id IS NULL"),
        postgresql_where=text("root_id IS NULL"),
    ),
    Index("submissions_node", "node", "received_at"),
    Index("submissions_judged", "node", "judged_at"),
    Index("submissions_newest", "received_at"),
    Index(
        "submissions_repeated",
        "status",
        sqlite_where=text("repeated_rows > 0"),
        postgresql_where=text("repeated_rows > 0"),
    ),
    Index("submissions_unjudged", "status", "reason", "shadow", "node"),
)

archive_pages = Table(  # objects with the rows of files that are over (store/archive.py)
    "archive_pages",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("digest", Text, nullable=False),
    Column("files", Integer, nullable=False),  # 0: leases that brought no file
    Column("epoch", BigInteger, nullable=False),  # the newest settled one when it was written
    Column("first_received", Float, nullable=False),
    Column("last_received", Float, nullable=False),
    # Days for which the page's rollout files were kept; they may be gone (store/removal.py)
    Column("kept_days", Integer),
    Column("removed", Boolean, nullable=False, server_default=false()),  # they are
)

archive_totals = Table(  # what is counted forever of archived rows (store/totals.py)
    "archive_totals",
    metadata,
    Column("name", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("value", BigInteger, nullable=False),
    PrimaryKeyConstraint("name", "subject"),
)

archived = Table(  # where an archived file is
    "archived",
    metadata,
    Column("digest", LargeBinary, primary_key=True),  # of the submission: 32 bytes
    Column("lease_digest", LargeBinary, nullable=False, unique=True),
    Column("page", Integer, nullable=False),  # archive_pages.id
    Column("place", SmallInteger, nullable=False),  # line of the page, from 0
)

tallies = Table(  # judged submissions by node, also archived ones; triggers keep it
    "tallies",
    metadata,
    Column("node", Text, nullable=False),
    Column("shadow", Boolean, nullable=False),
    Column("status", Text, nullable=False),  # SubmissionStatus but submitted
    Column("files", BigInteger, nullable=False),
    Column("units", BigInteger, nullable=False),
    PrimaryKeyConstraint("node", "shadow", "status"),
)

jobs = Table(  # one per submission: how many opinions it needs
    "jobs",
    metadata,
    Column("submission_digest", Text, primary_key=True),
    Column("status", Text, nullable=False),  # open, full, done, quarantined
    Column("needed", Integer),  # opinions to seal before any is submitted; None: undecided
    Column("assigned", Integer, nullable=False, default=0),  # active assignments
    Column("whole", Boolean, nullable=False, default=False),  # replay every row
    Column("created_at", Float, nullable=False),
    Column("shadow", Boolean, nullable=False, default=False),  # judged after all others
    Index("jobs_open", "status", "shadow", "created_at"),
)

assignments = Table(  # which validator judges which file
    "assignments",
    metadata,
    Column("submission_digest", Text, nullable=False),
    Column("validator", Text, nullable=False),
    Column("status", Text, nullable=False),  # assigned, claimed, sealed, given, abstained, missed
    Column("worker", Text),
    Column("until", Float, nullable=False),  # end of the claim or of the wait for it
    Column("not_before", Float, nullable=False, default=0),
    Column("attempts", Integer, nullable=False, default=0),  # claims that timed out
    Column("delays", Integer, nullable=False, default=0),  # claims postponed
    Column("seal", Text),
    Column("at", Float, nullable=False),  # of the last change of status
    PrimaryKeyConstraint("submission_digest", "validator"),
    Index("assignments_validator", "validator", "status"),
    Index("assignments_status", "status", "until"),
)

validators = Table(  # validators that ask for work
    "validators",
    metadata,
    Column("address", Text, primary_key=True),
    Column("seen_at", Float, nullable=False),
)

classes = Table(  # exact classes that validators announced (prime_engine/exact.py)
    "classes",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("key", Text, nullable=False),  # digest of the facts
    Column("facts", Text, nullable=False),  # JSON
    Column("fingerprint", Text, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Index("classes_policy", "policy_version", "key"),
)

class_members = Table(  # which validator or node announced which class
    "class_members",
    metadata,
    Column("account", Text, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("digest", Text, nullable=False),
    Column("at", Float, nullable=False),
    PrimaryKeyConstraint("account", "policy_version", "digest"),
    Index("class_members_digest", "digest"),
    Index("class_members_policy", "policy_version"),
)

class_records = Table(  # what the judged files of exact leases showed
    "class_records",
    metadata,
    Column("key", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("mismatched", BigInteger, nullable=False),  # files with a mismatch
    Column("differed", BigInteger, nullable=False, server_default=text("0")),  # nothing else shown
    Column("judged_at", Float, nullable=False, server_default=text("0")),  # the newest file
    Column("differed_at", Float),  # see manager/suspicion.py
    PrimaryKeyConstraint("key", "node"),
    Index("class_records_node", "node"),
)

class_rows = Table(  # rows of exact leases that were equal bit for bit
    "class_rows",
    metadata,
    Column("key", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("validator", Text, nullable=False),  # that compared them
    Column("rows", BigInteger, nullable=False),
    Column("longest", BigInteger, nullable=False),  # of them, in tokens
    PrimaryKeyConstraint("key", "node", "validator"),
)

class_suspects = Table(  # classes in which several providers' files differed
    "class_suspects",
    metadata,
    Column("key", Text, nullable=False),
    Column("calibration", Text, nullable=False),  # the run's, under which they did
    Column("at", Float, nullable=False),
    PrimaryKeyConstraint("key", "calibration"),
)

evaluations = Table(  # of published policies on held-out problems, by leases
    "evaluations",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("policy_version", BigInteger, nullable=False),
    Column("problems", BigInteger, nullable=False),  # the first N held-out ones
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("archived", Packed),  # JSON: results of its archived files (evaluations.keep_results)
)

groups = Table(
    "groups",
    metadata,
    Column("submission_digest", Text, nullable=False),
    Column("group_no", Integer, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("rows", Integer, nullable=False),
    Column("informative", Boolean, nullable=False),  # rewards not all equal
    Column("reward_micro_sum", BigInteger, nullable=False),
    Column("accepted_at", Float, nullable=False),
    Column("batch_step", BigInteger),  # None: free; groups.HELD_OUT: of an evaluation
    Column("ungraded", Integer, nullable=False, server_default=text("0")),
    PrimaryKeyConstraint("submission_digest", "group_no"),
    Index("groups_free", "batch_step", "informative", "policy_version"),
    Index("groups_newest", "accepted_at"),
)

batches = Table(
    "batches",
    metadata,
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("digest", Text, nullable=False),
    Column("body", Text, nullable=False),  # JSON of SignedBatch
    Column("rows", Integer, nullable=False),
    Column("mean_reward_micro", BigInteger, nullable=False),
    Column("staleness_max", Integer, nullable=False),
    Column("sealed_at", Float, nullable=False),
)

batch_targets = Table(  # groups of each target length in a batch, counted when it is sealed
    "batch_targets",
    metadata,
    Column("step", BigInteger, nullable=False, autoincrement=False),
    Column("target", BigInteger, nullable=False),
    Column("groups", BigInteger, nullable=False),
    PrimaryKeyConstraint("step", "target"),
)

policies = Table(
    "policies",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("digest", Text, nullable=False, unique=True),
    Column("step", BigInteger, nullable=False),
    Column("body", Text, nullable=False),  # JSON of SignedManifest
    Column("published_at", Float, nullable=False),
)

relays = Table(
    "relays",
    metadata,
    Column("url", Text, primary_key=True),
    Column("account", Text, nullable=False),
    Column("versions", Text, nullable=False),
    Column("first_seen", Float, nullable=False),
    Column("last_seen", Float, nullable=False),
)

arrivals = Table(
    "arrivals",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("node", Text, primary_key=True),
    Column("at", Float, nullable=False),  # of the first heartbeat that named the version
)

roots = Table(
    "roots",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("root", Text, nullable=False, unique=True),
    Column("leaves_object", Text, nullable=False),  # SHA-256 of the published leaves object
    Column("count", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("chain_seq", BigInteger),  # Work's number of the root, once confirmed
    Column("epoch", BigInteger),  # by the block's time
    Column("posted_at", BigInteger),  # block time
    Column("block", BigInteger),
)

credits = Table(
    "credits",
    metadata,
    Column("submission_digest", Text, primary_key=True),
    Column("node", Text, nullable=False),
    Column("units", BigInteger, nullable=False),
    Column("amount", Text, nullable=False),
    Column("earned_at", BigInteger, nullable=False),  # the submission's received_at
    Column("status", Text, nullable=False),  # earned, held, forfeited
    Index("credits_node", "node"),
)

reward_roots = Table(
    "reward_roots",
    metadata,
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("root", Text, nullable=False),
    Column("cumulative_total", Text, nullable=False),
    Column("object", Text, nullable=False),  # SHA-256 of the published settlement object
    Column("created_at", Float, nullable=False),
    Column("claimable_at", BigInteger),  # set by the indexer from the confirmed event
)

slashes = Table(
    "slashes",
    metadata,
    Column("submission_digest", Text, primary_key=True),
    Column("node", Text, nullable=False),
    Column("validator", Text, nullable=False),
    Column("evidence", Text, nullable=False),
    Column("reason", Integer, nullable=False),
    Column("amount", Text, nullable=False),
    Column("status", Text, nullable=False),  # queued, proposed, executed, cancelled
    Column("executable_at", BigInteger),
    Column("created_at", Float, nullable=False),
    Column("propose_tx", Text),
    Column("execute_tx", Text),
    Column("receipt", Packed),  # the submission's, once that is archived
)

# The next three are the manager's queue, which prime_chain/transaction_queue.py writes, too.
intents = Table(
    "intents",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),  # derived from the fact: repeats are harmless
    Column("kind", Text, nullable=False),  # join, root, policy, propose, …
    Column("payload", Text, nullable=False),  # JSON arguments
    Column("call_to", Text),
    Column("data", LargeBinary),  # NULL while the intent waits: its call is not built yet
    Column("value", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("status", Text, nullable=False),  # waiting, queued, sent, confirmed, failed
    Column("nonce", BigInteger),
    Column("gas", BigInteger),
    Column("note", Text, nullable=False),
    Column("error", Text),
    Column("tx_hash", Text),
    Column("block", BigInteger),
    Column("contract", Text),
    Column("block_hash", Text),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Index("intents_status", "status", "seq"),
    Index("intents_nonce", "nonce"),
    Index("intents_block", "block"),
    Index("intents_newest", "updated_at"),
)

sender_attempts = Table(
    "sender_attempts",
    metadata,
    Column("hash", Text, primary_key=True),
    Column("intent_id", Text, nullable=False),
    Column("nonce", BigInteger, nullable=False),
    Column("max_fee", Text, nullable=False),
    Column("priority_fee", Text, nullable=False),
    Column("raw", LargeBinary, nullable=False),
    Column("signed_at", Float, nullable=False),
    Column("sent_at", Float),
    Column("closed", Integer, nullable=False),
    Index("sender_attempts_intent", "intent_id", "signed_at"),
)

sender_meta = Table(
    "sender_meta",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

chain_events = Table(
    "chain_events",
    metadata,
    Column("block_hash", Text, nullable=False),
    Column("log_index", Integer, nullable=False),
    Column("block", BigInteger, nullable=False),
    Column("block_time", BigInteger, nullable=False),
    Column("tx_hash", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("args", Text, nullable=False),  # JSON
    Column("subject", Text),
    Column("second", Text),
    PrimaryKeyConstraint("block_hash", "log_index"),
    Index("chain_events_block", "block"),
    Index("chain_events_subject", "name", "subject"),
    Index("chain_events_second", "name", "second"),
    Index("chain_events_tx", "tx_hash"),
)

chain_state = Table(  # current state of all accounts
    "chain_state",
    metadata,
    Column("kind", Text, nullable=False),  # provider, stake, revoked
    Column("account", Text, nullable=False),
    Column("value", Text, nullable=False),
    PrimaryKeyConstraint("kind", "account"),
)

chain_undo = Table(  # rows of chain_state before a block; None: there was no row
    "chain_undo",
    metadata,
    Column("block", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("account", Text, nullable=False),
    Column("value", Text),
    PrimaryKeyConstraint("block", "kind", "account"),
)

chain_steps = Table(
    "chain_steps",
    metadata,
    Column("block", BigInteger, primary_key=True, autoincrement=False),
    Column("block_hash", Text, nullable=False),
)

cursors = Table(
    "cursors",
    metadata,
    Column("name", Text, primary_key=True),
    Column("block", BigInteger, nullable=False),
    Column("block_hash", Text, nullable=False),
)

loop_leases = Table(  # which orchestrator on this store runs the manager's loops
    "loop_leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("beat", BigInteger, nullable=False),  # incremented while its holder is alive
)

drift = Table(
    "drift",
    metadata,
    Column("node", Text, nullable=False),
    Column("setup", Text, nullable=False),
    Column("kind", Text, nullable=False),  # only files of one kind are compared
    Column("statistic", Text, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("total", Float, nullable=False),  # sum of the files' shares of their limits
    Column("squares", Float, nullable=False),
    PrimaryKeyConstraint("node", "setup", "kind", "statistic"),
)

opinions = Table(  # each validator's opinion on a file
    "opinions",
    metadata,
    Column("submission_digest", Text, nullable=False),
    Column("validator", Text, nullable=False),
    Column("reason", Integer, nullable=False),
    Column("body", Packed, nullable=False),  # JSON of SignedOpinion
    Column("at", Float, nullable=False),
    # The verdict contradicts it; triggers keep it (migration 0019)
    Column("overruled", Boolean, nullable=False, server_default=false()),
    PrimaryKeyConstraint("submission_digest", "validator"),
    Index("opinions_newest", "at"),
)

row_marks = Table(  # marks of accepted files' rows: see prime_verify/repeats.py
    "row_marks",
    metadata,
    Column("mark", Text, nullable=False),
    Column("improbable", Boolean, nullable=False),  # claimed too improbable to be drawn twice
    Column("submission_digest", Text, nullable=False),
    Column("at", Float, nullable=False),
    PrimaryKeyConstraint("mark", "improbable", "submission_digest"),
    Index("row_marks_submission", "submission_digest"),
    Index("row_marks_at", "at"),
)

planted = Table(  # the manager's own files with a known truth; added once judged
    "planted",
    metadata,
    Column("submission_digest", Text, primary_key=True),
    Column("kind", Text, nullable=False),  # honest, or the name of the attack
    Column("at", Float, nullable=False),
)

draw_commitments = Table(  # of validators
    "draw_commitments",
    metadata,
    Column("validator", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("body", Text, nullable=False),  # JSON of SignedDrawCommitment
    Column("revealed", Boolean, nullable=False, default=False),
    # None until acceptances are compared with it; then the first difference, or ""
    Column("compared", Text),
    # an acceptance of a lease of the epoch has a verdict
    Column("accepted", Boolean, nullable=False, server_default=false()),
    PrimaryKeyConstraint("validator", "epoch"),
    Index("draw_commitments_epoch", "epoch"),
    Index(
        "draw_commitments_compared",
        "epoch",
        sqlite_where=text("compared IS NULL OR compared <> ''"),
        postgresql_where=text("compared IS NULL OR compared <> ''"),
    ),
)

second_secrets = Table(  # the manager's own part of the draws
    "second_secrets",
    metadata,
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("commitment", Text, nullable=False, unique=True),
    Column("secret", Text, nullable=False),
    Column("revealed", Boolean, nullable=False, default=False),
)

meta = Table(
    "meta",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
