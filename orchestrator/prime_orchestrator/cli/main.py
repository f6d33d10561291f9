"""`orchestrator`: everything an operator types.

Sub-commands are imported when they are called, so that `--help` answers at once. Expected errors
are one sentence and an exit code.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from prime_core.command_line import (
    Json,
    LogLevel,
    PasswordFd,
    PollSeconds,
    group,
    program,
)
from prime_core.command_line import run as run_program
from prime_core.errors import UserError
from prime_core.ids import Digest
from prime_orchestrator.cli.storage import StoreOptions, with_database, with_objects, with_pool

_ELSEWHERE = {
    "quickstart": (
        "prime_orchestrator.cli.quickstart",
        "Set up a running pool from nothing, step by step.",
    ),
    "doctor": (
        "prime_orchestrator.cli.doctor",
        "Check an orchestrator. Every failure names its fix.",
    ),
    "status": (
        "prime_orchestrator.cli.status",
        "Show the pool, its nodes and its steps.",
    ),
    "costs": ("prime_orchestrator.cli.costs", "Show what the manager's transactions cost a day."),
    "calibrate": ("prime_orchestrator.cli.calibrate", "Measure honest drift; write the limits."),
    "classes": ("prime_orchestrator.cli.classes", "Show exact classes, and which are proven."),
    "relay": (
        "prime_orchestrator.relay",
        "Serve policies to nodes, from an origin or another relay.",
    ),
    "gateway": (
        "prime_orchestrator.cli.gateway",
        "Answer tool calls that need a network. Export them as a cassette.",
    ),
    "wallet": ("prime_chain.wallet_cli", "Make keys, and show their addresses."),
    "run": ("prime_orchestrator.cli.run", "Make, read and revise run definitions."),
    "rollouts": (
        "prime_orchestrator.cli.rollouts",
        "List, read and export rollout files.",
    ),
    "evaluations": (
        "prime_orchestrator.cli.evaluations",
        "Evaluate a policy by the pool's nodes, on held-out problems.",
    ),
    "env": ("prime_orchestrator.cli.env", "Contribute, check and review environments."),
    "pool": (
        "prime_orchestrator.cli.pool",
        "Create, fund, show and end a pool; choose its members.",
    ),
    "slash": ("prime_orchestrator.cli.slash", "List, execute and judge slash proposals."),
    "terms": (
        "prime_orchestrator.cli.terms",
        "Show and change deposits, bonds and their governor.",
    ),
    "rewards": ("prime_orchestrator.cli.rewards", "Show, explain and rebuild reward roots."),
    "deployment": (
        "prime_orchestrator.cli.deployment",
        "Deploy the contracts, or check a deployment.",
    ),
}
"""Command name → (module that holds its Typer `app`, help line)."""

app = program(
    "orchestrator",
    "Runs a pool: leases, intake, validation, batches, policies, settlement.",
    _ELSEWHERE,
)
store_app = group("The store behind the API.")
app.add_typer(store_app, name="store")


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def validate(context: typer.Context) -> None:
    """Judge submitted files. The same as `validator run`."""
    words = [sys.executable, "-m", "prime_validator.cli", "run", *context.args]
    os.execv(sys.executable, words)  # noqa: S606


@app.command()
@with_pool
def serve(
    options: StoreOptions,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    public_url: Annotated[
        str | None, typer.Option(help="How nodes reach this server (behind a proxy).")
    ] = None,
    also_known_as: Annotated[
        list[str] | None,
        typer.Option(help="Another URL at which clients reach this server; repeat for more."),
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(help="Standby of the PostgreSQL database; public pages are read from it."),
    ] = None,
    s3_public_endpoint: Annotated[
        str | None,
        typer.Option(help="URL at which nodes reach the S3 server, if it is a different one."),
    ] = None,
    rpc_ws: Annotated[
        list[str] | None,
        typer.Option(help="WebSocket endpoint that announces new blocks; repeat for more."),
    ] = None,
    chain_poll_seconds: PollSeconds = None,
    chain_idle_seconds: Annotated[
        float | None,
        typer.Option(help="Seconds between two reads of the chain while nothing is expected (12)."),
    ] = None,
    password_fd: PasswordFd = None,
    allow_relay: Annotated[
        list[str] | None,
        typer.Option(help="Account that may announce a relay without a seat; repeat for more."),
    ] = None,
    planted: Annotated[
        list[str] | None,
        typer.Option(help="Node of the manager's own whose files are planted; repeat for more."),
    ] = None,
    planted_secret: Annotated[
        Path | None, typer.Option(help="File with the secret that the planted nodes also have.")
    ] = None,
    planted_one_in: Annotated[
        int | None, typer.Option(help="One lease in N goes to planted nodes (default 50).")
    ] = None,
    lease_slots: Annotated[
        int | None, typer.Option(help="Most leases that a node holds open at once (default 4).")
    ] = None,
    remeasure_seconds: Annotated[
        float | None,
        typer.Option(
            help="Mean time between two random measurements of a node's cards (default 86400; "
            "0: never)."
        ),
    ] = None,
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            help="Address or network of a reverse proxy whose X-Forwarded-For says who asks; "
            "repeat for more. By default no proxy is trusted.",
        ),
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Serve the API and run its loops until SIGTERM."""
    flags: dict[str, object] = dict(locals())
    from prime_orchestrator.serve import run as run_server

    del flags["options"]
    run_server(options.settings(flags))


