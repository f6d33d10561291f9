"""`validator`: everything that a validator's operator types.

    run        judge files until SIGTERM
    doctor     whether this machine and account can judge, before it is relied on
    bond …     stake behind the verdicts: in the vault, slashable, free after the unbonding period

What needs torch or the chain is imported when it is called, so that `--help` answers at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from prime_chain import flows, history, wallet_cli
from prime_chain.amounts import parse_amount, prime
from prime_chain.client import ChainClient
from prime_chain.contracts import Binding, Contracts
from prime_chain.desk import Desk, Done, File, Json, PoolNumber, Rpc, at_desk, pool_of
from prime_core import ids
from prime_core.command_line import PollSeconds, Quorum, program
from prime_core.command_line import run as run_program
from prime_core.deployment import Deployment
from prime_core.errors import UserError
from prime_core.settings import load_settings, settings_file
from prime_core.times import utc

app = program("validator", "Judges rollout files for a pool, on a machine of its own.")
app.add_typer(wallet_cli.app, name="wallet")
Url = Annotated[str | None, typer.Option("--orchestrator", help="URL of the orchestrator.")]
Rpcs = Annotated[list[str] | None, typer.Option("--rpc", help="RPC endpoint; repeat for more.")]
Wallet = Annotated[Path | None, typer.Option(help="Keystore of the validator.")]
Data = Annotated[Path | None, typer.Option(help="Our own folder: secrets, opinions, policies.")]
PasswordFile = Annotated[Path | None, typer.Option(help="File with the keystore's password.")]
PasswordFd = Annotated[int | None, typer.Option(help="Open descriptor with it.")]
Contract = Annotated[
    Path | None, typer.Option("--deployment", help="Deployment JSON (default: as shipped).")
]
Device = Annotated[str | None, typer.Option(help="Where to replay: cpu, cuda, …")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
Tokens = Annotated[str, typer.Argument(help="Amount of PRIME, like 100 or 12.5.")]


@app.command()
def run(
    orchestrator: Url = None,
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    chain_poll_seconds: PollSeconds = None,
    wallet: Wallet = None,
    data: Data = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings.")] = None,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    deployment: Contract = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Relay or origin to fetch policies from; repeat for more."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.")] = None,
    policies: Annotated[int | None, typer.Option(help="Policies to keep loaded (3).")] = None,
    policy_memory_mb: Annotated[
        int | None, typer.Option(help="What loaded policies may take together; 0: no bound.")
    ] = None,
    pack: Annotated[
        int | None, typer.Option(help="Files of one policy whose rows share a prefill (4).")
    ] = None,
    first_answer_seconds: Annotated[
        float | None, typer.Option(help="How long the first start waits for an answer.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Judge the files that are assigned to this validator (may use a GPU) until SIGTERM."""
    flags: dict[str, object] = dict(locals())
    from prime_validator.run import run as judge
    from prime_validator.settings import Settings

    del flags["config"]
    lists = {"rpc": tuple(rpc or ()), "source": tuple(source or ())}
    judge(load_settings(Settings, flags | lists, settings_file(config)))


@app.command()
def doctor(
    orchestrator: Url = None,
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    chain_poll_seconds: PollSeconds = None,
    wallet: Wallet = None,
    data: Data = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings.")] = None,
    deployment: Contract = None,
    device: Device = None,
    dtype: Dtype = None,
    json_output: Json = False,
) -> None:
    """Check machine, network, appointment and bond; needs no password. Exits with 1 if the
    validator could not judge."""
    flags: dict[str, object] = dict(locals())
    from prime_validator.doctor import examine
    from prime_validator.settings import Settings

    for name in ("config", "json_output"):
        del flags[name]
    lists = {"rpc": tuple(rpc or ())}
    found = examine(load_settings(Settings, flags | lists, settings_file(config)))
    if json_output:
        typer.echo(json.dumps([asdict(one) for one in found]))
    else:
        for one in found:
            typer.echo(f"{'ok  ' if one.ok else 'FAIL'}  {one.name}: {one.said}")
    if not all(one.ok for one in found):
        raise typer.Exit(1)


