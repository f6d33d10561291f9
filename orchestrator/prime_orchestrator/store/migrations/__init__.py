"""Alembic's folder; see prime_orchestrator/store/migrate.py."""
