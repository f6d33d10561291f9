"""Thin routes: bounded body → service → answer. Their table is in prime_core/messages.py."""
