"""Deploys the contracts from the committed ABI and bytecode: the same for every network.

    orchestrator deployment deploy --network local --rpc URL --wallet K --password-file F …

Every step is an intent of a journalled sender, named by the digest of its bytes: run again after a
kill or a dead RPC, it goes on where it was; run again after success, it changes nothing and writes
the same file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eth_typing import HexAddress, HexStr
from web3.types import Nonce
from web3.utils.address import get_create_address

from protocol.chain import codec
from protocol.chain.client import Call, ChainClient
from protocol.chain.contracts import Contracts
from protocol.chain.deployment import SOLIDITY_NAMES, Deployment, Periods
from protocol.chain.errors import RpcError
from protocol.chain.sender import Sender
from protocol.core import encoding
from protocol.core.errors import FatalError, UserError
from protocol.core.ids import Address, address
from protocol.core.messages import ContractAddresses
from protocol.core.signing import ContractName, LocalSigner

ETHER = 10**18
YEAR = 365 * 86_400


@dataclass(frozen=True)
class Options:
    """What a deployment fixes for good. Amounts in wei of the token, times in Unix seconds.

    The guardian may disable reward roots and cancel slashes for `guardian_seconds` from the
    deployment's beginning.
    """

    periods: Periods
    testnet: bool
    holder: Address
    """Receives the initial supply."""
    supply: int
    guardian: Address
    guardian_seconds: int = YEAR
    dispute_deposit: int = 100 * ETHER
    validator_bond: int = 0


@dataclass(frozen=True)
class DryStep:
    """One transaction of a deployment that was not sent. `gas` None: the endpoint cannot tell."""

    name: str
    call: Call
    address: Address | None
    gas: int | None


Known = dict[ContractName, Address]

_LEVELS: tuple[tuple[ContractName, ...], ...] = (
    ("token", "registry"),
    ("vault",),
    ("pools",),
    ("work", "rewards"),
    ("slasher",),
)
"""Contracts by what must be on chain before them."""


def constructor_arguments(
    name: ContractName, options: Options, ends: int, known: Known
) -> tuple[Any, ...]:
    """Constructor arguments of a contract, given the addresses of those before it; `ends`: when
    the guardian's power does, in Unix seconds."""
    match name:
        case "token":
            return options.testnet, options.holder, options.supply
        case "registry":
            return ()
        case "vault":
            return known["token"], options.periods.as_tuple()
        case "pools":
            return known["registry"], known["vault"]
        case "work":
            return known["pools"], known["vault"]
        case "rewards":
            return (
                known["token"], known["registry"], known["pools"], known["vault"],
                options.guardian, ends,
            )  # fmt: skip
        case "slasher":
            terms = (
                options.guardian, ends,
                options.dispute_deposit, options.validator_bond,
            )  # fmt: skip
            return known["vault"], known["pools"], known["work"], terms


def creation(name: ContractName, options: Options, ends: int, known: Known) -> Call:
    """The transaction that creates a contract."""
    artifact = codec.artifact(SOLIDITY_NAMES[name])
    arguments = constructor_arguments(name, options, ends, known)
    data = artifact.bytecode + codec.encode(artifact.constructor, arguments)
    return Call(None, data, 0, f"create {SOLIDITY_NAMES[name]}")


def wirings(known: Known) -> dict[str, Call]:
    """The transactions that tell the contracts of those deployed after them, once."""
    told: dict[ContractName, tuple[Address, ...]] = {
        "registry": (known["vault"], known["pools"]),
        "vault": (known["registry"], known["pools"], known["slasher"]),
        "pools": (known["slasher"],),
    }
    calls = {}
    for name, arguments in told.items():
        function = codec.artifact(SOLIDITY_NAMES[name]).function("wire")
        data = codec.encode_call(function, arguments)
        calls[f"wire {name}"] = Call(known[name], data, 0, f"wire {SOLIDITY_NAMES[name]}")
    return calls


def check_options(options: Options, client: ChainClient) -> None:
    """Raises UserError for what the contracts would refuse, or nobody can want."""
    problem = options.periods.problem()
    if problem:
        raise UserError(problem, hint="lengthen unbonding or shorten the others")
    if options.testnet and not client.network.testnet:
        raise UserError(f"a faucet on {client.network.name} would give real value away")
    if options.guardian_seconds < 0:
        raise UserError("the guardian's power would end before it began")


def deploy(
    client: ChainClient,
    signer: LocalSigner,
    options: Options,
    *,
    journal: Path,
    timeout: float = 600.0,
    now: Callable[[], float] = time.time,
    report: Callable[[str], None] = lambda line: None,
) -> Deployment:
    """Deploys, or finishes a deployment begun with the same journal and options.

    `report` is told of each step. Raises UserError, UnavailableError (run it again),
    ChainRevertedError, FatalError if the chain does not hold what was deployed.
    """
    check_options(options, client)
    sender = Sender(client, signer, journal, now=now)
    try:
        return _deploy(client, sender, options, now(), timeout, report)
    finally:
        sender.close()


