"""Compares a deployment file with the chain, and shows who has which role.

    code        each contract's code is the committed one, byte for byte; its immutables are those
                that the constructor gives for the same arguments
    wiring      each contract knows the others that the file names
    parameters  periods, dispute deposit, validators' bond
    roles       arbiter, governor; none of them the deployer's own key

It only reads. A single endpoint can lie: give several by --rpc.

`standard_input` is the compiler's standard-JSON input of our contracts. A block explorer needs it
to show that the code on chain comes from these sources. One input holds all of contracts/src and
its imports, because the compiler's numbering of the files can show in the bytecode.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from eth_hash.auto import keccak

from prime_chain import codec
from prime_chain.amounts import prime
from prime_chain.client import Call, ChainClient
from prime_chain.contracts import Contracts
from prime_chain.errors import ChainRevertedError
from prime_core import ids
from prime_core.deployment import SOLIDITY_NAMES, Deployment
from prime_core.errors import FatalError, NotFoundError
from prime_core.ids import ZERO_ADDRESS, Address, Digest
from prime_core.signing import CONTRACT_NAMES, DOMAIN_NAME, DOMAIN_VERSION, ContractName

_DOMAIN_TYPE = keccak(
    b"EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
)
_WORD = 32
_IMPORT = re.compile(r"""^\s*import\s+(?:[^"';]*?from\s+)?["']([^"']+)["']\s*;""", re.MULTILINE)


@dataclass(frozen=True)
class DeploymentCheck:
    """One thing that was looked at. `fault`: it is wrong (a note otherwise, where not `ok`)."""

    name: str
    ok: bool
    found: str
    fault: bool = True


def verify(client: ChainClient, deployment: Deployment) -> None:
    """Raises FatalError with the first thing that is not as the deployment says."""
    for check in check_deployment(client, deployment):
        if not check.ok and check.fault:
            raise FatalError(f"{check.name}: {check.found}")


def check_deployment(client: ChainClient, deployment: Deployment) -> Iterator[DeploymentCheck]:
    """Every check, in the order of the module's docstring. Raises UnavailableError."""
    missing = False
    for name in CONTRACT_NAMES:
        for check in _code(client, deployment, name):
            missing = missing or not check.ok
            yield check
    if missing:
        return  # what another code answers means nothing
    contracts = Contracts(client, deployment)
    yield from _wiring(contracts)
    yield from _parameters(contracts)
    yield from _roles(contracts)


def _code(
    client: ChainClient, deployment: Deployment, name: ContractName
) -> Iterator[DeploymentCheck]:
    solidity, account = SOLIDITY_NAMES[name], deployment.address(name)
    title = f"code of {solidity}"
    found = client.code(account)
    if not found:
        yield DeploymentCheck(title, False, f"there is no {solidity} at {account}")
        return
    artifact = codec.artifact(solidity)
    if masked(found, artifact) != masked(artifact.runtime, artifact):
        yield DeploymentCheck(
            title, False, f"at {account} lies other code than this program's {solidity}"
        )
        return
    recorded = deployment.code.get(name)
    here = code_hash(found)
    if recorded is not None and recorded != here:
        yield DeploymentCheck(title, False, f"its hash is {here}, the file says {recorded}")
        return
    strange = _unexplained(client, deployment, name, found)
    if strange is None:
        yield DeploymentCheck(
            title, True, f"{here}; immutables not checked: the file keeps no arguments"
        )
    elif strange:
        yield DeploymentCheck(
            title, False, f"its constructor was given other arguments (at byte {strange[0]})"
        )
    else:
        yield DeploymentCheck(title, True, here)
    given = deployment.abi.get(name)
    if given is not None and given != artifact.digest:
        yield DeploymentCheck(
            f"ABI of {solidity}", False, "the file was made with another committed ABI", fault=False
        )


def code_hash(code: bytes) -> Digest:
    """keccak256 of code, as EXTCODEHASH gives it (EIP-1052)."""
    return ids.digest(keccak(code))


