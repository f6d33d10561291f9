"""Which chain and which contracts: the settings that every program on a chain has, and where a
pool's contracts are. They come from a file, from the shipped file of the chain, or, on a test
network only, from the orchestrator.

The client of the chain is imported where one is opened: programs whose settings name a chain that
a command does not read start in half the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from prime_chain.networks import POLL_SECONDS, by_chain_id
from prime_chain.shipped import shipped_chains, shipped_file
from prime_core.deployment import Deployment, Periods
from prime_core.errors import UnavailableError, UntrustedError, UserError
from prime_core.messages import PoolInfo
from prime_core.settings import BaseSettings, Urls, needed

if TYPE_CHECKING:
    from prime_chain.client import ChainClient


class ChainSettings(BaseSettings):
    """How a program reaches its chain."""

    rpc: Urls = ()
    """RPC endpoints of the chain."""
    rpc_quorum: int | None = Field(default=None, ge=1)
    """Endpoints that must answer alike; by default the majority of three or more."""
    chain_poll_seconds: float = Field(default=POLL_SECONDS, gt=0, le=60)
    """The longest pause between two looks at the chain while something is awaited there."""

    def need_rpc(self) -> tuple[str, ...]:
        """The RPC endpoints. Raises UserError if none was given."""
        found: tuple[str, ...] = needed(self, "rpc", "RPC endpoint")
        return found

    def open_chain(self, chain_id: int, *, timeout: float = 10.0) -> ChainClient:
        """A client of these endpoints. Raises UserError if none was given, or fewer than the
        quorum."""
        from prime_chain.client import ChainClient

        return ChainClient(
            self.need_rpc(),
            chain_id,
            timeout=timeout,
            quorum=self.rpc_quorum,
            poll_seconds=self.chain_poll_seconds,
        )


def deployment_for(
    info: PoolInfo | None,
    rpc: Sequence[str],
    file: Path | None = None,
    *,
    quorum: int | None = None,
) -> Deployment:
    """The deployment that `file` or the shipped file names, else the orchestrator's `info`.

    Raises UserError if nothing trusted names the contracts, UntrustedError if the orchestrator
    names others than the file.
    """
    found = _from_file(info, file) or _from_orchestrator(info, rpc, quorum)
    if info is not None and (info.contracts != found.contracts or info.chain_id != found.chain_id):
        raise UntrustedError(
            "the orchestrator names other contracts than the deployment file: do not send it "
            "stake or signatures until its operator has explained why"
        )
    return found


def _from_file(info: PoolInfo | None, file: Path | None) -> Deployment | None:
    if file is not None:
        return Deployment.load(file)
    shipped = shipped_file(info.chain_id) if info is not None else None
    return Deployment.load(shipped) if shipped is not None else None


def _from_orchestrator(info: PoolInfo | None, rpc: Sequence[str], quorum: int | None) -> Deployment:
    if info is None:
        raise UserError(
            "nothing says where the contracts are",
            hint="add --deployment FILE, or --orchestrator URL on a test network",
        )
    if not by_chain_id(info.chain_id).testnet:
        raise UserError(
            f"no deployment file of chain {info.chain_id} is shipped (shipped: "
            f"{shipped_chains()}), and where money is real the orchestrator's word is not enough",
            hint="add --deployment FILE from a source you trust",
        )
    from prime_chain.client import ChainClient
    from prime_chain.contracts import Contracts

    bare = Deployment(chain_id=info.chain_id, contracts=info.contracts, block=0, periods=Periods())
    client = ChainClient(rpc, info.chain_id, quorum=quorum)
    try:
        return bare.model_copy(update={"periods": Contracts(client, bare).work.periods()})
    except UnavailableError:
        return bare  # the periods are only shown; work goes on without the RPC
    finally:
        client.close()
