"""`orchestrator quickstart`: makes a pool from nothing, step by step. Run again, it resumes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_chain import networks
from prime_chain.chain_session import Rpc
from prime_core.command_line import Json, command
from prime_core.deployment import Periods
from prime_core.errors import UserError
from prime_core.waiting import until_stopped
from prime_orchestrator.cli.deployment import (
    DEFAULTS,
    DisputeWindow,
    Epoch,
    RewardDelay,
    SlashWindow,
    Unbonding,
    Validity,
)

if TYPE_CHECKING:
    from prime_orchestrator.quickstart import Found, Quickstart

MARKS = {"done": "✓", "to do": "…", "waits": "…", "failed": "✗", "note": "!"}
STARTED = ("orchestrator", "validator", "relay")

app = command()


@app.command()
def quickstart(
    folder: Annotated[Path, typer.Argument(help="Folder for keys, settings and data.")],
    rpc: Rpc,
    run: Annotated[Path, typer.Option(help="TOML file of the run; see docs/examples.")],
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the base model.")],
    network: Annotated[str, typer.Option(help="local, base-sepolia or base.")] = "local",
    deployment: Annotated[
        Path | None, typer.Option(help="Contracts that exist; else they are deployed.")
    ] = None,
    multisig: Annotated[
        str, typer.Option(help="Gets the contracts' roles and supply (on base: needed).")
    ] = "",
    validators: Annotated[int, typer.Option(help="How many to appoint.", min=1)] = 2,
    fund: Annotated[str, typer.Option(help="Rewards to put in, in whole tokens.")] = "5000",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API.", min=1, max=65_535)] = 8470,
    public_url: Annotated[str, typer.Option(help="How others reach the API.")] = "",
    relay_url: Annotated[str, typer.Option(help="How others reach the relay, on port 8480.")] = "",
    origin_url: Annotated[
        str, typer.Option(help="How others reach the trainer, on port 8475.")
    ] = "",
    epoch: Epoch = DEFAULTS.epoch_length,
    validity: Validity = DEFAULTS.validity,
    slash_window: SlashWindow = DEFAULTS.slash_window,
    dispute_window: DisputeWindow = DEFAULTS.dispute_window,
    reward_delay: RewardDelay = DEFAULTS.reward_delay,
    unbonding: Unbonding = DEFAULTS.unbonding,
    check: Annotated[
        bool, typer.Option("--check", help="Look at everything; change nothing.")
    ] = False,
    start: Annotated[
        bool,
        typer.Option("--start", help="Then run orchestrator, validators and relay until Ctrl-C."),
    ] = False,
    json_output: Json = False,
) -> None:
    """From nothing to a running pool: keys, contracts, run, pool, bonds, funds, settings.

    What is done already is left alone. Ends with exit code 64 where ether or tokens have to be sent
    to its accounts, and says how much; with 69 if the endpoint does not answer. With --check, exit
    code 1 means that something is wrong; missing ether is not.
    """
    from prime_orchestrator.quickstart import AGAIN, Plan, Quickstart

    plan = Plan(
        folder=folder.absolute(), network=networks.by_name(network), rpc=tuple(rpc),
        run=run.absolute(), model=model.absolute(),
        deployment=deployment.absolute() if deployment else None, multisig=multisig,
        validators=validators, fund=fund, host=host, port=port, public_url=public_url,
        relay_url=relay_url, origin_url=origin_url,
        periods=Periods(
            epoch_length=epoch, validity=validity, slash_window=slash_window,
            dispute_window=dispute_window, reward_delay=reward_delay, unbonding=unbonding,
        ),
    )  # fmt: skip
    steps = Quickstart(plan, lambda line: typer.echo(f"$ {line}", err=True))
    try:
        if start and steps.lacks_urls:
            raise UserError(
                f"the API is public at {steps.url}, but relay and origin are not: "
                "nodes would get no policy",
                hint="add --relay-url and --origin-url https://…: proxies for port 8480 here, and "
                "8475 where the trainer runs",
            )
        found = [_printed(one, json_output) for one in (steps.look() if check else steps.go())]
        if check:
            if any(one.state == "failed" for one in found):
                raise typer.Exit(1)
            return
        last = found[-1]
        if last.state != "done":
            code = None if steps.error is None else steps.error.exit_code
            raise UserError(f"{last.name}: {last.said}", hint=AGAIN, exit_code=code)
        commands = steps.commands()
        if json_output:
            typer.echo(json.dumps({"url": steps.url, "commands": commands}))
        else:
            for name, words in commands.items():
                if not (start and name.startswith(STARTED)):
                    typer.echo(f"{name}: {shlex.join(words)}")
        if start:
            _supervise(steps)
    finally:
        steps.close()


def _printed(found: Found, json_output: bool) -> Found:
    line = json.dumps(asdict(found)) if json_output else (
        f"{MARKS[found.state]} {found.name}: {found.said}"
    )  # fmt: skip
    typer.echo(line)
    sys.stdout.flush()
    return found


def _supervise(steps: Quickstart) -> None:
    """Runs the programs in the folder until a signal comes or one of them ends."""
    stop = until_stopped()
    commands = {name: words for name, words in steps.commands().items() if name.startswith(STARTED)}
    with _children(commands, steps.folder) as children:
        typer.echo(f"{steps.url} starts; logs are in {steps.folder}", err=True)
        while not stop.wait(0.5):
            for name, child in children.items():
                if (code := child.poll()) is not None:
                    raise UserError(
                        f"{name} ended with exit code {code}", hint=f"see {name}.log in the folder"
                    )


@contextmanager
def _children(
    commands: dict[str, list[str]], folder: Path
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Starts each command with its output in <name>.log; ends all of them, the last one first."""
    children: dict[str, subprocess.Popen[bytes]] = {}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        for name, words in commands.items():
            with (folder / f"{name}.log").open("ab") as log:
                children[name] = subprocess.Popen(
                    words, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env=os.environ | {"PATH": path}, start_new_session=True,
                )  # fmt: skip
        yield children
    finally:
        for child in reversed(children.values()):
            child.terminate()
        for child in children.values():
            child.wait()
