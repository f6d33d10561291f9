"""What calls would cost: gas of a whole sequence, and the L1 data fee where a chain charges one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from eth_account import Account
from eth_hash.auto import keccak

from devnet.chain import dev_signer
from devnet.deployed import Deployed
from prime_chain.amounts import ETHER
from prime_chain.client import Call, ChainClient, Fees
from prime_chain.costs import (
    GAS_PRICE_ORACLE,
    has_l1_fee,
    l1_fee,
    rehearse,
    total,
    unsigned_transaction,
    words,
)
from prime_chain.errors import RpcError

FEES = Fees(10**9, 10**6, 2 * 10**9)
WEI_A_BYTE = 1000
# What the predeploy does, in its simplest form: a fee for every byte of calldata.
#   CALLDATASIZE PUSH2 1000 MUL PUSH0 MSTORE PUSH1 32 PUSH0 RETURN
ORACLE = "0x" + "36" + "6103e8" + "02" + "5f" + "52" + "6020" + "5f" + "f3"


@pytest.fixture
def op_stack(deployed: Deployed) -> Iterator[Deployed]:
    """The chain with a contract at the GasPriceOracle's address."""
    deployed.anvil.rpc("anvil_setCode", GAS_PRICE_ORACLE, ORACLE)
    yield deployed
    deployed.anvil.rpc("anvil_setCode", GAS_PRICE_ORACLE, "0x")


def test_each_call_sees_what_the_ones_before_it_would_do(deployed: Deployed) -> None:
    c, account = deployed.contracts, deployed.accounts[3]
    calls = [
        c.token.faucet(), c.token.approve(c.vault.address, 5 * ETHER), c.vault.deposit(5 * ETHER),
    ]  # fmt: skip
    block = deployed.client.block_number()
    found = rehearse(deployed.client, calls, account.address)
    assert deployed.client.block_number() == block, "nothing is sent"
    assert [one.error for one in found] == [None, None, None]
    used = [deployed.send(account, call).gas_used for call in calls]
    for one, real in zip(found, used, strict=True):
        assert one.gas == pytest.approx(real, rel=0.02)


def test_a_refusal_is_named_by_its_custom_error(deployed: Deployed) -> None:
    c = deployed.contracts
    faucet, unbond = rehearse(
        deployed.client, [c.token.faucet(), c.vault.unbond(ETHER)], deployed.accounts[3].address
    )
    assert faucet.error is None
    assert unbond.error is not None
    assert unbond.error.name == "StakeNotFree"
    assert unbond.error.arguments == {"available": 0, "asked": ETHER}
    assert words(unbond) == (
        f"would be refused: StakeNotFree(available=0, asked={ETHER}): "
        "only 0 PRIME is free: seats need or slashes hold the rest"
    )
    assert unbond.error.exit_code == 64


def test_a_local_chain_says_plainly_that_it_charges_no_l1_data_fee(deployed: Deployed) -> None:
    assert not has_l1_fee(deployed.client)
    (one,) = rehearse(
        deployed.client, [deployed.contracts.token.faucet()], deployed.accounts[3].address
    )
    assert one.l1_fee is None
    assert words(one).endswith("no L1 data fee on this chain")


def test_the_l1_data_fee_is_asked_of_the_predeploy_for_the_unsigned_transaction(
    op_stack: Deployed,
) -> None:
    c, client, account = op_stack.contracts, op_stack.client, op_stack.accounts[3].address
    call = c.token.faucet()
    (one,) = rehearse(client, [call], account)
    assert one.gas is not None
    raw = unsigned_transaction(call, client.chain_id, client.nonce(account), one.gas, client.fees())
    padded = 4 + 64 + (len(raw) + 31) // 32 * 32  # selector, offset, length, the bytes
    assert one.l1_fee == padded * WEI_A_BYTE
    assert words(one).endswith("ETH")
    price = client.fees()
    assert total([one], price) == (
        one.gas * (price.base_fee + price.priority_fee) + padded * WEI_A_BYTE
    )
    longer = l1_fee(client, Call(call.to, call.data + bytes(range(200))), 0, one.gas, price)
    assert longer > one.l1_fee


def test_the_unsigned_transaction_is_the_one_that_is_signed() -> None:
    call = Call(dev_signer(1).address, b"\x12\x34", 7)
    raw = unsigned_transaction(call, 8453, 3, 50_000, FEES)
    signed = Account.sign_transaction(
        {
            "type": 2, "chainId": 8453, "nonce": 3, "gas": 50_000, "to": call.to, "value": 7,
            "data": call.data, "maxFeePerGas": FEES.max_fee,
            "maxPriorityFeePerGas": FEES.priority_fee,
        },
        bytes(dev_signer(0).account.key),
    )  # fmt: skip
    recovered = Account._recover_hash(keccak(raw), vrs=(signed.v + 27, signed.r, signed.s))
    assert recovered == dev_signer(0).address


class Plain(ChainClient):
    """An endpoint without eth_simulateV1."""

    def request(self, method: str, *params: Any, parse: Any = lambda value: value) -> Any:
        if method == "eth_simulateV1":
            raise RpcError(method, -32601, "the method does not exist")
        return super().request(method, *params, parse=parse)


def test_an_endpoint_that_cannot_simulate_tells_what_it_can(deployed: Deployed) -> None:
    c, account = deployed.contracts, deployed.accounts[3].address
    client = Plain([deployed.url], 31337)
    calls = [c.token.approve(c.vault.address, ETHER), c.vault.deposit(ETHER)]
    approve, deposit = rehearse(client, calls, account)
    assert approve.gas is not None
    assert (deposit.gas, deposit.error) == (None, None), "it may only lack the approval"
    assert "gas unknown" in words(deposit)
    assert total([approve, deposit], FEES) is None
    (refused,) = rehearse(client, [c.vault.unbond(ETHER)], account)
    assert refused.error is not None
    client.close()


def test_nothing_costs_nothing(deployed: Deployed) -> None:
    assert rehearse(deployed.client, [], deployed.accounts[3].address) == []
