"""`validator`: everything that a validator's operator types.

    run        judge files until SIGTERM
    doctor     whether this machine and account can judge, before it is relied on
    bond …     stake behind the verdicts: in the vault, slashable, free after the unbonding period
    juror …    judge disputed slashes of other pools in the court, for pay

What needs torch or the chain is imported when it is called, so that `--help` answers at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prime_chain import wallet_cli
from prime_chain.amounts import parse_amount, prime
from prime_chain.chain_session import (
    ChainSession,
    Done,
    File,
    PoolNumber,
    Rpc,
    open_contracts,
    pool_of,
    sends_transactions,
)
from prime_chain.shipped import help_text
from prime_core import ids
from prime_core.command_line import (
    AllowPrivate,
    BaseModel,
    ConfigFile,
    FirstAnswer,
    Json,
    LogLevel,
    PasswordFd,
    PasswordFile,
    PollSeconds,
    Quorum,
    Rpcs,
    group,
    program,
)
from prime_core.command_line import run as run_program
from prime_core.errors import UserError
from prime_core.times import utc

if TYPE_CHECKING:
    from prime_chain.contracts import Contracts
    from prime_core.settings import Settings as AnySettings

app = program(
    "validator", "Judges rollout files for a pool; needs no access to the orchestrator's machine."
)
app.add_typer(wallet_cli.app, name="wallet")
juror_app = group("Judge disputed slashes of other pools in the court.")
app.add_typer(juror_app, name="juror")
Url = Annotated[str | None, typer.Option("--orchestrator", help="URL of the orchestrator.")]
Wallet = Annotated[Path | None, typer.Option(help="Keystore of the validator.")]
Sources = Annotated[
    list[str] | None, typer.Option(help="Relay or origin to fetch policies from; repeat for more.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads of torch.")]
Server = Annotated[str, typer.Option(help="URL of the orchestrator.")]
Account = Annotated[str, typer.Argument(help="Address of the validator.")]
Data = Annotated[
    Path | None, typer.Option(help="Folder for the validator's secrets, opinions and policies.")
]
Contract = Annotated[Path | None, typer.Option("--deployment", help=help_text())]
Device = Annotated[
    str | None, typer.Option(help="Where to replay: cpu, cuda, cuda:0,cuda:1 or all.")
]
Policies = Annotated[int | None, typer.Option(help="Policies to keep loaded (3).")]
PolicyMemory = Annotated[
    int | None, typer.Option(help="What loaded policies may take together; 0: by free memory.")
]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
Class = Annotated[
    str | None,
    typer.Option(
        "--class",
        help="Verification class: digest of a calibration (default: the one new runs name).",
    ),
]
Tokens = Annotated[str, typer.Argument(help="Amount of PRIME, like 100 or 12.5.")]


@app.command()
def run(
    orchestrator: Url = None,
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    chain_poll_seconds: PollSeconds = None,
    wallet: Wallet = None,
    data: Data = None,
    config: ConfigFile = None,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    deployment: Contract = None,
    source: Sources = None,
    base_model: BaseModel = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    policies: Policies = None,
    policy_memory_mb: PolicyMemory = None,
    pack: Annotated[
        int | None, typer.Option(help="Files of one policy whose rows share a prefill (4).")
    ] = None,
    exact: Annotated[
        str | None,
        typer.Option(help="Announce the exact class for files in this dtype: float32, bfloat16."),
    ] = None,
    exact_engine: Annotated[
        str | None, typer.Option(help="Engine of these files: plain (default) or vllm.")
    ] = None,
    first_answer_seconds: FirstAnswer = None,
    allow_private: AllowPrivate = None,
    mirror: Annotated[
        Path | None,
        typer.Option(help="Folder: keep a copy of what rewards and slashes depend on."),
    ] = None,
    mirror_listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve the copy there.")
    ] = None,
    mirror_url: Annotated[str | None, typer.Option(help="URL of the copy for others.")] = None,
    mirror_gb: Annotated[float | None, typer.Option(help="Largest size of the copy (20).")] = None,
    log_level: LogLevel = None,
) -> None:
    """Judge the files assigned to this validator until SIGTERM. May use a GPU."""
    flags = dict(locals())
    from prime_validator.run import run as judge
    from prime_validator.settings import Settings

    judge(_loaded(Settings, flags))


@app.command()
def doctor(
    orchestrator: Url = None,
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    chain_poll_seconds: PollSeconds = None,
    wallet: Wallet = None,
    data: Data = None,
    config: ConfigFile = None,
    deployment: Contract = None,
    device: Device = None,
    dtype: Dtype = None,
    policies: Policies = None,
    policy_memory_mb: PolicyMemory = None,
    json_output: Json = False,
) -> None:
    """Check machine, network, appointment and bond. Needs no password. Exits with 1 if the
    validator could not judge."""
    flags = dict(locals())
    from prime_core.doctor import show
    from prime_validator.doctor import examine
    from prime_validator.settings import Settings

    del flags["json_output"]
    if not show(examine(_loaded(Settings, flags)), as_json=json_output):
        raise typer.Exit(1)


@app.command()
@sends_transactions
def bond(session: ChainSession, amount: Tokens) -> Done:
    """Bond stake for this account's verdicts."""
    from prime_chain import flows

    wei = parse_amount(amount)
    session.require_tokens(wei)
    session.perform(flows.stake(session.contracts, session.account, wei))
    return _stake_facts(session)


