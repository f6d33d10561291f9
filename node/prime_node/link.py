"""Determines chain, contracts and pool once from settings, shipped files and the orchestrator's
answer, in that order of trust (prime_chain.link)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prime_chain.client import ChainClient
from prime_chain.contracts import Contracts
from prime_chain.link import deployment_for
from prime_core.deployment import Deployment
from prime_core.errors import UnavailableError, UserError
from prime_core.messages import PoolInfo
from prime_node.config import Settings

MIRRORS = "prime-node audit mirrors --pool N --deployment FILE --rpc URL lists them"


@dataclass(frozen=True)
class Link:
    """A chain connection with its contracts and the selected pool."""

    client: ChainClient
    contracts: Contracts
    deployment: Deployment
    pool: int

    def close(self) -> None:
        self.client.close()


@contextmanager
def naming_mirrors(instead: str) -> Iterator[None]:
    """For the first requests of a command. `instead`: what can be typed while the orchestrator does
    not answer. Raises UserError with that and UnavailableError's exit code."""
    try:
        yield
    except UnavailableError as error:
        hint = f"check --orchestrator, or {instead} ({MIRRORS})"
        raise UserError(str(error), hint=hint, exit_code=error.exit_code) from error


def connect(settings: Settings, info: PoolInfo | None) -> Link:
    """Opens the RPC.

    Raises UserError if no source names the contracts or pool, UntrustedError if the orchestrator
    names other contracts than the file.
    """
    rpc = () if settings.deployment is not None else settings.need_rpc()
    deployment = deployment_for(info, rpc, settings.deployment, quorum=settings.rpc_quorum)
    pool = settings.pool if settings.pool is not None else (info.pool if info else None)
    if pool is None:
        raise UserError("no pool is named", hint="add --pool N, or --orchestrator URL")
    client = settings.open_chain(deployment.chain_id)
    return Link(client, Contracts(client, deployment), deployment, pool)
