"""`prime-node …` in this process.

That it starts as a process, too, is what test_node_cli.py and test_agent.py show.
"""

from __future__ import annotations

import os
import subprocess

from programs import typed

from prime_node.cli import main


def prime_node(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One command by its entry point, away from this machine's own settings."""
    clean = {name: value for name, value in os.environ.items() if "PRIME_NODE" not in name}
    ours = {"HOME": "/nonexistent", "NO_COLOR": "1"} | (env or {})
    return subprocess.CompletedProcess(words, *typed(main, "prime-node", *words, env=clean | ours))
