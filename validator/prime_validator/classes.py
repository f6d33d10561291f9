"""Announces the exact class of this machine for each new policy, so that leases may name it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from prime_broadcast.pool import Policies
from prime_core.errors import PrimeError, UnavailableError
from prime_core.validator_messages import ClassList, ExactClass
from prime_validator.api import ValidatorApi
from prime_verify.engines import EngineProvider

log = logging.getLogger(__name__)

LOOK_SECONDS, AGAIN_SECONDS = 2.0, 60.0
"""Seconds before the pool is asked for a new policy, and before a failed announcement is tried
again, so that a policy which cannot be fetched does not hold up judging."""


class Announcer:
    """Announces once for each policy; not thread-safe, like the engines. `dtype` is that of the
    files whose proof passes this machine repeats; `now` returns seconds."""

    def __init__(
        self,
        api: ValidatorApi,
        policies: Policies,
        engines: EngineProvider,
        dtype: str,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._policies = policies
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
        except PrimeError as error:
            log.warning("no exact class is announced now: %s", error)
            self._next = self._now() + AGAIN_SECONDS

    def _announce(self) -> None:
        version = self._api.pool().latest_version
        if version is None or version == self._said:
            return
        digest = self._api.policy(version).manifest.digest()
        self._policies.ensure(version, digest)  # which checks that it is the trainer's
        engine = self._engines.engine(version, digest)
        classes: tuple[ExactClass, ...] = ()
        try:
            measured = engine.in_dtype(self._dtype).numeric_class()
        except UnavailableError as error:  # it does not repeat its own bits, for example
            log.error("policy %d: this machine has no exact class: %s", version, error)
        else:
            log.info("policy %d: exact class %s (%s)", version, measured.digest(), measured.words)
            classes = (ExactClass(facts=dict(measured.facts), fingerprint=measured.fingerprint),)
        listed = ClassList(policy_version=version, policy_digest=digest, classes=classes)
        self._api.announce(listed)  # an empty list withdraws an earlier announcement
        self._said = version
