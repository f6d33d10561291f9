"""The node's key: opened from a v3 keystore, kept in memory, never printed, passed on or logged."""

from __future__ import annotations

from pathlib import Path

from prime_chain.keystore import create_keystore, keystore_address, load_keystore, read_password
from prime_core.errors import MalformedError, UserError
from prime_core.ids import Address, address
from prime_core.signing import LocalSigner
from prime_node.config import Settings


def new_wallet(
    out: Path, password_file: Path | None, password_fd: int | None, *, light: bool = False
) -> Address:
    """Generates a key and writes its keystore. Raises UserError if the file exists already."""
    out = out.expanduser()
    if out.exists():
        raise UserError(
            f"{out} exists already and is never overwritten",
            hint="name another file with --out, or move the old one away yourself",
        )
    password = read_password(password_file, password_fd, prompt="New password: ", confirm=True)
    return create_keystore(out, password, light=light)


def open_wallet(settings: Settings) -> LocalSigner:
    """Returns the node's signer. Raises UserError (no wallet, wrong password, no terminal to ask
    at)."""
    path = settings.need_wallet()
    password = read_password(
        settings.password_file, settings.password_fd, prompt=f"Password of {path}: "
    )
    return load_keystore(path, password)


def open_provider(settings: Settings, node: LocalSigner | None) -> LocalSigner | None:
    """Returns the owner's signer if its key is on this machine: from its own keystore, or the
    node's wallet if that is its own provider. None if the owner is elsewhere."""
    if settings.provider_wallet is not None:
        password = read_password(
            settings.provider_password_file or settings.password_file,
            None,
            prompt=f"Password of {settings.provider_wallet}: ",
        )
        return load_keystore(settings.provider_wallet, password)
    if node is not None and named_provider(settings) in (None, node.address):
        return node
    return None


def named_provider(settings: Settings) -> Address | None:
    """Returns the owner named by --provider, checksummed; None if none is named. Raises UserError
    if it is not an address."""
    if not settings.provider:
        return None
    try:
        return address(settings.provider)
    except MalformedError as error:
        raise UserError(
            f"--provider is {error}", hint="give the owner's address: 0x and 40 hex digits"
        ) from error


def wallet_address(settings: Settings) -> Address:
    """Returns the address that a keystore names, without its password. Raises UserError if it names
    none."""
    path = settings.need_wallet()
    found = keystore_address(path)
    if found is None:
        raise UserError(f"the keystore {path} does not name its address", hint="open it once")
    return found
