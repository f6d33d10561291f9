"""`orchestrator pool create|fund|show|end`: a pool's life on chain, by its manager's key.

Transactions are journalled: a command that was interrupted is taken up again by typing it again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from protocol.chain import history
from protocol.chain.amounts import parse_amount, prime
from protocol.chain.client import Call, ChainClient
from protocol.chain.contracts import Contracts
from protocol.chain.deployment import Deployment
from protocol.chain.events import PoolCreated
from protocol.chain.journal import Intent
from protocol.chain.keystore import load_keystore, read_password
from protocol.chain.sender import Sender
from protocol.core import ids
from protocol.core.errors import ConflictError, FatalError, UserError
from protocol.core.ids import ZERO_ADDRESS, Address
from protocol.run_file import read_run

app = typer.Typer(
    help="Create, fund, show and end a pool.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Rpc = Annotated[list[str], typer.Option("--rpc", help="RPC endpoint; repeat for more.")]
File = Annotated[Path, typer.Option("--deployment", help="Deployment JSON.")]
Wallet = Annotated[Path, typer.Option("--wallet", help="Keystore of the pool's manager.")]
PasswordFile = Annotated[
    Path | None, typer.Option("--password-file", help="File with its password.")
]
PasswordFd = Annotated[int | None, typer.Option("--password-fd", help="Open descriptor with it.")]
Pool = Annotated[int, typer.Option("--pool", help="Number of the pool.", min=0)]
JournalFile = Annotated[
    Path | None,
    typer.Option("--journal", help="Journal of transactions (default: beside the deployment)."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print calldata; send nothing.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@dataclass(frozen=True)
class Desk:
    """The manager at the chain. With `dry_run` its calls are collected and nothing is sent."""

    contracts: Contracts
    sender: Sender
    dry_run: bool
    calls: list[Call]

    @property
    def manager(self) -> Address:
        return self.sender.address

    def send(self, intent_id: str, call: Call) -> Intent | None:
        """Sends and waits; the same id is sent once. None in a dry run."""
        self.calls.append(call)
        return None if self.dry_run else self.sender.send_and_wait(intent_id, call)

    def dry_json(self) -> list[dict[str, str]]:
        """The calls of a dry run, as a multisig wants them."""
        return [
            {"to": call.to or "", "data": call.calldata(), "description": call.description}
            for call in self.calls
        ]


@app.command()
def create(
    rpc: Rpc,
    deployment: File,
    wallet: Wallet,
    run: Annotated[Path, typer.Option(help="Run definition (canonical JSON).")],
    trainer: Annotated[str, typer.Option(help="Account that signs policies.")],
    validator: Annotated[
        list[str] | None, typer.Option(help="Account to appoint as validator; repeat for more.")
    ] = None,
    capacity: Annotated[int, typer.Option(help="Most nodes at a time.", min=1)] = 1000,
    treasury: Annotated[
        str, typer.Option(help="Account that receives slashed stake; burned if not given.")
    ] = "",
    faucet: Annotated[
        bool, typer.Option("--faucet", help="Take 10,000 test tokens first (test networks).")
    ] = False,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    journal: JournalFile = None,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Create a pool for a run definition and appoint its validators; prints its number.

    Typed again with the same arguments it finishes or repeats its answer; for a second pool of the
    same run, name another --journal.
    """
    place = Deployment.load(deployment)
    definition = read_run(run)
    place.check_run(definition)
    signs, judges = ids.address(trainer), [ids.address(v) for v in validator or ()]
    pays = ids.address(treasury) if treasury else ZERO_ADDRESS
    with _desk(rpc, place, deployment, wallet, password_file, password_fd, journal, dry_run) as d:
        if faucet:
            d.send(f"faucet/{definition.digest()}", d.contracts.token.faucet())
        call = d.contracts.pools.create(
            signs, definition.digest(), definition.stake_per_class, capacity, pays
        )
        done = d.send(f"create/{definition.digest()}/{signs}/{capacity}/{pays}", call)
        if done is None:
            _echo_dry(d, json_output)
            return
        pool = _created(d, place, done)
        for account in judges:
            d.send(
                f"validator/{pool}/{account}", d.contracts.pools.set_validator(pool, account, True)
            )
    answer = {
        "pool": pool,
        "manager": d.manager,
        "trainer": signs,
        "validators": judges,
        "run_digest": definition.digest(),
        "transaction": done.tx_hash,
    }
    if json_output:
        typer.echo(json.dumps(answer))
    else:
        typer.echo(f"pool {pool} is created for run {definition.digest()}")


