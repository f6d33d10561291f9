"""What every command that sends transactions shares: its flags, its sender, and how it answers.

    send        journalled, one after the other; after an interruption the same command goes on
    --dry-run   nothing is sent: what each transaction would cost, or why it would be refused
                (then the exit code is not 0)
    --calldata  nothing is sent: what a multisig or another wallet has to send

Neither of the last two needs a password: `--sender` names the account, or the keystore does.
What talks to the chain is imported when a session opens, so that `--help` does not wait for it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prime_chain.amounts import ether, prime
from prime_chain.errors import ChainRevertedError
from prime_core import ids
from prime_core.command_line import (
    Json,
    PasswordFd,
    PasswordFile,
    PollSeconds,
    Quorum,
    as_typed,
    with_options,
)
from prime_core.errors import UserError
from prime_core.ids import Address

if TYPE_CHECKING:
    from prime_chain.client import Call, ChainClient
    from prime_chain.contracts import Contracts, Pool
    from prime_chain.costs import Cost
    from prime_chain.sender import Sender
    from prime_chain.transaction_queue import Intent
    from prime_core.deployment import Deployment
    from prime_core.signing import LocalSigner

Mode = Literal["send", "dry-run", "calldata"]

Rpc = Annotated[list[str], typer.Option("--rpc", help="RPC endpoint; repeat for more.")]
File = Annotated[Path, typer.Option("--deployment", help="Deployment JSON.")]
PoolNumber = Annotated[
    int, typer.Option("--pool", help="Number of the pool.", min=0, max=(1 << 63) - 1)
]
Amount = Annotated[str, typer.Option(help="Whole tokens, e.g. 5000 or 12.5.")]

_FLAGS: dict[str, tuple[Any, Any]] = {
    "rpc": (Rpc, inspect.Parameter.empty),
    "rpc_quorum": (Quorum, None),
    "chain_poll_seconds": (PollSeconds, None),
    "deployment": (File, inspect.Parameter.empty),
    "wallet": (
        Annotated[Path | None, typer.Option("--wallet", help="Keystore of the account.")],
        None,
    ),
    "password_file": (
        PasswordFile,
        None,
    ),
    "password_fd": (
        PasswordFd,
        None,
    ),
    "sender": (
        Annotated[
            str,
            typer.Option("--sender", help="Account that would send, with --dry-run or --calldata."),
        ],
        "",
    ),
    "journal": (
        Annotated[
            Path | None,
            typer.Option(
                "--journal",
                help="File that records its transactions (default: next to the deployment).",
            ),
        ],
        None,
    ),
    "dry_run": (
        Annotated[bool, typer.Option("--dry-run", help="Show calldata and gas; send nothing.")],
        False,
    ),
    "calldata": (
        Annotated[
            bool,
            typer.Option("--calldata", help="Print what a multisig has to send; send nothing."),
        ],
        False,
    ),
    "json_output": (Json, False),
}


@dataclass(frozen=True)
class Done:
    """What a command has to say once its transactions are sent."""

    facts: dict[str, Any]
    said: str


@dataclass
class ChainSession:
    """An account at the chain. Unless `mode` is "send", its calls are collected and not sent."""

    contracts: Contracts
    deployment: Deployment
    account: Address
    mode: Mode
    signer: LocalSigner | None = None
    sender: Sender | None = None
    finished: Sequence[Intent] = ()
    """What was finished of an interrupted command when the session was opened."""
    act: str = ""
    """What the ids of `perform` begin with."""
    calls: list[Call] = field(default_factory=list, init=False)
    hashes: list[str] = field(default_factory=list, init=False)

    @property
    def client(self) -> ChainClient:
        return self.contracts.client

    @property
    def sends(self) -> bool:
        return self.mode == "send"

    def send(self, intent_id: str, call: Call) -> Intent | None:
        """Sends and waits; the same id is sent once. None where nothing is sent.

        Raises ChainRevertedError with the contract's reason.
        """
        self.calls.append(call)
        if self.sender is None:
            return None
        done = self.sender.send_and_wait(intent_id, call)
        assert done.tx_hash is not None
        self.hashes.append(done.tx_hash)
        return done

    def perform(self, calls: Sequence[Call]) -> None:
        """Sends each in order. The same command sends them again when it is run again, except for
        those of an interrupted command that this one has finished."""
        from prime_chain.sender import left_of

        for call in left_of(calls, self.finished, self.act):
            self.send(f"{self.act}:{len(self.calls)}", call)

    def require_signer(self) -> LocalSigner:
        """The key, for what has to be signed off chain. Raises UserError in a dry run."""
        if self.signer is None:
            raise UserError(
                "this needs the key itself: its signature is the result",
                hint="leave out --dry-run and --calldata, and give --wallet",
            )
        return self.signer

    def require_tokens(self, needed: int) -> None:
        """Raises UserError if the account holds less than `needed` wei of the token, and no
        interrupted command may have spent them."""
        held = self.contracts.token.balance_of(self.account)
        if self.sends and not self.finished and held < needed:
            raise UserError(
                f"{self.account} holds {prime(held)}, less than {prime(needed)}",
                hint="send it tokens, or on a test network take some: prime-node faucet",
            )

    def pool(self, number: int) -> Pool:
        """The pool's facts. Raises UserError if there is none of that number."""
        return pool_of(self.contracts, number)


@contextmanager
def open_contracts(
    rpc: Sequence[str], deployment: Path, quorum: int | None = None
) -> Iterator[Contracts]:
    """The contracts that a deployment file names, for reading."""
    from prime_chain.client import ChainClient
    from prime_chain.contracts import Contracts
    from prime_core.deployment import Deployment

    place = Deployment.load(deployment)
    client = ChainClient(rpc, place.chain_id, quorum=quorum)
    try:
        yield Contracts(client, place)
    finally:
        client.close()


