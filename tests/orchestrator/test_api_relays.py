"""Relays that announce themselves: who may, and which addresses are passed on to nodes."""

from __future__ import annotations

import dataclasses
import json
import socket
from contextlib import closing

import pytest
from orchestrator_world import World, signer

from prime_core.errors import PolicyError
from prime_core.messages import RelayAnnouncement
from prime_orchestrator import serve
from prime_orchestrator.api import publishing
from prime_orchestrator.api.backend import MOST_RELAYS, RelayFaults
from prime_orchestrator.store import nodes


def test_relays_are_named_to_nodes_while_they_announce_themselves(world: World) -> None:
    relay = world.login(signer(5), "relay")
    body = b'{"url":"http://relay:9000","versions":[0,1]}'
    assert world.post("/v1/relays", body, relay).json() == {}
    assert world.http.get("/v1/relays").json() == [
        {"url": "http://relay:9000", "versions": [0, 1], "own": True}
    ]
    node = world.member(1)
    beat = world.post("/v1/heartbeat", b'{"policy_version":null}', node).json()
    assert beat["relays"] == ["http://relay:9000"]
    world.clock.advance(121)
    assert world.http.get("/v1/relays").json() == []


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "//x", "javascript:alert(1)", "http://", "http://x?q=1", "http://x#f"]
)
def test_a_relay_has_a_plain_address(world: World, url: str) -> None:
    relay = world.login(signer(5), "relay")
    body = json.dumps({"url": url, "versions": []}).encode()
    assert world.post("/v1/relays", body, relay).status_code == 400


def test_a_relays_address_belongs_to_its_first_account_and_their_number_is_bounded(
    world: World,
) -> None:
    first, second = world.login(signer(5), "relay"), world.login(signer(6), "relay")
    codes = [
        world.post("/v1/relays", b'{"url":"http://r%d"}' % number, first).status_code
        for number in range(9)
    ]
    assert codes == [200] * 8 + [403]
    assert world.post("/v1/relays", b'{"url":"http://r0"}', second).status_code == 403


