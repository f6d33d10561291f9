"""`wallet new` and `wallet show`: the keystore of the account that a program signs with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from prime_core.command_line import Json, PasswordFd, PasswordFile, group

app = group("The key of the account that signs.")


@app.command()
def new(
    out: Annotated[Path, typer.Option("--out", help="Keystore file to write.")],
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    light: Annotated[bool, typer.Option(hidden=True)] = False,
    as_json: Json = False,
) -> None:
    """Write a new key to an encrypted keystore v3 file. An existing file is never
    overwritten."""
    from prime_chain.keystore import create_keystore, read_password
    from prime_core.errors import UserError

    out = out.expanduser()
    if os.path.lexists(out):
        raise UserError(
            f"{out} exists already and is never overwritten",
            hint="name another file with --out, or move the old one away yourself",
        )
    password = read_password(password_file, password_fd, prompt="New password: ", confirm=True)
    address = create_keystore(out, password, light=light)
    if as_json:
        typer.echo(json.dumps({"address": address, "keystore": str(out)}))
    else:
        typer.echo(f"{address}  (keystore {out}; keep a copy of it and of its password)")


@app.command()
def show(
    wallet: Annotated[Path, typer.Option(help="Keystore file.")], as_json: Json = False
) -> None:
    """Show the address that a keystore names; needs no password."""
    from prime_chain.keystore import named_address

    address = named_address(wallet)
    if as_json:
        typer.echo(json.dumps({"address": address, "keystore": str(wallet)}))
    else:
        typer.echo(address)
