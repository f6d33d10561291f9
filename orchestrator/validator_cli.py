"""`orchestrator validate`: one validator process, until SIGTERM.

Judging runs in the main thread, the chain in another. Settings: flag > PRIME_VALIDATOR_* > default.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import secrets
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.appointment import Appointment
from orchestrator.claims import Patience
from orchestrator.config import refuse_password
from orchestrator.context import PoolContext, read_object
from orchestrator.draws import DrawSecrets
from orchestrator.policy_store import PolicyStore
from orchestrator.serve import Loops, set_up_logging
from orchestrator.store import meta, open_store, sqlite_url
from orchestrator.store.engine import Store
from orchestrator.validator import Validator, run_validator_chain_tick
from protocol.broadcast.access import Passes
from protocol.broadcast.manifest import Trust
from protocol.chain.client import ChainClient
from protocol.chain.contracts import Contracts
from protocol.chain.deployment import Deployment
from protocol.chain.keystore import load_keystore, read_password
from protocol.chain.sender import Sender
from protocol.core import ids
from protocol.core.calibration import CalibrationStatement
from protocol.core.checkpoint import PolicyStatement
from protocol.core.errors import (
    MalformedError,
    NotFoundError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from protocol.core.ids import ZERO_DIGEST, Address
from protocol.engine.base import cpu_name
from protocol.environments.registry import environment_for
from protocol.folders import make_folder
from protocol.proofs.thresholds import Calibration, parse_signed, shipped
from protocol.run_file import read_run
from protocol.stopping import until_stopped
from protocol.storage.base import ObjectStore
from protocol.storage.directory import DirectoryStore
from protocol.verification.engines import FolderEngines, load_engine
from protocol.waiting import (
    FIRST_ANSWER_HELP,
    FIRST_ANSWER_SECONDS,
    StoppedError,
    until_answered,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
log = logging.getLogger(__name__)

CHAIN_SECONDS = 0.7
IDLE_SECONDS = 0.3
PREPARE_SECONDS = 1.0
APPOINTMENT_SECONDS = 5.0


@app.command()
def validate(
    invoked: typer.Context,
    deployment: Annotated[
        Path, typer.Option(envvar="PRIME_VALIDATOR_DEPLOYMENT", help="Deployment JSON.")
    ],
    run: Annotated[
        Path, typer.Option(envvar="PRIME_VALIDATOR_RUN", help="Run definition (canonical JSON).")
    ],
    wallet: Annotated[
        Path, typer.Option(envvar="PRIME_VALIDATOR_WALLET", help="Keystore of the validator.")
    ],
    rpc: Annotated[
        list[str],
        typer.Option(envvar="PRIME_VALIDATOR_RPC", help="RPC endpoint; repeat for more."),
    ],
    pool: Annotated[int, typer.Option(envvar="PRIME_VALIDATOR_POOL", help="Number of the pool.")],
    orchestrator_data: Annotated[
        Path,
        typer.Option(
            envvar="PRIME_VALIDATOR_ORCHESTRATOR_DATA",
            help="The orchestrator's data folder: its database and objects, unless named below.",
        ),
    ] = Path("var/orchestrator"),
    database: Annotated[
        str,
        typer.Option(
            envvar="PRIME_VALIDATOR_DATABASE", help="sqlite:///PATH or postgresql://… to share."
        ),
    ] = "",
    objects: Annotated[
        Path | None,
        typer.Option(envvar="PRIME_VALIDATOR_OBJECTS", help="Folder of the object store."),
    ] = None,
    data: Annotated[
        Path,
        typer.Option(
            envvar="PRIME_VALIDATOR_DATA", help="Our own folder: policies and sender's journal."
        ),
    ] = Path("var/validator"),
    source: Annotated[
        list[str] | None,
        typer.Option(help="URL of a relay or origin to fetch policies from; repeat for more."),
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(envvar="PRIME_VALIDATOR_PASSWORD_FILE", help="File with the password."),
    ] = None,
    password_fd: Annotated[int | None, typer.Option(help="Open descriptor with it.")] = None,
    device: Annotated[str, typer.Option(help="Where to replay: cpu, cuda, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="Threads of torch.")] = None,
    policies: Annotated[int, typer.Option(help="Policies to keep loaded.", min=1)] = 3,
    policy_memory_mb: Annotated[
        int,
        typer.Option(
            help="What loaded policies may take together, by the size of their files; 0: no bound.",
            min=0,
        ),
    ] = 0,
    pack: Annotated[
        int, typer.Option(help="Files of one policy whose rows share a prefill.", min=1, max=64)
    ] = 4,
    claim_seconds: Annotated[
        float, typer.Option(help="How long a claim outlives us if we are killed.", min=3)
    ] = 30.0,
    first_answer_seconds: Annotated[
        float, typer.Option(help=FIRST_ANSWER_HELP, min=0)
    ] = FIRST_ANSWER_SECONDS,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Judge submitted files (may use a GPU) until SIGTERM."""
    set_up_logging(log_level)
    source_of_database = invoked.get_parameter_source("database")
    if source_of_database is not None and source_of_database.name == "COMMANDLINE":
        refuse_password(database, "PRIME_VALIDATOR_DATABASE")
    stop = until_stopped()
    with ExitStack() as stack:
        place = Deployment.load(deployment)
        definition = read_run(run)
        place.check_run(definition)
        environment = environment_for(definition)
        signer = load_keystore(
            wallet, read_password(password_file, password_fd, prompt=f"Password of {wallet}: ")
        )
        make_folder(data)
        store = open_store(database or sqlite_url(orchestrator_data / "orchestrator.sqlite"))
        stack.callback(store.close)
        store.migrate()
        client = ChainClient(rpc, place.chain_id)
        stack.callback(client.close)
        manager, trainer = pool_facts(store, place, pool, definition.digest())
        context = PoolContext(deployment=place, pool=pool, manager=manager, run=definition)
        files = DirectoryStore(objects or orchestrator_data / "objects")
        calibration = run_calibration(context, files)
        check_replay(calibration or shipped(), dtype, device)
        draws = DrawSecrets(
            store, files, context, signer, random=secrets.token_bytes, now=time.time
        )
        trust = Trust(trainer, place.domain_of(PolicyStatement), pool)
        fetched = PolicyStore(
            data / "policies",
            store,
            trust,
            sources=tuple(source or ()),
            passes=Passes(signer, place.domain("registry")),
            now=time.time,
        )
        loader = partial(load_engine, dtype=dtype, device=device, threads=threads)
        limit = policy_memory_mb << 20 if policy_memory_mb else None
        engines = FolderEngines(fetched.root, loader, keep=policies, max_bytes=limit)
        validator = Validator(
            store,
            files,
            context,
            signer,
            engines,
            environment,
            fetched,
            draws,
            worker=f"{signer.address}:{os.getpid()}:{secrets.token_hex(4)}",
            version=f"prime-open {importlib.metadata.version('prime-open')}",
            now=time.time,
            calibration=calibration,
            patience=Patience(claim_seconds=claim_seconds),
        )
        # a slash takes stake: where the network asks for it, endpoints must agree on its dry run
        journal = data / "validator.journal.sqlite"
        contracts = Contracts(client, place)
        appointment = Appointment(contracts, pool, signer.address)
        if not journal.exists() and not _first_answer(appointment, stop, first_answer_seconds):
            return
        sender = Sender(client, signer, journal, agree=True)
        stack.callback(sender.close)
        loops = Loops(on_crash=stop.set)
        stack.callback(loops.stop)
        loops.start(
            "chain",
            lambda: run_validator_chain_tick(store, context, contracts, sender, time.time),
            CHAIN_SECONDS,
        )
        loops.start("appointment", appointment.look, APPOINTMENT_SECONDS)
        loops.start("draws", draws.prepare, PREPARE_SECONDS)
        print(json.dumps({"validator": signer.address, "pid": os.getpid()}), flush=True)
        _judge_until(stop, validator, pack)
        loops.stop()
        loops.raise_crash()
    log.info("ended")


