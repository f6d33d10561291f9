"""Deploys the contracts from the committed ABI and bytecode: the same for every network.

    orchestrator deployment deploy --network local --rpc URL --wallet K --password-file F …

Every step is an intent of a journalled sender, named by the digest of its bytes. After a kill or an
RPC outage the same command goes on where it was. After success it changes nothing and writes the
same file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eth_typing import HexAddress, HexStr
from web3.types import Nonce
from web3.utils.address import get_create_address

from prime_chain import codec
from prime_chain.amounts import ETHER
from prime_chain.client import Call, ChainClient
from prime_chain.costs import has_l1_fee, l1_fee
from prime_chain.deployment_check import code_hash, verify
from prime_chain.errors import RpcError
from prime_chain.rpc import number
from prime_chain.sender import Sender
from prime_core import encoding
from prime_core.clock import Clock
from prime_core.deployment import SOLIDITY_NAMES, Deployment, Periods, Roles
from prime_core.errors import UserError
from prime_core.ids import ZERO_ADDRESS, Address, address
from prime_core.messages import ContractAddresses
from prime_core.signing import ContractName, LocalSigner, limit_recursion

limit_recursion()  # web3 has been imported

DEFAULT_BOND = 1000 * ETHER
DEFAULT_CAP = 10_000 * ETHER
DEFAULT_JUROR_BOND = 1000 * ETHER


@dataclass(frozen=True)
class Options:
    """What a deployment fixes. Amounts in wei of the token, times in Unix seconds.

    Roles are given by the constructors, so the deployer never has one unless it is named: the
    arbiter judges disputes and may cancel slashes and void reward roots; the governor (the arbiter,
    if None; no one, if zero) may announce other terms or another arbiter. Everything else is fixed
    for good.
    """

    periods: Periods
    testnet: bool
    holder: Address
    """Receives the initial supply."""
    supply: int
    arbiter: Address
    governor: Address | None = None
    dispute_deposit: int = 100 * ETHER
    validator_bond: int = 0
    """What a validator must have bonded for each open proposal; `DEFAULT_BOND` off the local
    network."""
    juror_bond: int = DEFAULT_JUROR_BOND
    """What a juror has at stake for a verification class."""
    treasury: Address = ZERO_ADDRESS
    """Receives what slashes take; zero: burned."""
    slash_cap: int = DEFAULT_CAP
    """The most that slashes take of one account within a validity window."""
    uptime_feed: Address = ZERO_ADDRESS
    """Says when the L2's sequencer was down, so that windows wait; zero: nothing does."""

    def roles(self) -> Roles:
        """Who has which power once the contracts are made."""
        return Roles(
            arbiter=self.arbiter,
            governor=self.arbiter if self.governor is None else self.governor,
            holder=self.holder,
            treasury=self.treasury,
        )


@dataclass(frozen=True)
class DryStep:
    """One transaction of a deployment that was not sent. `gas` None: the endpoint cannot tell;
    `l1_fee` in wei, None on a chain that charges none."""

    name: str
    call: Call
    address: Address | None
    gas: int | None
    l1_fee: int | None = None


Known = dict[ContractName, Address]

_LEVELS: tuple[tuple[ContractName, ...], ...] = (
    ("token", "registry"),
    ("vault",),
    ("pools",),
    ("work",),
    ("court",),
    ("slasher",),
    ("rewards",),
)
"""Contracts by what must be on chain before them."""


def constructor_arguments(name: ContractName, options: Options, known: Known) -> tuple[Any, ...]:
    """Constructor arguments of a contract, given the addresses of those before it."""
    match name:
        case "token":
            return options.testnet, options.holder, options.supply
        case "registry":
            return ()
        case "vault":
            periods = options.periods.as_tuple()
            return (
                known["token"], periods, options.treasury, options.slash_cap, options.uptime_feed,
            )  # fmt: skip
        case "pools":
            return known["registry"], known["vault"]
        case "work":
            return known["pools"], known["vault"]
        case "rewards":
            return (
                known["token"], known["registry"], known["pools"], known["vault"],
                known["slasher"],
            )  # fmt: skip
        case "slasher":
            terms = (
                options.arbiter, options.dispute_deposit, options.validator_bond,
                options.governor or options.arbiter,
            )  # fmt: skip
            return known["vault"], known["pools"], known["work"], known["court"], terms
        case "court":
            return known["vault"], known["pools"], known["work"], options.juror_bond


def creation(name: ContractName, options: Options, known: Known) -> Call:
    """The transaction that creates a contract."""
    artifact = codec.artifact(SOLIDITY_NAMES[name])
    arguments = constructor_arguments(name, options, known)
    data = artifact.bytecode + codec.encode(artifact.constructor, arguments)
    return Call(None, data, 0, f"create {SOLIDITY_NAMES[name]}")


def wirings(known: Known) -> dict[str, Call]:
    """The transactions that tell the contracts of those deployed after them, once."""
    wiring: dict[ContractName, tuple[Address, ...]] = {
        "registry": (known["vault"], known["pools"]),
        "vault": (known["registry"], known["pools"], known["slasher"]),
        "pools": (known["slasher"],),
        "court": (known["slasher"],),
    }
    calls = {}
    for name, arguments in wiring.items():
        function = codec.artifact(SOLIDITY_NAMES[name]).function("wire")
        data = codec.encode_call(function, arguments)
        calls[f"wire {name}"] = Call(known[name], data, 0, f"wire {SOLIDITY_NAMES[name]}")
    return calls


