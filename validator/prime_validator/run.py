"""`validator run`: one validator process, until SIGTERM.

Judging runs in the main thread, draws in another. It needs an orchestrator, an RPC endpoint, a
keystore and its own folder.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

from prime_broadcast.access import Passes
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import Trust
from prime_broadcast.pool import Policies
from prime_broadcast.sources import SourceBook
from prime_chain.contracts import Contracts
from prime_chain.keystore import open_keystore
from prime_chain.mirror import EVERY_SECONDS, Follower, HttpSource, Mirror, MirrorServer
from prime_core import tracing
from prime_core.checkpoint import PolicyStatement
from prime_core.errors import (
    MalformedError,
    NotFoundError,
    PolicyError,
    PrimeError,
    UnavailableError,
    UntrustedError,
)
from prime_core.folders import make_folder
from prime_core.ids import Digest
from prime_core.logs import log_to_stderr, set_process_fields
from prime_core.loops import Loops
from prime_core.transport.addresses import is_loopback
from prime_core.transport.client import OrchestratorClient
from prime_core.validator_messages import ClassList, ExactClass
from prime_core.waiting import StoppedError, until_answered, until_stopped
from prime_engine.exact import NumericClass
from prime_validator.api import ValidatorApi
from prime_validator.draws import Draws
from prime_validator.folder import Folder
from prime_validator.judging import JudgingSetup, Sessions, Validator
from prime_validator.pool import FILE, Runs, check_replay, find_pool, run_calibration
from prime_validator.settings import Settings
from prime_verify.engines import EngineProvider, FolderEngines, load_engine
from prime_verify.proofs.thresholds import shipped
from prime_verify.provers import Provers

log = logging.getLogger(__name__)
T = TypeVar("T")

PASSING = (UnavailableError, PolicyError, MalformedError, NotFoundError, UntrustedError)
"""Errors after which a tick is repeated later: outages, refusals (a wrong clock makes the
orchestrator refuse signatures), and what a proxy answers while the orchestrator is away."""
DRAW_SECONDS = 1.0
LONGEST_PAUSE = 30.0
LOOK_SECONDS, AGAIN_SECONDS = 2.0, 60.0
"""For `Announcer`: seconds before the pool is asked for a new policy, and before a failed
announcement is tried again, so that a policy which cannot be fetched does not hold up judging."""


def run(settings: Settings) -> None:
    """Judges until SIGTERM. Raises the first defect of a background thread."""
    log_to_stderr(settings.log_level)
    tracing.start("validator")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop = until_stopped()
    with ExitStack() as stack:
        url, _ = settings.need("orchestrator"), settings.need_rpc()
        wallet = settings.need("wallet")
        signer = open_keystore(wallet, settings.password_file, settings.password_fd)
        folder = Folder(settings.data)
        stack.callback(folder.close)
        worker = f"{os.getpid()}:{secrets.token_hex(8)}"

        def session() -> ValidatorApi:
            client = OrchestratorClient(
                url, signer, "validator", allow_private=settings.allow_private
            )
            stack.callback(client.close)
            return ValidatorApi(client, worker)

        api = session()
        known = (settings.data / FILE).exists()
        patience = None if known else settings.first_answer_seconds
        try:
            pool = _answered(lambda: find_pool(api, settings, settings.data), stop, patience)
            calibration = _answered(lambda: run_calibration(pool, api), stop, patience)
        except StoppedError:
            return
        set_process_fields(pool=pool.number, validator=signer.address)
        limited = check_replay(calibration or shipped(), settings.dtype, settings.device)
        if limited:
            log.warning("%s", limited)
        for sentence in (calibration or shipped()).unlisted():
            log.warning("%s", sentence)
        trust = Trust(pool.trainer, pool.domain(PolicyStatement), pool.number)
        book = SourceBook(
            passes=Passes(signer, pool.deployment.domain("registry")),
            public_only=not (settings.allow_private or is_loopback(url)),
        )
        policies = Policies(
            PolicyFolder(
                settings.data / "policies",
                trust,
                book=book,
                base_model=settings.base_model_source,
            ),
            session(),
            sources=settings.source,
        )
        loader = partial(
            load_engine, dtype=settings.dtype, device=settings.device, threads=settings.threads
        )
        engines = FolderEngines(
            policies.folder.root,
            loader,
            keep=settings.policies,
            max_bytes=settings.policy_bytes(),
            device=settings.device,
        )
        chain = settings.open_chain(pool.deployment.chain_id)
        stack.callback(chain.close)
        contracts = Contracts(chain, pool.deployment)
        runs = Runs(pool, session(), lambda: revisions_on_chain(contracts, pool.number))
        draws = Draws(folder, session(), pool, signer, random=secrets.token_bytes, now=time.time)
        mirror = None
        if settings.mirror is not None:
            mirror = Mirror(
                make_folder(settings.mirror),
                pool.deployment,
                pool.number,
                HttpSource(session().client),
                max_bytes=int(settings.mirror_gb * 10**9),
            )
        provers = None
        if settings.exact_engine == "vllm":
            provers = Provers(
                policies.folder.root,
                device=settings.device,
                threads=settings.threads,
                dtype=settings.exact,
            )
            stack.callback(provers.close)
        setup = JudgingSetup(
            engines, runs, policies, draws, version(), calibration, provers=provers
        )
        if mirror is not None:
            setup = replace(setup, hold=mirror.hold)
        sessions = Sessions(judging=api, keeping=session())
        validator = Validator(sessions, folder, pool, signer, setup, now=time.time)
        loops = Loops(stop.set, stop=stop, passing=PASSING, longest_pause=LONGEST_PAUSE)
        stack.callback(loops.stop, None)
        loops.start("draws", draws.prepare, DRAW_SECONDS)
        if mirror is not None and settings.mirror is not None:
            if settings.mirror_listen:
                at = settings.mirror_url or f"http://{settings.mirror_listen}"
                mirror.describe(api.client.pool(), at)
                stack.callback(MirrorServer(settings.mirror, settings.mirror_listen).close)
            follower = Follower(mirror, chain, pool.deployment)
            loops.start("mirror", follower.tick, EVERY_SECONDS)
        print(json.dumps({"validator": signer.address, "pid": os.getpid()}), flush=True)
        announcer = None
        if settings.exact:
            announcer = Announcer(
                api, policies, provers or engines, settings.exact, meanwhile=validator.present
            )
        judge_until(stop, validator, settings.pack, settings.idle_seconds, announcer)
        loops.stop(None)
        loops.raise_crash()
    log.info("ended")


def revisions_on_chain(contracts: Contracts, pool: int) -> list[tuple[int, Digest]]:
    """Returns first step and digest of each revision of the run on chain."""
    return [(one.from_step, one.run_digest) for one in contracts.pools.revisions_of(pool)]


def version() -> str:
    """Returns the verifier's version as it enters the law of an opinion."""
    return f"prime-open {importlib.metadata.version('prime-open')}"


