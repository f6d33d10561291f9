"""The demo's keys: one keystore and one password file for each party, made anew for each run."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from protocol.chain.keystore import create_keystore, load_keystore
from protocol.core.ids import Address
from protocol.core.signing import LocalSigner

PARTIES = ("deployer", "manager", "trainer", "validator", "relay")


@dataclass(frozen=True)
class Account:
    """Where a party's key lies; the key itself is opened only when asked for."""

    name: str
    address: Address
    keystore: Path
    password_file: Path

    def flags(self) -> tuple[str, ...]:
        """The command-line flags that name this account to any of the programs."""
        return ("--wallet", str(self.keystore), "--password-file", str(self.password_file))

    def open(self) -> LocalSigner:
        """The key, in memory."""
        return load_keystore(self.keystore, self.password_file.read_text())


def make(folder: Path, name: str) -> Account:
    """Draws a key and a password; the weak key derivation is for local networks only."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    password_file = folder / f"{name}.password"
    password_file.touch(mode=0o600)
    password = secrets.token_urlsafe(24)
    password_file.write_text(password)
    keystore = folder / f"{name}.json"
    address = create_keystore(keystore, password, light=True)
    return Account(name, address, keystore, password_file)
