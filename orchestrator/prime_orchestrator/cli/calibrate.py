"""`orchestrator calibrate`: honest drift of every setup on this machine, as a signed object.

The run definition names the calibration by its SHA-256 (`calibration = "0x…"`), and its pool's
manager answers for it: all that judge by it (validators, auditors, `prime-node verify`) refuse one
that the manager did not sign. Files that declare a setup which it does not cover are verified in
shadow: measured, never slashed, never paid.

Limits of a card accuse only if they find known lies, which are measured with them, and if another
party signed too (--second). Without that its files are judged like those of any card without
limits. For such a card `--from-observations` proposes limits (prime_verify.observed), which a
measurement on it has to confirm.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from prime_chain.keystore import open_keystore
from prime_core.calibration import CalibrationStatement
from prime_core.command_line import Json, PasswordFd, PasswordFile, command
from prime_core.deployment import Deployment
from prime_core.errors import UnavailableError, UserError
from prime_core.given import write_given
from prime_core.known_cards import is_gpu
from prime_core.logs import log_to_stderr
from prime_core.storage.base import put_object
from prime_core.storage.directory import DirectoryStore
from prime_orchestrator.cli.storage import StoreOptions, with_database
from prime_verify.engines import ENGINES

if TYPE_CHECKING:
    from prime_verify.proofs.thresholds import Calibration

app = command()


@app.command()
@with_database
def calibrate(
    options: StoreOptions,
    out: Annotated[Path, typer.Option(help="Calibration to write (JSON).")],
    model: Annotated[
        list[Path] | None, typer.Option(help="Folder of a model to measure with; repeat for more.")
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            help="ENGINE=INTERPRETER of an engine installed elsewhere (vllm=PATH). That of "
            "scripts/setup_vllm.sh is found by itself."
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="cpu or cuda; repeat for both (default: what this machine has)."),
    ] = None,
    replay_device: Annotated[
        str | None,
        typer.Option(help="What the pool's validators replay on (default: the first --device)."),
    ] = None,
    plain: Annotated[
        bool, typer.Option(help="Measure the plain engine, or only those of --python.")
    ] = True,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Earlier calibration, such as one of another machine: its setups stay, and what "
            "is measured again gets the wider of both limits."
        ),
    ] = None,
    scale: Annotated[float, typer.Option(help="Factor for the number of files.", min=0.001)] = 1.0,
    sign: Annotated[
        Path | None,
        typer.Option(help="Sign this calibration, which was measured before; measure nothing."),
    ] = None,
    from_observations: Annotated[
        str | None,
        typer.Option(
            help="Card without limits, such as NVIDIA H200: propose limits from what validators "
            "measured of the pool's accepted files. --keep names the run's calibration."
        ),
    ] = None,
    objects: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the pool's object store, to put it there too (--from-observations: to "
            "read from)."
        ),
    ] = None,
    deployment: Annotated[
        Path | None, typer.Option(help="Deployment JSON, to sign for its network.")
    ] = None,
    wallet: Annotated[
        Path | None,
        typer.Option(help="Keystore of the pool's manager (--second: of another party), to sign."),
    ] = None,
    second: Annotated[
        bool, typer.Option(help="Sign as another party than the manager: limits of cards take two.")
    ] = False,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    as_json: Json = False,
) -> None:
    """Measure honest drift of every setup here; write (and sign) the limits that follow."""
    from prime_verify.proofs.thresholds import load

    log_to_stderr("info")
    if (wallet is None) != (deployment is None):
        raise UserError(
            "a signature needs both a keystore and a network", hint="give --wallet and --deployment"
        )
    if (sign is not None or second) and wallet is None:
        raise UserError("no key is given to sign it", hint="give --wallet and --deployment")
    if from_observations is not None:
        if wallet is not None or model or sign is not None:
            raise UserError(
                "limits from observations are a proposal, which is neither measured nor signed",
                hint="give --from-observations without --model, --sign and --wallet",
            )
        _try_to_write(out)
        _propose(options, objects, from_observations, keep, out, as_json)
        return
    domain = Deployment.load(deployment).domain_of(CalibrationStatement) if deployment else None
    signer = None
    if wallet is not None:
        signer = open_keystore(wallet, password_file, password_fd)
    _try_to_write(out)  # what cannot be written is said now, not in an hour
    left_out: list[str] = []
    if sign is not None:
        found = load(sign)
    else:
        engines, devices = _interpreters(python or [], plain), device or _devices()
        kept = load(keep) if keep else None
        found, left_out = _measured(
            model or [], engines, devices, replay_device or devices[0], scale, kept
        )
    if signer is not None and domain is not None:
        found = found.sign(signer, domain, int(time.time()), second=second)
    write_given(out, found.canonical())  # its SHA-256 is its name
    if objects is not None:
        put_object(DirectoryStore(objects), found.canonical())
    by = found.signed.signer if found.signed else None
    written = {"calibration": str(out), "digest": found.digest(), "signer": by}
    if as_json:
        more = {
            "second": found.second.signer if found.second else None,
            "left_out": left_out,
            "unlisted": found.unlisted(),
        }
        typer.echo(json.dumps(written | more))
        return
    for setup in found.setups:
        typer.echo(
            f"{setup.engine} {setup.dtype} on {setup.device}: {setup.rows} rows in {setup.files} "
            f"files, batches of {', '.join(map(str, setup.batches))}"
        )
        for lie in setup.lies:
            typer.echo(f"  {lie.lie}: {lie.found} of {lie.sets} sets of rows are outside")
    for reason in left_out:
        typer.echo(f"left out: {reason}")
    for sentence in found.unlisted():
        typer.echo(sentence)
    typer.echo(f"for replays in {found.replay_dtype} on {found.replay_device}")
    typer.echo(
        f"signed by {by}"
        if by
        else "not signed: no pool is judged by it until its manager signs it (--sign)"
    )
    if found.second:
        typer.echo(f"signed by {found.second.signer} too")
    typer.echo(f"digest {found.digest()} → {out} (for the run definition: calibration = …)")


def _propose(
    options: StoreOptions,
    objects: Path | None,
    card: str,
    keep: Path | None,
    out: Path,
    as_json: bool,
) -> None:
    """Writes the limits that the pool's observations propose for `card`, and says what is next."""
    from prime_orchestrator.manager.uncalibrated import observations
    from prime_orchestrator.store import backup
    from prime_verify.observed import propose
    from prime_verify.proofs.thresholds import load, newest, shipped

    bases = [load(keep)] if keep else [newest(), shipped()]
    with options.pool({"objects": objects} if objects else {}) as (settings, store):
        kept = settings.open_objects("", backup.place(store))
        with store.read() as connection:
            for base in bases:  # the first by which accepted files were judged
                tables, left_out = observations(connection, kept, base, card)
                if tables:
                    break
    try:
        found = propose(base, card, tables)
    except UserError as error:
        raise UserError("; ".join([str(error), *left_out]), hint=error.hint) from error
    left_out += found.lacking
    write_given(out, found.calibration.canonical())
    if as_json:
        written = {"proposal": str(out), "digest": found.calibration.digest()}
        typer.echo(json.dumps(written | {"outside": found.outside, "left_out": left_out}))
        return
    new = found.calibration.setups[len(base.setups) :]
    for setup, providers in zip(new, found.providers, strict=True):
        typer.echo(
            f"{setup.engine} {setup.dtype} on {setup.device}: {setup.rows} rows in {setup.files} "
            f"files of {providers} providers"
        )
    for provider, files in found.outside.items():
        typer.echo(f"provider {provider}: {files} accepted files are outside the proposed limits")
    for reason in left_out:
        typer.echo(f"left out: {reason}")
    on = "cuda" if is_gpu(base.replay_device) else "cpu"
    typer.echo(
        f"proposal → {out}. It accuses no one. Next, on a machine with such a card: orchestrator "
        f"calibrate --device cuda --replay-device {on} --model POLICY --keep {out} --out NEW.json, "
        "which measures the card and known lies; then two parties sign NEW.json (--sign, --second)"
    )


