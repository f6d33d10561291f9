"""Announces the exact class of this machine for each new policy, so that leases may name it."""

from __future__ import annotations

import logging

from prime_broadcast.pool import Policies
from prime_core.errors import NotFoundError, UnavailableError
from prime_core.validator_messages import ClassList, ExactClass
from prime_validator.api import ValidatorApi
from prime_verify.engines import EngineProvider

log = logging.getLogger(__name__)


class Announcer:
    """Announces once for each policy; not thread-safe, like the engines. `dtype` is that of the
    files whose proof passes this machine repeats."""

    def __init__(
        self, api: ValidatorApi, policies: Policies, engines: EngineProvider, dtype: str
    ) -> None:
        self._api = api
        self._policies = policies
        self._engines = engines
        self._dtype = dtype
        self._said: int | None = None

    def tick(self) -> None:
        """Fetches and loads the newest policy if it is new, measures the class, and announces it.

        Raises UnavailableError if the orchestrator or a relay does not answer, UntrustedError if
        the policy is not the trainer's.
        """
        version = self._api.pool().latest_version
        if version is None or version == self._said:
            return
        digest = self._api.policy(version).manifest.digest()
        self._policies.ensure(version, digest)
        engine = self._engines.engine(version, digest).in_dtype(self._dtype)
        try:
            measured = engine.numeric_class()
        except UnavailableError as error:
            log.error("no exact class of policy %d is announced: %s", version, error)
            self._said = version
            return
        one = ExactClass(facts=dict(measured.facts), fingerprint=measured.fingerprint)
        try:
            self._api.announce(
                ClassList(policy_version=version, policy_digest=digest, classes=(one,))
            )
        except NotFoundError as error:
            log.error("the orchestrator takes no exact classes: %s", error)
        self._said = version
        log.info("policy %d: exact class %s (%s)", version, measured.digest(), measured.words)
