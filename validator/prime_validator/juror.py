"""A juror of the court: replays disputed slashes that it was drawn for, and votes.

    case opened ─► disputed ─► draw ─► replay ─► commit ──half window──► reveal ─► settle ─► collect
                                          └ no result in time: abstain

A juror is not a party to the pool. It fetches evidence, file and policy from the pool's
orchestrator or from mirrors, and replays the drawn rows with the code of `prime-node audit`. A
match confirms the slash, a mismatch overturns it. The pool may be hostile: each replay has a thread
of its own, for which the juror waits only as long as it has time to commit. A replay without a
result accuses neither side: the juror tries again while it can commit, and then abstains. A vote is
durable in the folder before it is committed to, so that a juror that was restarted reveals what it
committed to.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from prime_broadcast.access import Passes
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import Trust
from prime_broadcast.pool import Policies, PoolNames
from prime_broadcast.sources import SourceBook
from prime_chain.client import Call, ChainClient
from prime_chain.contracts import (
    CaseStatus,
    Contracts,
    CourtCase,
    Proposal,
    ProposalState,
    Vote,
    commitment_of,
)
from prime_chain.errors import ChainRevertedError
from prime_chain.events import CaseOpened, Event, JurorsDrawn, ValidatorSet
from prime_chain.history import read_events, read_slashes
from prime_chain.keystore import open_keystore
from prime_chain.link import deployment_for
from prime_chain.mirror import REORG_BLOCKS, AnySource, HttpSource, announced, open_sources
from prime_chain.rewards import history_of
from prime_chain.sender import Sender
from prime_core import encoding, ids
from prime_core.calibration import CalibrationStatement
from prime_core.checkpoint import PolicyStatement, SignedManifest
from prime_core.deployment import Deployment
from prime_core.errors import (
    ConflictError,
    NotFoundError,
    PrimeError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.logs import log_to_stderr
from prime_core.loops import Loops
from prime_core.run import RunDefinition
from prime_core.settings import needed
from prime_core.signing import Signer
from prime_core.transport.client import OrchestratorClient
from prime_core.waiting import until_stopped
from prime_engine.base import Engine
from prime_envs.base import Environment
from prime_envs.registry import environment_for
from prime_envs.sources import bring_files, datasets_folder
from prime_validator.folder import Folder, KeptVote
from prime_validator.pool import check_replay
from prime_validator.run import LONGEST_PAUSE, PASSING
from prime_validator.settings import JurorSettings
from prime_verify.audit import MAX_OBJECT_BYTES, Setting, audit_slash
from prime_verify.audit_compare import Audit
from prime_verify.engines import FetchedEngines, load_engine
from prime_verify.proofs.thresholds import Calibration, parse_signed, shipped, shipped_as
from prime_verify.provers import provers_here

log = logging.getLogger(__name__)

AGAIN_SECONDS = 30
"""Pause before a replay without a result is tried again."""
SLOT_SECONDS = 600
"""How long a replay keeps those of other pools waiting. Longer ones run on next to them."""
MOST_POLICY_BYTES = 256 << 30
"""Largest policy that is fetched: a node's default."""
SEND_SECONDS, TICK_SECONDS = 60.0, 2.0
VOTES = {"match": Vote.CONFIRM, "mismatch": Vote.OVERTURN}


class Replays(Protocol):
    """Replays what a slash rests on."""

    def audit(self, leaf: Digest, verification_class: Digest) -> Audit:
        """Returns *match*, *mismatch*, or *cannot tell*. Raises PrimeError if it cannot be
        replayed now, or not by the limits of that class. Called in threads, in one at a time for
        each pool."""
        ...


@dataclass(frozen=True)
class _Replay:
    """A replay in a thread. `since`: Unix seconds of the chain."""

    pool: int
    since: int
    result: Future[Audit] = field(default_factory=Future)


