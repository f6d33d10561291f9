"""The demo's keys: one keystore and one password file for each party, made anew for each run."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from prime_chain.keystore import create_keystore, keystore_address, load_keystore
from prime_core.errors import UserError
from prime_core.ids import Address
from prime_core.signing import LocalSigner

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


def recorded(folder: Path) -> dict[str, Account]:
    """The accounts of an earlier run. Raises UserError if there are none."""
    accounts = {}
    for keystore in sorted(folder.glob("*.json")):
        address = keystore_address(keystore)
        assert address is not None, "made by us, with its address"
        password_file = keystore.with_suffix(".password")
        accounts[keystore.stem] = Account(keystore.stem, address, keystore, password_file)
    if not accounts:
        raise UserError(f"there is no run under {folder.parent}", hint="make demo")
    return accounts
