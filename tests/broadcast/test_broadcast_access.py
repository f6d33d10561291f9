"""Readers sign; a server lets in those it should and refuses everything else."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from broadcast_world import DOMAIN, STRANGER, TRAINER, Run, same_files

from prime_broadcast.access import LIFETIME, SKEW, Gate, Passes, Rules
from prime_broadcast.client import fetch
from prime_broadcast.http1 import Limits
from prime_broadcast.server import Origin, Serving
from prime_broadcast.sources import SourceBook
from prime_core.errors import MalformedError, UnavailableError, UntrustedError
from prime_core.ids import ZERO_ADDRESS
from prime_core.signing import Domain

HERE, ELSEWHERE = "http://relay.example:8480", "http://other.example"
NOW = 1_000_000.0


def gate(*, now: float = NOW, **rules: object) -> Gate:
    return Gate(Rules(DOMAIN, **rules), HERE, lambda: now)  # type: ignore[arg-type]


def token(url: str = HERE, *, signer: object = TRAINER, domain: Domain = DOMAIN) -> str:
    return Passes(signer, domain, now=lambda: NOW).token(url)  # type: ignore[arg-type]


def changed(of: str, **fields: object) -> str:
    """The same signature over another grant."""
    held = json.loads(base64.urlsafe_b64decode(of + "=" * (-len(of) % 4)))
    held["grant"] |= fields
    return base64.urlsafe_b64encode(json.dumps(held).encode()).decode().rstrip("=")


def test_a_pass_names_its_signer() -> None:
    assert gate().admit(token()) == TRAINER.address


def test_one_pass_serves_a_server_until_it_runs_out() -> None:
    now = [NOW]
    passes = Passes(TRAINER, DOMAIN, now=lambda: now[0])
    first = passes.token(HERE)
    now[0] += LIFETIME - SKEW - 1
    assert passes.token(HERE) == first
    assert passes.token(ELSEWHERE) != first
    now[0] += 2
    assert passes.token(HERE) != first


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "",
        "nonsense",
        "A" * 5000,
        base64.urlsafe_b64encode(b"{}").decode(),
        token(ELSEWHERE),
        token(domain=Domain(chain_id=1, contract=ZERO_ADDRESS)),
        changed(token(), account=STRANGER.address),
        changed(token(), orchestrator=ELSEWHERE),
        changed(token(), scope="node"),
        changed(token(), expiry=int(NOW) + 10 * LIFETIME),
        changed(token(), expiry=int(NOW) + LIFETIME - 1),
        changed(token(), surplus=1),
    ],
)
def test_what_is_no_pass_for_this_server_is_refused(bad: str | None) -> None:
    with pytest.raises((UntrustedError, MalformedError)):
        gate().admit(bad)


@pytest.mark.parametrize("skew", [-SKEW + 1, SKEW - 1, LIFETIME])
def test_clocks_may_differ_by_minutes(skew: float) -> None:
    assert gate(now=NOW + skew).admit(token()) == TRAINER.address


@pytest.mark.parametrize(
    ("skew", "why"), [(-SKEW - 1, "from the future"), (LIFETIME + SKEW + 1, "has expired")]
)
def test_clocks_that_differ_by_more_are_named(skew: float, why: str) -> None:
    with pytest.raises(UntrustedError, match=why):
        gate(now=NOW + skew).admit(token())


def test_a_pass_that_was_let_in_ends_all_the_same() -> None:
    now = [NOW]
    one = Gate(Rules(DOMAIN), HERE, lambda: now[0])
    mine = token()
    one.admit(mine)
    now[0] += LIFETIME + SKEW + 1
    with pytest.raises(UntrustedError, match="expired"):
        one.admit(mine)


def test_members_may_change_at_any_time() -> None:
    members = {TRAINER.address}
    one = gate(members=lambda: members)
    assert one.admit(token()) == TRAINER.address
    with pytest.raises(UntrustedError, match="is not a member"):
        one.admit(token(signer=STRANGER))
    members.clear()
    with pytest.raises(UntrustedError, match="is not a member"):
        one.admit(token())


@pytest.fixture
def guarded(run: Run) -> Iterator[Origin]:
    run.publish()
    with Origin(run.root, Serving(rules=Rules(DOMAIN, lambda: {TRAINER.address}))) as origin:
        yield origin


def status(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urlopen(Request(url, headers=headers), timeout=20) as answer:
            return answer.status, ""
    except HTTPError as error:
        return error.code, error.headers.get("Prime-Reason", "")


def test_signed_requests_and_signed_urls_are_answered_others_get_401(guarded: Origin) -> None:
    url = f"{guarded.url}/policies/0/config.json"
    passes = Passes(TRAINER, DOMAIN)
    assert status(url) == (401, "sign the request: this server takes a pass")
    assert status(url, Authorization=passes.header(guarded.url)) == (200, "")
    assert status(f"{url}?pass={passes.token(guarded.url)}") == (200, "")
    assert status(f"{url}?pass={Passes(STRANGER, DOMAIN).token(guarded.url)}")[0] == 401
    assert status(f"{guarded.url}/healthz") == (200, "")
    assert status(f"{guarded.url}/metrics")[0] == 401


def test_a_reader_signs_what_it_fetches(guarded: Origin, run: Run, tmp_path: Path) -> None:
    from prime_broadcast import layout

    signed = layout.manifest_of(run.root, 0)
    with pytest.raises(UnavailableError, match="401 sign the request"):
        fetch(signed, [guarded.url], tmp_path / "0", patience=0.2)
    book = SourceBook(passes=Passes(TRAINER, DOMAIN))
    fetch(signed, [guarded.url], tmp_path / "0", book=book)
    assert same_files(tmp_path / "0", run, 0)


@pytest.mark.parametrize("exclusive", [True, False])
def test_limits_count_members_by_account_and_strangers_by_address(
    run: Run, exclusive: bool
) -> None:
    run.publish()
    limits = Limits(requests_per_second=0.001)
    everybody = {TRAINER.address, STRANGER.address}
    rules = Rules(DOMAIN, (lambda: everybody) if exclusive else None)
    with Origin(run.root, Serving(limits=limits, rules=rules)) as origin:
        url = f"{origin.url}/policies/0/config.json"
        one, two = Passes(TRAINER, DOMAIN), Passes(STRANGER, DOMAIN)
        codes = [
            status(url, Authorization=reader.header(origin.url))[0] for reader in (one, one, two)
        ]
    assert codes == [200, 429, 200 if exclusive else 429]