@dataclass
class Juror:
    """One juror. `random(n)` returns n unpredictable bytes."""

    contracts: Contracts
    sender: Sender
    folder: Folder
    replays: Replays
    random: Callable[[int], bytes]
    _open: dict[Digest, Digest] = field(default_factory=dict, init=False)
    """Submission → verification class of the cases that are not over."""
    _next: int = field(default=-1, init=False)
    _again_at: dict[Digest, int] = field(default_factory=dict, init=False)
    _running: dict[Digest, _Replay] = field(default_factory=dict, init=False)

    @property
    def account(self) -> Address:
        return self.sender.address

    def tick(self) -> None:
        """Does what is due in every case; of replays it only starts them, and looks whether they
        ended. Raises UnavailableError if no endpoint answers."""
        self._read_cases()
        waiting: list[tuple[Digest, CourtCase]] = []
        for leaf, verification_class in list(self._open.items()):
            case, proposal = (
                self.contracts.court.case_of(leaf),
                self.contracts.slasher.proposal(leaf),
            )
            if case is None or proposal is None:
                continue  # a reorganization took it away; its event is read again
            if case.status in (CaseStatus.SETTLED, CaseStatus.HANDED_OVER):
                del self._open[leaf]
            elif case.status is CaseStatus.OPEN:
                self._draw(leaf, verification_class, case, proposal)
            elif self.account in case.jurors and self._act(leaf, case, proposal):
                waiting.append((leaf, case))
        for leaf, case in sorted(waiting, key=lambda one: one[1].reveal_from):
            self._decide(leaf, case)
        due = {leaf for leaf, _ in waiting}
        self._running = {
            leaf: one for leaf, one in self._running.items() if leaf in due or not one.result.done()
        }
        self._collect()

    def _collect(self) -> None:
        self.sender.tick()  # what was not confirmed in time goes on
        if any(one.id.startswith("juror/collect/") for one in self.sender.open_intents()):
            return
        if self.contracts.court.pay_of(self.account) > 0:
            block = self.contracts.client.block_number()
            self._send(f"collect/{block}", self.contracts.court.collect())

    def _read_cases(self) -> None:
        client, deployment = self.contracts.client, self.contracts.deployment
        head = client.block_number()
        first = max(deployment.block, self._next - REORG_BLOCKS)
        for event in read_events(client, deployment, contracts=("court",), first=first, last=head):
            if isinstance(event, CaseOpened):
                self._open[event.leaf] = event.verification_class
        self._next = head + 1

    def _draw(
        self, leaf: Digest, verification_class: Digest, case: CourtCase, found: Proposal
    ) -> None:
        """Fixes the seed's block, or draws. Every juror of the class may be the first to send."""
        court = self.contracts.court
        window = self.contracts.deployment.periods.dispute_window
        if found.state is not ProposalState.DISPUTED:
            if found.state in (ProposalState.EXECUTED, ProposalState.CANCELLED):
                del self._open[leaf]
            return
        if court.window_time() >= found.deadline - (window - window // 4):
            del self._open[leaf]  # not drawn in time: the arbiter judges
            return
        if not court.juror_of(verification_class, self.account).seated:
            return
        head = self.contracts.client.block_number()
        if case.seed_block == 0 or head > case.seed_block:
            self._send(f"draw/{leaf}/{case.seed_block}", court.draw(leaf))

    def _act(self, leaf: Digest, case: CourtCase, proposal: Proposal) -> bool:
        """Commits, reveals or settles; returns whether a replay is due."""
        court = self.contracts.court
        now, ballot = court.window_time(), court.ballot_of(leaf, self.account)
        kept = self.folder.vote(leaf)
        if now < case.reveal_from:
            if kept is None:
                due = min(self._again_at.get(leaf, 0), _last_try(case))
                return ballot.commitment == ZERO_DIGEST and now >= due
            mine = commitment_of(leaf, self.account, Vote(kept.vote), kept.digest, kept.salt)
            if ballot.commitment == ZERO_DIGEST:
                self._send(f"commit/{leaf}", court.commit(leaf, mine))
            return False
        everyone = case.confirming + case.overturning == len(case.jurors)
        if everyone or now >= case.reveal_until:
            if proposal.state is ProposalState.DISPUTED and now >= proposal.deadline:
                self._send(f"lapse/{leaf}", self.contracts.slasher.lapse(leaf))
            self._send(f"settle/{leaf}", court.settle(leaf))
        elif kept is not None and ballot.vote is Vote.NONE and ballot.commitment != ZERO_DIGEST:
            vote = Vote(kept.vote)
            self._send(f"reveal/{leaf}", court.reveal(leaf, vote, kept.digest, kept.salt))
        return False

    def _decide(self, leaf: Digest, case: CourtCase) -> None:
        """Has the slash replayed and keeps the vote; abstains when the time to commit runs out."""
        court = self.contracts.court
        audit = self._replayed(leaf, case, court.window_time())
        if audit is None:
            return
        vote = VOTES.get(audit.result, Vote.ABSTAIN)
        if vote is Vote.ABSTAIN and (now := court.window_time()) < _last_try(case):
            self._again_at[leaf] = now + AGAIN_SECONDS
            log.warning("%s has no result yet: %s", leaf, audit.detail)
            return
        digest = encoding.sha256(encoding.canonical_json(audit.as_json()))
        salt = ids.digest(self.random(32))
        kept = self.folder.keep_vote(KeptVote(leaf, vote, digest, salt, audit.detail))
        log.info("%s: %s: %s", leaf, vote.name.lower(), audit.detail)
        mine = commitment_of(leaf, self.account, Vote(kept.vote), kept.digest, kept.salt)
        self._send(f"commit/{leaf}", court.commit(leaf, mine))

    def _replayed(self, leaf: Digest, case: CourtCase, now: int) -> Audit | None:
        """Returns what a replay that ended found; None if one runs, starts now, or has to wait for
        another."""
        mine = self._running.get(leaf)
        if mine is not None and mine.result.done():
            del self._running[leaf]
            return mine.result.result()
        if now >= _last_try(case):
            return Audit("cannot tell", "no replay had a result in time")
        running = [one for one in self._running.values() if not one.result.done()]
        if not any(one.pool == case.pool or now - one.since < SLOT_SECONDS for one in running):
            mine = self._running[leaf] = _Replay(case.pool, now)

            def replay() -> None:
                mine.result.set_result(self._audit(leaf, case.verification_class))

            threading.Thread(target=replay, name=f"replay {leaf[:10]}", daemon=True).start()
        return None

    def _audit(self, leaf: Digest, verification_class: Digest) -> Audit:
        try:
            return self.replays.audit(leaf, verification_class)
        except PrimeError as error:
            return Audit("cannot tell", str(error))
        except MemoryError as error:
            return Audit("cannot tell", f"out of memory: {error}")
        except Exception as error:
            # A defect of ours decides nothing, as in judging: log it in full, and abstain.
            log.exception("the replay of %s failed", leaf)
            return Audit("cannot tell", f"{type(error).__name__}: {error}")

    def _send(self, intent: str, call: Call) -> None:
        """Sends one call. What the contract refuses is only logged: another juror was first, or the
        time is over. So is what is not confirmed in time: other cases are due as well. The next
        tick reads what is so."""
        try:
            self.sender.send_and_wait(f"juror/{intent}", call, SEND_SECONDS)
        except (ChainRevertedError, UnavailableError, ConflictError) as error:
            log.warning("%s", error)


def _last_try(case: CourtCase) -> int:
    """Returns the time (Unix seconds) from which on a replay without a result is an abstention: a
    quarter of the time to commit is left then."""
    return case.reveal_from - (case.reveal_until - case.reveal_from) // 4


class _Orchestrators:
    """Where a pool's policies are named: its orchestrators, as the user named them."""

    def __init__(self, clients: list[OrchestratorClient]) -> None:
        self._clients = clients

    def policy(self, version: int) -> SignedManifest:
        """See Names."""
        for client in self._clients:
            try:
                return PoolNames(client).policy(version)
            except PrimeError as error:
                log.info("policy %d: %s", version, error)
        raise NotFoundError(f"no orchestrator of the pool names policy {version}")

    def relays(self) -> list[str]:
        """See Names."""
        found: list[str] = []
        for client in self._clients:
            try:
                found += PoolNames(client).relays()
            except PrimeError as error:
                log.info("relays: %s", error)
        return list(dict.fromkeys(found))


class PoolReplays:
    """Replays slashes of any pool of the deployment with what its orchestrator and mirrors serve.
    `load` loads an engine from a policy's folder."""

    def __init__(
        self,
        settings: JurorSettings,
        client: ChainClient,
        deployment: Deployment,
        signer: Signer,
        load: Callable[[Path], Engine],
        *,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._client = client
        self._deployment = deployment
        self._signer = signer
        self._load = load
        self._now = now

    def audit(self, leaf: Digest, verification_class: Digest) -> Audit:
        """See Replays."""
        client, deployment, settings = self._client, self._deployment, self._settings
        slash = next((s for s in read_slashes(client, deployment) if s.leaf == leaf), None)
        if slash is None:
            raise NotFoundError(f"the chain shows no slash for {leaf}")
        mirrors = announced(client, deployment, slash.pool).values()
        with open_sources(
            settings.orchestrator,
            mirrors,
            deployment,
            slash.pool,
            allow_private=settings.allow_private,
        ) as clients:
            source = AnySource([HttpSource(one) for one in clients])
            events = read_events(client, deployment, contracts=("pools",), pool=slash.pool)
            setting = self._setting(slash.pool, verification_class, events, source, clients)
            try:
                return audit_slash(slash, setting, source)
            finally:
                if setting.provers is not None:
                    setting.provers.close()

    def _setting(
        self,
        pool: int,
        verification_class: Digest,
        events: list[Event],
        source: AnySource,
        clients: list[OrchestratorClient],
    ) -> Setting:
        deployment, settings = self._deployment, self._settings
        facts = Contracts(self._client, deployment).pools.pool_of(pool)
        runs = history_of(events, pool, source.run)
        calibration: Calibration | None = None
        named = runs.first.calibration
        if named != ZERO_DIGEST and (calibration := shipped_as(named)) is None:
            raw = source.object(named, MAX_OBJECT_BYTES)
            domain = deployment.domain_of(CalibrationStatement)
            calibration = parse_signed(raw, facts.manager, domain)
        if (calibration or shipped()).digest() != verification_class:
            raise UntrustedError("the opinions name another class than the run's calibration")
        limited = check_replay(calibration or shipped(), settings.dtype, settings.device)
        if limited:
            raise UserError(f"a juror has to be able to confirm a rejection: {limited}")
        mine = [one for one in clients if not one.named]
        folder = PolicyFolder(
            settings.data / "court" / str(pool),
            Trust(facts.trainer, deployment.domain_of(PolicyStatement), pool),
            book=SourceBook(
                passes=Passes(self._signer, deployment.domain("registry")),
                public_only=not (settings.allow_private or any(one.allows_private for one in mine)),
            ),
            most_bytes=MOST_POLICY_BYTES,
        )
        policies = Policies(folder, _Orchestrators(mine), sources=settings.source)
        return Setting(
            deployment=deployment,
            pool=pool,
            manager=facts.manager,
            validators=frozenset(
                event.validator
                for event in events
                if isinstance(event, ValidatorSet) and event.pool == pool and event.on
            ),
            runs=runs,
            environments=self._environment,
            engines=FetchedEngines(
                folder.root, policies.ensure, self._load, device=settings.device
            ),
            now=self._now(),
            calibration=calibration,
            provers=provers_here(folder.root, device=settings.device, threads=settings.threads),
        )

    def _environment(self, run: RunDefinition) -> Environment:
        bring_files(
            run,
            datasets_folder(),
            public_only=not self._settings.allow_private,
            allow_path=False,
        )
        return environment_for(run)


def run(settings: JurorSettings) -> None:
    """Judges disputes until SIGTERM. Raises the first defect."""
    log_to_stderr(settings.log_level)
    stop = until_stopped()
    with ExitStack() as stack:
        wallet = needed(settings, "wallet")
        signer = open_keystore(wallet, settings.password_file, settings.password_fd)
        deployment = _deployment(settings)
        client = settings.open_chain(deployment.chain_id)
        stack.callback(client.close)
        client.check()
        client.require_funds(signer.address)
        folder = Folder(settings.data)
        stack.callback(folder.close)
        sender = Sender(client, signer, settings.data / "juror.journal.sqlite", agree=True)
        stack.callback(sender.close)
        load = partial(
            load_engine, dtype=settings.dtype, device=settings.device, threads=settings.threads
        )
        replays = PoolReplays(settings, client, deployment, signer, load, now=time.time)
        juror = Juror(Contracts(client, deployment), sender, folder, replays, secrets.token_bytes)
        loops = Loops(stop.set, stop=stop, passing=PASSING, longest_pause=LONGEST_PAUSE)
        stack.callback(loops.stop, None)
        loops.start("juror", juror.tick, max(TICK_SECONDS, client.network.block_time))
        print(json.dumps({"juror": signer.address, "pid": os.getpid()}), flush=True)
        stop.wait()
        loops.stop(None)
        loops.raise_crash()
    log.info("ended")


def _deployment(settings: JurorSettings) -> Deployment:
    if settings.deployment is not None or not settings.orchestrator:
        return deployment_for(None, settings.need_rpc(), settings.deployment)
    with OrchestratorClient(settings.orchestrator[0]) as server:
        return deployment_for(server.pool(), settings.need_rpc(), quorum=settings.rpc_quorum)


def status_of(contracts: Contracts, account: Address, verification_class: Digest) -> dict[str, Any]:
    """Returns a juror's bond, seat, pay and cases that are not over, for `validator juror status`;
    amounts in wei as decimal text, times in Unix seconds."""
    court, client = contracts.court, contracts.client
    juror = court.juror_of(verification_class, account)
    cases: list[dict[str, Any]] = []
    for event in read_events(client, contracts.deployment, contracts=("court",)):
        if not isinstance(event, JurorsDrawn) or account not in event.jurors:
            continue
        case, ballot = court.case_of(event.leaf), court.ballot_of(event.leaf, account)
        if case is not None and case.status is CaseStatus.DRAWN:
            cases.append(
                {
                    "leaf": event.leaf,
                    "pool": case.pool,
                    "committed": ballot.commitment != ZERO_DIGEST,
                    "vote": ballot.vote.name.lower(),
                    "reveal_from": case.reveal_from,
                    "reveal_until": case.reveal_until,
                }
            )
    seats = court.seats_of(verification_class)
    return {
        "juror": account,
        "class": verification_class,
        "bond": str(juror.bond),
        "bond_needed": str(court.juror_bond()),
        "registered": juror.seated,
        "open_cases": juror.drawn,
        "pay": str(court.pay_of(account)),
        "jurors": sum(seat.account is not None for seat in seats),
        "cases": cases,
    }
