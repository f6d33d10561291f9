"""Alembic's entry point: migrates over the connection that `migrate.upgrade` passes."""

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
