"""Leaving a pool. The agent is stopped first, because a running one would join again: it gives its
open leases back and delivers what is finished. Then the chain frees the stake, and only after that
the orchestrator is asked to end the node's sessions: it may be away or refuse."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from prime_core import ids
from prime_core.errors import PrimeError, UnavailableError, UserError
from prime_core.ids import Address
from prime_core.messages import LeaseInfo, RevokeRequest
from prime_core.node import SessionRevocation
from prime_core.signing import LocalSigner
from prime_core.times import utc
from prime_core.transport.client import Empty, OrchestratorClient
from prime_node.api import NodeApi
from prime_node.config import Settings
from prime_node.link import Link
from prime_node.nodes import nodes_of
from prime_node.owner import Owner, describe
from prime_node.spool import waiting_in
from prime_node.state import DataFolder
from prime_node.wallet import open_provider, open_wallet, wallet_address

STOP_SECONDS = 60.0
"""How long a stopping agent may show no progress."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Departure:
    """What `leave_pool` did. `sent`: its transactions (of a dry run, those to be sent).
    `unrevoked`: why the node's sessions were not ended; None if they were, or need not be."""

    sent: list[dict[str, str]]
    unrevoked: PrimeError | None = None


def leave_pool(
    settings: Settings,
    link: Link,
    node: Address | None = None,
    *,
    dry_run: bool,
    tell: Callable[[str], None],
) -> Departure:
    """Takes nodes out of the pool: `node`, or the wallet's own, or all that the wallet's account
    owns. Sends nothing if the wallet's node has left already. `tell` gets a sentence for each step
    of the agent's stop.

    Raises UserError if the account has no such node in the pool, UnavailableError if the running
    agent does not stop, and what Owner.act raises.
    """
    account, pools = wallet_address(settings), link.contracts.pools
    registry = link.contracts.registry
    if node is None and registry.provider_of(account) is None and registry.is_provider(account):
        named = nodes_of(link, account)
    else:
        named = [node or account]
    leaving = [one for one in named if pools.is_member(link.pool, one)]
    if not leaving and registry.provider_of(account) is None:
        raise UserError(
            f"{account} has no node in pool {link.pool}",
            hint="give the wallet of the node or of its owner, and see: prime-node node list",
        )
    calls = [pools.leave(link.pool, one) for one in leaving]
    if dry_run:
        return Departure(describe(calls))
    signer, data = open_wallet(settings), DataFolder(settings.data)
    status = data.read_status()
    works = account if status is None else ids.address(status.node)
    stop_agent(data, tell, lambda: _open_leases(settings, works))
    sent: list[dict[str, str]] = []
    if calls:
        data.make()
        owner = Owner(link, open_provider(settings, signer) or signer, data.chain)
        try:
            sent = owner.act("leave", lambda _: calls, tell)
        finally:
            owner.close()
    if account in named:
        try:
            _revoke(settings.need_orchestrator(), signer)
        except PrimeError as error:
            return Departure(sent, error)
    return Departure(sent)


def stop_agent(
    data: DataFolder,
    tell: Callable[[str], None],
    open_leases: Callable[[], Sequence[LeaseInfo] | None],
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Stops the agent that uses `data`, if any, and waits until it has ended, however long it makes
    progress. `open_leases` returns its open leases, None where they are not known. Raises
    UnavailableError if it makes no progress for STOP_SECONDS."""
    holder = data.holder()
    if holder is None:
        return
    left, held = waiting_in(data.spool), open_leases()
    tell(
        f"the agent (process {holder}) is asked to stop: it gives its open leases back"
        f"{'' if held is None else f' ({len(held)})'} and delivers its finished files "
        f"({left} waiting)"
    )
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(holder, signal.SIGTERM)
    end = clock() + STOP_SECONDS
    while data.holder() is not None:
        if (now_left := waiting_in(data.spool)) != left:
            left, end = now_left, clock() + STOP_SECONDS
            tell(f"the agent still stops: {left} finished file(s) wait to be delivered")
        if clock() > end:
            raise UnavailableError(
                f"the agent (process {holder}) has made no progress for {STOP_SECONDS:.0f} s; end "
                f"it with: kill {holder}, then type prime-node leave again"
            )
        pause(POLL_SECONDS)
    left, held = waiting_in(data.spool), open_leases()
    said = "the agent has ended"
    if left:
        said += f"; {left} finished file(s) were not delivered"
    if held:
        until = utc(max(lease.deadline for lease in held))
        said += f"; {len(held)} lease(s) that it gave back run out by {until}"
    tell(said)


def _open_leases(settings: Settings, node: Address) -> list[LeaseInfo] | None:
    """Returns the node's open leases; None if no orchestrator is named or it does not answer
    with a list."""
    if not settings.orchestrator:
        return None
    try:
        with closing(NodeApi(settings.need_orchestrator(), None, timeout=5.0)) as api:
            return [one for one in api.leases(node) if one.status == "open"]
    except PrimeError:
        return None


def _revoke(orchestrator: str, signer: LocalSigner) -> None:
    """Ends the node's sessions at the orchestrator immediately."""
    with OrchestratorClient(orchestrator) as client:
        revocation = SessionRevocation(
            account=signer.address,
            orchestrator=client.pool().orchestrator,
            revoked_before=int(time.time()) + 1,
        )
        signature = signer.sign(revocation, client.domain("registry"))
        body = RevokeRequest(revocation=revocation, signature=signature)
        client.post("/v1/sessions/revoke", body, Empty, signed=False)