def _deploy(
    client: ChainClient,
    sender: Sender,
    options: Options,
    started: float,
    timeout: float,
    report: Callable[[str], None],
) -> Deployment:
    # A deployment taken up again must ask for the very same bytes.
    ends = int(sender.remember("guardian_ends", str(int(started + options.guardian_seconds))))
    known: Known = {}
    transactions: dict[str, str] = {}
    blocks: list[int] = []

    def finish(step: str, intent_id: str, call: Call) -> Address | None:
        done = sender.send_and_wait(intent_id, call, timeout)
        assert done.tx_hash is not None
        assert done.block is not None
        transactions[step] = done.tx_hash
        blocks.append(done.block)
        report(f"{call.description}: {done.contract or 'done'} in block {done.block}")
        return done.contract

    for level in _LEVELS:
        calls = {name: creation(name, options, ends, known) for name in level}
        for name, call in calls.items():  # all of a level at once, then wait for each
            _submit_again(sender, _intent(name, call), call)
        for name, call in calls.items():
            created = finish(name, _intent(name, call), call)
            assert created is not None
            known[name] = created
    wires = wirings(known)
    for step, call in wires.items():
        _submit_again(sender, _intent(step, call), call)
    for step, call in wires.items():
        finish(step, _intent(step, call), call)
    deployment = Deployment(
        chain_id=client.chain_id,
        contracts=ContractAddresses(**known),
        block=min(blocks),
        periods=options.periods,
        deployer=sender.address,
        arguments={
            name: tuple(_text(a) for a in constructor_arguments(name, options, ends, known))
            for name in known
        },
        transactions=transactions,
        abi={name: codec.artifact(SOLIDITY_NAMES[name]).digest for name in known},
    )
    verify(client, deployment)
    return deployment


def _submit_again(sender: Sender, intent_id: str, call: Call) -> None:
    if sender.submit(intent_id, call).status == "failed":
        sender.retry(intent_id)


def verify(client: ChainClient, deployment: Deployment) -> None:
    """Raises FatalError unless the chain holds this deployment: code, periods and wiring."""
    for account, contract_name in deployment.addresses().items():
        if not client.code(account):
            raise FatalError(f"there is no {SOLIDITY_NAMES[contract_name]} at {account}")
    contracts = Contracts(client, deployment)
    if contracts.work.periods() != deployment.periods:
        raise FatalError("the periods on chain are not those of the deployment file")
    wired = (
        (contracts.registry, "vault", "vault"), (contracts.registry, "pools", "pools"),
        (contracts.vault, "slasher", "slasher"), (contracts.pools, "slasher", "slasher"),
        (contracts.slasher, "work", "work"), (contracts.rewards, "token", "token"),
    )  # fmt: skip
    for contract, function, name in wired:
        (found,) = contract.read(function)
        if found != getattr(deployment.contracts, name):
            raise FatalError(f"{contract.NAME}.{function} on chain is {found}")


def dry_run(client: ChainClient, deployer: Address, options: Options) -> list[DryStep]:
    """Every transaction of a deployment with its gas, sending none.

    Each contract is executed by eth_call and laid over the state in which the next is estimated.
    """
    check_options(options, client)
    nonce = client.nonce(deployer)
    known: Known = {}
    overlay: dict[str, dict[str, str]] = {}
    steps: list[DryStep] = []
    ends = int(time.time()) + options.guardian_seconds
    order = [name for level in _LEVELS for name in level]
    for name in order:
        call = creation(name, options, ends, known)
        known[name] = create_address(deployer, nonce + len(steps))
        overlay[deployer] = {"nonce": hex(nonce + len(steps))}
        request = {"from": deployer, "data": call.calldata()}
        steps.append(DryStep(name, call, known[name], _gas(client, request, overlay)))
        runtime = _overlaid(client, "eth_call", request, overlay)
        if runtime is not None:
            overlay[known[name]] = {"code": runtime}
    for wiring, call in wirings(known).items():
        request = {"from": deployer, "to": str(call.to), "data": call.calldata()}
        steps.append(DryStep(wiring, call, None, _gas(client, request, overlay)))
    return steps


def create_address(creator: Address, nonce: int) -> Address:
    """Address of the contract that `creator` makes with its transaction number `nonce` (CREATE)."""
    return address(get_create_address(HexAddress(HexStr(creator)), Nonce(nonce)))


def _gas(client: ChainClient, request: dict[str, str], overlay: dict[str, Any]) -> int | None:
    found = _overlaid(client, "eth_estimateGas", request, overlay)
    return int(found, 16) if found is not None else None


def _overlaid(
    client: ChainClient, method: str, request: dict[str, str], overlay: dict[str, Any]
) -> str | None:
    try:
        return str(client.request(method, request, "latest", overlay))
    except RpcError:  # an endpoint without state overrides
        return None


def _intent(step: str, call: Call) -> str:
    to = bytes.fromhex(call.to[2:]) if call.to is not None else b""
    return f"deploy/{step}/{encoding.sha256(to + call.data)[2:18]}"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_text(one) for one in value) + ")"
    return str(value).lower() if isinstance(value, bool) else str(value)
