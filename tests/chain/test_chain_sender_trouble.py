"""The journalled sender in trouble: kills, reorgs, a stranger with its key, a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sender_kit import FakeTime, Make, target, transfer

from devnet.chain import CHAIN_ID, Anvil
from devnet.deployed import Deployed
from prime_chain.client import Call, ChainClient
from prime_chain.sender import Sender
from prime_core.clock import Clock
from prime_core.errors import FatalError, UnavailableError, UserError


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
    sender.submit("a", transfer(target(12)))
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
    assert by_hand.client.balance(target(12)) == 1


@pytest.mark.slow
def test_sigkill_in_the_middle_of_many_loses_none_and_doubles_none(
    deployed: Deployed, tmp_path: Path, make: Make, clock: FakeTime
) -> None:
    """A real process, really killed, several times."""
    code = """
import sys
from pathlib import Path
from devnet.chain import CHAIN_ID, dev_signer
from prime_chain.client import Call, ChainClient
from prime_chain.sender import Sender
from prime_core.ids import address
sender = Sender(ChainClient([sys.argv[1]], CHAIN_ID), dev_signer(3), Path(sys.argv[2]))
for i in range(40):
    sender.submit(f"i{i}", Call(address(sys.argv[3]), b"", 1, "one wei"))
print("submitted", flush=True)
while sender.tick():
    print("tick", flush=True)
"""
    arguments = [deployed.url, str(tmp_path / "journal.sqlite"), target(13)]
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
    assert deployed.client.balance(target(13)) == 40


def test_a_reorg_that_drops_the_transaction_sends_it_again(
    deployed: Deployed, make: Make, clock: FakeTime
) -> None:
    deployed.anvil.mine(3)
    sender = make()
    sender.submit("a", transfer(target(14)))
    assert sender.wait("a", 60).status == "confirmed"
    deployed.anvil.rpc("anvil_reorg", 2, [])  # the two newest blocks are now empty
    assert deployed.client.balance(target(14)) == 0
    clock.time += 4
    sender.tick()
    reopened = sender.status("a")
    assert reopened is not None
    assert reopened.status == "sent"
    clock.time += 4
    assert sender.wait("a", 60).status == "confirmed"
    assert deployed.client.balance(target(14)) == 1


def test_a_nonce_taken_by_a_stranger_is_noticed_and_the_intent_sent_with_the_next(
    by_hand: Deployed, make: Make, clock: FakeTime
) -> None:
    sender = make()
    sender.submit("a", transfer(target(15)))
    sender.tick()
    by_hand.anvil.rpc("anvil_dropAllTransactions")
    stranger = make(journal="stranger.sqlite")  # the same key in another program
    stranger.submit("theirs", transfer(target(16)))
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
    assert by_hand.client.balance(target(15)) == 1


def test_a_gap_of_nonces_is_filled_so_that_later_ones_are_mined(
    by_hand: Deployed, make: Make, clock: FakeTime
) -> None:
    """A transaction from a journal that was lost held the nonce before ours, and then vanished."""
    lost = make(journal="lost.sqlite")
    lost.submit("gone", transfer(target(17)))
    lost.tick()
    sender = make()
    sender.submit("a", transfer(target(18)))
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
    assert by_hand.client.balance(target(18)) == 1
    assert sender.open_intents() == []


def test_an_endpoint_that_shows_an_old_nonce_is_not_believed(
    deployed: Deployed, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make()
    sender.submit("a", transfer(target(21)))
    done = sender.wait("a", 60)
    real = ChainClient.nonce
    monkeypatch.setattr(ChainClient, "nonce", lambda self, account, block="latest": done.nonce)
    sender.submit("b", transfer(target(21)))
    sender.tick()
    held = sender.status("b")
    assert held is not None
    assert held.status == "queued"
    assert "lag" in sender.trouble
    monkeypatch.setattr(ChainClient, "nonce", real)
    assert sender.wait("b", 60).nonce == (done.nonce or 0) + 1
    assert deployed.client.balance(target(21)) == 2


def test_where_endpoints_must_agree_nothing_is_sent_until_they_do(
    deployed: Deployed, tmp_path: Path, clock: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ChainClient([deployed.url, deployed.url + "/"], CHAIN_ID, quorum=2)
    second = client.singles()[1]
    monkeypatch.setattr(second, "call", lambda call, **kw: b"another answer")
    sender = Sender(
        client,
        deployed.accounts[3],
        tmp_path / "j",
        agree=True,
        clock=Clock(now=clock, sleep=clock.sleep),
    )
    sender.submit("a", transfer(target(22)))
    sender.tick()
    assert "disagree" in sender.trouble
    assert deployed.client.balance(target(22)) == 0
    monkeypatch.undo()
    monkeypatch.setattr(client, "network", replace(client.network, min_agreeing=2))
    assert sender.wait("a", 60).status == "confirmed"
    sender.close()
    client.close()


def test_a_full_disk_is_one_sentence_and_loses_nothing_written(make: Make) -> None:
    sender = make()
    sender.submit("first", transfer(target(23)))
    pages = sender._queue._db.execute("PRAGMA page_count").fetchone()[0]
    sender._queue._db.execute(f"PRAGMA max_page_count = {pages + 1}")

    def fill() -> None:
        for number in range(100):
            sender.submit(f"i{number}", Call(target(23), bytes(4000), 0, "large"))

    with pytest.raises(UnavailableError, match="is full: free some space"):
        fill()
    kept = [intent.id for intent in sender.open_intents()]
    assert "first" in kept
    sender.close()
    assert [intent.id for intent in make().open_intents()] == kept


def test_a_damaged_journal_is_fatal_and_reads_are_guarded(make: Make) -> None:
    sender = make()
    sender.submit("first", transfer(target(24)))
    sender._queue._db.execute("DROP TABLE sender_attempts")
    with pytest.raises(FatalError, match=r"queue .* sender_attempts"):
        sender.status("first")


def test_an_idle_sender_asks_no_rpc(
    deployed: Deployed, make: Make, clock: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make()
    sender.submit("a", transfer(target(19)))
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


def test_a_journal_of_a_recreated_chain_is_refused(
    deployed: Deployed, make: Make, tmp_path: Path, clock: FakeTime
) -> None:
    sender = make()
    sender.submit("a", transfer(target(20)))
    sender.wait("a", 60)
    sender.close()
    with Anvil(extra=("--timestamp", "1700000000")) as other:
        client = ChainClient([other.url], CHAIN_ID)
        again = make(client=client)
        again.submit("b", transfer(target(20)))
        with pytest.raises(UserError, match="belongs to genesis"):
            again.tick()
        client.close()


def test_a_journal_that_is_no_database_is_one_sentence(make: Make, tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"this is not SQLite" * 100)
    with pytest.raises((UserError, FatalError), match="journal"):
        make()
