"""The command `orchestrator`."""