@store_app.command()
@with_database
def migrate(options: StoreOptions) -> None:
    """Bring the database's schema up to date. `serve` does it by itself."""
    with options.opened() as (_, store):
        store.migrate()
    typer.echo("the schema is up to date")


@store_app.command()
@with_objects
def check(
    options: StoreOptions,
    read: Annotated[
        bool, typer.Option("--read", help="Check each object's SHA-256, not only that it is there.")
    ] = False,
) -> None:
    """Look for every object that the database names. Exit code 1 if one is absent or
    damaged."""
    from prime_orchestrator.store import backup

    with options.pool() as (settings, store):
        place = backup.place(store)
        found = backup.check(store, settings.open_objects("", place), read=read)
    for name in found.absent:
        typer.echo(f"absent or damaged: {name}")
    typer.echo(f"pool {place}: {found.rows} rows, {found.objects} objects, "
               f"{len(found.absent)} absent or damaged")  # fmt: skip
    if found.pages:
        typer.echo(
            f"not looked for: old rollout files of {found.pages} pages of the archive, which "
            "orchestrator store prune-files removed"
        )
    if found.absent:
        raise typer.Exit(1)


@store_app.command("backup")
@with_objects
def save(
    options: StoreOptions,
    folder: Annotated[Path, typer.Argument(help="New folder, or one with older objects.")],
) -> None:
    """Copy database and objects into a folder. `serve` keeps running. Exit code 1 if an
    object that the database names is absent or damaged; all else is saved."""
    from prime_orchestrator.store import backup

    with options.pool() as (settings, store):
        place = backup.place(store)
        made = backup.backup(store, settings.open_objects("", place), folder.absolute())
    typer.echo(f"pool {place}: {made.rows} rows and {made.objects} new objects in {folder}")
    _end_if_absent(made.absent, "the backup is made without")


@store_app.command()
@with_objects
def restore(
    options: StoreOptions,
    folder: Annotated[Path, typer.Argument(help="What `store backup` made.")],
) -> None:
    """Fill an empty database and object store from a backup. Exit code 1 if an object that it
    names is absent or damaged; all else is restored."""
    from prime_orchestrator.store import backup

    saved = backup.open_backup(folder.absolute())
    try:
        place = backup.place(saved)
    finally:
        saved.close()
    with options.opened() as (settings, store):
        made = backup.restore(folder.absolute(), store, settings.open_objects("", place))
    typer.echo(f"pool {place}: {made.rows} rows and {made.objects} objects restored")
    _end_if_absent(made.absent, "restored without")