def masked(code: bytes, artifact: codec.Artifact) -> bytes:
    """`code` with the immutables of `artifact` zeroed."""
    plain = bytearray(code)
    for start, end in artifact.immutables:
        plain[start:end] = bytes(len(plain[start:end]))
    return bytes(plain)


def domain_separator(chain_id: int, contract: Address) -> bytes:
    """EIP-712 domain separator of one of our contracts."""
    parts = (
        _DOMAIN_TYPE, keccak(DOMAIN_NAME.encode()), keccak(DOMAIN_VERSION.encode()),
        chain_id.to_bytes(_WORD, "big"), bytes(12) + bytes.fromhex(contract[2:]),
    )  # fmt: skip
    return keccak(b"".join(parts))


def _unexplained(
    client: ChainClient, deployment: Deployment, name: ContractName, code: bytes
) -> list[int] | None:
    """Positions of immutables that the same constructor with the same arguments, run again by
    eth_call, gives otherwise; None if the file keeps no arguments.

    What holds the contract's own address (EIP-712's cache) differs at another address and is
    computed instead.
    """
    encoded = deployment.encoded_arguments.get(name)
    if encoded is None or not deployment.deployer:
        return None
    artifact = codec.artifact(SOLIDITY_NAMES[name])
    account = deployment.address(name)
    create = Call(None, artifact.bytecode + bytes.fromhex(encoded.removeprefix("0x")), 0, "again")
    try:
        again = client.call(create, sender=ids.address(deployment.deployer))
    except ChainRevertedError as error:
        raise FatalError(
            f"the constructor of {artifact.name} refuses the arguments of the file: {error.reason}"
        ) from error
    own = bytes(12) + bytes.fromhex(account[2:])
    separator = domain_separator(deployment.chain_id, account)
    return [
        start
        for start, end in artifact.immutables
        if code[start:end] not in (again[start:end], own, separator)
    ]


def _wiring(contracts: Contracts) -> Iterator[DeploymentCheck]:
    c, places = contracts, contracts.deployment.contracts
    expected = (
        (c.registry, "vault"), (c.registry, "pools"), (c.vault, "token"), (c.vault, "registry"),
        (c.vault, "pools"), (c.vault, "slasher"), (c.pools, "registry"), (c.pools, "vault"),
        (c.pools, "slasher"), (c.work, "pools"), (c.rewards, "token"), (c.rewards, "registry"),
        (c.rewards, "pools"), (c.rewards, "slasher"), (c.slasher, "token"), (c.slasher, "vault"),
        (c.slasher, "pools"), (c.slasher, "work"), (c.slasher, "court"), (c.court, "token"),
        (c.court, "vault"), (c.court, "pools"), (c.court, "work"), (c.court, "slasher"),
    )  # fmt: skip
    for contract, name in expected:
        (found,) = contract.read(name)
        yield DeploymentCheck(
            f"{contract.NAME} knows {name}", found == getattr(places, name), found
        )


def _parameters(contracts: Contracts) -> Iterator[DeploymentCheck]:
    deployment = contracts.deployment
    periods = contracts.work.periods()
    same = periods == deployment.periods
    said = "as the file says" if same else f"on chain {periods.as_tuple()}"
    yield DeploymentCheck("periods", same, said)
    problem = periods.problem()
    yield DeploymentCheck(
        "stake outlasts its liability", not problem, problem or f"{periods.unbonding} s"
    )
    trap, whole = periods.trap(), periods.self_help == periods.validity
    helped = f"for {periods.self_help} s of a validity of {periods.validity} s"
    yield DeploymentCheck("a node can root forgotten work", whole, trap or helped, fault=False)
    if (testnet := contracts.token.is_testnet()) and not contracts.client.network.testnet:
        yield DeploymentCheck(
            "no faucet where value is real", not testnet, "the token has a faucet"
        )
    deposit, bond = contracts.slasher.dispute_deposit(), contracts.slasher.validator_bond()
    yield DeploymentCheck("dispute deposit", deposit > 0, prime(deposit), fault=False)
    yield DeploymentCheck("validators' bond", bond > 0, prime(bond), fault=False)
    stake = contracts.court.juror_bond()
    yield DeploymentCheck("jurors' bond", stake > 0, prime(stake))


