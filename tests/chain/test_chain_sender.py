"""The journalled sender against a real anvil: intents, nonces, failures, fees."""

from __future__ import annotations

import itertools

import pytest
from sender_kit import GWEI, FakeTime, Make, target, transfer

from devnet.chain import CHAIN_ID
from devnet.deployed import Deployed
from devnet.ports import free_port
from prime_chain.client import Call, ChainClient, Fees
from prime_chain.errors import ChainRevertedError
from prime_chain.sender import FeePolicy, Sender, bumped
from prime_chain.transaction_queue import Attempt
from prime_core.errors import ConflictError, UnavailableError
from prime_core.ids import ZERO_DIGEST, Address
from prime_core.signing import LocalSigner


def test_an_intent_is_sent_once_however_often_it_is_submitted(
    deployed: Deployed, make: Make
) -> None:
    sender = make()
    for _ in range(3):
        sender.submit("a", transfer(target(1)))
        sender.tick()
    done = sender.wait("a", 60)
    assert done.status == "confirmed"
    sender.submit("a", transfer(target(1)))
    sender.tick()
    assert deployed.client.balance(target(1)) == 1
    assert len(done.hashes) == 1


def test_an_id_that_stands_for_another_call_is_refused(make: Make) -> None:
    sender = make()
    sender.submit("a", transfer(target(1), 1))
    with pytest.raises(ConflictError):
        sender.submit("a", transfer(target(1), 2))


def test_many_intents_are_in_flight_together_and_mined_in_order(
    by_hand: Deployed, make: Make
) -> None:
    sender = make()
    for i in range(20):
        sender.submit(f"i{i}", transfer(target(2)))
    assert sender.tick() == 20
    sent = [i for i in sender.open_intents() if i.status == "sent"]
    assert len(sent) == 16  # the limit in flight
    assert [i.nonce for i in sent] == list(range(sent[0].nonce or 0, (sent[0].nonce or 0) + 16))
    by_hand.anvil.mine()
    sender.tick()
    by_hand.anvil.mine()
    assert sender.tick() == 0
    assert by_hand.client.balance(target(2)) == 20


def test_a_refused_call_fails_with_its_decoded_error_and_burns_no_nonce(
    deployed: Deployed, make: Make
) -> None:
    sender = make()
    nonce = deployed.client.nonce(sender.address)
    call = deployed.contracts.vault.deposit(5)  # no allowance
    sender.submit("bad", call)
    sender.submit("good", transfer(target(3)))
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
    sender.submit("take", _take(by_hand, 5, target(4)))
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


def test_a_mined_failure_tried_again_is_sent_again(by_hand: Deployed, make: Make) -> None:
    sender = make()
    _allow(by_hand, 5)
    by_hand.anvil.mine()
    sender.submit("take", _take(by_hand, 5, target(5)))
    sender.tick()
    _allow(by_hand, 2, tip=200 * GWEI)
    by_hand.anvil.mine()
    sender.tick()
    by_hand.anvil.rpc("evm_setAutomine", True)
    _allow(by_hand, 5)
    again = sender.send_and_wait("take", _take(by_hand, 5, target(5)))
    assert again.status == "confirmed"
    assert len(again.hashes) == 2
    assert by_hand.contracts.token.balance_of(target(5)) == 5


def test_no_rpc_keeps_everything_and_goes_on_when_it_is_back(
    deployed: Deployed, make: Make, clock: FakeTime
) -> None:
    dead = ChainClient([f"http://127.0.0.1:{free_port()}"], CHAIN_ID, timeout=1)
    sender = make(client=dead)
    sender.submit("a", transfer(target(6)))
    assert sender.tick() == 1
    assert "no RPC endpoint answers" in sender.trouble
    with pytest.raises(UnavailableError, match="stays in the queue"):
        sender.wait("a", 5)
    sender.close()
    back = make()
    assert back.wait("a", 60).status == "confirmed"
    assert back.trouble == ""


def test_a_stuck_transaction_is_replaced_with_an_eighth_more_up_to_the_cap(
    by_hand: Deployed, make: Make, clock: FakeTime
) -> None:
    cap = 4 * GWEI
    sender = make(policy=FeePolicy(cap, stuck_seconds=10, resend_seconds=3))
    by_hand.anvil.rpc("anvil_setNextBlockBaseFeePerGas", hex(GWEI))
    sender.submit("a", transfer(target(7)))
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
    assert by_hand.client.balance(target(7)) == 1  # one of them, once


def _pass_over(deployed: Deployed, sender: Sender, clock: FakeTime, times: int) -> None:
    """Mines blocks that leave the sender's transactions out, and lets time pass."""
    for _ in range(times):
        deployed.anvil.rpc("anvil_dropAllTransactions")
        deployed.anvil.rpc("anvil_setNextBlockBaseFeePerGas", hex(GWEI))
        deployed.anvil.mine()
        clock.time += 11
        sender.tick()


def test_only_the_lowest_waiting_nonce_is_replaced(
    by_hand: Deployed, make: Make, clock: FakeTime
) -> None:
    sender = make()
    sender.submit("low", transfer(target(8)))
    sender.submit("high", transfer(target(8)))
    sender.tick()
    sender.tick()
    _pass_over(by_hand, sender, clock, times=1)
    low, high = sender.status("low"), sender.status("high")
    assert low is not None
    assert high is not None
    assert (len(low.attempts), len(high.attempts)) == (2, 1)


def test_fees_above_the_cap_hold_the_intent_until_they_fall(deployed: Deployed, make: Make) -> None:
    sender = make(policy=FeePolicy(max_fee=1, stuck_seconds=10, resend_seconds=3))
    sender.submit("a", transfer(target(9)))
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
    sender.submit("a", transfer(target(10)))
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
    by_hand: Deployed, make: Make, clock: FakeTime
) -> None:
    sender = make()
    sender.submit("a", transfer(target(11)))
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


def test_bump_rounds_up_and_stops_at_the_cap() -> None:
    old = Attempt(ZERO_DIGEST, 0, 100, 10, b"", 0.0, None)
    assert bumped(old, Fees(1, 1, 3), 10**9) == (113, 12)
    assert bumped(old, Fees(1, 500, 1000), 10**9) == (1000, 500)  # the market rose further
    assert bumped(old, Fees(1, 500, 1000), 200) == (200, 200)
    assert bumped(old, Fees(1, 1, 3), 112) is None
