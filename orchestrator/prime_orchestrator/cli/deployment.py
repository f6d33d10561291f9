"""`orchestrator deployment deploy|check|sources`: the one deployer of every network, its reader."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_chain import networks
from prime_chain.amounts import ETHER, ether, parse_amount
from prime_chain.chain_session import Rpc
from prime_chain.keystore import keystore_address, open_keystore
from prime_chain.networks import Network
from prime_core import encoding
from prime_core.command_line import Json, PasswordFd, PasswordFile, Quorum, group
from prime_core.deployment import Deployment, Periods
from prime_core.errors import NotFoundError, UserError
from prime_core.folders import make_folder
from prime_core.given import write_given
from prime_core.ids import ZERO_ADDRESS, Address, address

if TYPE_CHECKING:
    from prime_chain import deployer
    from prime_chain.client import ChainClient

app = group("Deploy the contracts, or check a deployment.")
DEFAULTS = Periods()
ROOT = Path(__file__).resolve().parents[3]
CHECK_FAILED = 1

Epoch = Annotated[int, typer.Option(help="Period of pay, in seconds.")]
Validity = Annotated[int, typer.Option(help="Seconds after a root in which its files are judged.")]
SlashWindow = Annotated[int, typer.Option(help="Seconds in which a slash can be disputed.")]
DisputeWindow = Annotated[int, typer.Option(help="Seconds in which a dispute can be judged.")]
RewardDelay = Annotated[int, typer.Option(help="Seconds before a reward root can be claimed.")]
Unbonding = Annotated[int, typer.Option(help="Seconds before unbonded stake can be withdrawn.")]


def default_file(chain_id: int) -> Path:
    """Where a deployment is written by default."""
    folder = Path("var/deployments") if chain_id == 31337 else Path("deployments")
    return folder / f"{chain_id}.json"


@app.command()
def deploy(
    rpc: Rpc,
    wallet: Annotated[Path, typer.Option(help="Keystore of the deployer.")],
    network: Annotated[str, typer.Option(help="local, base-sepolia or base.")] = "local",
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    out: Annotated[Path | None, typer.Option(help="Deployment file to write.")] = None,
    multisig: Annotated[
        str, typer.Option(help="Gets every role and the supply (on base: needed).")
    ] = "",
    arbiter: Annotated[
        str, typer.Option(help="Judges disputes; may cancel slashes and void reward roots.")
    ] = "",
    treasury: Annotated[
        str, typer.Option(help="Receives what slashes take; burned if not given.")
    ] = "",
    slash_cap: Annotated[
        str, typer.Option(help="Most that one account loses in a validity window, in whole tokens.")
    ] = "10000",
    uptime_feed: Annotated[
        str, typer.Option(help="Chainlink's sequencer uptime feed (default: the network's).")
    ] = "",
    governor: Annotated[
        str,
        typer.Option(
            help="May change deposit and bond after a delay; without it they never change."
        ),
    ] = "",
    holder: Annotated[str, typer.Option(help="Receives the initial supply.")] = "",
    supply: Annotated[int, typer.Option(help="Initial supply, in whole tokens.")] = 1_000_000_000,
    dispute_deposit: Annotated[
        str, typer.Option(help="Cost of a dispute, in whole tokens, or 0.")
    ] = "100",
    validator_bond: Annotated[
        str,
        typer.Option(
            help="Stake behind a slash proposal, in whole tokens, or 0 (default: 1000; 0 on local)."
        ),
    ] = "",
    juror_bond: Annotated[
        str, typer.Option(help="Bond of a juror for one verification class, in whole tokens.")
    ] = "1000",
    epoch: Epoch = DEFAULTS.epoch_length,
    validity: Validity = DEFAULTS.validity,
    slash_window: SlashWindow = DEFAULTS.slash_window,
    dispute_window: DisputeWindow = DEFAULTS.dispute_window,
    reward_delay: RewardDelay = DEFAULTS.reward_delay,
    unbonding: Unbonding = DEFAULTS.unbonding,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print calldata and gas; send nothing.")
    ] = False,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
) -> None:
    """Deploy every contract, or finish an interrupted deployment.

    Roles are given by the constructors: --arbiter and --governor name who gets them, else
    --multisig gets both, and without any of these the deployer's own key does.
    """
    from prime_chain import deployer
    from prime_chain.client import ChainClient

    chain = networks.by_name(network)
    file = out or default_file(chain.chain_id)
    if file.exists() and not dry_run:
        raise UserError(
            f"{file} holds a deployment already", hint="name another by --out, or move it away"
        )
    signer = None if dry_run else open_keystore(wallet, password_file, password_fd)
    sender = signer.address if signer is not None else _address_of(wallet)
    given = address(multisig) if multisig else None
    options = deployer.Options(
        periods=Periods(
            epoch_length=epoch,
            validity=validity,
            slash_window=slash_window,
            dispute_window=dispute_window,
            reward_delay=reward_delay,
            unbonding=unbonding,
        ),
        testnet=chain.testnet,
        holder=address(holder) if holder else given or sender,
        supply=supply * ETHER,
        arbiter=address(arbiter) if arbiter else given or sender,
        treasury=address(treasury) if treasury else ZERO_ADDRESS,
        slash_cap=parse_amount(slash_cap),
        uptime_feed=address(uptime_feed) if uptime_feed else chain.uptime_feed,
        governor=_governor(governor, given or sender),
        dispute_deposit=_tokens(dispute_deposit),
        validator_bond=_bond(validator_bond, chain),
        juror_bond=parse_amount(juror_bond),
    )
    client = ChainClient(rpc, chain.chain_id, quorum=rpc_quorum)
    try:
        client.check()
        if signer is None:
            _print_dry_run(client, sender, options, json_output)
            return
        client.require_funds(signer.address)
        make_folder(file.parent)
        deployment = deployer.deploy(
            client,
            signer,
            options,
            journal=file.with_suffix(".journal.sqlite"),
            commit=commit_of(ROOT),
            report=lambda line: typer.echo(line, err=True),
        )
    finally:
        client.close()
    deployment = _keep_sources(deployment, file)
    deployment.save(file)
    if json_output:
        typer.echo(deployment.model_dump_json())
    else:
        typer.echo(f"deployed to {chain.name}; addresses are in {file}")


@app.command()
def check(
    rpc: Rpc,
    deployment: Annotated[Path, typer.Option(help="Deployment file.")],
    json_output: Json = False,
    rpc_quorum: Quorum = None,
) -> None:
    """Check a deployment: code, arguments, wiring, parameters, roles.

    Exits with 1 if anything is wrong; what is only worth knowing is marked by "!".
    """
    from prime_chain.client import ChainClient
    from prime_chain.deployment_check import check_deployment

    known = Deployment.load(deployment)
    client = ChainClient(rpc, known.chain_id, quorum=rpc_quorum)
    try:
        client.check()
        found = list(check_deployment(client, known))
    finally:
        client.close()
    wrong = [one for one in found if not one.ok and one.fault]
    if json_output:
        checks = [asdict(one) for one in found]
        typer.echo(json.dumps({"ok": not wrong, "chain_id": known.chain_id, "checks": checks}))
    else:
        for one in found:
            mark = "✓" if one.ok else "✗" if one.fault else "!"
            typer.echo(f"{mark} {one.name}: {one.found}")
        holds = "does not hold" if wrong else "holds"
        typer.echo(f"chain {known.chain_id} {holds} the deployment of {deployment}")
    if wrong:
        raise typer.Exit(CHECK_FAILED)


@app.command()
def sources(
    out: Annotated[Path, typer.Option(help="File to write.")],
) -> None:
    """Write the compiler's standard-JSON input. An explorer verifies the contracts with it."""
    from prime_chain.deployment_check import standard_input

    write_given(out, standard_input(ROOT))
    typer.echo(f"the input is in {out}; name a contract as contracts/src/Pools.sol:Pools")