@app.command()
@sends_transactions
def unbond(session: ChainSession, amount: Tokens) -> Done:
    """Start to take the bond out. It stays slashable until it is withdrawn."""
    session.perform([session.contracts.vault.unbond(parse_amount(amount))])
    return _stake_facts(session)


@app.command()
@sends_transactions
def rebond(session: ChainSession, amount: Tokens) -> Done:
    """Bond again what is on its way out."""
    session.perform([session.contracts.vault.rebond(parse_amount(amount))])
    return _stake_facts(session)


@app.command()
@sends_transactions
def withdraw(session: ChainSession) -> Done:
    """Take out the stake that has finished unbonding."""
    session.perform([session.contracts.vault.withdraw()])
    return _stake_facts(session)


@app.command()
@sends_transactions
def resign(session: ChainSession, pool: PoolNumber) -> Done:
    """Give up the role in a pool. Open proposals stay open."""
    session.perform([session.contracts.pools.resign(pool)])
    facts = {"pool": pool, "validator": session.account, "on": False}
    return Done(facts, f"{session.account} judges no longer in pool {pool}")


@app.command("announce-mirror")
@sends_transactions
def announce_mirror(
    session: ChainSession,
    pool: PoolNumber,
    url: Annotated[str, typer.Argument(help="URL of the mirror; empty takes it back.")],
) -> Done:
    """Announce this validator's mirror on chain. It serves a copy of the pool's evidence
    and tables."""
    session.perform([session.contracts.work.announce_mirror(pool, url)])
    said = f"pool {pool} names {url}" if url else f"pool {pool} names no mirror"
    return Done(
        {"pool": pool, "validator": session.account, "url": url}, f"{said} for {session.account}"
    )


@app.command()
def status(
    rpc: Rpc,
    deployment: File,
    account: Account,
    pool: PoolNumber,
    data: Annotated[Path | None, typer.Option(help="Count the opinions in this folder.")] = None,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
) -> None:
    """Show appointment, bond and open proposals."""
    from prime_chain.contracts import Binding

    target = ids.address(account)
    if data is not None and not (data / "validator.sqlite").is_file():
        raise UserError(f"{data} is not a validator's folder", hint="name that of validator run")
    with open_contracts(rpc, deployment, rpc_quorum) as contracts:
        found = _status(contracts, target, pool)
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
    typer.echo(f"validator {target} of pool {pool}: {able}")
    ask = f"no; the manager types: orchestrator pool set-validator {target} --pool {pool}"
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
@sends_transactions
def claim(
    session: ChainSession,
    pool: PoolNumber,
    orchestrator: Server,
) -> Done:
    """Claim what the account earned by judging files."""
    from prime_chain.claims import Payable
    from prime_core.transport.client import OrchestratorClient

    with OrchestratorClient(orchestrator) as server:
        found = Payable(server, session.contracts, pool).claim_of(session.account)
    paid = found.cumulative - session.contracts.rewards.claimed(pool, session.account)
    session.perform([session.contracts.rewards.claim(found)])
    facts = {"pool": pool, "epoch": found.epoch, "paid": str(paid)}
    return Done(facts, f"{prime(paid)} paid to {session.account}")


