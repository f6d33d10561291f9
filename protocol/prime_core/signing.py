"""EIP-712 statements: a base class that hashes, signs and recovers.

A statement is a frozen pydantic model whose fields carry their Solidity types and whose class names
the contract that checks it. Identity always comes from the recovered signer, never from a field.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar, Literal, Protocol

from coincurve import PrivateKey, PublicKey
from eth_hash.auto import keccak
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from prime_core import ids
from prime_core.errors import MalformedError, UntrustedError
from prime_core.ids import Address, Digest, Signature

ContractName = Literal[
    "token", "registry", "vault", "pools", "work", "rewards", "slasher", "court"
]  # fmt: skip
CONTRACT_NAMES: tuple[ContractName, ...] = (
    "token", "registry", "vault", "pools", "work", "rewards", "slasher", "court",
)  # fmt: skip

DOMAIN_NAME = "Prime"
DOMAIN_VERSION = "1"

SECP256K1_ORDER = 0xFFFFFFFF_FFFFFFFF_FFFFFFFF_FFFFFFFE_BAAEDCE6_AF48A03B_BFD25E8C_D0364141


@dataclass(frozen=True)
class Sol:
    """The Solidity type of a field in the EIP-712 struct hash."""

    name: str


U8 = Annotated[int, Field(ge=0, lt=2**8), Sol("uint8")]
U32 = Annotated[int, Field(ge=0, lt=2**32), Sol("uint32")]
U64 = Annotated[int, Field(ge=0, lt=2**64), Sol("uint64")]
U256 = Annotated[int, Field(ge=0, lt=2**256), Sol("uint256")]


def _checked(check: Callable[[str], str]) -> AfterValidator:
    """`check` for a model's field: pydantic takes a ValueError for the field's and names it, and
    lets every other error through."""

    def of_field(value: str) -> str:
        try:
            return check(value)
        except MalformedError as error:
            raise ValueError(str(error)) from error

    return AfterValidator(of_field)


def _text(pattern: str) -> WithJsonSchema:
    """What the API's document says of a field that is checked by a function."""
    return WithJsonSchema({"type": "string", "pattern": pattern})


@dataclass(frozen=True)
class _Hex:
    """Lowercase hexadecimal text, checked by pydantic itself: a function of ours for each field is
    most of the time that a message takes to parse."""

    pattern: str
    said: str
    lengths: tuple[int, int] | None = None

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        least, most = self.lengths or (None, None)
        text = core_schema.str_schema(pattern=self.pattern, min_length=least, max_length=most)
        return core_schema.custom_error_schema(
            text, custom_error_type="hexadecimal", custom_error_message=self.said
        )


AddressField = Annotated[
    Address, _checked(ids.address), _text("^0x[0-9a-fA-F]{40}$"), Sol("address")
]
DigestField = Annotated[
    Digest, _Hex("^0x[0-9a-f]{64}$", "not a 32-byte lowercase hex digest"), Sol("bytes32")
]
SignatureField = Annotated[
    Signature,
    _Hex(
        "^0x([0-9a-f]{2})+$",
        "not a signature: expected 0x and 65 to 4096 bytes of lowercase hex",
        (2 + 2 * 65, 2 + 2 * 4096),
    ),
]
Text = Annotated[str, Field(max_length=512), Sol("string")]


