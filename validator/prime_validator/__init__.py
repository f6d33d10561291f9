"""The validator: a separate program that judges rollout files for a pool."""