@app.command("sign-table")
@sends_transactions
def sign_table(
    session: ChainSession,
    pool: PoolNumber,
    settlement: Annotated[Path, typer.Argument(help="File of the settlement.")],
) -> Done:
    """Sign the table of what the pool owes. For `orchestrator rewards post-table`; sends nothing.

    Checks that the settlement is of this pool and adds up, not that the files earned it.
    """
    from prime_core.settlement import read_settlement

    found = read_settlement(settlement)
    if (found.chain_id, found.pool) != (session.deployment.chain_id, pool):
        raise UserError(f"the settlement is of pool {found.pool} on chain {found.chain_id}")
    if sum(found.amounts().values()) != int(found.cumulative_total):
        raise UserError("the settlement's amounts do not sum to its total")
    table = found.table()
    signature = session.require_signer().sign(table, session.deployment.domain_of(table))
    return Done({"epoch": table.epoch, "root": table.root, "signature": signature}, signature)


@app.command()
def rewards(
    orchestrator: Server,
    account: Account,
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    deployment: Contract = None,
    json_output: Json = False,
) -> None:
    """Show what the account earned by judging files. With an RPC, also what of it was paid."""
    from prime_chain.link import deployment_for
    from prime_core.messages import RewardInfo
    from prime_core.transport.client import OrchestratorClient

    target = ids.address(account)
    with OrchestratorClient(orchestrator) as server:
        info = server.get(f"/v1/rewards/{target}", RewardInfo)
        pool = server.pool()
    found: dict[str, Any] = info.model_dump(mode="json") | {"paid": None}
    if rpc:
        from prime_chain.client import ChainClient
        from prime_chain.contracts import Contracts

        place = deployment_for(pool, rpc, deployment, quorum=rpc_quorum)
        client = ChainClient(rpc, place.chain_id, quorum=rpc_quorum)
        try:
            found["paid"] = str(Contracts(client, place).rewards.claimed(pool.pool, target))
        finally:
            client.close()
    if json_output:
        typer.echo(json.dumps(found))
        return
    if info.epoch is None:
        typer.echo("no reward root is on chain yet")
        return
    typer.echo(f"{target}: {prime(int(info.cumulative))} earned up to epoch {info.epoch}")
    if found["paid"] is not None:
        typer.echo(f"  {prime(int(found['paid']))} of it paid")


# -- juror -----------------------------------------------------------------------------------------


@juror_app.command("register")
@sends_transactions
def juror_register(session: ChainSession, verification_class: Class = None) -> Done:
    """Bond for the court. From now on this account can be drawn for disputes of other pools.

    A drawn juror that does not vote loses a tenth of the bond: keep `validator juror run` running.
    """
    c, name = session.contracts, _class(verification_class)
    needed = c.court.juror_bond()
    session.require_tokens(needed)
    short = c.token.allowance(session.account, c.court.address) < needed
    approve = [c.token.approve(c.court.address, needed)] if short else []
    session.perform([*approve, c.court.register(name)])
    facts = {"juror": session.account, "class": name, "bond": str(needed)}
    return Done(facts, f"{session.account} is a juror of class {name}, with {prime(needed)} bonded")


@juror_app.command("leave")
@sends_transactions
def juror_leave(session: ChainSession, verification_class: Class = None) -> Done:
    """Leave the register of jurors. Votes in open cases are still due; then `withdraw` the bond."""
    name = _class(verification_class)
    session.perform([session.contracts.court.leave(name)])
    facts = {"juror": session.account, "class": name, "registered": False}
    return Done(facts, f"{session.account} is not drawn any more for class {name}")