def _end_if_absent(absent: tuple[Digest, ...], without: str) -> None:
    """Ends with exit code 1 if a copy lacks objects."""
    if absent:
        more = " and others" if len(absent) > 1 else ""
        typer.echo(
            f"{without} {len(absent)} objects that the database names and that are absent or "
            f"damaged: {absent[0]}{more}; orchestrator store check --read lists them",
            err=True,
        )
        raise typer.Exit(1)


@store_app.command("rotate-secret")
@with_database
def rotate_secret(options: StoreOptions) -> None:
    """Make a new secret of signed URLs. Each `serve` takes it when it is started again."""
    from prime_core.storage.signing import SECRET_BYTES
    from prime_orchestrator.store import meta

    with options.pool() as (_, store), store.begin() as connection:
        meta.put(connection, meta.URL_SECRET, secrets.token_hex(SECRET_BYTES))
    typer.echo("start every serve process on this database again: URLs of before are void then")


@store_app.command()
@with_database
def prune(
    options: StoreOptions,
    days: Annotated[int, typer.Option(help="Rows younger than this stay.", min=7)] = 30,
    archive: Annotated[
        Path | None, typer.Option(help="New folder that receives the rows as Parquet files.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the rows; delete nothing.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Delete old rows that nothing depends on. See docs/retention.md; `serve` keeps running."""
    from prime_orchestrator.store import retention

    with options.pool() as (_, store):
        found = retention.prune(store, time.time() - days * 86_400, archive, dry_run=dry_run)
    _echo_rows(found, "would go" if dry_run else "deleted", json_output)


@store_app.command("prune-files")
@with_objects
def prune_files(
    options: StoreOptions,
    days: Annotated[int, typer.Option(help="Files younger than this stay.", min=1)],
    deployment: Annotated[Path | None, typer.Option(help="Deployment JSON.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the files; delete nothing.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Delete rollout files of archived work. See docs/retention.md; `serve` keeps running."""
    from prime_core.deployment import Deployment
    from prime_orchestrator.cli.storage import progress
    from prime_orchestrator.store import backup, removal

    with options.pool({"deployment": deployment}) as (settings, store):
        place = backup.place(store)
        known = Deployment.load(settings.need("deployment"))
        if not place.startswith(f"{known.chain_id}/{known.contracts.pools}/"):
            raise UserError(
                f"the database belongs to pool {place}, not to a pool of this deployment",
                hint="name the pool's own deployment by --deployment",
            )
        if days < known.periods.dispute_days:
            raise UserError(
                f"a file can be in dispute for longer than {days} days",
                hint=f"--days {known.periods.dispute_days} or more",
            )
        objects = settings.open_objects("", place)
        with progress() as bar:
            task = bar.add_task("files", total=None)
            done = removal.remove(
                store,
                objects,
                time.time(),
                days,
                dry_run=dry_run,
                went=lambda files: bar.advance(task, files),
            )
    if json_output:
        typer.echo(json.dumps(asdict(done)))
        return
    typer.echo(
        f"{done.files} rollout files ({done.bytes / 1e9:.1f} GB) of {done.pages} pages "
        f"{'would go' if dry_run else 'deleted'}; {done.shared} stay: something else has the same "
        "bytes"
    )


@store_app.command()
@with_database
def export(
    options: StoreOptions,
    folder: Annotated[Path, typer.Argument(help="New folder.")],
    json_output: Json = False,
) -> None:
    """Write the tables, without secrets, as Parquet files."""
    from prime_orchestrator.store import retention

    with options.pool() as (_, store):
        found = retention.export(store, folder)
    _echo_rows(found, f"in {folder}", json_output)


def _echo_rows(found: dict[str, int], what: str, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps(found))
        return
    for name, count in found.items():
        typer.echo(f"{name}: {count} rows {what}")


def main() -> None:
    """Entry point."""
    run_program(app, "orchestrator")


if __name__ == "__main__":
    main()
