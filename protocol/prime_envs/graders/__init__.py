"""Graders: what one answer to one task is worth, the same on every machine. See `base`."""