@juror_app.command("withdraw")
@sends_transactions
def juror_withdraw(session: ChainSession, verification_class: Class = None) -> Done:
    """Take the bond back after leaving. The account's cases must be settled."""
    name = _class(verification_class)
    bond = session.contracts.court.juror_of(name, session.account).bond
    session.perform([session.contracts.court.withdraw(name)])
    facts = {"juror": session.account, "class": name, "withdrawn": str(bond)}
    return Done(facts, f"{prime(bond)} returned to {session.account}")


@juror_app.command("collect")
@sends_transactions
def juror_collect(session: ChainSession) -> Done:
    """Collect the pay for votes; `juror run` does it by itself."""
    pay = session.contracts.court.pay_of(session.account)
    session.perform([session.contracts.court.collect()])
    facts = {"juror": session.account, "paid": str(pay)}
    return Done(facts, f"{prime(pay)} paid to {session.account}")


@juror_app.command("status")
def juror_status(
    rpc: Rpc,
    deployment: File,
    account: Annotated[str, typer.Argument(help="Address of the juror.")],
    verification_class: Class = None,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
) -> None:
    """Show bond, seat, pay and open cases of a juror."""
    from prime_validator.juror import status_of

    with open_contracts(rpc, deployment, rpc_quorum) as contracts:
        found = status_of(contracts, ids.address(account), _class(verification_class))
    if json_output:
        typer.echo(json.dumps(found))
        return
    seated = "registered" if found["registered"] else "not registered"
    typer.echo(f"juror {found['juror']} of class {found['class']}: {seated}")
    typer.echo(
        f"  bond       {prime(int(found['bond']))}, {prime(int(found['bond_needed']))} needed"
    )
    typer.echo(f"  pay        {prime(int(found['pay']))}")
    typer.echo(f"  register   {found['jurors']} jurors (the court judges from seven on)")
    for case in found["cases"]:
        done = (
            case["vote"] if case["vote"] != "none" else "committed" if case["committed"] else "due"
        )
        typer.echo(
            f"  case       {case['leaf']}  vote {done}; reveal by {utc(case['reveal_until'])}"
        )


@juror_app.command("run")
def juror_run(
    orchestrator: Annotated[
        list[str] | None,
        typer.Option(help="Orchestrator, or mirror, of a pool to judge for; repeat for more."),
    ] = None,
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    chain_poll_seconds: PollSeconds = None,
    wallet: Wallet = None,
    data: Data = None,
    config: ConfigFile = None,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    deployment: Contract = None,
    source: Sources = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    allow_private: AllowPrivate = None,
    log_level: LogLevel = None,
) -> None:
    """Replay drawn disputes, vote and collect pay until SIGTERM. May use a GPU."""
    flags = dict(locals())
    from prime_validator.juror import run as judge
    from prime_validator.settings import JurorSettings

    judge(_loaded(JurorSettings, flags))


def _loaded(kind: type[AnySettings], flags: dict[str, Any]) -> AnySettings:
    """Settings of `kind` from a command's parameters, environment and the file of --config."""
    from prime_core.settings import load_settings, settings_file

    return load_settings(kind, flags, settings_file(flags.pop("config")))


def _class(given: str | None) -> ids.Digest:
    if given is not None:
        return ids.digest(given)
    from prime_verify.proofs.thresholds import newest

    return newest().digest()


def _status(contracts: Contracts, account: ids.Address, pool: int) -> dict[str, Any]:
    from prime_chain import flows, history

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


def _stake_facts(session: ChainSession) -> Done:
    from prime_chain import flows

    view = flows.stake_view(
        session.contracts, session.account, session.client.agreed_block("latest").time
    )
    facts = {
        "validator": session.account,
        "active": str(view.active),
        "unbonding": str(sum(one.amount for one in view.unbonding)),
    }
    return Done(facts, f"{session.account} has {prime(view.active)} bonded")


def main() -> None:
    """Entry point."""
    run_program(app, "validator")


if __name__ == "__main__":
    main()
