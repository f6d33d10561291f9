"""Joining a pool.

    owner's part ready?  no, and the key is here on a test network ──► do it (faucet, stake, node)
           │             no ──► write a consent, print the owner's one command, and wait
           ▼ yes
    hardware challenge ──► invite ──► the orchestrator sends the invite to the chain

The heartbeat's answer shows the membership itself; no second loop watches for it. A shadow node
(--shadow) has no owner's part: after a challenge, it may work. The challenge measures this
machine's speed; it is not declared. In a run with `cards`, a proof of cards (cards.py) takes its
place.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from prime_chain.client import Call
from prime_chain.contracts import Pool, prime
from prime_core.errors import PolicyError, PrimeError
from prime_core.ids import Address
from prime_core.messages import AdmissionAnswer, AdmissionRequest, Challenge
from prime_core.node import Hardware, NodeConsent
from prime_core.run import RunDefinition
from prime_core.signing import LocalSigner
from prime_core.task import Task
from prime_node.api import NodeApi
from prime_node.cards import prove, turn_seconds
from prime_node.config import RuntimeName, Settings
from prime_node.fingerprint import require_seen
from prime_node.link import Link
from prime_node.nodes import sign_consent
from prime_node.owner import (
    CONSENT_SECONDS,
    Owner,
    Standing,
    missing_calls,
    read_standing,
)
from prime_node.runtime.base import Device
from prime_node.state import DataFolder

log = logging.getLogger("prime.node.join")
OWNER_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class Accounts:
    """Who joins: the node's key, its provider, and the provider's key if it is on this machine."""

    node: LocalSigner
    provider: Address
    owner: LocalSigner | None = None


class OwnersPart:
    """What a node's owner does on chain before it may join: provider, node and stake for a seat."""

    def __init__(
        self,
        api: NodeApi,
        link: Link | None,
        run: RunDefinition,
        accounts: Accounts,
        data: DataFolder,
        *,
        now: Callable[[], float],
    ) -> None:
        self._api = api
        self._link = link
        self._run = run
        self._signer = accounts.node
        self._owner_signer = accounts.owner
        self._provider = accounts.provider
        self._data = data
        self._now = now

    def ready(self, stop: threading.Event) -> bool:
        """Returns True once provider, node and stake for a seat are on chain; False if stopped."""
        if self._link is None:
            log.warning("no RPC is named (--rpc): stake and registration are not checked here")
            return True
        printed = False
        while not stop.is_set():
            calls = self._missing(self._link)
            if not calls:
                return True
            if self._acts_itself:
                self._perform(self._link)
                continue
            if not printed:
                self._ask_owner(self._link)
                printed = True
            stop.wait(OWNER_POLL_SECONDS)
        return False

    def _needed(self, standing: Standing) -> int:
        """Returns the active stake (wei) that Pools.join requires for this node's seat and the
        provider's other seats. Uses the chain's figures, not the orchestrator's."""
        return standing.committed + self._run.stake_per_seat

    def _missing(self, link: Link) -> list[Call]:
        standing = read_standing(link, self._signer.address, self._provider)
        needed = self._needed(standing)
        if standing.member or standing.ready(needed):
            return []
        now = int(self._now())
        return missing_calls(link, standing, needed, self._signer, now)

    def _perform(self, link: Link) -> None:
        assert self._owner_signer is not None, "_acts_itself"
        owner = Owner(link, self._owner_signer, self._data.chain)
        try:
            owner.finish_open(log.info)  # what a killed agent sent, before more is sent
            standing = read_standing(link, self._signer.address, self._provider)
            calls = self._missing(link)
            if (short := self._needed(standing) - standing.active) > 0:
                owner.fill_from_faucet(short)
            for call in calls:
                log.info("on chain: %s", call.description)
            owner.perform(calls)
        finally:
            owner.close()

    def _ask_owner(self, link: Link) -> None:
        """Writes the node's consent to a file, and names the one command for the owner."""
        deadline = int(self._now()) + CONSENT_SECONDS
        domain = link.deployment.domain_of(NodeConsent)
        signed = sign_consent(self._signer, self._provider, domain, deadline)
        file = self._data.root / "consent.json"
        file.write_text(signed.model_dump_json(indent=2) + "\n")
        standing = read_standing(link, self._signer.address, self._provider)
        stake = prime(self._needed(standing)).removesuffix(" PRIME")
        for line in (
            "this node waits for its owner, which has to add it:",
            f"  {self._provider}",
            "its consent, valid for 7 days, is in the file",
            f"  {file}",
            "with a copy of it, the owner types one command:",
            f"  prime-node node add consent.json --stake {stake} \\",
            f"    --orchestrator {self._api.client.base_url} \\",
            "    --rpc URL --wallet OWNER_KEYSTORE",
            "a Safe instead adds --multisig --provider SAFE",
        ):
            log.warning("%s", line)  # the node waits until someone acts

    @property
    def _acts_itself(self) -> bool:
        return (
            self._owner_signer is not None
            and self._link is not None
            and self._link.client.network.testnet
        )


