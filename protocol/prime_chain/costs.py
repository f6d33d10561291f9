"""What calls would cost, before anything is sent: gas of each, run one after the other, and on an
OP-stack chain (Base) the L1 data fee next to it.

    rehearse(calls) ── eth_simulateV1: each sees what the ones before it did
                    └─ an endpoint without it: each estimated alone, what depends on another unknown

L1 data fee: `GasPriceOracle.getL1Fee(unsigned RLP transaction)` at its predeploy address
(specs.optimism.io, Predeploys); for a transaction of which only the size is known,
`getL1FeeUpperBound(size)`. A chain without that contract charges none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rlp  # type: ignore[import-untyped]

from prime_chain import codec
from prime_chain.amounts import ether
from prime_chain.client import Call, ChainClient, Fees, all_artifacts
from prime_chain.errors import ChainRevertedError, RpcError
from prime_chain.rpc import number
from prime_core.ids import Address, address

GAS_PRICE_ORACLE = address("0x420000000000000000000000000000000000000F")
_GET_L1_FEE = codec.Item(
    "getL1Fee",
    ({"name": "_data", "type": "bytes"},),
    ({"name": "", "type": "uint256"},),
    bytes.fromhex("49948e0e"),
)
_GET_L1_FEE_UPPER_BOUND = codec.Item(
    "getL1FeeUpperBound",
    ({"name": "_unsignedTxSize", "type": "uint256"},),
    ({"name": "", "type": "uint256"},),
    bytes.fromhex("f1c7a58b"),
)


@dataclass(frozen=True)
class Cost:
    """One call's cost. `gas` used, None where the endpoint cannot tell; `l1_fee` in wei, None on a
    chain that charges none; `error` why it would revert."""

    call: Call
    gas: int | None
    l1_fee: int | None
    error: ChainRevertedError | None = None


def has_l1_fee(client: ChainClient) -> bool:
    """Whether this chain charges for its data on L1 (an OP-stack chain)."""
    return bool(client.code(GAS_PRICE_ORACLE))


def unsigned_transaction(call: Call, chain_id: int, nonce: int, gas: int, fees: Fees) -> bytes:
    """The bytes of an EIP-1559 transaction that are hashed for signing: 0x02 ‖ rlp([…])."""
    to = bytes.fromhex(call.to[2:]) if call.to is not None else b""
    body = [
        chain_id, nonce, fees.priority_fee, fees.max_fee, gas, to, call.value, call.data, [],
    ]  # fmt: skip
    return b"\x02" + bytes(rlp.encode(body))


def l1_fee(client: ChainClient, call: Call, nonce: int, gas: int, fees: Fees) -> int:
    """Wei that the chain charges for the call's data on L1, by its GasPriceOracle now.

    Raises RpcError or ChainRevertedError where there is no such contract; see `has_l1_fee`.
    """
    raw = unsigned_transaction(call, client.chain_id, nonce, gas, fees)
    return _ask_oracle(client, _GET_L1_FEE, raw)


def l1_fee_at_most(client: ChainClient, size: int) -> int:
    """Wei that the chain charges at most for an unsigned transaction of `size` bytes on L1, by its
    GasPriceOracle now. A chain before the Fjord upgrade is asked for bytes that do not compress.

    Raises RpcError or ChainRevertedError where there is no such contract; see `has_l1_fee`.
    """
    try:
        return _ask_oracle(client, _GET_L1_FEE_UPPER_BOUND, size)
    except ChainRevertedError:
        return _ask_oracle(client, _GET_L1_FEE, random.Random(size).randbytes(size))


def _ask_oracle(client: ChainClient, function: codec.Item, argument: bytes | int) -> int:
    ask = Call(GAS_PRICE_ORACLE, codec.encode_call(function, [argument]), 0, "the L1 data fee")
    return client.read(ask, lambda data: int(codec.decode(function.outputs, data)[0]))


def rehearse(client: ChainClient, calls: Sequence[Call], sender: Address) -> list[Cost]:
    """What each of `calls`, sent in order by `sender`, would cost or why it would revert.

    Sends nothing and signs nothing. Raises UnavailableError if no endpoint answers.
    """
    if not calls:
        return []
    try:
        results = _simulated(client, calls, sender)
    except RpcError:  # an endpoint without eth_simulateV1
        results = _estimated(client, calls, sender)
    if not has_l1_fee(client):
        return [Cost(c, gas, None, error) for c, (gas, error) in zip(calls, results, strict=True)]
    nonce, fees = client.nonce(sender), client.fees()
    return [
        Cost(call, gas, l1_fee(client, call, nonce + number, gas or 1_000_000, fees), error)
        for number, (call, (gas, error)) in enumerate(zip(calls, results, strict=True))
    ]


def total(costs: Sequence[Cost], fees: Fees) -> int | None:
    """Wei for all of them at today's fees, L1 data included; None if a gas figure is unknown."""
    known = [cost.gas for cost in costs if cost.gas is not None]
    if len(known) != len(costs):
        return None
    per_gas = fees.base_fee + fees.priority_fee
    return sum(known) * per_gas + sum(cost.l1_fee or 0 for cost in costs)


def refusal(costs: Sequence[Cost]) -> ChainRevertedError | None:
    """Why the first of them that would be refused would be; None if all would go through."""
    return next((cost.error for cost in costs if cost.error is not None), None)


def words(cost: Cost) -> str:
    """A cost in words: gas and L1 fee, or why the call would be refused."""
    if cost.error is not None:
        meaning = cost.error.meaning
        return f"would be refused: {cost.error.reason}" + (f": {meaning}" if meaning else "")
    gas = (
        "gas unknown until the ones before it are sent" if cost.gas is None else f"{cost.gas:,} gas"
    )
    l1 = "no L1 data fee on this chain" if cost.l1_fee is None else f"L1 data {ether(cost.l1_fee)}"
    return f"{gas}, {l1}"


Result = tuple[int | None, ChainRevertedError | None]


def _simulated(client: ChainClient, calls: Sequence[Call], sender: Address) -> list[Result]:
    steps = []
    for call in calls:
        step = {"from": sender, "data": call.calldata(), "value": hex(call.value)}
        steps.append(step if call.to is None else step | {"to": call.to})
    return client.request(
        "eth_simulateV1",
        {"blockStateCalls": [{"calls": steps}]},
        "latest",
        parse=lambda answer: [
            _result(one, call) for one, call in zip(answer[0]["calls"], calls, strict=True)
        ],
    )


def _result(result: dict[str, Any], call: Call) -> Result:
    gas = number(result["gasUsed"])
    if number(result["status"]) == 1:
        return gas, None
    fault = result.get("error") or {}
    text = fault.get("data") or result.get("returnData") or "0x"
    data = bytes.fromhex(str(text).removeprefix("0x"))
    doing = call.description or "the call"
    return gas, codec.decode_revert(data, all_artifacts(), doing, str(fault.get("message", "")))


def _estimated(client: ChainClient, calls: Sequence[Call], sender: Address) -> list[Result]:
    found: list[Result] = []
    for place, call in enumerate(calls):
        try:
            found.append((client.estimate_gas(call, sender), None))
        except ChainRevertedError as error:  # a later one may only lack what comes before it
            found.append((None, error if place == 0 else None))
    return found
