"""PrimeToken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from eth_hash.auto import keccak

from prime_chain.amounts import prime
from prime_chain.client import BlockId, Call
from prime_chain.contracts.base import Contract
from prime_core import ids
from prime_core.ids import Address, Digest
from prime_core.signing import (
    Domain,
    LocalSigner,
    encode_member,
    type_hash,
    typed_data_hash,
)

_PERMIT = {
    "owner": "address",
    "spender": "address",
    "value": "uint256",
    "nonce": "uint256",
    "deadline": "uint256",
}
"""Members of EIP-2612's Permit, in order."""


@dataclass(frozen=True)
class Permit:
    """A signed allowance (EIP-2612). `deadline` in Unix seconds."""

    deadline: int
    v: int
    r: Digest
    s: Digest


class Token(Contract):
    """PrimeToken: ERC-20 with permit and, on test networks, a faucet."""

    NAME = "token"

    def balance_of(self, account: Address, block: BlockId = "latest") -> int:
        return cast(int, self._one("balanceOf", account, block=block))

    def allowance(self, owner: Address, spender: Address, block: BlockId = "latest") -> int:
        return cast(int, self._one("allowance", owner, spender, block=block))

    def is_testnet(self, block: BlockId = "latest") -> bool:
        """Whether the faucet is open."""
        return bool(self._one("testnet", block=block))

    def faucet(self) -> Call:
        """Mints 10,000 PRIME to the sender; reverts off test networks."""
        return self.write("faucet", what="take 10000 PRIME from the test faucet")

    def approve(self, spender: Address, amount: int) -> Call:
        what = f"let {spender} take {prime(amount)}"
        return self.write("approve", spender, amount, what=what)

    def nonces(self, owner: Address, block: BlockId = "latest") -> int:
        """Permits used by `owner`."""
        return cast(int, self._one("nonces", owner, block=block))

    def permit(self, owner: LocalSigner, spender: Address, amount: int, deadline: int) -> Permit:
        """Signs an allowance instead of sending one (EIP-2612); reads the owner's nonce."""
        values = (owner.address, spender, amount, self.nonces(owner.address), deadline)
        encoded = map(encode_member, _PERMIT.values(), values)
        struct_hash = keccak(type_hash("Permit", _PERMIT) + b"".join(encoded))
        domain = Domain(chain_id=self.deployment.chain_id, contract=self.address)
        raw = ids.to_bytes(owner.sign_hash(typed_data_hash(domain, struct_hash)))
        return Permit(deadline, raw[64], ids.digest(raw[:32]), ids.digest(raw[32:64]))

    def transfer(self, to: Address, amount: int) -> Call:
        return self.write("transfer", to, amount, what=f"send {prime(amount)} to {to}")
