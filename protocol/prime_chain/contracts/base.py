"""What all contract wrappers share: reads decode, writes are unsent Calls."""

from __future__ import annotations

from typing import Any, ClassVar

from prime_chain import codec
from prime_chain.client import BlockId, Call, ChainClient
from prime_core.deployment import SOLIDITY_NAMES, Deployment
from prime_core.ids import Address
from prime_core.signing import ContractName


class Contract:
    """A deployed contract seen through its committed ABI."""

    NAME: ClassVar[ContractName]

    def __init__(self, client: ChainClient, deployment: Deployment) -> None:
        self.client = client
        self.deployment = deployment
        self.address: Address = deployment.address(self.NAME)
        self._artifact = codec.artifact(SOLIDITY_NAMES[self.NAME])

    def write(self, function: str, *values: Any, what: str) -> Call:
        """The unsent transaction `function(values)`; `what` says what it does."""
        data = codec.encode_call(self._artifact.function(function), values)
        return Call(self.address, data, 0, what)

    def read(self, function: str, *values: Any, block: BlockId = "latest") -> tuple[Any, ...]:
        """Decoded outputs of a view, as a quorum of endpoints gives them. Raises
        ChainRevertedError, UnavailableError."""
        item = self._artifact.function(function)
        what = f"reading {self._artifact.name}.{function}"
        call = Call(self.address, codec.encode_call(item, values), 0, what)
        return self.client.agreed_read(
            call, lambda data: codec.decode(item.outputs, data), block=block
        )

    def _one(self, function: str, *values: Any, block: BlockId = "latest") -> Any:
        return self.read(function, *values, block=block)[0]


def or_none(account: Address) -> Address | None:
    return None if int(account, 16) == 0 else account