@app.command()
@at_desk
def bond(desk: Desk, amount: Tokens) -> Done:
    """Put stake behind the verdicts that this account will give."""
    wei = parse_amount(amount)
    desk.require_tokens(wei)
    desk.perform(flows.stake(desk.contracts, desk.account, wei))
    return _stands(desk)


@app.command()
@at_desk
def unbond(desk: Desk, amount: Tokens) -> Done:
    """Start to take the bond out; it stays slashable until it is withdrawn."""
    desk.perform([desk.contracts.vault.unbond(parse_amount(amount))])
    return _stands(desk)


@app.command()
@at_desk
def rebond(desk: Desk, amount: Tokens) -> Done:
    """Bond again what is on its way out."""
    desk.perform([desk.contracts.vault.rebond(parse_amount(amount))])
    return _stands(desk)


@app.command()
@at_desk
def withdraw(desk: Desk) -> Done:
    """Take out the stake whose unbonding has ended."""
    desk.perform([desk.contracts.vault.withdraw()])
    return _stands(desk)


@app.command()
@at_desk
def resign(desk: Desk, pool: PoolNumber) -> Done:
    """Give up the role in a pool; proposals that are open stay open."""
    desk.perform([desk.contracts.pools.resign(pool)])
    facts = {"pool": pool, "validator": desk.account, "on": False}
    return Done(facts, f"{desk.account} judges no longer in pool {pool}")


@app.command()
def status(
    rpc: Rpc,
    deployment: File,
    account: Annotated[str, typer.Argument(help="Address of the validator.")],
    pool: PoolNumber,
    data: Annotated[Path | None, typer.Option(help="Count the opinions in this folder.")] = None,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
) -> None:
    """Whether the account may judge, what its bond is, which proposals wait for a word."""
    place = Deployment.load(deployment)
    meant = ids.address(account)
    client = ChainClient(rpc, place.chain_id, quorum=rpc_quorum)
    try:
        found = _status(Contracts(client, place), meant, pool)
    finally:
        client.close()
    if data is not None:
        from prime_validator.folder import Folder

        folder = Folder(data)
        found["opinions"] = folder.counts()
        folder.close()
    if json_output:
        typer.echo(json.dumps(found))
        return
    active, needed = int(found["active"]), int(found["bond_needed"])
    able = "may propose" if found["may_propose"] else "may not propose"
    typer.echo(f"validator {meant} of pool {pool}: {able}")
    ask = f"no; the manager types: orchestrator pool set-validator {meant} --pool {pool}"
    typer.echo(f"  appointed  {'yes' if found['appointed'] else ask}")
    typer.echo(f"  bond       {prime(active)}, {prime(needed)} needed")
    typer.echo(f"  held       {prime(int(found['pending']))} by open slashes")
    typer.echo(f"  answers to {Binding(**found['bound']).words() or 'no manager'}")
    for one in found["unbonding"]:
        typer.echo(f"  unbonding  {prime(int(one['amount']))} until {utc(one['mature_at'])}")
    if "opinions" in found:
        said = found["opinions"]
        typer.echo(f"  opinions   {said['given']} handed in, {said['sealed']} sealed")
    for slash in found["disputes"]:
        typer.echo(f"  disputed   {slash['leaf']} of node {slash['node']}")


@app.command()
@at_desk
def claim(
    desk: Desk,
    pool: PoolNumber,
    orchestrator: Annotated[str, typer.Option(help="URL of the orchestrator.")],
) -> Done:
    """Have what the account earned by judging files paid to it."""
    from prime_chain.claims import payable_claim
    from prime_core.transport.client import OrchestratorClient

    with OrchestratorClient(orchestrator) as server:
        found = payable_claim(server, desk.contracts, pool, desk.account)
    paid = found.cumulative - desk.contracts.rewards.claimed(pool, desk.account)
    desk.perform([desk.contracts.rewards.claim(found)])
    facts = {"pool": pool, "epoch": found.epoch, "paid": str(paid)}
    return Done(facts, f"{prime(paid)} paid to {desk.account}")


