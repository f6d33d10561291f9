"""Alembic's folder; see orchestrator/store/migrate.py."""
