"""PrimeToken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from eth_account.messages import encode_typed_data

from protocol.chain.amounts import prime
from protocol.chain.client import BlockId, Call
from protocol.chain.contracts.base import Contract
from protocol.core import ids
from protocol.core.ids import Address, Digest
from protocol.core.signing import LocalSigner


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

    def total_supply(self, block: BlockId = "latest") -> int:
        return cast(int, self._one("totalSupply", block=block))

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
        types = {
            "Permit": [
                {"name": "owner", "type": "address"},
                {"name": "spender", "type": "address"},
                {"name": "value", "type": "uint256"},
                {"name": "nonce", "type": "uint256"},
                {"name": "deadline", "type": "uint256"},
            ]
        }
        message = {
            "owner": owner.address,
            "spender": spender,
            "value": amount,
            "nonce": self.nonces(owner.address),
            "deadline": deadline,
        }
        domain = {
            "name": "Prime",
            "version": "1",
            "chainId": self.deployment.chain_id,
            "verifyingContract": self.address,
        }
        signed = owner.account.sign_message(encode_typed_data(domain, types, message))
        r, s = (ids.digest(part.to_bytes(32, "big")) for part in (signed.r, signed.s))
        return Permit(deadline, signed.v, r, s)

    def transfer(self, to: Address, amount: int) -> Call:
        return self.write("transfer", to, amount, what=f"send {prime(amount)} to {to}")
