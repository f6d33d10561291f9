"""Thin routes: bounded body → service → answer. Their table is in protocol/core/messages.py."""
