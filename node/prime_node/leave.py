"""Leaving a pool: the agent stops first (a running one would join again), then the chain hears."""

from __future__ import annotations

import os
import signal
import time

from prime_core.errors import UnavailableError
from prime_core.messages import RevokeRequest
from prime_core.node import SessionRevocation
from prime_core.signing import LocalSigner
from prime_core.transport.client import Empty, OrchestratorClient
from prime_node.config import Settings
from prime_node.link import connect
from prime_node.owner import Owner, describe
from prime_node.state import DataFolder
from prime_node.wallet import open_provider, open_wallet, wallet_address

STOP_SECONDS = 60.0


def leave_pool(settings: Settings, *, dry_run: bool) -> list[dict[str, str]]:
    """Takes the node out of its pool; the transactions sent (or, dry, to be sent).

    Raises UnavailableError if the running agent does not end.
    """
    data = DataFolder(settings.data)
    with OrchestratorClient(settings.need_orchestrator()) as client:
        link = connect(settings, client.pool())
        try:
            node = wallet_address(settings)
            call = link.contracts.pools.leave(link.pool, node)
            rows = describe([call])
            if dry_run:
                return rows
            signer = open_wallet(settings)
            stop_agent(data)
            _revoke(client, signer)
            if link.contracts.pools.class_of(link.pool, node) == 0:
                return []
            data.make()
            owner = Owner(link, open_provider(settings, signer) or signer, data.chain)
            try:
                for row, hash_ in zip(rows, owner.perform([call]), strict=True):
                    row["transaction"] = hash_
            finally:
                owner.close()
            return rows
        finally:
            link.close()


def stop_agent(data: DataFolder) -> None:
    """Ends the agent that uses `data`, if one does, and waits for it."""
    holder = data.holder()
    if holder is None:
        return
    os.kill(holder, signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    while data.holder() is not None:
        if time.monotonic() > end:
            raise UnavailableError(f"the agent (process {holder}) does not end; end it yourself")
        time.sleep(0.2)


def _revoke(client: OrchestratorClient, signer: LocalSigner) -> None:
    """Ends the node's sessions at the orchestrator, at once."""
    revocation = SessionRevocation(
        account=signer.address,
        orchestrator=client.pool().orchestrator,
        revoked_before=int(time.time()) + 1,
    )
    signature = signer.sign(revocation, client.domain("registry"))
    body = RevokeRequest(revocation=revocation, signature=signature)
    client.post("/v1/sessions/revoke", body, Empty, signed=False)
