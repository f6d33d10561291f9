"""Deliberately false files: what planted nodes submit."""
