"""ABI encoding and decoding of the committed contracts, in the project's own words.

Digests and addresses are text on our side (prime_core.ids), bytes on the wire; a struct may be
given as the Statement that carries the same member names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

from eth_abi.abi import decode as abi_decode
from eth_abi.abi import encode as abi_encode
from eth_abi.exceptions import DecodingError, EncodingError
from eth_hash.auto import keccak
from eth_utils.abi import collapse_if_tuple

from prime_chain.errors import ChainRevertedError
from prime_core import ids
from prime_core.encoding import sha256
from prime_core.errors import FatalError, MalformedError
from prime_core.ids import Digest
from prime_core.signing import Statement

Field = Mapping[str, Any]
"""One entry of an ABI's inputs or outputs: name, type, components."""

_ERROR = bytes.fromhex("08c379a0")  # Error(string)
_PANIC = bytes.fromhex("4e487b71")  # Panic(uint256)


@dataclass(frozen=True)
class Item:
    """A function, event or error of an ABI. `selector`: 4 bytes (32 for an event)."""

    name: str
    inputs: tuple[Field, ...]
    outputs: tuple[Field, ...]
    selector: bytes

    @property
    def signature(self) -> str:
        return f"{self.name}({','.join(_type(item) for item in self.inputs)})"


@dataclass(frozen=True)
class Artifact:
    """A committed contract: its ABI by name, its bytecode, the SHA-256 of its file.

    `runtime` is the code as it lies on chain, but for `immutables`: [start, end) byte ranges that
    the constructor fills in (zero here).
    """

    name: str
    functions: dict[str, Item]
    events: dict[bytes, Item]
    errors: dict[bytes, Item]
    constructor: tuple[Field, ...]
    bytecode: bytes = field(repr=False)
    digest: Digest
    runtime: bytes = field(default=b"", repr=False)
    immutables: tuple[tuple[int, int], ...] = ()

    def function(self, name: str) -> Item:
        """Raises FatalError if the committed ABI lacks it: ABI and program do not fit."""
        try:
            return self.functions[name]
        except KeyError:
            raise FatalError(f"the ABI of {self.name} has no function {name}") from None


def _type(item: Field) -> str:
    return str(collapse_if_tuple(item))  # type: ignore[arg-type]


def parse_artifact(name: str, raw: bytes) -> Artifact:
    """An artifact file {"abi": […], "bytecode": "0x…"} as solc and forge write it."""
    body = json.loads(raw)
    functions: dict[str, Item] = {}
    events: dict[bytes, Item] = {}
    errors: dict[bytes, Item] = {}
    constructor: tuple[Field, ...] = ()
    for entry in body["abi"]:
        inputs, outputs = tuple(entry.get("inputs", ())), tuple(entry.get("outputs", ()))
        kind = entry["type"]
        if kind == "constructor":
            constructor = inputs
        elif kind in ("function", "event", "error"):
            types = ",".join(_type(item) for item in inputs)
            full = keccak(f"{entry['name']}({types})".encode())
            item = Item(entry["name"], inputs, outputs, full if kind == "event" else full[:4])
            if kind == "function":
                functions.setdefault(item.name, item)
            else:
                (events if kind == "event" else errors)[item.selector] = item
    return Artifact(
        name,
        functions,
        events,
        errors,
        constructor,
        _bytecode(body["bytecode"]),
        sha256(raw),
        _bytecode(body.get("deployedBytecode", "")),
        tuple((start, start + length) for start, length in body.get("immutables", ())),
    )


def _bytecode(code: str | Mapping[str, str]) -> bytes:
    text = code if isinstance(code, str) else code["object"]
    return bytes.fromhex(text.removeprefix("0x"))


@lru_cache(maxsize=32)
def artifact(name: str) -> Artifact:
    """The committed artifact of Solidity contract `name`. Raises FatalError if it is missing."""
    file = resources.files("prime_chain").joinpath("abi", f"{name}.json")
    try:
        return parse_artifact(name, file.read_bytes())
    except FileNotFoundError as error:
        raise FatalError(
            f"the committed ABI {name}.json is missing from protocol/prime_chain"
        ) from error


def encode_call(item: Item, values: Sequence[Any]) -> bytes:
    """Selector and encoded arguments. Raises MalformedError if a value does not fit its type."""
    return item.selector + encode(item.inputs, values)


def encode(fields: Sequence[Field], values: Sequence[Any]) -> bytes:
    """ABI encoding of `values`. Raises MalformedError if one does not fit its type."""
    if len(fields) != len(values):
        raise MalformedError(f"{len(values)} values for {len(fields)} ABI fields")
    try:
        wire = [_to_wire(item, value) for item, value in zip(fields, values, strict=True)]
        return bytes(abi_encode([_type(item) for item in fields], wire))
    except (EncodingError, ValueError, TypeError, AttributeError) as error:
        raise MalformedError(f"a value does not fit its ABI type: {error}") from error