def _roles(contracts: Contracts) -> Iterator[DeploymentCheck]:
    deployment, client = contracts.deployment, contracts.client
    arbiter = contracts.slasher.arbiter()
    if (said := deployment.roles) is not None:
        (treasury,) = contracts.vault.read("treasury")
        yield DeploymentCheck("treasury as the file says", treasury == said.treasury, treasury)
        # the role is handed on behind a delay: that is not a fault of the deployment
        yield DeploymentCheck(
            "arbiter as at deployment", arbiter == said.arbiter, arbiter, fault=False
        )
        governor = contracts.slasher.governor() or ZERO_ADDRESS
        # the role may be handed on, by its holder alone: that is not a fault of the deployment
        yield DeploymentCheck(
            "governor as at deployment", governor == said.governor, governor, fault=False
        )
    held = {
        "arbiter": arbiter,
        "governor": contracts.slasher.governor() or ZERO_ADDRESS,
        "offered governor": contracts.slasher.pending_governor() or ZERO_ADDRESS,
    }
    for role, account in held.items():
        name = f"deployer is not {role}"
        mine = account == deployment.deployer
        # on a test network one key may be all: said, not refused
        yield DeploymentCheck(name, not mine, account, fault=mine and not client.network.testnet)
        if account != ZERO_ADDRESS and not client.network.testnet:
            kind = "a contract" if client.code(account) else "a single key"
            yield DeploymentCheck(
                f"{role} is a multisig", bool(client.code(account)), kind, fault=False
            )


def standard_input(root: Path) -> bytes:
    """The input (JSON) for the repository at `root`, with the settings of its foundry.toml.

    Raises NotFoundError where sources or their libraries are not there: an installed package has
    none.
    """
    try:
        profile = tomllib.loads((root / "foundry.toml").read_text())["profile"]["default"]
    except OSError as error:
        raise NotFoundError(f"there are no contract sources at {root}") from error
    remappings: list[str] = profile["remappings"]
    first = sorted(
        path.relative_to(root).as_posix() for path in (root / profile["src"]).rglob("*.sol")
    )
    sources: dict[str, dict[str, str]] = {}
    waiting = list(first)
    while waiting:
        name = waiting.pop()
        if name in sources:
            continue
        try:
            text = (root / name).read_text()
        except OSError as error:
            raise NotFoundError(f"{name} is not there: make setup installs it") from error
        sources[name] = {"content": text}
        waiting += [resolve(name, wanted, remappings) for wanted in _IMPORT.findall(text)]
    body: dict[str, Any] = {
        "language": "Solidity",
        "sources": dict(sorted(sources.items())),
        "settings": {
            "remappings": remappings,
            "optimizer": {"enabled": profile["optimizer"], "runs": profile["optimizer_runs"]},
            "viaIR": profile["via_ir"],
            "evmVersion": profile["evm_version"],
            "metadata": {
                "bytecodeHash": profile["bytecode_hash"],
                "appendCBOR": profile["cbor_metadata"],
            },
            "outputSelection": {
                "*": {"*": ["abi", "evm.bytecode.object", "evm.deployedBytecode.object"]}
            },
        },
    }
    return json.dumps(body, indent=1).encode() + b"\n"


def resolve(importer: str, wanted: str, remappings: list[str]) -> str:
    """The source unit that `wanted` names in file `importer` (solc's rules: relative paths against
    the importer's folder, else the longest matching remapping)."""
    if wanted.startswith("."):
        parts: list[str] = list(PurePosixPath(importer).parent.parts)
        for part in wanted.split("/"):
            if part == "..":
                parts.pop()
            elif part != ".":
                parts.append(part)
        return "/".join(parts)
    pairs = (one.split("=", 1) for one in remappings)
    fits = [(prefix, target) for prefix, target in pairs if wanted.startswith(prefix)]
    if not fits:
        return wanted
    prefix, target = max(fits, key=lambda pair: len(pair[0]))
    return target + wanted[len(prefix) :]