@app.command("sign-table")
@at_desk
def sign_table(
    desk: Desk,
    pool: PoolNumber,
    settlement: Annotated[Path, typer.Argument(help="File of the settlement.")],
) -> Done:
    """Sign what the pool owes, for `orchestrator rewards post-table`; sends nothing.

    Checks that the settlement is of this pool and adds up, not that the files earned it.
    """
    from prime_core.settlement import read_settlement

    found = read_settlement(settlement)
    if (found.chain_id, found.pool) != (desk.deployment.chain_id, pool):
        raise UserError(f"the settlement is of pool {found.pool} on chain {found.chain_id}")
    if sum(found.amounts().values()) != int(found.cumulative_total):
        raise UserError("the settlement's amounts do not sum to its total")
    table = found.table()
    signature = desk.require_signer().sign(table, desk.deployment.domain_of(table))
    return Done({"epoch": table.epoch, "root": table.root, "signature": signature}, signature)


@app.command()
def rewards(
    orchestrator: Annotated[str, typer.Option(help="URL of the orchestrator.")],
    account: Annotated[str, typer.Argument(help="Address of the validator.")],
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    deployment: Contract = None,
    json_output: Json = False,
) -> None:
    """What the account earned by judging files, and with an RPC what of it was paid."""
    from prime_chain.link import deployment_for
    from prime_core.messages import RewardInfo
    from prime_core.transport.client import OrchestratorClient

    meant = ids.address(account)
    with OrchestratorClient(orchestrator) as server:
        info = server.get(f"/v1/rewards/{meant}", RewardInfo)
        pool = server.pool()
    found: dict[str, Any] = info.model_dump(mode="json") | {"paid": None}
    if rpc:
        place = deployment_for(pool, rpc, deployment, quorum=rpc_quorum)
        client = ChainClient(rpc, place.chain_id, quorum=rpc_quorum)
        try:
            found["paid"] = str(Contracts(client, place).rewards.claimed(pool.pool, meant))
        finally:
            client.close()
    if json_output:
        typer.echo(json.dumps(found))
        return
    if info.epoch is None:
        typer.echo("no reward root is on chain yet")
        return
    typer.echo(f"{meant}: {prime(int(info.cumulative))} earned up to epoch {info.epoch}")
    if found["paid"] is not None:
        typer.echo(f"  {prime(int(found['paid']))} of it paid")


def _status(contracts: Contracts, account: ids.Address, pool: int) -> dict[str, Any]:
    client = contracts.client
    view = flows.stake_view(contracts, account, client.agreed_block("latest").time)
    needed = contracts.slasher.validator_bond()
    appointed = contracts.pools.is_validator(pool, account)
    manager = pool_of(contracts, pool).manager
    bound_elsewhere = needed > 0 and view.bound.manager not in (None, manager)
    slashes = history.read_slashes(client, contracts.deployment)
    return {
        "validator": account,
        "pool": pool,
        "appointed": appointed,
        "may_propose": appointed and view.unbondable >= needed and not bound_elsewhere,
        "bound": asdict(view.bound),
        "active": str(view.active),
        "bond_needed": str(needed),
        "pending": str(view.pending),
        "withdrawable": str(view.withdrawable),
        "unbonding": [asdict(one) | {"amount": str(one.amount)} for one in view.unbonding],
        "disputes": [
            {"leaf": one.leaf, "node": one.node, "proposed_tx": one.proposed_tx}
            for one in slashes
            if one.pool == pool and one.status == "disputed"
        ],
    }


def _stands(desk: Desk) -> Done:
    view = flows.stake_view(desk.contracts, desk.account, desk.client.agreed_block("latest").time)
    facts = {
        "validator": desk.account,
        "active": str(view.active),
        "unbonding": str(sum(one.amount for one in view.unbonding)),
    }
    return Done(facts, f"{desk.account} has {prime(view.active)} bonded")


def main() -> None:
    """Entry point."""
    run_program(app, "validator")


if __name__ == "__main__":
    main()
