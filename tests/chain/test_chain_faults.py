"""One endpoint of three at fault in every way: what is read stays whole, nothing is sent twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sender_kit import FakeTime, Make, target, transfer

from devnet.chain import CHAIN_ID
from devnet.deployed import Deployed
from devnet.faulty import KINDS, FaultyRpc, Kind, RpcFault
from prime_chain.client import ChainClient
from prime_chain.contracts import Contracts
from prime_chain.errors import RangeTooLargeError
from prime_chain.events import Event, ProviderRegistered
from prime_chain.history import read_events
from prime_chain.sender import Sender
from prime_chain.watcher import BlockRef, Confirmed, Watcher
from prime_core.errors import FatalError, UnavailableError

Open = Callable[..., FaultyRpc]

#: Kinds that cost a time-out each. The others end by themselves: a busy machine gets time.
SILENT = {"hang", "deaf", "drip"}


@pytest.fixture
def proxy(deployed: Deployed) -> Iterator[Open]:
    made: list[FaultyRpc] = []

    def build(*faults: RpcFault) -> FaultyRpc:
        made.append(FaultyRpc(deployed.url, faults))
        return made[-1]

    yield build
    for one in made:
        one.close()


def _read_all(watcher: Watcher) -> list[Event]:
    trail: list[BlockRef] = []
    events: list[Event] = []
    for _ in range(20):
        before = len(trail)
        for step in watcher.poll(trail):
            assert isinstance(step, Confirmed), "a lie looked like a reorganization"
            events += step.events
            trail.append(step.block)
        if len(trail) == before:
            break
    return events


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_any_fault_of_one_endpoint_changes_nothing_of_what_is_read(
    deployed: Deployed, proxy: Open, kind: str, place: int
) -> None:
    for account in (1, 2, 3):
        signer = deployed.accounts[account]
        deployed.send(signer, deployed.contracts.registry.register_provider(signer.address))
        deployed.anvil.mine(2)
    true = _read_all(Watcher(deployed.client, deployed.deployment))
    assert sum(isinstance(event, ProviderRegistered) for event in true) == 3
    bad = proxy()
    fault = RpcFault(kind, seconds=0.05 if kind == "delay" else 60)  # type: ignore[arg-type]
    urls = [deployed.url, proxy().url]
    urls.insert(place, bad.url)
    timeout = 3.0 if kind in SILENT else 30.0
    if place == 0 and kind != "lie":  # it goes wrong in a read that no quorum checks
        client = ChainClient(urls, CHAIN_ID, timeout=timeout)
        client.block_number()  # its chain is known to be ours
        bad.faults = (fault,)
        assert client.balance(signer.address, 3) == deployed.client.balance(signer.address, 3)
        client.close()
    bad.faults = (fault,)
    client = ChainClient(urls, CHAIN_ID, timeout=timeout)
    watcher = Watcher(client, deployed.deployment, max_span=3)
    assert _read_all(watcher) == true
    balance = client.agree(lambda one: one.balance(signer.address, 3))
    assert balance == deployed.client.balance(signer.address, 3)
    client.close()


def test_of_two_endpoints_one_that_leaves_logs_out_is_found_out_and_a_forged_log_is_refused(
    deployed: Deployed, proxy: Open
) -> None:
    signer = deployed.accounts[1]
    for at in range(1, 5):
        deployed.send(signer, deployed.contracts.registry.set_revoked_before(signer.address, at))
    true = _read_all(Watcher(deployed.client, deployed.deployment))
    bad = proxy(RpcFault("omit", methods=("eth_getLogs",)))
    client = ChainClient([bad.url, deployed.url], CHAIN_ID)
    assert _read_all(Watcher(client, deployed.deployment)) == true
    assert bad.injected["omit"] > 0
    client.close()
    bad.faults = (RpcFault("forge"),)
    client = ChainClient([bad.url, deployed.url], CHAIN_ID)
    with pytest.raises(UnavailableError, match="disagree"):
        _read_all(Watcher(client, deployed.deployment))
    client.close()


@pytest.mark.slow
def test_an_endpoint_that_hangs_costs_one_time_out(deployed: Deployed, proxy: Open) -> None:
    """The background alone tests it again, at any time."""
    clock = [0.0]
    bad = proxy(RpcFault("hang"))
    client = ChainClient([bad.url, deployed.url], CHAIN_ID, timeout=2, now=lambda: clock[0])
    caller = threading.get_ident()
    waited: list[int] = []
    post = client._pool.endpoints[0]._post

    def watched(body: bytes) -> bytes:
        waited.append(threading.get_ident())
        return post(body)

    client._pool.endpoints[0]._post = watched  # type: ignore[method-assign]
    for _ in range(20):
        client.balance(target(1))
        clock[0] += 60
    assert waited.count(caller) == 1
    bad.faults = ()
    probe = client._pool.endpoints[0]._probe
    assert probe is not None
    probe.join()  # ends by its time-out; the next one is answered
    clock[0] += 600
    client.balance(target(1))
    client._pool.endpoints[0]._probe.join()  # type: ignore[union-attr]
    assert not client._pool.endpoints[0].resting()
    client.close()


def test_a_range_that_no_answer_can_hold_is_halved_until_one_does(
    deployed: Deployed, proxy: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prime_chain import rpc

    signer = deployed.accounts[1]
    for at in range(1, 31):
        deployed.send(signer, deployed.contracts.registry.set_revoked_before(signer.address, at))
    true = _read_all(Watcher(deployed.client, deployed.deployment))
    monkeypatch.setattr(rpc, "MAX_ANSWER_BYTES", 6000)
    client = ChainClient([deployed.url], CHAIN_ID)
    with pytest.raises(RangeTooLargeError):
        client.logs(0, client.block_number(), list(deployed.deployment.addresses()))
    assert _read_all(Watcher(client, deployed.deployment)) == true
    client.close()


def test_an_intent_whose_receipt_is_hidden_for_long_is_not_sent_again(
    deployed: Deployed, proxy: Open, make: Make, clock: FakeTime
) -> None:
    hiding = proxy(RpcFault("omit"))
    sender: Sender = make(ChainClient([hiding.url], CHAIN_ID))
    to = target(70)
    sender.submit("pay", transfer(to, 100))
    for _ in range(12):
        sender.tick()
        deployed.anvil.mine(3)
        clock.sleep(30)
    found = sender.status("pay")
    assert found is not None
    assert found.status == "sent"
    assert "looking for the receipt" in found.note
    assert deployed.client.balance(to) == 100
    hiding.faults = ()
    sender.tick()
    found = sender.status("pay")
    assert found is not None
    assert found.status == "confirmed"
    assert deployed.client.balance(to) == 100


def test_confirmed_does_not_survive_a_reorganization_in_which_a_stranger_takes_the_nonce(
    deployed: Deployed, make: Make, clock: FakeTime
) -> None:
    sender: Sender = make()
    signer = deployed.accounts[3]
    to, other = target(71), target(72)
    before = deployed.anvil.snapshot()
    sender.submit("pay", transfer(to, 100))
    sender.wait("pay", 60)
    deployed.anvil.mine(2)
    before()  # the chain without it …
    deployed.anvil.rpc("evm_mine", deployed.now() + 7)  # … and with other blocks
    deployed.send(signer, transfer(other, 1))  # the nonce goes to a transaction that is not ours
    deployed.anvil.mine(5)
    sender.tick()
    clock.sleep(5)
    sender.wait("pay", 60)
    assert deployed.client.balance(to) == 100
    assert deployed.client.balance(other) == 1


def test_a_lying_refusal_of_one_endpoint_fails_no_intent(
    deployed: Deployed, proxy: Open, make: Make
) -> None:
    lying = [proxy(RpcFault(kind)) for kind in ("lie", "deaf")]  # type: ignore[arg-type]
    client = ChainClient([*(one.url for one in lying), deployed.url, proxy().url, proxy().url],
                         CHAIN_ID)  # fmt: skip
    sender: Sender = make(client)
    to = target(73)
    sender.submit("pay", transfer(to, 5))
    assert sender.wait("pay", 60).status == "confirmed"
    assert deployed.client.balance(to) == 5
    client.close()


def test_a_view_is_believed_only_as_a_quorum_gives_it(deployed: Deployed, proxy: Open) -> None:
    lying, honest = proxy(RpcFault("lie", methods=("eth_call",))), proxy()
    client = ChainClient([lying.url, honest.url, proxy().url], CHAIN_ID)
    token = Contracts(client, deployed.deployment).token
    account = deployed.accounts[1].address
    assert token.balance_of(account) == deployed.contracts.token.balance_of(account)
    assert lying.injected["lie"] > 0
    assert honest.asked["eth_call"] > 0
    client.close()


class WrongTime(FaultyRpc):
    """An endpoint whose blocks are a day old."""

    def _falsified(self, method: str, result: Any, kinds: dict[Kind, RpcFault]) -> Any:
        if method == "eth_getBlockByNumber" and result:
            return result | {"timestamp": hex(int(result["timestamp"], 16) - 86_400)}
        return result


def test_code_and_the_times_of_events_are_believed_only_as_a_quorum_gives_them(
    deployed: Deployed, proxy: Open
) -> None:
    signer = deployed.accounts[1]
    deployed.send(signer, deployed.contracts.registry.set_revoked_before(signer.address, 1))
    truth = read_events(deployed.client, deployed.deployment)
    token = deployed.deployment.address("token")
    lying, late = proxy(RpcFault("lie", methods=("eth_getCode",))), WrongTime(deployed.url)
    for first, wrong in ((lying.url, lying), (late.url, late)):
        client = ChainClient([first, proxy().url, proxy().url], CHAIN_ID)
        assert client.code(token) == deployed.client.code(token)
        assert read_events(client, deployed.deployment) == truth
        assert wrong.asked["eth_getCode" if wrong is lying else "eth_getBlockByNumber"] > 0
        client.close()
    late.close()


@pytest.mark.parametrize("keep", [0, 1, 100, 4096])
def test_a_journal_that_was_emptied_or_cut_off_refuses_to_start_with_the_way_out(
    make: Make, tmp_path: Path, keep: int
) -> None:
    sender: Sender = make()
    sender.submit("pay", transfer(target(74)))
    sender.close()
    path = tmp_path / "journal.sqlite"
    for rest in tmp_path.glob("journal.sqlite-*"):
        rest.unlink()
    raw = path.read_bytes()
    assert len(raw) > 4096
    path.write_bytes(raw[:keep])
    with pytest.raises((FatalError, UnavailableError), match="remove the file"):
        make()
