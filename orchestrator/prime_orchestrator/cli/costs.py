"""`orchestrator costs`: what the manager's recent transactions cost, and the cost per day."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Annotated

import typer

from prime_chain.amounts import ether
from prime_core.command_line import Json, Quorum, Rpcs, command
from prime_core.errors import UserError
from prime_orchestrator.cli.storage import StoreOptions, progress, with_database

MOST = 5_000
"""Most transactions whose receipts are read."""
DAY_HOURS = 24.0

app = command()


@app.command()
@with_database
def costs(
    options: StoreOptions,
    hours: Annotated[float, typer.Option(min=0.01, max=24, help="How far back to look.")] = 24.0,
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    json_output: Json = False,
) -> None:
    """Show what the manager's recent transactions cost, by kind, and the cost per day.

    Fees come from the receipts and include the L1 data fee on an OP-stack chain. Deployments, stake
    and pool funds are not included.
    """
    from prime_orchestrator.store import intents, meta, submissions

    since = time.time() - 3600 * hours
    with options.pool({"rpc": tuple(rpc or ()), "rpc_quorum": rpc_quorum}) as (settings, store):
        with store.read() as connection:
            chain_id = int(str(meta.get(connection, meta.SERVES)).partition("/")[0])
            mined = intents.mined_since(connection, since, MOST + 1)
            files = submissions.received_since(connection, since)
        if len(mined) > MOST:
            raise UserError(
                f"the pool sent more than {MOST} transactions in {hours:g} hours",
                hint="choose a shorter period with --hours",
            )
        client = settings.open_chain(chain_id)
        try:
            spent: dict[str, list[int]] = defaultdict(list)
            with progress("transactions") as shown:
                for kind, tx_hash in shown.track(mined):
                    fee = client.paid_fee(tx_hash)
                    if fee is None:
                        raise UserError(
                            f"the endpoint has no receipt of {tx_hash}",
                            hint="use --rpc with an endpoint that keeps old receipts",
                        )
                    spent[kind or "nonce used up"].append(fee)
        finally:
            client.close()
    total = sum(map(sum, spent.values()))
    if json_output:
        by_kind = {
            kind: {"transactions": len(fees), "wei": str(sum(fees))}
            for kind, fees in sorted(spent.items())
        }
        said = {
            "hours": hours, "files": files, "wei": str(total),
            "wei_a_day": str(round(total * DAY_HOURS / hours)), "kinds": by_kind,
        }  # fmt: skip
        typer.echo(json.dumps(said))
        return
    typer.echo(f"{'kind':16}{'transactions':>14}   cost")
    for kind, fees in sorted(spent.items(), key=lambda one: -sum(one[1])):
        typer.echo(f"{kind:16}{len(fees):>14}   {ether(sum(fees))}")
    each = f", {ether(round(total * 1000 / files))} for 1,000 files" if files else ""
    typer.echo(
        f"in {hours:g} hours: {ether(total)} for {files} files{each}; "
        f"a day: {ether(round(total * DAY_HOURS / hours))}"
    )
