"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("mean_reward_micro", sa.BigInteger(), nullable=False),
        sa.Column("staleness_max", sa.Integer(), nullable=False),
        sa.Column("sealed_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("step"),
    )
    op.create_table(
        "chain_events",
        sa.Column("block_hash", sa.Text(), nullable=False),
        sa.Column("log_index", sa.Integer(), nullable=False),
        sa.Column("block", sa.BigInteger(), nullable=False),
        sa.Column("block_time", sa.BigInteger(), nullable=False),
        sa.Column("tx_hash", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("args", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=True),
        sa.Column("second", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("block_hash", "log_index"),
    )
    op.create_index("chain_events_block", "chain_events", ["block"], unique=False)
    op.create_index("chain_events_second", "chain_events", ["name", "second"], unique=False)
    op.create_index("chain_events_subject", "chain_events", ["name", "subject"], unique=False)
    op.create_index("chain_events_tx", "chain_events", ["tx_hash"], unique=False)
    op.create_table(
        "chain_state",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "account"),
    )
    op.create_table(
        "chain_steps",
        sa.Column("block", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("block_hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("block"),
    )
    op.create_table(
        "chain_undo",
        sa.Column("block", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("block", "kind", "account"),
    )
    op.create_table(
        "challenges",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("seed", sa.Text(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("issued_at", sa.Float(), nullable=False),
        sa.Column("deadline", sa.BigInteger(), nullable=False),
        sa.Column("hardware", sa.Text(), nullable=False),
        sa.Column("runtime", sa.Text(), nullable=False),
        sa.Column("used", sa.Boolean(), nullable=False),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.Column("rate", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("challenges_node", "challenges", ["node", "issued_at"], unique=False)
    op.create_table(
        "credits",
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("units", sa.BigInteger(), nullable=False),
        sa.Column("amount", sa.Text(), nullable=False),
        sa.Column("earned_at", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("submission_digest"),
    )
    op.create_index("credits_node", "credits", ["node"], unique=False)
    op.create_table(
        "cursors",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("block", sa.BigInteger(), nullable=False),
        sa.Column("block_hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "loop_leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "sender_meta",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "sender_intents",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("call_to", sa.Text(), nullable=True),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("nonce", sa.BigInteger(), nullable=True),
        sa.Column("gas", sa.BigInteger(), nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("tx_hash", sa.Text(), nullable=True),
        sa.Column("block", sa.BigInteger(), nullable=True),
        sa.Column("contract", sa.Text(), nullable=True),
        sa.Column("block_hash", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("id"),
    )
    op.create_index("sender_intents_block", "sender_intents", ["block"], unique=False)
    op.create_index("sender_intents_nonce", "sender_intents", ["nonce"], unique=False)
    op.create_index("sender_intents_open", "sender_intents", ["status", "seq"], unique=False)
    op.create_table(
        "sender_attempts",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("intent_id", sa.Text(), nullable=False),
        sa.Column("nonce", sa.BigInteger(), nullable=False),
        sa.Column("max_fee", sa.Text(), nullable=False),
        sa.Column("priority_fee", sa.Text(), nullable=False),
        sa.Column("raw", sa.LargeBinary(), nullable=False),
        sa.Column("signed_at", sa.Float(), nullable=False),
        sa.Column("sent_at", sa.Float(), nullable=True),
        sa.Column("closed", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("hash"),
    )
    op.create_index(
        "sender_attempts_intent", "sender_attempts", ["intent_id", "signed_at"], unique=False
    )
    op.create_table(
        "drift",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("setup", sa.Text(), nullable=False),
        sa.Column("statistic", sa.Text(), nullable=False),
        sa.Column("files", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.Float(), nullable=False),
        sa.Column("squares", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("node", "setup", "statistic"),
    )
    op.create_table(
        "opinions",
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("validator", sa.Text(), nullable=False),
        sa.Column("reason", sa.Integer(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("submission_digest", "validator"),
    )
    op.create_table(
        "planted",
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("submission_digest"),
    )
    op.create_table(
        "draw_secrets",
        sa.Column("validator", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("revealed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("validator", "epoch"),
    )
    op.create_index("draw_secrets_epoch", "draw_secrets", ["epoch"], unique=False)
    op.create_table(
        "groups",
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("group_no", sa.Integer(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("informative", sa.Boolean(), nullable=False),
        sa.Column("reward_micro_sum", sa.BigInteger(), nullable=False),
        sa.Column("accepted_at", sa.Float(), nullable=False),
        sa.Column("batch_step", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("submission_digest", "group_no"),
    )
    op.create_index(
        "groups_free", "groups", ["batch_step", "informative", "policy_version"], unique=False
    )
    op.create_table(
        "intents",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("tx_hash", sa.Text(), nullable=True),
        sa.Column("block", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("intents_block", "intents", ["block"], unique=False)
    op.create_index(
        "intents_lane_status", "intents", ["lane", "status", "created_at"], unique=False
    )
    op.create_table(
        "jobs",
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("claimed_by", sa.Text(), nullable=True),
        sa.Column("claimed_until", sa.Float(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("abstentions", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("not_before", sa.Float(), nullable=False),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("submission_digest"),
    )
    op.create_index("jobs_ready", "jobs", ["status", "shadow", "created_at"], unique=False)
    op.create_table(
        "leases",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("lease_index", sa.BigInteger(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("deadline", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("upload_sha256", sa.Text(), nullable=True),
        sa.Column("upload_size", sa.BigInteger(), nullable=True),
        sa.Column("uploads", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.Column("target", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
        sa.UniqueConstraint("step", "lease_index"),
    )
    op.create_index("leases_created", "leases", ["shadow", "created_at"], unique=False)
    op.create_index("leases_node_status", "leases", ["node", "status"], unique=False)
    op.create_index("leases_status_deadline", "leases", ["status", "deadline"], unique=False)
    op.create_table(
        "meta",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "nodes",
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("speed_class", sa.Integer(), nullable=False),
        sa.Column("token_rate", sa.Float(), nullable=True),
        sa.Column("challenge_rate", sa.Float(), nullable=True),
        sa.Column("hardware", sa.Text(), nullable=False),
        sa.Column("runtime", sa.Text(), nullable=False),
        sa.Column("last_heartbeat", sa.Float(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_second", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("address"),
    )
    op.create_table(
        "nonces",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("nonce", sa.Text(), nullable=False),
        sa.Column("expires", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", "nonce"),
    )
    op.create_index("nonces_expires", "nonces", ["expires"], unique=False)
    op.create_table(
        "policies",
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("published_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("version"),
        sa.UniqueConstraint("digest"),
    )
    op.create_table(
        "arrivals",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("version", "node"),
    )
    op.create_table(
        "relays",
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("versions", sa.Text(), nullable=False),
        sa.Column("first_seen", sa.Float(), nullable=False),
        sa.Column("last_seen", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("url"),
    )
    op.create_table(
        "reward_roots",
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("root", sa.Text(), nullable=False),
        sa.Column("cumulative_total", sa.Text(), nullable=False),
        sa.Column("object", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("claimable_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("epoch"),
    )
    op.create_table(
        "roots",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("root", sa.Text(), nullable=False),
        sa.Column("leaves_object", sa.Text(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("chain_seq", sa.BigInteger(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=True),
        sa.Column("posted_at", sa.BigInteger(), nullable=True),
        sa.Column("block", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("root"),
    )
    op.create_table(
        "sessions",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("issued_at", sa.BigInteger(), nullable=False),
        sa.Column("expiry", sa.BigInteger(), nullable=False),
        sa.Column("revoked", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("key_id"),
    )
    op.create_index("sessions_account", "sessions", ["account"], unique=False)
    op.create_table(
        "slashes",
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("validator", sa.Text(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("reason", sa.Integer(), nullable=False),
        sa.Column("amount", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("executable_at", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("propose_tx", sa.Text(), nullable=True),
        sa.Column("execute_tx", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("submission_digest"),
    )
    op.create_table(
        "submissions",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("lease_digest", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("receipt", sa.Text(), nullable=False),
        sa.Column("received_at", sa.Float(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reason", sa.Integer(), nullable=False),
        sa.Column("units", sa.BigInteger(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=True),
        sa.Column("verdict_table", sa.Text(), nullable=True),
        sa.Column("evidence", sa.Text(), nullable=True),
        sa.Column("validator", sa.Text(), nullable=True),
        sa.Column("judged_at", sa.Float(), nullable=True),
        sa.Column("root_id", sa.Integer(), nullable=True),
        sa.Column("leaf_index", sa.Integer(), nullable=True),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.Column("compute_share", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("digest"),
        sa.UniqueConstraint("lease_digest"),
    )
    op.create_index("submissions_judged", "submissions", ["node", "judged_at"], unique=False)
    op.create_index("submissions_node", "submissions", ["node", "received_at"], unique=False)
    op.create_index("submissions_root", "submissions", ["root_id"], unique=False)
    op.create_index("submissions_status", "submissions", ["status"], unique=False)
