"""Judged files are counted by node as they change, so that status and metrics need not count them;
indexes for the newest groups and opinions and for repeated rows.

Triggers keep the counts, so that every statement that changes a submission also changes its count.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_TAKE = """UPDATE tallies SET files = files - 1, units = units - OLD.units
    WHERE node = OLD.node AND shadow = OLD.shadow AND status = OLD.status;"""
_GIVE = """INSERT INTO tallies (node, shadow, status, files, units)
    VALUES (NEW.node, NEW.shadow, NEW.status, 1, NEW.units)
    ON CONFLICT (node, shadow, status) DO UPDATE
    SET files = tallies.files + 1, units = tallies.units + excluded.units;"""
_UPDATE = "UPDATE OF node, shadow, status, units"
_POSTGRESQL = (
    f"""CREATE OR REPLACE FUNCTION tally_submission() RETURNS trigger AS $$
    BEGIN
        IF TG_OP <> 'INSERT' AND OLD.status <> 'submitted' THEN
            {_TAKE}
        END IF;
        IF TG_OP <> 'DELETE' AND NEW.status <> 'submitted' THEN
            {_GIVE}
        END IF;
        RETURN NULL;
    END $$ LANGUAGE plpgsql""",
    f"""CREATE TRIGGER submissions_tally AFTER INSERT OR DELETE OR {_UPDATE}
    ON submissions FOR EACH ROW EXECUTE FUNCTION tally_submission()""",
)
_SQLITE = tuple(
    f"CREATE TRIGGER submissions_tally_{name} AFTER {event} ON submissions "
    f"WHEN {row}.status <> 'submitted' BEGIN {act} END"
    for name, event, row, act in (
        ("insert", "INSERT", "NEW", _GIVE),
        ("delete", "DELETE", "OLD", _TAKE),
        ("leave", _UPDATE, "OLD", _TAKE),
        ("enter", _UPDATE, "NEW", _GIVE),
    )
)


def upgrade() -> None:
    op.create_table(
        "tallies",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("files", sa.BigInteger(), nullable=False),
        sa.Column("units", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("node", "shadow", "status"),
    )
    op.execute(
        "INSERT INTO tallies (node, shadow, status, files, units) "
        "SELECT node, shadow, status, count(*), sum(units) FROM submissions "
        "WHERE status <> 'submitted' GROUP BY node, shadow, status"
    )
    for statement in _POSTGRESQL if op.get_context().dialect.name == "postgresql" else _SQLITE:
        op.execute(statement)
    op.create_index("submissions_repeated", "submissions", ["repeated_rows"])
    op.create_index("groups_newest", "groups", ["accepted_at", "submission_digest"])
    op.create_index("opinions_newest", "opinions", ["at"])
