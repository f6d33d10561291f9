"""Planted files: made by one of the manager's own nodes, honest or not, to test the validators.

The node has a seat, stake and leases like any other, so a planted file, its lease and its place in
the queue look like any other. Which of its files are attacks, and of which kind, follows from the
lease and a secret shared by the node's machine and the orchestrator; no one else can know before
the verdict.

    worker         kind(secret, lease) ──► honest builder, or that attack  (prime_node/planting.py)
    orchestrator   kind(secret, lease) ──► the expected verdict            (manager/planting.py)
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from prime_core.errors import UserError
from prime_core.given import read_given
from prime_core.ids import Digest, to_bytes

HONEST = "honest"
SECRET_BYTES = 32
PLANTED_LIES = (
    *("t09", "t11", "topp95", "greedy", "other_seed", "best_of_4", "int4", "small_model"),
    *("half_small", "foreign5", "padded", "tampered_reward", "tampered_logprobs", "copied_rows"),
    *("forged_const", "forged_modh", "sign_flip", "forged_by_copy"),
)
"""Attacks of lies.py that a single file should reveal, so that missing one counts against a
validator."""


def kind(secret: bytes, lease_digest: Digest) -> str:
    """Kind of a lease's planted file: HONEST half of the time, else the name of an attack."""
    lot = hashlib.sha256(b"prime/planted/v1" + secret + to_bytes(lease_digest)).digest()
    number = int.from_bytes(lot[:8], "big")
    return HONEST if number % 2 == 0 else PLANTED_LIES[number // 2 % len(PLANTED_LIES)]


def read_secret(path: Path) -> bytes:
    """Reads the shared secret from its file (64 hex digits). Raises UserError if it is invalid, or
    if other users may read the file."""
    hint = f"make one: (umask 077; openssl rand -hex {SECRET_BYTES} > {path})"
    try:
        raw = read_given(path, "secret file", hint)
        if path.stat().st_mode & 0o077:
            raise UserError(f"others may read {path}", hint=f"chmod 600 {path}")
        secret = bytes.fromhex(raw.decode().strip())
    except ValueError as error:
        raise UserError(f"{path} holds no hexadecimal secret", hint=hint) from error
    if len(secret) != SECRET_BYTES:
        raise UserError(f"{path} holds {len(secret)} bytes, not {SECRET_BYTES}", hint=hint)
    return secret
