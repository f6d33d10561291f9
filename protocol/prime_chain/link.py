"""Where a pool's contracts are: from a file, from the shipped file of the chain, or, on a test
network only, from the orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prime_chain.client import ChainClient
from prime_chain.contracts import Contracts
from prime_chain.networks import by_chain_id
from prime_core.deployment import Deployment, Periods
from prime_core.errors import UnavailableError, UntrustedError, UserError
from prime_core.messages import PoolInfo

SHIPPED = Path(__file__).resolve().parents[2] / "contracts" / "deployments"


def deployment_for(
    info: PoolInfo | None, rpc: Sequence[str], file: Path | None = None
) -> Deployment:
    """The deployment that `file` or the shipped file names, else the orchestrator's `info`.

    Raises UserError if nothing trusted names the contracts, UntrustedError if the orchestrator
    names others than the file.
    """
    found = _from_file(info, file) or _from_orchestrator(info, rpc)
    if info is not None and (info.contracts != found.contracts or info.chain_id != found.chain_id):
        raise UntrustedError(
            "the orchestrator names other contracts than the deployment file: do not send it "
            "stake or signatures until its operator has explained why"
        )
    return found


def _from_file(info: PoolInfo | None, file: Path | None) -> Deployment | None:
    if file is not None:
        return Deployment.load(file)
    if info is not None and (SHIPPED / f"{info.chain_id}.json").is_file():
        return Deployment.load(SHIPPED / f"{info.chain_id}.json")
    return None


def _from_orchestrator(info: PoolInfo | None, rpc: Sequence[str]) -> Deployment:
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
    client = ChainClient(rpc, info.chain_id)
    try:
        return bare.model_copy(update={"periods": Contracts(client, bare).work.periods()})
    except UnavailableError:
        return bare  # the periods are only shown; work goes on without the RPC
    finally:
        client.close()