def check_options(options: Options, client: ChainClient) -> None:
    """Raises UserError for settings that the contracts refuse or that make no sense."""
    if problem := options.periods.problem():
        raise UserError(problem, hint="lengthen unbonding or shorten the others")
    if trap := options.periods.trap():
        raise UserError(
            trap, hint="lengthen --slash-window or --dispute-window, or shorten --epoch"
        )
    if options.testnet and not client.network.testnet:
        raise UserError(f"a faucet on {client.network.name} would give real value away")
    if not client.network.testnet:
        _check_roles(options, client)
    if options.uptime_feed != ZERO_ADDRESS and not client.code(options.uptime_feed):
        raise UserError(
            f"the sequencer uptime feed {options.uptime_feed} is not a contract here",
            hint="--uptime-feed names it; the zero address means that there is none",
        )


def _check_roles(options: Options, client: ChainClient) -> None:
    """Where value is real, no single key may hold a role or the supply."""
    held = {"arbiter": options.arbiter, "holder": options.holder}
    if options.governor is not None and options.governor != ZERO_ADDRESS:
        held["governor"] = options.governor
    for role, account in held.items():
        if not client.code(account):
            raise UserError(
                f"the {role} {account} is not a contract: on {client.network.name} it must be "
                "a multisig",
                hint=f"deploy a multisig first and name it by --multisig (or --{role})",
            )
    if options.validator_bond == 0 or options.dispute_deposit == 0:
        raise UserError(
            "a bond or deposit of nothing leaves a wrong word without a price",
            hint="give --validator-bond and --dispute-deposit",
        )


def deploy(
    client: ChainClient,
    signer: LocalSigner,
    options: Options,
    *,
    journal: Path,
    commit: str = "",
    timeout: float = 600.0,
    now: Callable[[], float] = time.time,
    report: Callable[[str], None] = lambda line: None,
) -> Deployment:
    """Deploys, or finishes a deployment begun with the same journal and options.

    `commit` names the sources in the file; `report` is called for each step. Raises UserError,
    UnavailableError (run it again), ChainRevertedError, FatalError if the chain does not hold what
    was deployed.
    """
    check_options(options, client)
    sender = Sender(client, signer, journal, clock=Clock(now))
    try:
        made = _deploy(client, sender, options, timeout, report)
    finally:
        sender.close()
    deployment = made.model_copy(update={"commit": commit})
    verify(client, deployment)
    return deployment


def _deploy(
    client: ChainClient,
    sender: Sender,
    options: Options,
    timeout: float,
    report: Callable[[str], None],
) -> Deployment:
    known: Known = {}
    transactions: dict[str, str] = {}
    blocks: dict[str, int] = {}

    def finish(step: str, intent_id: str, call: Call) -> Address | None:
        done = sender.send_and_wait(intent_id, call, timeout)
        assert done.tx_hash is not None
        assert done.block is not None
        transactions[step] = done.tx_hash
        blocks[step] = done.block
        report(f"{call.description}: {done.contract or 'done'} in block {done.block}")
        return done.contract

    for level in _LEVELS:
        calls = {name: creation(name, options, known) for name in level}
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
    arguments = {name: constructor_arguments(name, options, known) for name in known}
    artifacts = {name: codec.artifact(SOLIDITY_NAMES[name]) for name in known}
    return Deployment(
        chain_id=client.chain_id,
        contracts=ContractAddresses(**known),
        block=min(blocks.values()),
        periods=options.periods,
        deployer=sender.address,
        roles=options.roles(),
        blocks=blocks,
        arguments={name: tuple(_text(one) for one in arguments[name]) for name in known},
        encoded_arguments={
            name: "0x" + codec.encode(artifacts[name].constructor, arguments[name]).hex()
            for name in known
        },
        transactions=transactions,
        abi={name: artifacts[name].digest for name in known},
        code={name: code_hash(client.code(known[name])) for name in known},
    )


def _submit_again(sender: Sender, intent_id: str, call: Call) -> None:
    if sender.submit(intent_id, call).status == "failed":
        sender.retry(intent_id)


def dry_run(client: ChainClient, deployer: Address, options: Options) -> list[DryStep]:
    """Every transaction of a deployment with its gas, sending none.

    Each contract is executed by eth_call and laid over the state in which the next is estimated.
    """
    check_options(options, client)
    nonce = client.nonce(deployer)
    known: Known = {}
    overlay: dict[str, dict[str, str]] = {}
    steps: list[DryStep] = []
    order = [name for level in _LEVELS for name in level]
    for name in order:
        call = creation(name, options, known)
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
    if not has_l1_fee(client):
        return steps
    fees = client.fees()
    return [
        replace(step, l1_fee=l1_fee(client, step.call, nonce + n, step.gas or 5_000_000, fees))
        for n, step in enumerate(steps)
    ]


def create_address(creator: Address, nonce: int) -> Address:
    """Address of the contract that `creator` makes with its transaction number `nonce` (CREATE)."""
    return address(get_create_address(HexAddress(HexStr(creator)), Nonce(nonce)))


def _gas(client: ChainClient, request: dict[str, str], overlay: dict[str, Any]) -> int | None:
    found = _overlaid(client, "eth_estimateGas", request, overlay)
    return number(found) if found is not None else None


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
