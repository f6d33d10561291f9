"""The node's key: opened from a v3 keystore, kept in memory, never printed, passed on or logged."""

from __future__ import annotations

from prime_chain.keystore import named_address, open_keystore
from prime_core.errors import MalformedError, UserError
from prime_core.ids import Address, address
from prime_core.signing import LocalSigner
from prime_node.config import Settings


def open_wallet(settings: Settings) -> LocalSigner:
    """Returns the node's signer. Raises UserError (no wallet, wrong password, no terminal to ask
    at)."""
    return open_keystore(settings.need_wallet(), settings.password_file, settings.password_fd)


def open_provider(settings: Settings, node: LocalSigner | None) -> LocalSigner | None:
    """Returns the owner's signer if its key is on this machine: from its own keystore, or the
    node's wallet if that is its own provider. None if the owner is elsewhere."""
    if settings.provider_wallet is not None:
        return open_keystore(
            settings.provider_wallet, settings.provider_password_file or settings.password_file
        )
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
    return named_address(settings.need_wallet())
