"""What status and metrics show of recent batches and opinions is written as it happens, so that
they need not join groups, submissions and leases: target lengths by batch, and whether a verdict
contradicts an opinion. Files with repeated rows are counted in an index of their own.

Triggers keep `overruled`, so that every statement that changes a verdict also changes it. Reasons 1
to 49 reject. A store with history gets what is shown of it: the newest 8 batches and 2000 opinions.
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"

_TARGETS = """INSERT INTO batch_targets (step, target, groups)
    SELECT g.batch_step, l.target, count(*) FROM groups g
    JOIN submissions s ON s.digest = g.submission_digest
    JOIN leases l ON l.digest = s.lease_digest
    WHERE g.batch_step > (SELECT max(step) FROM batches) - 8
    GROUP BY g.batch_step, l.target"""
_OVERRULED = """UPDATE opinions SET overruled = TRUE
    WHERE at >= (SELECT min(at) FROM (SELECT at FROM opinions ORDER BY at DESC LIMIT 2000) AS new)
    AND (SELECT CASE s.status
            WHEN 'accepted' THEN opinions.reason BETWEEN 1 AND 49
            WHEN 'rejected' THEN opinions.reason = 0 ELSE FALSE END
        FROM submissions s WHERE s.digest = opinions.submission_digest)"""
_JUDGED = """UPDATE opinions SET overruled = NOT overruled
    WHERE submission_digest = NEW.digest AND overruled <> CASE NEW.status
        WHEN 'accepted' THEN reason BETWEEN 1 AND 49
        WHEN 'rejected' THEN reason = 0 ELSE FALSE END;"""
_GIVEN = """UPDATE opinions SET overruled = NOT overruled
    WHERE submission_digest = NEW.submission_digest AND validator = NEW.validator
    AND overruled <> (SELECT CASE s.status
            WHEN 'accepted' THEN NEW.reason BETWEEN 1 AND 49
            WHEN 'rejected' THEN NEW.reason = 0 ELSE FALSE END
        FROM submissions s WHERE s.digest = NEW.submission_digest);"""
_IS_JUDGED = """EXISTS (SELECT 1 FROM submissions s
    WHERE s.digest = NEW.submission_digest AND s.status <> 'submitted')"""
_POSTGRESQL = (
    f"""CREATE FUNCTION overrule_judged() RETURNS trigger AS $$
    BEGIN
        {_JUDGED}
        RETURN NULL;
    END $$ LANGUAGE plpgsql""",
    f"""CREATE FUNCTION overrule_given() RETURNS trigger AS $$
    BEGIN
        IF {_IS_JUDGED} THEN
            {_GIVEN}
        END IF;
        RETURN NULL;
    END $$ LANGUAGE plpgsql""",
    """CREATE TRIGGER submissions_overrule AFTER UPDATE OF status ON submissions FOR EACH ROW
    WHEN (NEW.status <> OLD.status) EXECUTE FUNCTION overrule_judged()""",
    """CREATE TRIGGER opinions_overrule AFTER INSERT ON opinions FOR EACH ROW
    EXECUTE FUNCTION overrule_given()""",
)
_SQLITE = (
    f"""CREATE TRIGGER submissions_overrule AFTER UPDATE OF status ON submissions
    WHEN NEW.status <> OLD.status BEGIN {_JUDGED} END""",
    f"""CREATE TRIGGER opinions_overrule AFTER INSERT ON opinions
    WHEN {_IS_JUDGED} BEGIN {_GIVEN} END""",
)


def upgrade() -> None:
    op.create_table(
        "batch_targets",
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("target", sa.BigInteger(), nullable=False),
        sa.Column("groups", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("step", "target"),
    )
    op.execute(_TARGETS)
    op.add_column(
        "opinions", sa.Column("overruled", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.execute(_OVERRULED)
    op.drop_index("submissions_repeated", "submissions")
    op.create_index(
        "submissions_repeated", "submissions", ["status"],
        sqlite_where=sa.text("repeated_rows > 0"), postgresql_where=sa.text("repeated_rows > 0"),
    )  # fmt: skip
    for statement in _POSTGRESQL if op.get_context().dialect.name == "postgresql" else _SQLITE:
        op.execute(statement)