def judge_until(
    stop: threading.Event,
    validator: Validator,
    pack: int,
    idle_seconds: float,
    announcer: Announcer | None = None,
) -> None:
    """Judges up to `pack` files together until `stop`, and announces the exact class of each new
    policy. Asks again every `idle_seconds` when there is nothing, with growing pauses while the
    orchestrator refuses or does not answer."""
    pause = idle_seconds
    while not stop.is_set():
        try:
            if announcer is not None:
                announcer.tick()
            judged = validator.judge_some(pack)
            pause = idle_seconds
        except PASSING as error:
            pause = min(2 * pause, LONGEST_PAUSE)
            log.warning("judging pauses for %.1f s: %s", pause, error)
            judged = []
        if not judged:
            stop.wait(pause)


def _answered(ask: Callable[[], T], stop: threading.Event, give_up: float | None) -> T:
    def tell(error: UnavailableError, wait: float) -> None:
        log.warning("%s; trying again in %.0f s", error, wait)

    return until_answered(ask, stop, tell, give_up=give_up)


class Announcer:
    """Announces once for each policy; not thread-safe, like the engines. `engines` repeat proof
    passes of files in `dtype`; `now` returns seconds. `meanwhile` is entered while a policy is
    fetched and loaded, which may take minutes."""

    def __init__(
        self,
        api: ValidatorApi,
        policies: Policies,
        engines: EngineProvider | Provers,
        dtype: str,
        *,
        now: Callable[[], float] = time.monotonic,
        meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._api = api
        self._policies = policies
        self._meanwhile = meanwhile
        self._engines = engines
        self._dtype = dtype
        self._now = now
        self._said: int | None = None
        self._next = -math.inf

    def tick(self) -> None:
        """Fetches and loads the newest policy if it is new, measures the class, and announces it.
        What fails is logged and tried again later."""
        if self._now() < self._next:
            return
        try:
            self._announce()
            self._next = self._now() + LOOK_SECONDS
        except (PrimeError, MemoryError) as error:
            log.warning("no exact class is announced now: %s", error or "no memory is left")
            self._next = self._now() + AGAIN_SECONDS

    def _announce(self) -> None:
        version = self._api.pool().latest_version
        if version is None or version == self._said:
            return
        digest = self._api.policy(version).manifest.digest()
        classes: tuple[ExactClass, ...] = ()
        measured: NumericClass | None = None
        with self._meanwhile():
            self._policies.ensure(version, digest)  # which checks that it is the trainer's
            try:
                measured = self._measured(version, digest)
            except UnavailableError as error:  # it does not repeat its own bits, for example
                log.error("policy %d: this machine has no exact class: %s", version, error)
        if measured is not None:
            log.info("policy %d: exact class %s (%s)", version, measured.digest(), measured.words)
            classes = (ExactClass(facts=dict(measured.facts), fingerprint=measured.fingerprint),)
        listed = ClassList(policy_version=version, policy_digest=digest, classes=classes)
        self._api.announce(listed)  # an empty list withdraws an earlier announcement
        self._said = version

    def _measured(self, version: int, digest: Digest) -> NumericClass:
        if isinstance(self._engines, Provers):
            with self._engines.using(version, digest, self._dtype) as engine:
                return engine.numeric_class()
        return self._engines.engine(version, digest).in_dtype(self._dtype).numeric_class()
