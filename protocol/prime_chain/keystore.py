"""Keys at rest: Web3 Secret Storage version 3 (keystore v3) files, and where passwords come from.

A key exists in the clear only in memory, as a LocalSigner. Files are made with mode 0600, appear
whole or not at all, and are never overwritten.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import json
import os
import secrets
import sys
import uuid
from pathlib import Path
from typing import Any

from eth_hash.auto import keccak

from prime_core.errors import UserError
from prime_core.given import read_given
from prime_core.ids import Address, address
from prime_core.signing import SECP256K1_ORDER, LocalSigner

SCRYPT_N = 1 << 18
LIGHT_SCRYPT_N = 1 << 12
"""For tests and devnets: 4 MiB and milliseconds instead of 256 MiB and a second."""

_MAX_KEYSTORE_BYTES = 64 << 10
_MAX_SCRYPT_MEMORY = 1 << 30
_MAX_PBKDF2_ROUNDS = 10_000_000
_MAX_PASSWORD_BYTES = 4096
_OTHER_FILE = "name a keystore v3 file, or restore a backup"
_ONE_LINE = "give a file with the password as its only line by --password-file"


def create_keystore(path: Path, password: str, *, light: bool = False) -> Address:
    """Draws a new key and writes it encrypted to `path`. Returns its address.

    Raises UserError if `path` exists, its folder cannot be written, or the password is empty.
    `light` weakens the key derivation and is for tests and local networks only.
    """
    key = (secrets.randbelow(SECP256K1_ORDER - 1) + 1).to_bytes(32, "big")
    return save_keystore(path, key, password, light=light)


def save_keystore(path: Path, private_key: bytes, password: str, *, light: bool = False) -> Address:
    """Writes an existing 32-byte key encrypted to `path`; otherwise as `create_keystore`."""
    if not password:
        raise UserError("an empty password protects nothing", hint="choose a password")
    if os.path.lexists(path):  # unlike Path.exists, False where the folder cannot be searched
        raise _exists(path)
    rounds = LIGHT_SCRYPT_N if light else SCRYPT_N
    body = _encrypted(private_key, password, rounds)
    text = json.dumps(body, sort_keys=True).encode() + b"\n"
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)  # fails where `path` exists, unlike a rename
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise UserError(
            f"the keystore {path} cannot be written: {error.strerror}",
            hint="name a folder that you may write to",
        ) from error
    return LocalSigner(private_key).address


def load_keystore(path: Path, password: str) -> LocalSigner:
    """Decrypts the keystore at `path`.

    Raises UserError if the file is missing, is not a keystore v3, asks for an unreasonable key
    derivation, or the password is wrong.
    """
    return _opened(path, _read(path), password)


def _opened(path: Path, body: dict[str, Any], password: str) -> LocalSigner:
    try:
        key = _decrypted(body["crypto"] if "crypto" in body else body["Crypto"], password)
        signer = None if key is None else LocalSigner(key)
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise _broken(path, f"{type(error).__name__}: {error}") from error
    if signer is None:
        raise UserError(
            f"the password does not open {path}",
            hint="check the password file or type it again; nothing was changed",
        )
    named = str(body.get("address", "")).removeprefix("0x").lower()
    if named and named != signer.address[2:].lower():
        raise _broken(path, f"it names 0x{named} but holds the key of {signer.address}")
    return signer


def open_keystore(
    path: Path, password_file: Path | None = None, password_fd: int | None = None
) -> LocalSigner:
    """Decrypts the keystore at `path` with a password as in `read_password`.

    Raises UserError as both do; the file is looked at before a password is asked for. It is read
    once, so `path` may be a pipe.
    """
    body = _read(path)
    password = read_password(password_file, password_fd, prompt=f"Password of {path}: ")
    return _opened(path, body, password)


def keystore_address(path: Path) -> Address | None:
    """The address that the keystore names (unproven until it is opened); None if it names none."""
    named = str(_read(path).get("address", "")).removeprefix("0x")
    return address("0x" + named) if named else None


def named_address(path: Path) -> Address:
    """Returns the address that the keystore names. Raises UserError if there is no keystore or it
    names none."""
    found = keystore_address(path)
    if found is None:
        raise UserError(f"the keystore {path} does not name its address", hint="open it once")
    return found


def _encrypted(key: bytes, password: str, rounds: int) -> dict[str, Any]:
    """Web3 Secret Storage 3 with scrypt (r = 8, p = 1) and AES-128-CTR."""
    salt, iv = secrets.token_bytes(16), secrets.token_bytes(16)
    parameters = {"n": rounds, "r": 8, "p": 1, "dklen": 32, "salt": salt.hex()}
    derived = _derived("scrypt", parameters, password)
    text = _aes_ctr(derived[:16], iv, key)
    return {
        "version": 3,
        "id": str(uuid.uuid4()),
        "address": LocalSigner(key).address[2:].lower(),
        "crypto": {
            "cipher": "aes-128-ctr",
            "cipherparams": {"iv": iv.hex()},
            "ciphertext": text.hex(),
            "kdf": "scrypt",
            "kdfparams": parameters,
            "mac": keccak(derived[16:32] + text).hex(),
        },
    }


def _decrypted(crypto: dict[str, Any], password: str) -> bytes | None:
    """The key; None if the MAC says that the password is wrong. Raises ValueError, KeyError,
    TypeError or AttributeError for a file in another form."""
    if crypto["cipher"] != "aes-128-ctr":
        raise ValueError(f"unknown cipher {crypto['cipher']!r}")
    text = bytes.fromhex(crypto["ciphertext"].removeprefix("0x"))
    derived = _derived(crypto["kdf"], crypto["kdfparams"], password)
    mac = bytes.fromhex(crypto["mac"].removeprefix("0x"))
    if not hmac.compare_digest(keccak(derived[16:32] + text), mac):
        return None
    iv = bytes.fromhex(crypto["cipherparams"]["iv"].removeprefix("0x")).rjust(16, b"\0")
    return _aes_ctr(derived[:16], iv, text)


def _derived(kdf: str, parameters: dict[str, Any], password: str) -> bytes:
    salt = bytes.fromhex(parameters["salt"].removeprefix("0x"))
    length = parameters["dklen"]
    if length < 32:
        raise ValueError("the derived key is shorter than 32 bytes")
    if kdf == "scrypt":
        n, r, p = (parameters[name] for name in ("n", "r", "p"))
        return hashlib.scrypt(
            password.encode(), salt=salt, n=n, r=r, p=p, maxmem=(1 << 31) - 1, dklen=length
        )
    if kdf == "pbkdf2" and parameters["prf"] == "hmac-sha256":
        return hashlib.pbkdf2_hmac("sha256", password.encode(), salt, parameters["c"], length)
    raise ValueError(f"unknown key derivation {kdf!r}")


def _aes_ctr(key: bytes, iv: bytes, data: bytes) -> bytes:
    # the import costs 0.1 s, and to read an address needs none
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES(key), modes.CTR(iv)).encryptor()
    return cipher.update(data) + cipher.finalize()


def _read(path: Path) -> dict[str, Any]:
    raw = read_given(
        path,
        "keystore",
        _OTHER_FILE,
        limit=_MAX_KEYSTORE_BYTES,
        missing=f"make one with: prime-node wallet new --out {path}",
    )
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _broken(path, "it is not JSON") from error
    if not isinstance(body, dict) or body.get("version") != 3:
        raise _broken(path, "it is not of version 3")
    crypto = body.get("crypto", body.get("Crypto"))
    parameters = crypto.get("kdfparams") if isinstance(crypto, dict) else None
    if not isinstance(parameters, dict):
        raise _broken(path, "it has no key derivation")
    sizes = {name: parameters.get(name, 1) for name in ("n", "r", "p", "c", "dklen")}
    if not all(isinstance(size, int) and 0 < size < 1 << 32 for size in sizes.values()):
        raise _broken(path, "its key derivation is not numeric")
    if sizes["n"] * sizes["r"] * 128 > _MAX_SCRYPT_MEMORY or sizes["p"] > 16:
        raise _broken(path, "its key derivation would take more than 1 GiB of memory")
    if sizes["c"] > _MAX_PBKDF2_ROUNDS:
        raise _broken(path, "its key derivation would take minutes")
    return body


def _exists(path: Path) -> UserError:
    return UserError(
        f"{path} exists already and is never overwritten",
        hint="name another file, or move the old one away yourself",
    )


def _broken(path: Path, why: str) -> UserError:
    return UserError(f"{path} is not a usable keystore: {why}", hint=_OTHER_FILE)


def read_password(
    password_file: Path | None = None,
    password_fd: int | None = None,
    *,
    prompt: str = "Password: ",
    confirm: bool = False,
) -> str:
    """The password from a file, else an open descriptor, else typed at the terminal.

    One trailing newline is dropped. `confirm` asks twice when typed. Raises UserError if none is to
    be had (no terminal, unreadable file), or it is empty, too long, or not UTF-8.
    """
    if password_file is not None and password_fd is not None:
        raise UserError("give --password-file or --password-fd, not both")
    if password_file is not None:
        raw = read_given(password_file, "password file", _ONE_LINE, limit=_MAX_PASSWORD_BYTES)
        return _clean(raw, str(password_file))
    if password_fd is not None:
        try:
            with os.fdopen(password_fd, "rb") as file:
                return _clean(file.read(_MAX_PASSWORD_BYTES + 1), f"descriptor {password_fd}")
        except OSError as error:
            raise UserError(
                f"descriptor {password_fd} cannot be read: {error.strerror}",
                hint="open it in your shell, e.g. --password-fd 3 3< file",
            ) from error
    if not sys.stdin.isatty():
        raise UserError(
            "a password is needed and there is no terminal to ask at",
            hint="give --password-file FILE or --password-fd N",
        )
    typed = getpass.getpass(prompt)
    if confirm and getpass.getpass("Again: ") != typed:
        raise UserError("the two passwords differ", hint="start again")
    return _clean(typed.encode(), "what you typed")


def _clean(raw: bytes, source: str) -> str:
    if len(raw) > _MAX_PASSWORD_BYTES:
        raise UserError(
            f"the password from {source} exceeds {_MAX_PASSWORD_BYTES} bytes", hint=_ONE_LINE
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"the password from {source} is not UTF-8 text", hint=_ONE_LINE) from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise UserError(f"the password from {source} is empty", hint=_ONE_LINE)
    return text
