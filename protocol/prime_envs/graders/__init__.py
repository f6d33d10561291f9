"""Graders: score one answer to one task, identically on every machine. See `base`."""