def _first_answer(appointment: Appointment, stop: threading.Event, seconds: float) -> bool:
    """Asks the chain for the first time; False if told to stop before it answered. Raises
    UnavailableError if no RPC answers within `seconds`."""

    def tell(error: UnavailableError, wait: float) -> None:
        log.warning("%s; trying again in %.0f s", error, wait)

    try:
        until_answered(appointment.look, stop, tell, give_up=seconds)
    except StoppedError:
        return False
    return True


def _judge_until(stop: threading.Event, validator: Validator, pack: int) -> None:
    """Judges what there is, up to `pack` files together; looks again every IDLE_SECONDS when there
    is nothing."""
    pause = IDLE_SECONDS
    while not stop.is_set():
        try:
            judged = validator.judge_some(pack)
            pause = IDLE_SECONDS
        except UnavailableError as error:
            pause = min(2 * pause, 30.0)
            log.warning("judging pauses for %.1f s: %s", pause, error)
            judged = []
        if not judged:
            stop.wait(pause)


def pool_facts(
    store: Store, deployment: Deployment, pool: int, run_digest: str
) -> tuple[Address, Address]:
    """Manager and trainer of the pool, as `orchestrator serve` has found them on chain.

    Raises UserError if the database is another pool's, or the run definition is.
    """
    place = f"{deployment.chain_id}/{deployment.contracts.pools}/{pool}"
    with store.read() as connection:
        serves, facts = meta.get(connection, "serves"), meta.get(connection, "pool_facts")
    if serves is None or facts is None:
        raise UserError(
            "the database belongs to no pool yet",
            hint="start `orchestrator serve` with it first",
        )
    if serves != place:
        raise UserError(
            f"the database belongs to pool {serves}, not {place}",
            hint="name another --orchestrator-data or --database",
        )
    manager, trainer, its_run = json.loads(facts)
    if its_run != run_digest:
        raise UserError(
            f"the run definition's digest is {run_digest}, the pool's is {its_run}",
            hint="give the file that the pool was made with by --run",
        )
    return ids.address(manager), ids.address(trainer)


