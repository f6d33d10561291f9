"""The journalled sender against a real anvil: nonces, fees, kills, reorgs, trouble that passes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from devnet.chain import CHAIN_ID, Anvil, free_port
from devnet.deployed import Deployed
from protocol.chain.client import Call, ChainClient, Fees
from protocol.chain.errors import ChainRevertedError
from protocol.chain.fees import FeePolicy, bumped, default_policy
from protocol.chain.journal import Attempt
from protocol.chain.sender import Sender
from protocol.core.errors import ConflictError, FatalError, UnavailableError, UserError
from protocol.core.ids import ZERO_DIGEST, Address, address
from protocol.core.signing import LocalSigner

GWEI = 10**9


class Clock:
    """Unix time in a test's hands; `sleep` moves it."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def by_hand(deployed: Deployed) -> Iterator[Deployed]:
    """A chain that mines only when told."""
    deployed.anvil.rpc("evm_setAutomine", False)
    yield deployed
    deployed.anvil.rpc("anvil_dropAllTransactions")
    deployed.anvil.rpc("evm_setAutomine", True)


Make = Callable[..., Sender]


@pytest.fixture
def make(deployed: Deployed, tmp_path: Path, clock: Clock) -> Iterator[Make]:
    """Makes senders of account 3 over one journal, as a restarted process would."""
    made: list[Sender] = []

    def build(
        client: ChainClient | None = None,
        policy: FeePolicy | None = None,
        signer: LocalSigner | None = None,
        journal: str = "journal.sqlite",
    ) -> Sender:
        client = client or deployed.client
        sender = Sender(
            client,
            signer or deployed.accounts[3],
            tmp_path / journal,
            policy=policy or replace(default_policy(client), stuck_seconds=10, resend_seconds=3),
            now=clock,
            sleep=clock.sleep,
        )
        made.append(sender)
        return sender

    yield build
    for sender in made:
        sender.close()


def _transfer(to: Address, wei: int = 1) -> Call:
    return Call(to, b"", wei, f"send {wei} wei")


def _target(number: int) -> Address:
    return address("0x" + f"{number + 0xABC0000:040x}")


def test_an_intent_is_sent_once_however_often_it_is_submitted(
    deployed: Deployed, make: Make
) -> None:
    sender = make()
    for _ in range(3):
        sender.submit("a", _transfer(_target(1)))
        sender.tick()
    done = sender.wait("a", 60)
    assert done.status == "confirmed"
    sender.submit("a", _transfer(_target(1)))
    sender.tick()
    assert deployed.client.balance(_target(1)) == 1
    assert len(done.hashes) == 1


def test_an_id_that_stands_for_another_call_is_refused(make: Make) -> None:
    sender = make()
    sender.submit("a", _transfer(_target(1), 1))
    with pytest.raises(ConflictError):
        sender.submit("a", _transfer(_target(1), 2))


def test_many_intents_are_in_flight_together_and_mined_in_order(
    by_hand: Deployed, make: Make
) -> None:
    sender = make()
    for i in range(20):
        sender.submit(f"i{i}", _transfer(_target(2)))
    assert sender.tick() == 20
    sent = [i for i in sender.open_intents() if i.status == "sent"]
    assert len(sent) == 16  # the limit in flight
    assert [i.nonce for i in sent] == list(range(sent[0].nonce or 0, (sent[0].nonce or 0) + 16))
    by_hand.anvil.mine()
    sender.tick()
    by_hand.anvil.mine()
    assert sender.tick() == 0
    assert by_hand.client.balance(_target(2)) == 20


def test_a_refused_call_fails_with_its_decoded_error_and_burns_no_nonce(
    deployed: Deployed, make: Make
) -> None:
    sender = make()
    nonce = deployed.client.nonce(sender.address)
    call = deployed.contracts.vault.deposit(5)  # no allowance
    sender.submit("bad", call)
    sender.submit("good", _transfer(_target(3)))
    assert sender.wait("good", 60).status == "confirmed"
    bad = sender.status("bad")
    assert bad is not None
    assert bad.status == "failed"
    assert bad.error is not None
    assert bad.error.name == "ERC20InsufficientAllowance"
    assert bad.error.arguments["needed"] == 5
    assert deployed.client.nonce(sender.address) == nonce + 1
    with pytest.raises(ChainRevertedError, match="ERC20InsufficientAllowance"):
        sender.send_and_wait("bad", call)