def decode(fields: Sequence[Field], data: bytes) -> tuple[Any, ...]:
    """Decoded values in our words. Raises MalformedError if `data` does not decode."""
    try:
        wire = abi_decode([_type(item) for item in fields], data)
    except (DecodingError, OverflowError, ValueError) as error:
        raise MalformedError(f"the chain's answer does not decode: {error}") from error
    return tuple(_from_wire(item, value) for item, value in zip(fields, wire, strict=True))


def _word(kind: str, word: bytes) -> Any:
    """A value of one 32-byte word, for the types that fill events; None for any other type.

    Raises MalformedError if the word does not fit the type.
    """
    if kind == "address":
        if any(word[:12]):
            raise MalformedError("a word that is not an address")
        return known_address(word[12:])
    if kind == "bytes32":
        return ids.digest(word)
    if kind.startswith("uint"):
        value = int.from_bytes(word, "big")
        if value >> int(kind[4:]):
            raise MalformedError(f"a word that is not a valid {kind}")
        return value
    return None


@lru_cache(maxsize=1 << 16)
def known_address(raw: str | bytes) -> ids.Address:
    """`ids.address`, remembered: its checksum costs a hash."""
    return ids.address(raw)


def decode_log(item: Item, topics: Sequence[bytes], data: bytes) -> dict[str, Any]:
    """An event's arguments by Solidity name. Raises MalformedError if the log does not fit."""
    indexed = [entry for entry in item.inputs if entry.get("indexed")]
    plain = [entry for entry in item.inputs if not entry.get("indexed")]
    if len(topics) != len(indexed) + 1:
        raise MalformedError(f"a log of {item.name} with {len(topics)} topics")
    values: dict[str, Any] = {}
    words = [*topics[1:], *(data[at : at + 32] for at in range(0, 32 * len(plain), 32))]
    whole = len(data) == 32 * len(plain) and all(len(word) == 32 for word in words)
    for entry, word in zip([*indexed, *plain], words, strict=True):
        found = _word(str(entry["type"]), word) if whole else None
        if found is None:
            break
        values[str(entry["name"])] = found
    else:
        return {str(entry["name"]): values[str(entry["name"])] for entry in item.inputs}
    for entry, topic in zip(indexed, topics[1:], strict=True):
        values[str(entry["name"])] = decode([entry], topic)[0]
    for entry, value in zip(plain, decode(plain, data), strict=True):
        values[str(entry["name"])] = value
    return {str(entry["name"]): values[str(entry["name"])] for entry in item.inputs}


def decode_revert(
    data: bytes, artifacts: Sequence[Artifact], doing: str = "", message: str = ""
) -> ChainRevertedError:
    """The error that revert data stands for, by the first artifact that knows it."""
    selector, body = data[:4], data[4:]
    try:
        if selector == _ERROR:
            text = decode([{"name": "message", "type": "string"}], body)[0]
            return ChainRevertedError("Error", {"message": text}, doing)
        if selector == _PANIC:
            code = decode([{"name": "code", "type": "uint256"}], body)[0]
            return ChainRevertedError("Panic", {"code": hex(code)}, doing)
        for known in artifacts:
            item = known.errors.get(selector)
            if item is not None:
                names = [str(e["name"]) or f"_{i}" for i, e in enumerate(item.inputs)]
                values = decode(item.inputs, body)
                return ChainRevertedError(item.name, dict(zip(names, values, strict=True)), doing)
    except MalformedError:
        pass  # data that only looks like one of ours: show it as it is
    shown: dict[str, Any] = {"data": "0x" + data.hex()} if data else {}
    if message:
        shown["message"] = message[:300]
    return ChainRevertedError("Unknown", shown, doing)


def _element(item: Field) -> tuple[Field, bool]:
    kind = str(item["type"])
    if kind.endswith("]"):
        return {**item, "type": kind[: kind.rindex("[")]}, True
    return item, False


def _to_wire(item: Field, value: Any) -> Any:
    element, is_array = _element(item)
    kind = str(item["type"])
    if is_array:
        return [_to_wire(element, one) for one in value]
    if kind == "tuple":
        parts = item["components"]
        if isinstance(value, Statement):
            names = [member["name"] for member in next(iter(value.eip712_types().values()))]
            fields = dict(zip(names, value.__class__.model_fields, strict=True))
            return tuple(_to_wire(p, getattr(value, fields[p["name"]])) for p in parts)
        return tuple(_to_wire(p, one) for p, one in zip(parts, value, strict=True))
    if kind.startswith("bytes") and isinstance(value, str):
        return bytes.fromhex(value.removeprefix("0x"))
    return value


def _from_wire(item: Field, value: Any) -> Any:
    element, is_array = _element(item)
    kind = str(item["type"])
    if is_array:
        return tuple(_from_wire(element, one) for one in value)
    if kind == "tuple":
        parts = item["components"]
        return tuple(_from_wire(p, one) for p, one in zip(parts, value, strict=True))
    if kind == "address":
        return ids.address(value)
    if kind == "bytes32":
        return ids.digest(bytes(value))
    if kind.startswith("bytes"):
        return "0x" + bytes(value).hex()
    return value
