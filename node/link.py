"""Which chain, which contracts, which pool: settled once from settings, shipped files and the
orchestrator's word, in that order of trust."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from node.config import Settings
from protocol.chain.client import ChainClient
from protocol.chain.contracts import Contracts
from protocol.chain.deployment import Deployment, Periods
from protocol.chain.networks import by_chain_id
from protocol.core.errors import UnavailableError, UntrustedError, UserError
from protocol.core.messages import PoolInfo

SHIPPED = Path(__file__).resolve().parents[1] / "contracts" / "deployments"


@dataclass(frozen=True)
class Link:
    """A chain connection with its contracts and the pool that is meant."""

    client: ChainClient
    contracts: Contracts
    deployment: Deployment
    pool: int

    def close(self) -> None:
        self.client.close()


def connect(settings: Settings, info: PoolInfo | None) -> Link:
    """Opens the RPC. Contracts come from --deployment, else from the shipped file of that chain,
    else (test networks only) from the orchestrator `info`.

    Raises UserError if nothing names the contracts or pool, UntrustedError if the orchestrator
    names other contracts than the file.
    """
    deployment = _from_file(settings, info)
    if deployment is None:
        deployment = _from_orchestrator(settings, info)
    if info is not None and (
        info.contracts != deployment.contracts or info.chain_id != deployment.chain_id
    ):
        raise UntrustedError(
            "the orchestrator names other contracts than the deployment file: do not send it "
            "stake or signatures until its operator has explained why"
        )
    pool = settings.pool if settings.pool is not None else (info.pool if info else None)
    if pool is None:
        raise UserError("no pool is named", hint="add --pool N, or --orchestrator URL")
    client = ChainClient(settings.need_rpc(), deployment.chain_id)
    return Link(client, Contracts(client, deployment), deployment, pool)


def _from_file(settings: Settings, info: PoolInfo | None) -> Deployment | None:
    if settings.deployment is not None:
        return Deployment.load(settings.deployment)
    if info is not None and (SHIPPED / f"{info.chain_id}.json").is_file():
        return Deployment.load(SHIPPED / f"{info.chain_id}.json")
    return None


def _from_orchestrator(settings: Settings, info: PoolInfo | None) -> Deployment:
    if info is None:
        raise UserError(
            "nothing says where the contracts are",
            hint="add --deployment FILE, or --orchestrator URL on a test network",
        )
    if not by_chain_id(info.chain_id).testnet:
        raise UserError(
            f"no deployment file for chain {info.chain_id} is installed, and where money is real "
            "the orchestrator's word is not enough",
            hint="add --deployment FILE from a source you trust",
        )
    bare = Deployment(chain_id=info.chain_id, contracts=info.contracts, block=0, periods=Periods())
    client = ChainClient(settings.need_rpc(), info.chain_id)
    try:
        return bare.model_copy(update={"periods": Contracts(client, bare).work.periods()})
    except UnavailableError:
        return bare  # the periods are only shown; work goes on without the RPC
    finally:
        client.close()
