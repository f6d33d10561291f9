"""The validator: a program of its own that judges rollout files for a pool."""