def _allow(deployed: Deployed, amount: int, tip: int = GWEI) -> None:
    """Account 0, which holds the tokens, lets account 3 take `amount`."""
    owner = deployed.accounts[0]
    call = deployed.contracts.token.approve(deployed.accounts[3].address, amount)
    signed = owner.account.sign_transaction(
        {
            "type": 2, "chainId": CHAIN_ID, "nonce": deployed.client.nonce(owner.address),
            "gas": 100_000, "maxFeePerGas": 400 * GWEI, "maxPriorityFeePerGas": tip,
            "value": 0, "to": call.to, "data": call.data,
        }
    )  # fmt: skip
    deployed.client.send_raw(bytes(signed.raw_transaction))


def _take(deployed: Deployed, amount: int, to: Address) -> Call:
    token = deployed.contracts.token
    return token.write("transferFrom", deployed.accounts[0].address, to, amount, what="take tokens")


def test_a_reverted_receipt_is_a_failure_with_its_decoded_error(
    by_hand: Deployed, make: Make
) -> None:
    """The estimate passes, but the allowance is withdrawn in the same block, before our turn."""
    sender = make()
    _allow(by_hand, 5)
    by_hand.anvil.mine()
    sender.submit("take", _take(by_hand, 5, _target(4)))
    sender.tick()
    _allow(by_hand, 2, tip=200 * GWEI)
    by_hand.anvil.mine()
    sender.tick()
    take = sender.status("take")
    assert take is not None
    assert take.status == "failed"
    assert take.tx_hash is not None  # it was mined, and reverted
    assert take.error is not None
    assert take.error.name == "ERC20InsufficientAllowance"
    assert take.error.arguments == {"spender": sender.address, "allowance": 2, "needed": 5}


def test_calls_that_build_on_one_another_go_into_one_block(by_hand: Deployed, make: Make) -> None:
    sender = make(signer=by_hand.accounts[0])  # holds tokens
    token, vault = by_hand.contracts.token, by_hand.contracts.vault
    sender.submit("approve", token.approve(vault.address, 7))
    sender.submit("deposit", vault.deposit(7))
    sender.tick()
    by_hand.anvil.mine()
    assert sender.tick() == 0
    assert vault.active(sender.address) == 7