class Join:
    """Joins one node to one pool; `step` may be called again whenever the orchestrator answers
    "join"."""

    def __init__(
        self,
        settings: Settings,
        api: NodeApi,
        run: RunDefinition,
        hardware: Hardware,
        owners_part: OwnersPart,
        *,
        stop: threading.Event,
    ) -> None:
        self._settings = settings
        self._api = api
        self._run = run
        self._hardware = hardware
        self._owners_part = owners_part
        self._stop = stop
        self.device = challenge_device(hardware, run.task)
        self._measuring: threading.Thread | None = None

    def step(self) -> None:
        """Completes the owner's part (or waits for it), then solves a challenge.

        Returns early when stopped. Raises UserError (the owner must fix something), PolicyError
        (the pool refuses this machine), UnavailableError (retry).
        """
        if self._settings.shadow or self._owners_part.ready(self._stop):
            self._solve(self._api)

    @property
    def measuring(self) -> bool:
        """Whether `measure` is under way."""
        return self._measuring is not None and self._measuring.is_alive()

    def measure(self) -> None:
        """Solves one more challenge, or proves the cards again, in a separate thread, while
        heartbeats continue."""
        if not self.measuring:
            self._measuring = threading.Thread(
                target=self._measure, name="prime-measure", daemon=True
            )
            self._measuring.start()

    def _measure(self) -> None:
        try:
            with closing(self._api.another()) as api:
                self._solve(api)
        except (PrimeError, RuntimeError) as error:  # RuntimeError: of torch, such as no memory
            log.warning("this machine was not measured: %s", error)

    def _solve(self, api: NodeApi) -> None:
        if self._run.cards is not None:
            prove(
                api,
                self._run.cards,
                self._hardware,
                self._settings.runtime,
                throttle=self._settings.throttle,
                shadow=self._settings.shadow,
                stop=self._stop,
            )
            return
        admit(
            api,
            self._hardware,
            self._settings.runtime,
            device=self.device,
            throttle=self._settings.throttle,
            shadow=self._settings.shadow,
            stop=self._stop,
        )


def check_pool(link: Link, api: NodeApi) -> Pool:
    """Compares the orchestrator's statements about the pool with the chain's, and returns the
    latter.

    Raises PolicyError if they differ, UnavailableError if no RPC answers.
    """
    info = api.client.pool()
    on_chain = link.contracts.pools.pool_of(link.pool)
    stated = (info.manager, info.trainer, info.run_digest)
    if stated != (on_chain.manager, on_chain.trainer, on_chain.run_digest):
        raise PolicyError(
            f"the orchestrator describes pool {link.pool} otherwise than the chain does: "
            "wrong --pool, wrong --deployment, or an impostor"
        )
    return on_chain


def challenge_device(hardware: Hardware, task: Task) -> Device:
    """Returns where this machine's speed is measured, which is where its worker generates: on its
    cards if the pool's task gets them, otherwise on the CPU. Raises UserError if torch does not see
    them."""
    if not (task.gpus and hardware.gpus):
        return "cpu"
    require_seen(hardware.gpus)
    return "cuda"


def admit(
    api: NodeApi,
    hardware: Hardware,
    runtime: RuntimeName,
    *,
    device: Device = "cpu",
    throttle: float = 1.0,
    shadow: bool = False,
    stop: threading.Event | None = None,
) -> AdmissionAnswer | None:
    """Requests a challenge, waits for its turn, solves it and submits the products.

    Returns None if `stop` was set before the turn came. Raises PolicyError if the pool refuses this
    machine. `throttle` N makes it N times slower (development); `shadow` requests no seat.
    """
    stop = stop or threading.Event()
    wish = AdmissionRequest(hardware=hardware, task_runtime=runtime, shadow=shadow)
    while (answered := api.challenge(wish)).challenge is None:
        if stop.wait(turn_seconds(answered.retry_after_ms)):
            return None
    challenge = answered.challenge
    started = time.monotonic()
    products = solve(challenge, device)
    if throttle > 1.0:
        time.sleep((time.monotonic() - started) * (throttle - 1.0))
    answer = api.solution(challenge.id, products)
    log.info("measured %d million multiply-adds a second", answer.mmacs_per_second)
    return answer


def solve(challenge: Challenge, device: str) -> bytes:
    """Returns the products in wire format (int64 little-endian)."""
    from prime_verify.proofs import hardware as challenges

    return challenges.encode_solution(
        challenges.solve(challenge.seed, challenge.size, challenge.rounds, device)
    )