def test_a_relay_needs_a_seat_in_the_pool_or_the_operators_leave(world: World) -> None:
    body = b'{"url":"http://relay:9000","versions":[]}'
    stranger = world.post("/v1/relays", body, world.login(signer(7), "relay"))
    assert stranger.status_code == 403
    assert f"--allow-relay {signer(7).address}" in stranger.json()["detail"]

    world.member(8)
    with world.backend.store.begin() as connection:
        nodes.set_member(connection, signer(8).address, provider=signer(9).address)
    for number, account in enumerate((world.trainer, world.manager, signer(8), signer(9))):
        url = b'{"url":"http://relay:%d"}' % (9100 + number)
        assert world.post("/v1/relays", url, world.login(account, "relay")).status_code == 200
    own = {info["url"]: info["own"] for info in world.http.get("/v1/relays").json()}
    assert [own[f"http://relay:{9100 + number}"] for number in range(4)] == [True] * 2 + [False] * 2
    with world.backend.store.begin() as connection:
        nodes.set_status(connection, signer(8).address, "ejected", last_heartbeat=0.0)
    for account in (signer(8), signer(9)):
        answer = world.post("/v1/relays", body, world.login(account, "relay"))
        assert answer.status_code == 403, "who lost its seat has no say"


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("10.0.0.7", ["10.0.0.7"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("169.254.169.254", ["169.254.169.254"]),
        ("[::1]", ["::1"]),
        ("[::ffff:192.168.0.1]", ["::ffff:192.168.0.1"]),
        ("[fe80::1]", ["fe80::1%eth0"]),
        ("100.64.1.1", ["100.64.1.1"]),
        ("0.0.0.0", ["0.0.0.0"]),
        ("inside.example.org", ["93.184.216.34", "192.168.3.4"]),
    ],
)
def test_off_local_networks_a_relay_has_a_public_address(
    monkeypatch: pytest.MonkeyPatch, host: str, found: list[str]
) -> None:
    """Its address goes to every node: none may be sent into its own network by it."""
    answers = [(0, 0, 0, "", (one, 0)) for one in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    url = f"http://{host}:8480"
    with pytest.raises(PolicyError, match=r"private address.* announce a public address"):
        publishing.check_url(url, local=False)
    publishing.check_url(url, local=True)


@pytest.mark.parametrize(
    ("host", "here", "allowed"),
    [
        ("127.0.0.1", True, True),
        ("127.0.0.1", False, False),
        ("169.254.169.254", True, False),
        ("10.0.0.7", True, False),
    ],
)
def test_a_pool_of_one_machine_takes_relays_of_that_machine_on_any_chain(
    world: World, host: str, here: bool, allowed: bool
) -> None:
    place = world.backend.context.deployment.model_copy(update={"chain_id": 84532})
    backend = dataclasses.replace(
        world.backend,
        on_one_machine=here,
        context=dataclasses.replace(world.backend.context, deployment=place),
    )
    relay = RelayAnnouncement(url=f"http://{host}:8480", versions=(0,))
    if allowed:
        publishing.announce_relay(backend, signer(5).address, relay)
        assert [one["url"] for one in world.http.get("/v1/relays").json()] == [relay.url]
    else:
        with pytest.raises(PolicyError, match="announce a public address"):
            publishing.announce_relay(backend, signer(5).address, relay)


@pytest.mark.parametrize(
    ("host", "others", "alone"),
    [
        ("127.0.0.1", set(), True),
        ("127.0.0.1", {"http://localhost:8470"}, True),
        ("127.0.0.1", {"https://pool.example.org"}, False),
        ("0.0.0.0", set(), False),
    ],
)
def test_a_pool_is_of_one_machine_if_it_listens_there_and_is_known_by_no_other_name(
    host: str, others: set[str], alone: bool
) -> None:
    with closing(serve.bind(host, 0)) as listener:
        urls = {serve.address_of(listener), *others}
        assert serve.on_one_machine(listener, urls) is alone


@pytest.mark.parametrize(
    "url",
    ["http://user:secret@relay.example", "http://relay.example/\n/x", "http://relay\x1b[2J.example",
     "http://relay.example/?q=1", "http://rel\u202eay.example", "ftp://relay.example"],
)  # fmt: skip
def test_a_relay_url_with_credentials_or_control_characters_is_refused(
    world: World, url: str
) -> None:
    world.member(1)
    body = json.dumps({"url": url}).encode()
    answer = world.post("/v1/relays", body, world.login(signer(1), "relay"))
    assert answer.status_code == 400
    assert world.http.get("/v1/relays").json() == []


def test_a_public_relay_is_taken_and_one_without_address_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [(0, 0, 0, "", ("93.184.216.34", 0)), (0, 0, 0, "", ("2606:2800:220:1::1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    publishing.check_url("https://relay.example.org/pool", local=False)

    def unknown(*_: object, **__: object) -> None:
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(PolicyError, match="has no address"):
        publishing.check_url("https://relay.invalid", local=False)


def test_a_report_of_wrong_chunks_is_counted_once_a_node_and_nothing_else_follows(
    world: World,
) -> None:
    world.post("/v1/relays", b'{"url":"http://relay:9000/"}', world.login(signer(5), "relay"))
    one, two = world.member(1), world.member(2)
    body = b'{"policy_version":null,"lied":["http://relay:9000","http://never.announced"]}'
    for session in (one, one, two):
        beat = world.post("/v1/heartbeat", body, session).json()
        assert beat["relays"] == ["http://relay:9000"], "no stranger's word takes a relay away"
    text = world.http.get("/metrics").text
    assert 'prime_relay_lies_reported{relay="http://relay:9000"} 2.0\n' in text
    assert "never.announced" not in text
    world.post("/v1/heartbeat", body, world.login(signer(7), "node"))
    assert 'relay="http://relay:9000"} 2.0\n' in world.http.get("/metrics").text, "a stranger's"


def test_a_relay_that_fell_silent_keeps_the_count_of_its_lies() -> None:
    faults, nodes = RelayFaults(), [signer(number).address for number in (1, 2)]
    faults.note(nodes[0], ["http://a"], ["http://a", "http://b"])
    faults.note(nodes[1], ["http://b"], ["http://b"])
    assert faults.counts() == {"http://a": 1, "http://b": 1}
    faults.note(nodes[0], ["http://a"], ["http://b"])
    faults.note(nodes[1], ["http://a"], ["http://a", "http://b"])
    assert faults.counts() == {"http://a": 2, "http://b": 1}


def test_the_relays_whose_lies_are_counted_are_bounded() -> None:
    faults, node = RelayFaults(), signer(1).address
    urls = [f"http://relay-{number}" for number in range(MOST_RELAYS + 3)]
    for url in urls:
        faults.note(node, [url], [url])
    assert list(faults.counts()) == urls[3:], "the ones named first go"


@pytest.mark.parametrize("lied", [["http://x"] * 17, ["x" * 513], "http://x", [1]])
def test_an_unbounded_or_odd_report_of_wrong_chunks_is_refused(world: World, lied: object) -> None:
    body = json.dumps({"policy_version": None, "lied": lied}).encode()
    assert world.post("/v1/heartbeat", body, world.member(1)).status_code in (400, 422)
