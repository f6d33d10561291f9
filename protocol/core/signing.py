"""EIP-712 statements: one base class, one way to digest, sign and recover.

A statement is a frozen pydantic model whose fields carry their Solidity type and whose class names
the contract that checks it. Identity always comes from the recovered signer, never from a field.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from eth_account import Account
from eth_account.messages import SignableMessage, encode_typed_data
from eth_keys.constants import SECPK1_N
from eth_utils.crypto import keccak
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from protocol.core import ids
from protocol.core.errors import UntrustedError
from protocol.core.ids import Address, Digest, Signature

# py_ecc, which eth-account brings along, lifts the interpreter's recursion limit to 100,000 when it
# is imported. With that, deeply nested JSON from outside overflows the C stack and kills the
# process, where it should raise RecursionError.
sys.setrecursionlimit(min(sys.getrecursionlimit(), 1000))

ContractName = Literal["token", "registry", "vault", "pools", "work", "rewards", "slasher"]
CONTRACT_NAMES: tuple[ContractName, ...] = (
    "token", "registry", "vault", "pools", "work", "rewards", "slasher",
)  # fmt: skip

DOMAIN_NAME = "Prime"
DOMAIN_VERSION = "1"


@dataclass(frozen=True)
class Sol:
    """The Solidity type under which a field enters the EIP-712 struct hash."""

    name: str


U8 = Annotated[int, Field(ge=0, lt=2**8), Sol("uint8")]
U32 = Annotated[int, Field(ge=0, lt=2**32), Sol("uint32")]
U64 = Annotated[int, Field(ge=0, lt=2**64), Sol("uint64")]
U256 = Annotated[int, Field(ge=0, lt=2**256), Sol("uint256")]
AddressField = Annotated[Address, AfterValidator(ids.address), Sol("address")]
DigestField = Annotated[Digest, AfterValidator(ids.digest), Sol("bytes32")]
SignatureField = Annotated[Signature, AfterValidator(ids.signature)]
Text = Annotated[str, Field(max_length=512), Sol("string")]


class Strict(BaseModel):
    """Base of everything parsed from outside: frozen, no unknown field, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="strings")


class Domain(Strict):
    """EIP-712 domain: chain and verifying contract under the fixed name and version."""

    chain_id: U256
    contract: AddressField


class Statement(Strict):
    """A signed struct. Subclasses set `CONTRACT` and annotate fields with Sol types.

    The EIP-712 type name is the class name; member names are the field names in camelCase.
    """

    CONTRACT: ClassVar[ContractName]

    @classmethod
    def eip712_types(cls) -> dict[str, list[dict[str, str]]]:
        """The EIP-712 `types` entry, e.g. {"Lease": [{"name": "pool", "type": "uint256"}, …]}."""
        members = []
        for name, info in cls.model_fields.items():
            sol = next(item for item in info.metadata if isinstance(item, Sol))
            members.append({"name": _camel(name), "type": sol.name})
        return {cls.__name__: members}

    def signable(self, domain: Domain) -> SignableMessage:
        """The EIP-712 message under `domain`."""
        types = self.eip712_types()
        message: dict[str, Any] = {}
        for member, name in zip(types[type(self).__name__], type(self).model_fields, strict=True):
            value = getattr(self, name)
            is_bytes = member["type"] == "bytes32"
            message[member["name"]] = bytes.fromhex(value[2:]) if is_bytes else value
        return encode_typed_data(
            domain_data={
                "name": DOMAIN_NAME,
                "version": DOMAIN_VERSION,
                "chainId": domain.chain_id,
                "verifyingContract": domain.contract,
            },
            message_types=types,
            message_data=message,
        )

    def digest(self, domain: Domain) -> Digest:
        """keccak256(0x19 ‖ 0x01 ‖ domain separator ‖ struct hash) (EIP-712)."""
        message = self.signable(domain)
        return ids.digest(keccak(b"\x19" + message.version + message.header + message.body))

    def recover(self, domain: Domain, signature: Signature) -> Address:
        """The externally owned account that signed. Raises UntrustedError if none did.

        Only the canonical low-s form is taken (EIP-2), so a signature has one encoding.
        """
        raw = ids.to_bytes(signature)
        if len(raw) != 65 or raw[64] not in (27, 28):
            raise UntrustedError("the signature is not 65 bytes r‖s‖v with v 27 or 28")
        if int.from_bytes(raw[32:64], "big") > SECPK1_N // 2:
            raise UntrustedError("the signature is not in low-s form (EIP-2)")
        try:
            return ids.address(Account.recover_message(self.signable(domain), signature=raw))
        except Exception as error:  # eth_keys raises several unrelated types on bad points
            raise UntrustedError(f"the signature recovers to no account: {error}") from error


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class Signer(Protocol):
    """Whatever holds a key: a local account, a keystore, a remote signer."""

    @property
    def address(self) -> Address: ...

    def sign(self, statement: Statement, domain: Domain) -> Signature:
        """EIP-712 signature by this key."""
        ...


class LocalSigner:
    """A private key in this process's memory. `repr` never shows it."""

    def __init__(self, private_key: bytes) -> None:
        self._account = Account.from_key(private_key)
        self.address: Address = ids.address(self._account.address)

    def __repr__(self) -> str:
        return f"LocalSigner({self.address})"

    @property
    def account(self) -> Any:
        """The eth-account LocalAccount, for signing transactions."""
        return self._account

    def sign(self, statement: Statement, domain: Domain) -> Signature:
        signed = self._account.sign_message(statement.signable(domain))
        return ids.signature(bytes(signed.signature))