def _measured(
    models: list[Path],
    python_of: dict[str, Path | None],
    devices: list[str],
    replay_device: str,
    scale: float,
    found: Calibration | None,
) -> tuple[Calibration, list[str]]:
    """What every device's setups measure, next to those of `found`, and what was left out. Raises
    UnavailableError if nothing could be measured."""
    from prime_verify.calibrate import calibrate as measure

    left_out: list[str] = []
    measured = False
    for one in devices:
        try:
            found, lacking = measure(
                models,
                python_of=python_of,
                device=one,
                replay_device=replay_device,
                scale=scale,
                keep=found,
            )
        except UnavailableError as error:
            left_out.append(f"{one}: {error}")
            continue
        left_out += lacking
        measured = True
    if found is None or not measured:
        raise UnavailableError("; ".join(left_out))
    return found, left_out


def _try_to_write(out: Path) -> None:
    """Raises UserError if the calibration could not be written there."""
    try:
        with NamedTemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror}", hint="name another file with --out"
        ) from error


def _devices() -> list[str]:
    """What this machine can measure on."""
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _interpreters(words: list[str], plain: bool) -> dict[str, Path | None]:
    """Engines to measure: plain here by default, vLLM where scripts/setup_vllm.sh has
    put it, and those that --python names."""
    found: dict[str, Path | None] = {"plain": None} if plain else {}
    vllm = Path(os.environ.get("PRIME_VLLM_HOME", "var/engines/vllm")) / "bin" / "python"
    if vllm.exists():
        found["vllm"] = vllm
    for word in words:
        engine, _, path = word.partition("=")
        if engine not in ENGINES or not path:
            raise UserError(
                f"--python {word!r} names no engine", hint=f"ENGINE is one of {', '.join(ENGINES)}"
            )
        if not Path(path).exists():
            raise UserError(f"there is no interpreter {path}", hint="scripts/setup_vllm.sh")
        found[engine] = Path(path)
    return found