def pool_of(contracts: Contracts, number: int) -> Pool:
    """The pool's facts. Raises UserError if there is none of that number."""
    try:
        return contracts.pools.pool_of(number)
    except ChainRevertedError as error:
        raise UserError(
            f"there is no pool {number} on this chain: {error.reason}",
            hint="check --pool and --deployment",
        ) from error


def sends_transactions(function: Callable[..., Done]) -> Callable[..., None]:
    """Makes a command of `function(session, own parameters …)`: adds the common flags, opens the
    session and prints the answer in the requested form."""

    def command(**values: Any) -> None:
        flags = {name: values.pop(name) for name in _FLAGS}
        json_output = flags.pop("json_output")
        with open_session(**flags, command=as_typed(function, values)) as session:
            done = function(session, **values)
            if session.sends:
                answer = done.facts | {"transactions": session.hashes}
                typer.echo(json.dumps(answer) if json_output else done.said)
            elif (refused := echo_unsent(session, json_output)) is not None:
                raise typer.Exit(refused.exit_code)

    return with_options(function, _FLAGS, command)


@contextmanager
def open_session(
    rpc: list[str],
    rpc_quorum: int | None,
    chain_poll_seconds: float | None,
    deployment: Path,
    wallet: Path | None,
    password_file: Path | None,
    password_fd: int | None,
    sender: str,
    journal: Path | None,
    dry_run: bool,
    calldata: bool,
    command: str,
) -> Iterator[ChainSession]:
    """The session that these flags describe. `command`: see Sender.acting. Raises UserError for
    what the user can correct."""
    from prime_chain.client import ChainClient
    from prime_chain.contracts import Contracts
    from prime_chain.networks import POLL_SECONDS
    from prime_chain.sender import Sender
    from prime_core.deployment import Deployment

    place = Deployment.load(deployment)
    mode: Mode = "calldata" if calldata else "dry-run" if dry_run else "send"
    opened = partial(
        ChainClient,
        rpc,
        place.chain_id,
        quorum=rpc_quorum,
        poll_seconds=chain_poll_seconds or POLL_SECONDS,
    )
    if mode != "send":
        account = _account(wallet, sender)
        client = opened()
        try:
            client.check()
            yield ChainSession(Contracts(client, place), place, account, mode)
        finally:
            client.close()
        return
    signer = _signer(wallet, sender, password_file, password_fd)
    client = opened()
    path = journal or deployment.with_name(f"{deployment.stem}.{signer.address}.journal.sqlite")
    try:
        client.check()
        client.require_funds(signer.address)
        out = Sender(client, signer, path)
        try:
            finished = out.finish_open(partial(typer.echo, err=True), command)
            with out.acting(command) as act:
                yield ChainSession(
                    Contracts(client, place),
                    place,
                    signer.address,
                    mode,
                    signer,
                    out,
                    finished,
                    act,
                )
        finally:
            out.close()
    finally:
        client.close()


def _signer(
    wallet: Path | None, sender: str, password_file: Path | None, password_fd: int | None
) -> LocalSigner:
    from prime_chain.keystore import open_keystore

    if wallet is None:
        raise UserError(
            "no wallet is named",
            hint="add --wallet KEYSTORE, or --calldata --sender ADDRESS to sign elsewhere",
        )
    signer = open_keystore(wallet, password_file, password_fd)
    if sender and ids.address(sender) != signer.address:
        raise UserError(
            f"the keystore {wallet} is of {signer.address}, not of {sender}",
            hint="add --calldata to print what that account has to send",
        )
    return signer


def _account(wallet: Path | None, sender: str) -> Address:
    from prime_chain.keystore import keystore_address

    if sender:
        return ids.address(sender)
    found = keystore_address(wallet) if wallet is not None else None
    if found is None:
        raise UserError(
            "nothing says which account would send", hint="add --sender ADDRESS, or --wallet"
        )
    return found


def echo_unsent(session: ChainSession, json_output: bool) -> ChainRevertedError | None:
    """Prints the collected calls: with their cost after a dry run, bare for a multisig. Returns
    the first refusal that a dry run met."""
    from prime_chain import costs

    found = (
        costs.rehearse(session.client, session.calls, session.account)
        if session.mode == "dry-run"
        else []
    )
    rows = [row_of(call) for call in session.calls]
    if found:
        rows = [row | cost_of(cost) for row, cost in zip(rows, found, strict=True)]
    if json_output:
        answer = {"chain_id": session.deployment.chain_id, "sender": session.account, "calls": rows}
        typer.echo(json.dumps({"dry_run": True} | answer))
        return costs.refusal(found)
    if not rows:
        typer.echo("nothing is left to be sent")
    for number, row in enumerate(rows):
        typer.echo(f"# {row['description']}\nto    {row['to']}\ndata  {row['data']}")
        if found:
            typer.echo(f"cost  {costs.words(found[number])}")
    if found and (wei := costs.total(found, session.client.fees())) is not None:
        typer.echo(f"# in all about {ether(wei)} at today's fees")
    return costs.refusal(found)


def row_of(call: Call) -> dict[str, Any]:
    """A call as a multisig wants it."""
    return {
        "to": call.to or "",
        "value": str(call.value),
        "data": call.calldata(),
        "description": call.description,
    }


def cost_of(cost: Cost) -> dict[str, Any]:
    """A rehearsed call's cost for JSON; `l1_fee_wei` None: this chain charges none."""
    fee = None if cost.l1_fee is None else str(cost.l1_fee)
    error = None
    if (why := cost.error) is not None:
        error = {"name": why.name, "reason": why.reason, "meaning": why.meaning}
    return {"gas": cost.gas, "l1_fee_wei": fee, "error": error}