class Strict(BaseModel):
    """Base of all parsed external data: frozen, no unknown fields, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="strings")


class Answer(Strict):
    """Base of server responses. Unknown fields are ignored, so that responses may gain fields.
    Requests and signed statements stay Strict."""

    model_config = ConfigDict(extra="ignore")


class Domain(Strict):
    """EIP-712 domain: chain and verifying contract; name and version are fixed."""

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

    def struct_hash(self) -> Digest:
        """EIP-712 hashStruct; independent of the domain."""
        return ids.digest(self._struct_hash())

    def _struct_hash(self) -> bytes:
        type_hash, members = _layout(type(self))
        return keccak(
            type_hash + b"".join(encode_member(sol, getattr(self, name)) for name, sol in members)
        )

    def digest(self, domain: Domain) -> Digest:
        """keccak256(0x19 ‖ 0x01 ‖ domain separator ‖ struct hash) (EIP-712)."""
        return ids.digest(typed_data_hash(domain, self._struct_hash()))

    def recover(self, domain: Domain, signature: Signature) -> Address:
        """Recovers the externally owned account that signed. Raises UntrustedError if there is
        none.

        Accepts only the canonical low-s form (EIP-2), so a signature has exactly one encoding.
        """
        raw = ids.to_bytes(signature)
        if len(raw) != 65 or raw[64] not in (27, 28):
            raise UntrustedError("the signature is not 65 bytes r‖s‖v with v 27 or 28")
        if int.from_bytes(raw[32:64], "big") > SECP256K1_ORDER // 2:
            raise UntrustedError("the signature is not in low-s form (EIP-2)")
        recoverable = raw[:64] + bytes([raw[64] - 27])
        digest = typed_data_hash(domain, self._struct_hash())
        try:
            key = PublicKey.from_signature_and_message(recoverable, digest, hasher=None)
        except Exception as error:  # libsecp256k1's binding raises bare Exception and ValueError
            raise UntrustedError(f"the signature recovers to no account: {error}") from error
        return _account_of(key)


@cache
def _layout(kind: type[Statement]) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """The type hash of a statement class and its members as (field name, Solidity type)."""
    types = kind.eip712_types()[kind.__name__]
    members = tuple((name, one["type"]) for name, one in zip(kind.model_fields, types, strict=True))
    return type_hash(kind.__name__, {one["name"]: one["type"] for one in types}), members


def type_hash(name: str, members: Mapping[str, str]) -> bytes:
    """keccak256 of `Name(type member,…)` (EIP-712, encodeType without nested structs)."""
    inner = ",".join(f"{sol} {member}" for member, sol in members.items())
    return keccak(f"{name}({inner})".encode())


def encode_member(sol: str, value: object) -> bytes:
    """Encodes one member as 32 bytes (EIP-712). Raises TypeError for types that are not supported
    here (bytes, arrays, nested structs)."""
    if isinstance(value, int) and (sol.startswith("uint") or sol == "bool"):
        return value.to_bytes(32, "big")
    if isinstance(value, str):
        if sol == "bytes32":
            return bytes.fromhex(value[2:])
        if sol == "address":
            return bytes(12) + bytes.fromhex(value[2:])
        if sol == "string":
            return keccak(value.encode())
    raise TypeError(f"EIP-712 member of type {sol} with a {type(value).__name__}")


@lru_cache(maxsize=256)
def _domain_separator(chain_id: int, contract: Address) -> bytes:
    members = {
        "name": "string",
        "version": "string",
        "chainId": "uint256",
        "verifyingContract": "address",
    }
    values = (DOMAIN_NAME, DOMAIN_VERSION, chain_id, contract)
    encoded = map(encode_member, members.values(), values)
    return keccak(type_hash("EIP712Domain", members) + b"".join(encoded))


def typed_data_hash(domain: Domain, struct_hash: bytes) -> bytes:
    """The 32-byte hash to sign for a struct under `domain` (EIP-712)."""
    return keccak(b"\x19\x01" + _domain_separator(domain.chain_id, domain.contract) + struct_hash)


def _account_of(key: PublicKey) -> Address:
    return ids.address(keccak(key.format(compressed=False)[1:])[12:])


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class Signer(Protocol):
    """A key holder: a local account, a keystore, or a remote signer."""

    @property
    def address(self) -> Address: ...

    def sign(self, statement: Statement, domain: Domain) -> Signature:
        """EIP-712 signature by this key."""
        ...


class LocalSigner:
    """A private key in this process's memory. `repr` never reveals it.

    Raises ValueError unless `private_key` is 32 bytes in [1, curve order).
    """

    def __init__(self, private_key: bytes) -> None:
        if len(private_key) != 32:
            raise ValueError("a private key has 32 bytes")
        self._key = PrivateKey(private_key)
        self.address: Address = _account_of(self._key.public_key)

    def __repr__(self) -> str:
        return f"LocalSigner({self.address})"

    @property
    def account(self) -> Any:
        """The eth-account LocalAccount, for signing transactions. Imports eth_account."""
        from eth_account import Account

        limit_recursion()
        return Account.from_key(self._key.secret)

    def sign_hash(self, digest: bytes) -> Signature:
        """Signature r‖s‖v (low s, v 27 or 28) of a 32-byte digest."""
        raw = self._key.sign_recoverable(digest, hasher=None)
        return ids.signature(raw[:64] + bytes([raw[64] + 27]))

    def sign(self, statement: Statement, domain: Domain) -> Signature:
        return self.sign_hash(typed_data_hash(domain, statement._struct_hash()))


def limit_recursion() -> None:
    """Resets the interpreter's recursion limit to at most 1,000. Call it after importing
    eth_account or web3: their dependency py_ecc raises it to 100,000, with which deeply nested
    external JSON overflows the C stack and kills the process instead of raising RecursionError."""
    sys.setrecursionlimit(min(sys.getrecursionlimit(), 1000))
