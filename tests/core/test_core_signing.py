"""Recovery agrees with eth-account, which shares no code with it; what is no key, signature or
address is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from eth_account import Account
from eth_utils.address import is_address, to_checksum_address
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from prime_core import ids
from prime_core.errors import MalformedError, UntrustedError
from prime_core.ids import Address, Signature
from prime_core.node import SessionRevocation
from prime_core.signing import (
    SECP256K1_ORDER,
    DigestField,
    Domain,
    LocalSigner,
    SignatureField,
)

ADDRESSES = st.binary(min_size=20, max_size=20).map(
    lambda raw: to_checksum_address("0x" + raw.hex())
)
DIGEST_FIELD: TypeAdapter[str] = TypeAdapter(DigestField)
SIGNATURE_FIELD: TypeAdapter[str] = TypeAdapter(SignatureField)


@settings(max_examples=200, deadline=None)
@given(
    raw=st.one_of(
        st.binary(min_size=65, max_size=65),
        st.tuples(
            st.sampled_from([0, 1, SECP256K1_ORDER - 1, SECP256K1_ORDER, 2**256 - 1]),
            st.sampled_from([0, 1, SECP256K1_ORDER // 2, SECP256K1_ORDER // 2 + 1, 2**256 - 1]),
            st.sampled_from([0, 1, 27, 28, 255]),
        ).map(lambda t: t[0].to_bytes(32, "big") + t[1].to_bytes(32, "big") + bytes([t[2]])),
    )
)
def test_any_65_bytes_recover_as_eth_account_recovers_them_or_are_untrusted(raw: bytes) -> None:
    statement = SessionRevocation(
        account=LocalSigner(b"\1" * 32).address, orchestrator="http://x", revoked_before=1
    )
    domain = Domain(chain_id=1, contract=LocalSigner(b"\2" * 32).address)
    digest = ids.to_bytes(statement.digest(domain))
    try:
        ours: Address | None = statement.recover(domain, Signature("0x" + raw.hex()))
    except UntrustedError:
        ours = None
    r, s, v = int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:64], "big"), raw[64]
    theirs = None
    if v in (27, 28) and s <= SECP256K1_ORDER // 2:
        try:
            theirs = Account._recover_hash(digest, vrs=(v, r, s))
        except Exception:
            theirs = None
    assert ours == theirs


@given(
    text=st.one_of(
        st.from_regex(r"\A0x[0-9a-fA-F]{38,42}\Z"),
        ADDRESSES,
        ADDRESSES.map(str.lower),
        ADDRESSES.map(lambda text: "0x" + text[2:].upper()),
        ADDRESSES.map(lambda text: text.swapcase()),
        ADDRESSES.map(lambda text: text[:2] + text[2:].swapcase()),
        st.text(max_size=45),
    )
)
def test_an_address_is_taken_exactly_if_it_is_one_and_its_checksum_holds(text: str) -> None:
    try:
        found: str | None = ids.address(text)
    except MalformedError:
        found = None
    right = None
    if text.startswith("0x") and is_address(text):
        checked, digits = to_checksum_address(text), text[2:]
        right = checked if text == checked or digits in (digits.lower(), digits.upper()) else None
    assert found == right


@pytest.mark.parametrize("key", [bytes(32), SECP256K1_ORDER.to_bytes(32, "big"), b"\1" * 31])
def test_what_is_no_private_key_is_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        LocalSigner(key)


@settings(max_examples=300, deadline=None)
@given(size=st.sampled_from([0, 31, 32, 33, 64, 65, 66, 4096, 4097]), data=st.data())
def test_a_message_s_hexadecimal_fields_take_what_their_types_take(
    size: int, data: st.DataObject
) -> None:
    """pydantic checks the fields by patterns, everything else by prime_core.ids."""
    text = "0x" + (bytes([data.draw(st.integers(0, 255))]) * size).hex()
    at = data.draw(st.integers(0, len(text)))
    change = data.draw(st.sampled_from(["", "", "\n", " ", "A", "g", "٣", "00"]))
    text = text[:at] + change + text[at + data.draw(st.sampled_from([0, len(change)])) :]
    for field, check in ((DIGEST_FIELD, ids.digest), (SIGNATURE_FIELD, ids.signature)):
        assert _takes(field.validate_python, text) == _takes(check, text), text


def _takes(check: Callable[[str], object], text: str) -> bool:
    try:
        check(text)
    except (MalformedError, ValueError):
        return False
    return True
