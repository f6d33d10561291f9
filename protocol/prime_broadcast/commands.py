"""What the commands of prime_broadcast share: next versions, manifests of servers, keys."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from prime_broadcast import layout
from prime_broadcast.client import Base
from prime_broadcast.durable import settle
from prime_broadcast.manifest import (
    MANIFEST_NAME,
    Trust,
    build_manifest,
    parse_signed,
    read_signed,
)
from prime_broadcast.publish import finalize, publish
from prime_broadcast.transfer import Link
from prime_core import ids
from prime_core.checkpoint import Manifest, PolicyStatement, SignedManifest
from prime_core.errors import ConflictError, PrimeError, UntrustedError, UserError
from prime_core.given import read_given
from prime_core.signing import Domain, LocalSigner, Signer


def publish_next(
    folder: Path, data: Path, version: int | None, pool: int, signer: Signer, domain: Domain
) -> Manifest:
    present = layout.versions(data)
    number = version if version is not None else (present[-1] + 1 if present else 0)
    if version is None and present:
        last = layout.manifest_of(data, present[-1]).manifest
        same = build_manifest(
            folder, pool=pool, version=last.version, step=last.step, chunk_size=last.chunk_size
        )
        if same.result_digest == last.result_digest:
            return last
    elif version is not None and present and version < present[-1]:
        raise ConflictError(f"version {present[-1]} is published already; {version} is older")
    manifest = publish(folder, data, pool=pool, version=number, step=number)
    statement = PolicyStatement(pool=pool, version=number, manifest_digest=manifest.digest())
    finalize(data, SignedManifest(manifest=manifest, signature=signer.sign(statement, domain)))
    return manifest


def look_up(
    sources: list[str], trust: Trust, version: int | None, have: int | None
) -> tuple[SignedManifest, list[Manifest]]:
    """The wanted signed manifest and all others that hold, from the first server that has it."""
    failures: list[str] = []
    for url in sources:
        link = Link(url)
        try:
            offered = []
            for signed in read_index(link)[0]:
                trust.check(signed)
                offered.append(signed)
            if version is None:
                if not offered:
                    raise UserError(f"{url} serves no version yet")
                wanted = layout.newest_first(offered)[0]
                newest = wanted.manifest.version
                if have is not None and newest < have:
                    raise UntrustedError(
                        f"it offers version {newest} as the newest, and {have} is here already: "
                        "it is behind, or replays old ones"
                    )
            else:
                path = layout.address_of(version, MANIFEST_NAME)
                wanted = parse_signed(link.read_small(path, layout.MAX_INDEX_BYTES))
                trust.check(wanted)
                if wanted.manifest.version != version:
                    raise UntrustedError(f"it gave another version than {version}")
            return wanted, [signed.manifest for signed in offered]
        except PrimeError as error:
            failures.append(f"{url}: {error}")
            if url == sources[-1]:
                raise type(error)("; ".join(failures)) from error
        finally:
            link.close()
    raise UserError("no server was named")


def read_index(
    link: Link, known: tuple[list[SignedManifest], str | None] | None = None
) -> tuple[list[SignedManifest], str | None]:
    """A server's index and its entity tag; `known`, without a body, if it is still that."""
    address = f"/{layout.POLICIES}/{layout.INDEX_NAME}"
    found = link.read_changed(address, layout.MAX_INDEX_BYTES, known[1] if known else None)
    if found is None:
        assert known is not None
        return known
    return layout.parse_index(found[0]), found[1]


def on_disk(dest: Path, trust: Trust) -> dict[int, Base]:
    found: dict[int, Base] = {}
    if dest.is_dir():
        settle(dest)
        for path in dest.iterdir():
            if path.name.isascii() and path.name.isdigit() and (path / MANIFEST_NAME).is_file():
                signed = read_signed(path / MANIFEST_NAME)
                found[int(path.name)] = Base(path, trust.check(signed))
    return found


def trust_in(signer: str, chain_id: int, contract: str, pool: int) -> Trust:
    domain = Domain(chain_id=chain_id, contract=ids.address(contract))
    return Trust(ids.address(signer), domain, pool)


def open_key(path: Path) -> LocalSigner:
    """The key in `path` (64 hex digits), made on first use. Raises UserError if it is readable by
    others or holds something else."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise UserError(f"the key file {path} cannot be made: {error.strerror}") from error
    hint = "name another file; one that is missing is made"
    text = read_given(path, "key file", hint, limit=200).decode("ascii", "replace").strip()
    if path.stat().st_mode & 0o077:
        raise UserError(f"others may read the key file {path}", hint=f"chmod 600 {path}")
    if len(text) != 64 or not all(digit in "0123456789abcdef" for digit in text):
        raise UserError(f"{path} holds no key: expected 64 lowercase hex digits", hint=hint)
    return LocalSigner(bytes.fromhex(text))
