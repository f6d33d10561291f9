"""Hypothesis strategies for bytes from outside: arbitrary bytes, arbitrary JSON, and valid bytes
that were changed. Instances of the project's models are made from their fields' types."""

from __future__ import annotations

import json
import types
from enum import Enum
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from prime_core import ids
from prime_core.signing import AddressField, DigestField, SignatureField

Values = st.SearchStrategy[Any]
_DIGESTS = st.sampled_from(["0x" + pair * 32 for pair in ("00", "11", "ab", "ff")])
_ADDRESSES = st.sampled_from([ids.address("0x" + pair * 20) for pair in ("00", "11", "ab")])
_SIGNATURES = st.sampled_from(["0x" + pair * 65 for pair in ("00", "1b")] + ["0x" + "22" * 4096])
_BY_CHECK = {
    get_args(field)[1]: values
    for field, values in (
        (DigestField, _DIGESTS), (AddressField, _ADDRESSES), (SignatureField, _SIGNATURES)
    )
}  # fmt: skip

TRICKS = st.sampled_from(
    [
        None, True, 0, -1, 2**31, 2**63, 2**64, 2**256, -(2**63), 10**400, 1e308, -0.0, 5e-324,
        "", "\0", "\ud800", "\u202e", "é" * 40, "a" * 5000, "0x", "0x" + "11" * 32,
        "0x" + "ff" * 20, "../../etc/passwd", "http://[", "http://a:99999999/",
        "http://u:p@127.0.0.1/\r\nX: y",
        "१२", "1e5", "NaN", [], {}, [[]], {"": None}, [0] * 300,
    ]
)  # fmt: skip
"""Values on which parsers have failed: bounds of integers, text that does not encode, URLs."""
JSON = st.recursive(
    TRICKS | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
RAW_JSON = st.sampled_from(
    [b"", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b'{"a":1,"a":2}', b'"\\ud800"',
     b"\xef\xbb\xbf{}", b"-", b"1e999999", b"NaN", b"[1,]", b'{"a":"\xff"}', b"{}\0"]
)  # fmt: skip


def instances(model: type[BaseModel]) -> Values:
    """JSON objects of the model's shape; its own rules across fields may refuse them."""
    return st.fixed_dictionaries(
        {field.alias or name: _of_field(field) for name, field in model.model_fields.items()}
    )


def _of_field(field: FieldInfo) -> Values:
    return _of(field.annotation, tuple(field.metadata))


def _of(kind: Any, about: tuple[Any, ...]) -> Values:
    if isinstance(kind, NewType):
        return _of(kind.__supertype__, about)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _of(inner[0], (*inner[1:], *about))
    for mark in about:
        if isinstance(mark, AfterValidator) and mark in _BY_CHECK:
            return _BY_CHECK[mark]
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.one_of(*(_of(one, about) for one in inner))
    if origin in (tuple, list, frozenset, set):
        least, most = _bound(about, "min_length", 0), _bound(about, "max_length", 2)
        if origin is tuple and Ellipsis not in inner:
            return st.tuples(*(_of(one, ()) for one in inner))
        return st.lists(_of(inner[0], ()), min_size=least, max_size=max(least, min(most, 2)))
    if origin is dict:
        return st.dictionaries(_of(inner[0], ()), _of(inner[1], ()), max_size=2)
    if not isinstance(kind, type):
        return JSON
    if issubclass(kind, BaseModel):
        return st.deferred(lambda: instances(kind))
    if issubclass(kind, Enum):
        return st.sampled_from([one.value for one in kind])
    return _plain(kind, about)


def _plain(kind: type, about: tuple[Any, ...]) -> Values:
    if kind is type(None):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        low = _bound(about, "ge", _bound(about, "gt", -2) + 1)
        high = _bound(about, "le", _bound(about, "lt", 2**64) - 1)
        return st.sampled_from(sorted({low, min(low + 1, high), high}))
    if kind is float:
        return st.sampled_from([0.0, 0.5, 1.0])
    if kind is str:
        pattern = next((m.pattern for m in about if getattr(m, "pattern", None)), None)
        if pattern is not None:
            return st.from_regex(pattern, fullmatch=True)
        return st.sampled_from(["", "a", "name", "http://127.0.0.1:1/x"])
    return JSON


def _bound(about: tuple[Any, ...], name: str, otherwise: int) -> int:
    found = (getattr(mark, name, None) for mark in about)
    return next((value for value in found if value is not None), otherwise)


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value in which one place holds something else, or one key more or fewer."""
    place = draw(st.sampled_from([value] if not isinstance(value, dict | list) else [value, None]))
    if place is not None and draw(st.integers(0, 3)) == 0:
        return draw(JSON)
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        match draw(st.integers(0, 5)):
            case 0:
                return {name: one for name, one in value.items() if name != key}
            case 1:
                return {**value, draw(st.text(max_size=4)): draw(JSON)}
        return {**value, key: draw(altered(value[key]))}
    if isinstance(value, list) and value:
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(altered(value[at])), *value[at + 1 :]]
    return draw(JSON)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with up to three places changed, cut out, doubled or put in."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(result)))
        end = min(len(result), at + draw(st.integers(0, 9)))
        match draw(st.integers(0, 4)):
            case 0:
                result[at:end] = draw(st.binary(max_size=8))
            case 1:
                del result[at:end]
            case 2:
                result[at:at] = result[at:end] * draw(st.integers(1, 3))
            case 3:
                del result[at:]
            case 4 if at < len(result):
                result[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(result)


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def outside(
    valid: st.SearchStrategy[bytes], json_like: Values | None = None
) -> st.SearchStrategy[bytes]:
    """What a stranger may send where `valid` bytes are due: those, damaged ones, other bytes, and,
    if they are JSON (`json_like`), other JSON and values put in other places."""
    kinds = [valid, valid.flatmap(damaged), st.binary(max_size=300)]
    if json_like is not None:
        kinds += [json_like.flatmap(altered).map(as_bytes)] * 4
        kinds += [JSON.map(as_bytes), RAW_JSON]
    return st.one_of(*kinds)