def test_where_the_endpoint_keeps_no_pending_state_a_dependent_call_waits_instead_of_failing(
    by_hand: Deployed, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ChainClient.estimate_gas

    def at_latest(self: ChainClient, call: Call, sender: Address) -> int:
        return real(self, call, sender, block="latest")

    monkeypatch.setattr(ChainClient, "estimate_gas", at_latest)
    sender = make(signer=by_hand.accounts[0])
    token, vault = by_hand.contracts.token, by_hand.contracts.vault
    sender.submit("approve", token.approve(vault.address, 7))
    sender.submit("deposit", vault.deposit(7))
    sender.tick()
    waiting = sender.status("deposit")
    assert waiting is not None
    assert (waiting.status, waiting.note) == ("queued", "waits for earlier transactions")
    by_hand.anvil.mine()
    sender.tick()
    by_hand.anvil.mine()
    sender.tick()
    assert vault.active(sender.address) == 7
    assert sender.open_intents() == []


def test_a_failed_intent_can_be_tried_again_once_its_cause_is_mended(
    deployed: Deployed, make: Make
) -> None:
    sender = make(signer=deployed.accounts[0])
    token, vault = deployed.contracts.token, deployed.contracts.vault
    sender.submit("deposit", vault.deposit(7))
    assert sender.wait("deposit", 60).status == "failed"
    deployed.send(deployed.accounts[0], token.approve(vault.address, 7))
    assert sender.send_and_wait("deposit", vault.deposit(7)).status == "confirmed"
    assert vault.active(sender.address) == 7


def test_a_mined_failure_tried_again_is_sent_anew(by_hand: Deployed, make: Make) -> None:
    sender = make()
    _allow(by_hand, 5)
    by_hand.anvil.mine()
    sender.submit("take", _take(by_hand, 5, _target(5)))
    sender.tick()
    _allow(by_hand, 2, tip=200 * GWEI)
    by_hand.anvil.mine()
    sender.tick()
    by_hand.anvil.rpc("evm_setAutomine", True)
    _allow(by_hand, 5)
    again = sender.send_and_wait("take", _take(by_hand, 5, _target(5)))
    assert again.status == "confirmed"
    assert len(again.hashes) == 2
    assert by_hand.contracts.token.balance_of(_target(5)) == 5


def test_no_rpc_keeps_everything_and_goes_on_when_it_is_back(
    deployed: Deployed, make: Make, clock: Clock
) -> None:
    dead = ChainClient([f"http://127.0.0.1:{free_port()}"], CHAIN_ID, timeout=1)
    sender = make(client=dead)
    sender.submit("a", _transfer(_target(6)))
    assert sender.tick() == 1
    assert "no RPC endpoint answers" in sender.trouble
    with pytest.raises(UnavailableError, match="stays in the journal"):
        sender.wait("a", 5)
    sender.close()
    back = make()
    assert back.wait("a", 60).status == "confirmed"
    assert back.trouble == ""


def test_a_stuck_transaction_is_replaced_with_an_eighth_more_up_to_the_cap(
    by_hand: Deployed, make: Make, clock: Clock
) -> None:
    cap = 4 * GWEI
    sender = make(policy=FeePolicy(cap, stuck_seconds=10, resend_seconds=3))
    by_hand.anvil.rpc("anvil_setNextBlockBaseFeePerGas", hex(GWEI))
    sender.submit("a", _transfer(_target(7)))
    sender.tick()
    for _ in range(40):
        clock.time += 11
        sender.tick()
    calm = sender.status("a")
    assert calm is not None
    assert len(calm.hashes) == 1  # no block came: a higher fee would buy nothing
    _pass_over(by_hand, sender, clock, times=12)
    stuck = sender.status("a")
    assert stuck is not None
    fees = [attempt.max_fee for attempt in stuck.attempts]
    assert len(fees) > 1
    assert len({attempt.nonce for attempt in stuck.attempts}) == 1
    assert all(new >= old * 1.125 for old, new in itertools.pairwise(fees))
    tips = [attempt.priority_fee for attempt in stuck.attempts]
    assert all(new >= old * 1.125 for old, new in itertools.pairwise(tips))
    assert fees[-1] <= cap < fees[-1] * 1.125 + 1
    assert "fee cap of 4 gwei" in stuck.note
    by_hand.anvil.mine()
    sender.tick()
    done = sender.status("a")
    assert done is not None
    assert done.status == "confirmed"
    assert by_hand.client.balance(_target(7)) == 1  # one of them, once


def _pass_over(deployed: Deployed, sender: Sender, clock: Clock, times: int) -> None:
    """Mines blocks that leave the sender's transactions out, and lets time pass."""
    for _ in range(times):
        deployed.anvil.rpc("anvil_dropAllTransactions")
        deployed.anvil.rpc("anvil_setNextBlockBaseFeePerGas", hex(GWEI))
        deployed.anvil.mine()
        clock.time += 11
        sender.tick()


def test_only_the_lowest_waiting_nonce_is_replaced(
    by_hand: Deployed, make: Make, clock: Clock
) -> None:
    sender = make()
    sender.submit("low", _transfer(_target(8)))
    sender.submit("high", _transfer(_target(8)))
    sender.tick()
    sender.tick()
    _pass_over(by_hand, sender, clock, times=1)
    low, high = sender.status("low"), sender.status("high")
    assert low is not None
    assert high is not None
    assert (len(low.attempts), len(high.attempts)) == (2, 1)


def test_fees_above_the_cap_hold_the_intent_until_they_fall(deployed: Deployed, make: Make) -> None:
    sender = make(policy=FeePolicy(max_fee=1, stuck_seconds=10, resend_seconds=3))
    sender.submit("a", _transfer(_target(9)))
    assert sender.tick() == 1
    held = sender.status("a")
    assert held is not None
    assert (held.status, held.hashes) == ("queued", ())
    assert "exceed the cap" in held.note
    sender.close()
    assert make().wait("a", 60).status == "confirmed"  # fees are under this one's cap


def test_without_funds_it_says_so_and_heals_when_topped_up(deployed: Deployed, make: Make) -> None:
    poor = LocalSigner(b"\x11" * 32)
    deployed.anvil.rpc("anvil_setBalance", poor.address, "0x0")
    sender = make(signer=poor)
    sender.submit("a", _transfer(_target(10)))
    for _ in range(3):
        sender.tick()
    held = sender.status("a")
    assert held is not None
    assert held.status == "queued"
    assert "insufficient funds" in held.note
    assert poor.address in held.note
    deployed.anvil.fund(poor.address, 1)
    assert sender.wait("a", 60).status == "confirmed"


def test_a_lost_transaction_is_broadcast_again_unchanged(
    by_hand: Deployed, make: Make, clock: Clock
) -> None:
    sender = make()
    sender.submit("a", _transfer(_target(11)))
    sender.tick()
    by_hand.anvil.rpc("anvil_dropAllTransactions")
    clock.time += 4
    sender.tick()
    by_hand.anvil.mine()
    sender.tick()
    done = sender.status("a")
    assert done is not None
    assert done.status == "confirmed"
    assert len(done.hashes) == 1


class _Killed(BaseException):
    """Ends a process in the middle of a step."""


@pytest.mark.parametrize("when", ["before the broadcast", "after the broadcast"])
def test_killed_around_the_broadcast_it_sends_exactly_once(
    by_hand: Deployed, make: Make, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    real = ChainClient.send_raw

    def killed(self: ChainClient, raw: bytes) -> None:
        if when == "after the broadcast":
            real(self, raw)
        raise _Killed

    sender = make()
    sender.submit("a", _transfer(_target(12)))
    monkeypatch.setattr(ChainClient, "send_raw", killed)
    with pytest.raises(_Killed):
        sender.tick()
    sender.close()
    monkeypatch.setattr(ChainClient, "send_raw", real)
    restarted = make()
    restarted.tick()
    by_hand.anvil.mine()
    restarted.tick()
    done = restarted.status("a")
    assert done is not None
    assert done.status == "confirmed"
    assert len(done.hashes) == 1
    assert by_hand.client.balance(_target(12)) == 1


def test_sigkill_in_the_middle_of_many_loses_none_and_doubles_none(
    deployed: Deployed, tmp_path: Path, make: Make, clock: Clock
) -> None:
    """A real process, really killed, several times."""
    code = """
import sys
from pathlib import Path
from devnet.chain import CHAIN_ID, dev_signer
from protocol.chain.client import Call, ChainClient
from protocol.chain.sender import Sender
from protocol.core.ids import address
sender = Sender(ChainClient([sys.argv[1]], CHAIN_ID), dev_signer(3), Path(sys.argv[2]))
for i in range(40):
    sender.submit(f"i{i}", Call(address(sys.argv[3]), b"", 1, "one wei"))
print("submitted", flush=True)
while sender.tick():
    print("tick", flush=True)
"""
    arguments = [deployed.url, str(tmp_path / "journal.sqlite"), _target(13)]
    for ticks in (1, 2):
        child = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(ticks):
            child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    clock.time = time.time()
    sender = make()
    for i in range(40):
        assert sender.wait(f"i{i}", 600).status == "confirmed"
    assert deployed.client.balance(_target(13)) == 40


def test_a_reorg_that_drops_the_transaction_sends_it_again(
    deployed: Deployed, make: Make, clock: Clock
) -> None:
    deployed.anvil.mine(3)
    sender = make()
    sender.submit("a", _transfer(_target(14)))
    sender.tick()
    sender.tick()
    first = sender.status("a")
    assert first is not None
    assert first.status == "confirmed"
    deployed.anvil.rpc("anvil_reorg", 2, [])  # the two newest blocks are now empty
    assert deployed.client.balance(_target(14)) == 0
    clock.time += 4
    sender.tick()
    reopened = sender.status("a")
    assert reopened is not None
    assert reopened.status == "sent"
    clock.time += 4
    assert sender.wait("a", 60).status == "confirmed"
    assert deployed.client.balance(_target(14)) == 1


def test_a_nonce_taken_by_a_stranger_is_noticed_and_the_intent_sent_with_the_next(
    by_hand: Deployed, make: Make, clock: Clock
) -> None:
    sender = make()
    sender.submit("a", _transfer(_target(15)))
    sender.tick()
    by_hand.anvil.rpc("anvil_dropAllTransactions")
    stranger = make(journal="stranger.sqlite")  # the same key in another program
    stranger.submit("theirs", _transfer(_target(16)))
    stranger.tick()
    by_hand.anvil.mine()
    for _ in range(4):
        by_hand.anvil.mine()
        sender.tick()
    by_hand.anvil.mine()
    sender.tick()
    done = sender.status("a")
    assert done is not None
    assert done.status == "confirmed"
    assert by_hand.client.balance(_target(15)) == 1


def test_a_gap_of_nonces_is_filled_so_that_later_ones_are_mined(
    by_hand: Deployed, make: Make, clock: Clock
) -> None:
    """A transaction from a journal that was lost held the nonce before ours, and then vanished."""
    lost = make(journal="lost.sqlite")
    lost.submit("gone", _transfer(_target(17)))
    lost.tick()
    sender = make()
    sender.submit("a", _transfer(_target(18)))
    sender.tick()
    ours = sender.status("a")
    gone = lost.status("gone")
    assert ours is not None
    assert gone is not None
    assert ours.nonce == (gone.nonce or 0) + 1  # behind the one in the pool, not over it
    by_hand.anvil.rpc("anvil_dropAllTransactions")
    for _ in range(3):
        clock.time += 11
        sender.tick()
        by_hand.anvil.mine()
    sender.tick()
    assert by_hand.client.balance(_target(18)) == 1
    assert sender.open_intents() == []


def test_an_endpoint_that_shows_an_old_nonce_is_not_believed(
    deployed: Deployed, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make()
    sender.submit("a", _transfer(_target(21)))
    done = sender.wait("a", 60)
    real = ChainClient.nonce
    monkeypatch.setattr(ChainClient, "nonce", lambda self, account, **kw: done.nonce)
    sender.submit("b", _transfer(_target(21)))
    sender.tick()
    held = sender.status("b")
    assert held is not None
    assert held.status == "queued"
    assert "lags" in sender.trouble
    monkeypatch.setattr(ChainClient, "nonce", real)
    assert sender.wait("b", 60).nonce == (done.nonce or 0) + 1
    assert deployed.client.balance(_target(21)) == 2


def test_where_endpoints_must_agree_nothing_is_sent_until_they_do(
    deployed: Deployed, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ChainClient([deployed.url, deployed.url + "/"], CHAIN_ID)
    monkeypatch.setattr(client, "network", replace(client.network, min_agreeing=2))
    second = client.singles()[1]
    monkeypatch.setattr(second, "call", lambda call, **kw: b"another answer")
    sender = Sender(
        client, deployed.accounts[3], tmp_path / "j", agree=True, now=clock, sleep=clock.sleep
    )
    sender.submit("a", _transfer(_target(22)))
    sender.tick()
    assert "disagree" in sender.trouble
    assert deployed.client.balance(_target(22)) == 0
    monkeypatch.undo()
    monkeypatch.setattr(client, "network", replace(client.network, min_agreeing=2))
    assert sender.wait("a", 60).status == "confirmed"
    sender.close()
    client.close()


def test_a_full_disk_is_one_sentence_and_loses_nothing_written(make: Make) -> None:
    sender = make()
    sender.submit("first", _transfer(_target(23)))
    pages = sender._journal._db.execute("PRAGMA page_count").fetchone()[0]
    sender._journal._db.execute(f"PRAGMA max_page_count = {pages + 1}")

    def fill() -> None:
        for number in range(100):
            sender.submit(f"i{number}", Call(_target(23), bytes(4000), 0, "large"))

    with pytest.raises(UnavailableError, match="is full: free some space"):
        fill()
    kept = [intent.id for intent in sender.open_intents()]
    assert "first" in kept
    sender.close()
    assert [intent.id for intent in make().open_intents()] == kept


def test_a_damaged_journal_is_fatal_and_reads_are_guarded(make: Make) -> None:
    sender = make()
    sender.submit("first", _transfer(_target(24)))
    sender._journal._db.execute("DROP TABLE sender_attempts")
    with pytest.raises(FatalError, match=r"journal .* sender_attempts"):
        sender.status("first")


def test_an_idle_sender_asks_no_rpc(
    deployed: Deployed, make: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make()
    sender.submit("a", _transfer(_target(19)))
    sender.wait("a", 60)
    clock.time += 3600

    def no_request(self: ChainClient, method: str, *params: object) -> object:
        raise AssertionError(f"asked {method}")

    monkeypatch.setattr(ChainClient, "request", no_request)
    assert sender.tick() == 0


def test_a_journal_of_another_account_is_refused(deployed: Deployed, make: Make) -> None:
    make()
    with pytest.raises(UserError, match="belongs to account"):
        make(signer=deployed.accounts[4])


def test_a_journal_of_a_chain_that_was_made_anew_is_refused(
    deployed: Deployed, make: Make, tmp_path: Path, clock: Clock
) -> None:
    sender = make()
    sender.submit("a", _transfer(_target(20)))
    sender.wait("a", 60)
    sender.close()
    with Anvil(extra=("--timestamp", "1700000000")) as other:
        client = ChainClient([other.url], CHAIN_ID)
        again = make(client=client)
        again.submit("b", _transfer(_target(20)))
        with pytest.raises(UserError, match="belongs to genesis"):
            again.tick()
        client.close()


def test_a_journal_that_is_no_database_is_one_sentence(make: Make, tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"this is not SQLite" * 100)
    with pytest.raises((UserError, FatalError), match="journal"):
        make()


def test_bump_rounds_up_and_stops_at_the_cap() -> None:
    old = Attempt(ZERO_DIGEST, 0, 100, 10, b"", 0.0, None)
    assert bumped(old, Fees(1, 1, 3), 10**9) == (113, 12)
    assert bumped(old, Fees(1, 500, 1000), 10**9) == (1000, 500)  # the market rose further
    assert bumped(old, Fees(1, 500, 1000), 200) == (200, 200)
    assert bumped(old, Fees(1, 1, 3), 112) is None
