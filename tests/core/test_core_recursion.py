"""Deeply nested input from outside must be an error, never the end of the process."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from prime_core.signing import LocalSigner
assert LocalSigner(bytes([1]) * 32).account.address
import prime_chain.rpc, prime_chain.deployer
from prime_core.encoding import parse_canonical_json
from prime_core.errors import MalformedError
for text in (b"[" * 1_000_000, b'{"a":' * 500_000):
    try:
        parse_canonical_json(text)
    except MalformedError:
        print("refused")
"""


def test_nested_json_is_refused_and_does_not_overflow_the_stack() -> None:
    # In a process of its own: where the guard is missing, it dies by a segmentation fault.
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.split() == ["refused", "refused"]
