"""The pool's writer: verdicts, settlement, slashes, batches."""
