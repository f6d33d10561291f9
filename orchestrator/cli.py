"""`orchestrator`: everything an operator types.

Sub-commands are imported when they are called, so that `--help` answers at once and `serve` never
loads what only the validator needs (torch). Expected errors are one sentence and an exit code.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from protocol.core.errors import PrimeError
from protocol.core.printing import last_words

app = typer.Typer(
    name="orchestrator",
    help="Runs a pool: leases, intake, validation, batches, policies, settlement.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
store_app = typer.Typer(help="The store behind the API.", no_args_is_help=True)
app.add_typer(store_app, name="store")

_ELSEWHERE = {
    "validate": ("orchestrator.validator_cli", "Judge submitted files (may use a GPU)."),
    "calibrate": ("orchestrator.calibrate_cli", "Measure honest drift; write the limits."),
    "relay": ("orchestrator.relay", "Serve policies to nodes, from an origin or another relay."),
    "run": ("orchestrator.run_cli", "Make and read run definitions."),
    "env": ("orchestrator.env_cli", "Contribute, check and review environments."),
    "pool": ("orchestrator.pool_cli", "Create, fund, show and end a pool; its members."),
    "validator": ("orchestrator.validators_cli", "A validator's bond and word in disputes."),
    "slash": ("orchestrator.slash_cli", "Slash proposals; the guardian's cancel and disable."),
    "terms": ("orchestrator.terms_cli", "Dispute deposit, validators' bond, and the governor."),
    "rewards": ("orchestrator.rewards_cli", "Show, explain and rebuild reward roots."),
    "deployment": ("orchestrator.deployment_cli", "Deploy the contracts, or check a deployment."),
}
"""Command name → (module that holds its Typer `app`, help line)."""


def _forward(name: str, module: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        target = importlib.import_module(module)
        target.app(args=context.args, prog_name=f"orchestrator {name}")

    return command


for _name, (_module, _help) in _ELSEWHERE.items():
    app.command(
        _name,
        help=_help,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_forward(_name, _module))

Config = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of the store and its objects.")]
Database = Annotated[
    str | None,
    typer.Option("--database", help="sqlite:///PATH or postgresql://… (default: in --data)."),
]


@app.command()
def serve(
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    public_url: Annotated[
        str | None, typer.Option(help="How nodes reach this server (behind a proxy).")
    ] = None,
    data: Data = None,
    database: Database = None,
    objects: Annotated[Path | None, typer.Option(help="Folder of the object store.")] = None,
    deployment: Annotated[Path | None, typer.Option(help="Deployment JSON.")] = None,
    rpc: Annotated[list[str] | None, typer.Option(help="RPC endpoint; repeat for more.")] = None,
    pool: Annotated[int | None, typer.Option(help="Number of the pool on chain.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run definition (canonical JSON).")] = None,
    wallet: Annotated[Path | None, typer.Option(help="Keystore of the pool's manager.")] = None,
    password_file: Annotated[Path | None, typer.Option(help="File with its password.")] = None,
    password_fd: Annotated[int | None, typer.Option(help="Open descriptor with it.")] = None,
    allow_relay: Annotated[
        list[str] | None,
        typer.Option(help="Account that may announce a relay without a seat; repeat for more."),
    ] = None,
    planted: Annotated[
        list[str] | None,
        typer.Option(help="Node of the manager's own whose files are planted; repeat for more."),
    ] = None,
    planted_secret: Annotated[
        Path | None, typer.Option(help="File with the secret that planted nodes share with us.")
    ] = None,
    planted_one_in: Annotated[
        int | None, typer.Option(help="One lease in so many goes to them (default 50).")
    ] = None,
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            help="Address or network of a reverse proxy whose X-Forwarded-For says who asks; "
            "repeat for more. By default nobody's is believed.",
        ),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Serve the API and run its loops (chain, batches, settlement) until SIGTERM."""
    flags: dict[str, object] = dict(locals())
    from orchestrator.config import load
    from orchestrator.serve import run as run_server

    del flags["config"]
    lists = {
        "rpc": tuple(rpc or ()),
        "allow_relay": tuple(allow_relay or ()),
        "planted": tuple(planted or ()),
        "trusted_proxies": tuple(trusted_proxies or ()),
    }
    run_server(load(flags | lists, config))


@store_app.command()
def migrate(config: Config = None, data: Data = None, database: Database = None) -> None:
    """Bring the database's schema up to date (`serve` does it by itself)."""
    from orchestrator.config import load
    from orchestrator.store import open_store

    settings = load({"data": data, "database": database}, config)
    store = open_store(settings.database_url)
    try:
        store.migrate()
    finally:
        store.close()
    typer.echo("the schema is up to date")


def main() -> None:
    """Entry point: expected errors become one sentence on stderr and their exit code."""
    try:
        app(prog_name="orchestrator")
    except PrimeError as error:
        print(last_words("orchestrator", error), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
