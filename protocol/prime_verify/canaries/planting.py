"""Planted files: made by a node of the manager's own, honest or lying, to see who notices.

The node has a seat, stake and leases like any other, so nothing in a file, its lease or the queue
tells it apart. Which of its files lie, and how, follows from the lease and a secret that the node's
machine and the orchestrator share; nobody else can know before the verdict.

    worker         kind(secret, lease) ──► honest builder, or that lie   (prime_node/planting.py)
    orchestrator   kind(secret, lease) ──► what the verdict should be   (manager/planting.py)
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from prime_core.errors import UserError
from prime_core.ids import Digest, to_bytes

HONEST = "honest"
SECRET_BYTES = 32
PLANTED_LIES = (
    *("t09", "t11", "topp95", "greedy", "other_seed", "best_of_4", "int4", "small_model"),
    *("half_small", "foreign5", "padded", "tampered_reward", "tampered_logprobs", "copied_rows"),
    *("forged_const", "forged_modh", "sign_flip", "forged_by_copy"),
)
"""Those of lies.py that one file should show: a miss says something of the validator."""


def kind(secret: bytes, lease_digest: Digest) -> str:
    """What the planted file of a lease is: HONEST every second time, else a lie's name."""
    lot = hashlib.sha256(b"prime/planted/v1" + secret + to_bytes(lease_digest)).digest()
    number = int.from_bytes(lot[:8], "big")
    return HONEST if number % 2 == 0 else PLANTED_LIES[number // 2 % len(PLANTED_LIES)]


def read_secret(path: Path) -> bytes:
    """The shared secret from its file (64 hex digits). Raises UserError if it is none, or if others
    than its owner may read it."""
    hint = f"make one: (umask 077; openssl rand -hex {SECRET_BYTES} > {path})"
    try:
        if path.stat().st_mode & 0o077:
            raise UserError(f"others may read {path}", hint=f"chmod 600 {path}")
        secret = bytes.fromhex(path.read_text().strip())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise UserError(f"{path} holds no hexadecimal secret", hint=hint) from error
    if len(secret) != SECRET_BYTES:
        raise UserError(f"{path} holds {len(secret)} bytes, not {SECRET_BYTES}", hint=hint)
    return secret
