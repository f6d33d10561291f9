"""What runs inside the container: one lease after another, end to end. No key, no network."""
