"""RFC 9421 signatures: what is signed is what is checked."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from prime_core.errors import MalformedError, UntrustedError
from prime_core.transport.signatures import (
    SessionKey,
    Verified,
    check_body,
    sign_headers,
    verify_headers,
)

NOW = 1_700_000_000.0
NONCE = "n" * 24
BODY = b'{"a":1}'


def verify_request(
    method: str,
    authority: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float,
) -> Verified:
    verified = verify_headers(method, authority, target, headers, now=now)
    check_body(verified, body)
    return verified


@pytest.fixture
def signed() -> tuple[SessionKey, dict[str, str]]:
    key = SessionKey.generate()
    headers = sign_headers(key, "POST", "http://h:8/v1/x?q=1", BODY, now=NOW, nonce=NONCE)
    return key, {name.lower(): value for name, value in headers.items()}


def test_a_signed_request_proves_its_key_and_nonce(
    signed: tuple[SessionKey, dict[str, str]],
) -> None:
    key, headers = signed
    verified = verify_request("POST", "h:8", "/v1/x?q=1", headers, BODY, now=NOW + 5)
    assert (verified.key_id, verified.nonce) == (key.key_id, NONCE)


@pytest.mark.parametrize(
    ("method", "authority", "target", "body"),
    [
        ("PUT", "h:8", "/v1/x?q=1", BODY),
        ("POST", "evil:8", "/v1/x?q=1", BODY),
        ("POST", "h:8", "/v1/y?q=1", BODY),
        ("POST", "h:8", "/v1/x?q=2", BODY),
        ("POST", "h:8", "/v1/x", BODY),
        ("POST", "h:8", "/v1/x?q=1", BODY + b" "),
    ],
)
def test_changing_any_covered_part_breaks_the_signature(
    signed: tuple[SessionKey, dict[str, str]],
    method: str,
    authority: str,
    target: str,
    body: bytes,
) -> None:
    with pytest.raises(UntrustedError):
        verify_request(method, authority, target, signed[1], body, now=NOW)


@pytest.mark.parametrize("shift", [-120.0, 200.0])
def test_a_stale_or_future_signature_is_refused(
    signed: tuple[SessionKey, dict[str, str]], shift: float
) -> None:
    with pytest.raises(UntrustedError, match="clock"):
        verify_request("POST", "h:8", "/v1/x?q=1", signed[1], BODY, now=NOW + shift)


def test_another_key_cannot_stand_in(signed: tuple[SessionKey, dict[str, str]]) -> None:
    headers = dict(signed[1])
    headers["signature-input"] = headers["signature-input"].replace(
        signed[0].key_id, SessionKey.generate().key_id
    )
    with pytest.raises(UntrustedError):
        verify_request("POST", "h:8", "/v1/x?q=1", headers, BODY, now=NOW)


@pytest.mark.parametrize("name", ["signature", "signature-input"])
def test_missing_or_foreign_headers_are_malformed(
    signed: tuple[SessionKey, dict[str, str]], name: str
) -> None:
    headers = dict(signed[1])
    headers[name] = "sig2=:AAAA:"
    with pytest.raises(MalformedError):
        verify_request("POST", "h:8", "/v1/x?q=1", headers, BODY, now=NOW)
