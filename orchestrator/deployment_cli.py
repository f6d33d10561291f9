"""`orchestrator deployment deploy|check`: the one deployer of every network, and its reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from protocol.chain import deployer, networks
from protocol.chain.client import ChainClient
from protocol.chain.deployment import Deployment, Periods
from protocol.chain.keystore import load_keystore, read_password
from protocol.core.errors import UserError
from protocol.core.ids import address
from protocol.folders import make_folder

app = typer.Typer(
    help="Deploy the contracts, or check a deployment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
DEFAULTS = Periods()
Rpc = Annotated[list[str], typer.Option("--rpc", help="RPC endpoint; repeat for more.")]


def default_file(chain_id: int) -> Path:
    """Where a deployment is kept: local ones are not for the repository."""
    folder = Path("var/deployments") if chain_id == 31337 else Path("contracts/deployments")
    return folder / f"{chain_id}.json"


@app.command()
def deploy(
    rpc: Rpc,
    wallet: Annotated[Path, typer.Option(help="Keystore of the deployer.")],
    network: Annotated[str, typer.Option(help="local, base-sepolia or base.")] = "local",
    password_file: Annotated[Path | None, typer.Option(help="File with its password.")] = None,
    password_fd: Annotated[int | None, typer.Option(help="Open descriptor with it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Deployment file to write.")] = None,
    guardian: Annotated[str, typer.Option(help="May cancel slashes for a time.")] = "",
    supply: Annotated[int, typer.Option(help="Initial supply, in whole tokens.")] = 1_000_000_000,
    epoch: Annotated[int, typer.Option(help="Seconds.")] = DEFAULTS.epoch_length,
    validity: Annotated[int, typer.Option(help="Seconds.")] = DEFAULTS.validity,
    slash_window: Annotated[int, typer.Option(help="Seconds.")] = DEFAULTS.slash_window,
    dispute_window: Annotated[int, typer.Option(help="Seconds.")] = DEFAULTS.dispute_window,
    reward_delay: Annotated[int, typer.Option(help="Seconds.")] = DEFAULTS.reward_delay,
    unbonding: Annotated[int, typer.Option(help="Seconds.")] = DEFAULTS.unbonding,
    dry_run: Annotated[bool, typer.Option(help="Print calldata and gas; send nothing.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Deploy every contract, or finish a deployment that was interrupted."""
    chain = networks.by_name(network)
    file = out or default_file(chain.chain_id)
    if file.exists() and not dry_run:
        raise UserError(
            f"{file} holds a deployment already", hint="name another by --out, or move it away"
        )
    signer = load_keystore(wallet, read_password(password_file, password_fd))
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
        holder=signer.address,
        supply=supply * deployer.ETHER,
        guardian=address(guardian) if guardian else signer.address,
    )
    client = ChainClient(rpc, chain.chain_id)
    try:
        client.check()
        if dry_run:
            _print_dry_run(client, signer.address, options, json_output)
            return
        client.require_funds(signer.address)
        make_folder(file.parent)
        deployment = deployer.deploy(
            client,
            signer,
            options,
            journal=file.with_suffix(".journal.sqlite"),
            report=lambda line: typer.echo(line, err=True),
        )
    finally:
        client.close()
    deployment.save(file)
    if json_output:
        typer.echo(deployment.model_dump_json())
    else:
        typer.echo(f"deployed to {chain.name}; addresses are in {file}")


@app.command()
def check(
    rpc: Rpc,
    deployment: Annotated[Path, typer.Option(help="Deployment file.")],
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Prove that the chain holds this deployment: code, periods, wiring."""
    known = Deployment.load(deployment)
    client = ChainClient(rpc, known.chain_id)
    try:
        client.check()
        deployer.verify(client, known)
    finally:
        client.close()
    if json_output:
        typer.echo(json.dumps({"ok": True, "chain_id": known.chain_id}))
    else:
        typer.echo(f"chain {known.chain_id} holds the deployment of {deployment}")


def _print_dry_run(
    client: ChainClient, sender: str, options: deployer.Options, json_output: bool
) -> None:
    steps = deployer.dry_run(client, address(sender), options)
    if json_output:
        rows = [
            {"step": s.name, "to": s.call.to, "data": s.call.calldata(), "gas": s.gas}
            for s in steps
        ]
        typer.echo(json.dumps({"steps": rows}))
        return
    for step in steps:
        gas = "gas unknown" if step.gas is None else f"{step.gas:,} gas"
        typer.echo(f"{step.call.description}: {gas}\n  {step.call.calldata()}")