def run_calibration(context: PoolContext, objects: ObjectStore) -> Calibration | None:
    """The run's own calibration object; None where it uses the shipped one.

    Raises UserError if the object is not in the store, is no calibration, or is not signed by the
    pool's manager.
    """
    named = context.run.calibration
    if named == ZERO_DIGEST:
        return None
    hint = "put the object that the run definition names into the object store"
    try:
        raw = read_object(objects, named)
    except (NotFoundError, UntrustedError) as error:
        raise UserError(f"the run's calibration is not there: {error}", hint=hint) from error
    try:
        return parse_signed(raw, context.manager, context.domain(CalibrationStatement))
    except (MalformedError, UntrustedError) as error:
        hint = "the run has to name one that its manager signed (docs/verification.md)"
        raise UserError(str(error), hint=hint) from error


def check_replay(calibration: Calibration, dtype: str, device: str) -> None:
    """Raises UserError if a validator that replays so could judge nothing by this calibration."""
    due = calibration.replay_dtype, calibration.replay_device
    on_cpu = device == "cpu"
    fits = due[1] == cpu_name() if on_cpu else not due[1].startswith("cpu")
    if dtype == due[0] and fits:
        return
    raise UserError(
        f"the run's calibration holds for replays in {due[0]} on {due[1]}, not in {dtype} on "
        f"{cpu_name() if on_cpu else device}: this validator could judge no file",
        hint="replay as it says, or measure another: orchestrator calibrate --replay-device",
    )