def commit_of(root: Path) -> str:
    """The commit of the sources at `root`, "-dirty" if contracts or their ABI differ from it; the
    package's version where there is no repository."""
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(
            root, "status", "--porcelain", "--", "contracts/src", "protocol/prime_chain/abi"
        )
    except (OSError, subprocess.CalledProcessError):
        return f"prime-open {importlib.metadata.version('prime-open')}"
    return head + ("-dirty" if changed else "")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def _keep_sources(deployment: Deployment, file: Path) -> Deployment:
    """Keeps the compiler's input next to the deployment file, where the sources are here."""
    from prime_chain.deployment_check import standard_input

    try:
        raw = standard_input(ROOT)
    except NotFoundError as error:
        typer.echo(f"no compiler input is kept: {error}", err=True)
        return deployment
    file.with_suffix(".input.json").write_bytes(raw)
    return deployment.model_copy(update={"source_input": encoding.sha256(raw)})


def _address_of(wallet: Path) -> Address:
    found = keystore_address(wallet)
    if found is None:
        raise UserError(f"the keystore {wallet} does not name its address", hint="open it once")
    return found


def _governor(text: str, default: Address) -> Address:
    if text == "none":
        return ZERO_ADDRESS
    return address(text) if text else default


def _tokens(text: str) -> int:
    return 0 if text.strip() == "0" else parse_amount(text)


def _bond(text: str, chain: Network) -> int:
    if text:
        return _tokens(text)
    from prime_chain.deployer import DEFAULT_BOND

    return 0 if chain.name == "local" else DEFAULT_BOND


def _print_dry_run(
    client: ChainClient, sender: Address, options: deployer.Options, json_output: bool
) -> None:
    from prime_chain import deployer

    steps = deployer.dry_run(client, sender, options)
    fees = client.fees()
    per_gas = fees.base_fee + fees.priority_fee
    gas = sum(step.gas or 0 for step in steps)
    data = None if steps[0].l1_fee is None else sum(step.l1_fee or 0 for step in steps)
    wei = gas * per_gas + (data or 0)
    if json_output:
        rows: list[dict[str, Any]] = [
            {
                "step": s.name,
                "to": s.call.to,
                "address": s.address,
                "data": s.call.calldata(),
                "gas": s.gas,
                "l1_fee_wei": None if s.l1_fee is None else str(s.l1_fee),
            }
            for s in steps
        ]
        totals = {"gas": gas, "l1_fee_wei": None if data is None else str(data), "wei": str(wei)}
        typer.echo(json.dumps({"steps": rows, "total": totals}))
        return
    for step in steps:
        said = "gas unknown" if step.gas is None else f"{step.gas:,} gas"
        said += "" if step.l1_fee is None else f", L1 data {ether(step.l1_fee)}"
        typer.echo(f"{step.call.description}: {said}\n  {step.call.calldata()}")
    l1 = "no L1 data fee on this chain" if data is None else f"{ether(data)} of L1 data"
    typer.echo(f"in all {gas:,} gas at {per_gas / 10**9:g} gwei and {l1}: about {ether(wei)}")
