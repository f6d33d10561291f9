"""Finds out whether a node or relay has all of a policy; used by `trainer publish`.

A node's heartbeat names the newest policy that it has verified, and the orchestrator reports this
(`reach` in its status). A relay that is announced there lists the versions that it has completely
on /healthz. Plain readers report nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pydantic import TypeAdapter, ValidationError

from prime_broadcast.transfer import Link, TransferError
from prime_core.errors import MalformedError, PrimeError
from prime_core.messages import RelayInfo, Status
from prime_core.transport.client import OrchestratorClient

log = logging.getLogger(__name__)
LOOK_SECONDS = 2.0
_RELAYS = TypeAdapter(list[RelayInfo])


def whole_at(
    client: OrchestratorClient, version: int, ended: Callable[[], bool] = lambda: False
) -> str | None:
    """A relay or node that has all of a published policy, in words; None if none is known, or once
    `ended` returns True. Raises PrimeError if the orchestrator does not answer."""
    reach = {of.version: len(of.after_ms) for of in client.get("/v1/status", Status).reach}
    if reach.get(version):
        return "a node"
    try:
        relays = _RELAYS.validate_json(client.request("GET", "/v1/relays", b"", signed=False))
    except ValidationError as error:
        raise MalformedError("the orchestrator's list of relays does not parse") from error
    for relay in relays:
        if not ended() and version in relay.versions and _says_whole(relay.url, version):
            return f"the relay {relay.url}"
    return None


def wait_whole(client: OrchestratorClient, version: int, stop: threading.Event) -> str | None:
    """Waits until `whole_at` finds one, and returns it; None if `stop` is set first."""
    trouble = ""
    while True:
        try:
            if (who := whole_at(client, version, stop.is_set)) is not None:
                return who
            trouble = ""
        except PrimeError as error:
            if str(error) != trouble:
                trouble = str(error)
                log.warning("cannot ask who has policy %d: %s", version, error)
        if stop.wait(LOOK_SECONDS):
            return None


def _says_whole(url: str, version: int) -> bool:
    """Whether a relay claims to have the version. Origins do not count: they have what they
    publish, and this may be our own."""
    try:
        link = Link(url)
        try:
            health = link.health()
        finally:
            link.close()
    except (TransferError, ValueError):  # unreachable, or an invalid address
        return False
    complete = health.get("complete")
    return health.get("role") == "relay" and isinstance(complete, list) and version in complete