@app.command()
def fund(
    rpc: Rpc,
    deployment: File,
    wallet: Wallet,
    pool: Pool,
    amount: Annotated[str, typer.Option(help="Whole tokens, e.g. 5000 or 12.5.")],
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    journal: JournalFile = None,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Add to what the pool can pay out as rewards."""
    wei = parse_amount(amount)
    place = Deployment.load(deployment)
    with _desk(rpc, place, deployment, wallet, password_file, password_fd, journal, dry_run) as d:
        c = d.contracts
        if not dry_run:
            held = c.token.balance_of(d.manager)
            if held < wei:
                raise UserError(
                    f"{d.manager} holds {prime(held)}, less than {prime(wei)}",
                    hint="send it tokens, or on a test network create the pool with --faucet",
                )
        occasion = secrets.token_hex(8)  # two fundings of the same amount are two facts
        if c.token.allowance(d.manager, c.rewards.address) < wei:
            d.send(f"approve/{occasion}", c.token.approve(c.rewards.address, wei))
        done = d.send(f"fund/{pool}/{occasion}", c.rewards.fund(pool, wei))
        if done is None:
            _echo_dry(d, json_output)
            return
        free = c.rewards.funds(pool).free
    if json_output:
        answer = {"pool": pool, "added": str(wei), "free": str(free), "transaction": done.tx_hash}
        typer.echo(json.dumps(answer))
    else:
        typer.echo(f"pool {pool} has {prime(free)} free for rewards")


@app.command()
def show(rpc: Rpc, deployment: File, pool: Pool, json_output: Json = False) -> None:
    """What the chain says of a pool: who runs it, its members, its money."""
    place = Deployment.load(deployment)
    client = ChainClient(rpc, place.chain_id)
    try:
        contracts = Contracts(client, place)
        found = _pool(contracts, pool)
        funds = contracts.rewards.funds(pool)
    finally:
        client.close()
    facts: dict[str, Any] = {"pool": pool, **asdict(found)}
    facts |= {
        "stake_per_class": str(found.stake_per_class),
        "free": str(funds.free),
        "reserved": str(funds.reserved),
    }
    if json_output:
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"pool {pool}{' (ended)' if found.ended else ''}")
    typer.echo(f"  manager   {found.manager}")
    typer.echo(f"  trainer   {found.trainer}")
    burned = int(found.treasury, 16) == 0
    typer.echo(f"  treasury  {'none: slashed stake is burned' if burned else found.treasury}")
    typer.echo(f"  run       {found.run_digest}")
    typer.echo(f"  nodes     {found.members} of {found.capacity}")
    typer.echo(f"  stake     {prime(found.stake_per_class)} a speed class")
    typer.echo(f"  rewards   {prime(funds.free)} free, {prime(funds.reserved)} promised")


@app.command()
def end(
    rpc: Rpc,
    deployment: File,
    wallet: Wallet,
    pool: Pool,
    refund: Annotated[
        bool, typer.Option("--refund", help="Take back what is promised to nobody, at once.")
    ] = False,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    journal: JournalFile = None,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """End a pool for good: no new members, policies or work.

    Refund after the last reward roots are posted: what is refunded cannot pay them.
    """
    place = Deployment.load(deployment)
    with _desk(rpc, place, deployment, wallet, password_file, password_fd, journal, dry_run) as d:
        if dry_run or not _pool(d.contracts, pool).ended:
            d.send(f"end/{pool}", d.contracts.pools.end(pool))
        if refund:
            d.send(f"refund/{pool}/{secrets.token_hex(8)}", d.contracts.rewards.refund(pool))
        if dry_run:
            _echo_dry(d, json_output)
            return
    if json_output:
        typer.echo(json.dumps({"pool": pool, "ended": True, "refunded": refund}))
    else:
        typer.echo(f"pool {pool} is ended")


# ── below ────────────────────────────────────────────────────────────────────────────────────────


def _created(desk: Desk, deployment: Deployment, done: Intent) -> int:
    assert done.tx_hash is not None
    for event in history.transaction_events(desk.sender.client, deployment, done.tx_hash):
        if isinstance(event, PoolCreated):
            return event.pool
    raise FatalError(f"transaction {done.tx_hash} created no pool")


def _pool(contracts: Contracts, pool: int) -> Any:
    try:
        return contracts.pools.pool_of(pool)
    except ConflictError as error:
        raise UserError(
            f"there is no pool {pool} on this chain: {error}", hint="check --pool and --deployment"
        ) from error


@contextmanager
def _desk(
    rpc: list[str],
    deployment: Deployment,
    file: Path,
    wallet: Path,
    password_file: Path | None,
    password_fd: int | None,
    journal: Path | None,
    dry_run: bool,
) -> Iterator[Desk]:
    signer = load_keystore(
        wallet, read_password(password_file, password_fd, prompt=f"Password of {wallet}: ")
    )
    client = ChainClient(rpc, deployment.chain_id)
    path = journal or file.with_name(f"{file.stem}.{signer.address}.journal.sqlite")
    try:
        client.check()
        if not dry_run:
            client.require_funds(signer.address)
        sender = Sender(client, signer, path)
        try:
            for left in sender.open_intents() if not dry_run else ():
                typer.echo(f"finishing what was interrupted: {left.call.description}", err=True)
                sender.wait(left.id, 120.0)
            yield Desk(Contracts(client, deployment), sender, dry_run, [])
        finally:
            sender.close()
    finally:
        client.close()


def _echo_dry(desk: Desk, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps({"dry_run": True, "calls": desk.dry_json()}))
        return
    for call in desk.dry_json():
        typer.echo(f"# {call['description']}\nto   {call['to']}\ndata {call['data']}")
