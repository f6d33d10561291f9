"""`prime-node …` in this process: another one would spend a second of processor on imports alone.

That it starts as a process, too, is what test_node_cli.py and test_agent.py show.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from unittest.mock import patch

from prime_node.cli import main


def prime_node(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One command by its entry point, away from this machine's own settings."""
    out, said, status = io.StringIO(), io.StringIO(), 0
    clean = {name: value for name, value in os.environ.items() if "PRIME_NODE" not in name}
    ours = {"HOME": "/nonexistent", "NO_COLOR": "1"} | (env or {})
    with (
        patch.object(sys, "argv", ["prime-node", *words]),
        patch.dict(os.environ, clean | ours, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(said),
    ):
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(words, status, out.getvalue(), said.getvalue())
