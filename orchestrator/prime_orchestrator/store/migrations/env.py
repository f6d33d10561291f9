"""Alembic's entry: migrates over the connection that `migrate.upgrade` hands in."""

from alembic import context

from prime_orchestrator.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
