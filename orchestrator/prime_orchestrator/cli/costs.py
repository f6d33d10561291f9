"""`orchestrator costs`: what a pool's recent transactions cost, and what a load would cost."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prime_chain.amounts import ether
from prime_core.command_line import Json, Quorum, Rpcs, command
from prime_core.errors import UserError
from prime_orchestrator.cli.storage import StoreOptions, progress, with_database

if TYPE_CHECKING:
    from prime_chain.client import ChainClient, PaidFee
    from prime_core.ids import Digest
    from prime_orchestrator.daily_costs import DailyCost

MOST = 5_000
"""Most transactions whose receipts are read, of the manager and of others."""
DAY_HOURS = 24.0
NOT_SEEN = (
    "not included: deployments, pool funds, and transactions of validators and trainer that "
    "neither moved their stake nor made an event of the pool that names them"
)

app = command()


@app.command()
@with_database
def costs(
    options: StoreOptions,
    hours: Annotated[float, typer.Option(min=0.01, max=24, help="How far back to look.")] = 24.0,
    files: Annotated[
        int | None,
        typer.Option(
            min=0, help="Instead: the cost of a day with this many files, without a pool."
        ),
    ] = None,
    slashes: Annotated[int, typer.Option(min=0, help="With --files: slashes a day.")] = 0,
    policies: Annotated[
        int, typer.Option(min=0, help="With --files: policies published a day.")
    ] = 0,
    joins: Annotated[int, typer.Option(min=0, help="With --files: nodes that join a day.")] = 0,
    ejections: Annotated[int, typer.Option(min=0, help="With --files: nodes ejected a day.")] = 0,
    root_seconds: Annotated[
        int | None, typer.Option(min=1, help="With --files: the run's root_seconds.")
    ] = None,
    root_submissions: Annotated[
        int | None, typer.Option(min=1, help="With --files: the run's root_submissions.")
    ] = None,
    epoch_seconds: Annotated[
        int | None, typer.Option(min=5, help="With --files: the run's epoch_seconds.")
    ] = None,
    network: Annotated[
        str, typer.Option(help="With --files: network of --rpc, whose fees count.")
    ] = "base",
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    json_output: Json = False,
) -> None:
    """Show what the manager's recent transactions cost, by kind, and the cost per day.

    Fees come from the receipts and include the L1 data fee on an OP-stack chain. Transactions of
    the pool's validators and trainer are shown apart: those that moved their stake, and those that
    events of the pool name. Deployments and pool funds are not included.

    With --files: the cost of a day with that many files, slashes, policies, joins and ejections,
    from measured gas; with --rpc, at the fees of --network now.
    """
    chain: dict[str, object] = {"rpc": tuple(rpc or ()), "rpc_quorum": rpc_quorum}
    if files is None:
        _paid(options, hours, chain, json_output)
        return
    from prime_chain.networks import by_name
    from prime_orchestrator.daily_costs import Load, daily_costs

    given = {
        "root_seconds": root_seconds, "root_submissions": root_submissions,
        "epoch_seconds": epoch_seconds,
    }  # fmt: skip
    a_day = {"slashes": slashes, "policies": policies, "joins": joins, "ejections": ejections}
    load = Load(files, **a_day, **{name: value for name, value in given.items() if value})
    chain_id, settings = by_name(network).chain_id, options.settings(chain)
    client = settings.open_chain(chain_id) if settings.rpc else None
    try:
        found = daily_costs(load, chain_id, client)
    finally:
        if client is not None:
            client.close()
    typer.echo(_load_json(load.files, found) if json_output else _load_text(load.files, found))


def _load_json(files: int, found: list[DailyCost]) -> str:
    said = [asdict(one) | {"wei": _text(one.wei), "l1_wei": _text(one.l1_wei)} for one in found]
    return json.dumps({"files": files, "kinds": said})


def _text(wei: int | None) -> str | None:
    return None if wei is None else str(wei)


def _load_text(files: int, found: list[DailyCost]) -> str:
    from prime_orchestrator.daily_costs import LEFT_OUT

    lines = [f"{'kind':16}{'transactions':>14}{'gas':>18}   cost"]
    for one in found:
        cost = "-" if one.wei is None else ether(one.wei + (one.l1_wei or 0))
        lines.append(f"{one.kind:16}{one.transactions:>14,}{one.gas:>18,}   {cost}")
    gas, size = sum(one.gas for one in found), sum(one.l1_bytes for one in found)
    said = f"a day with {files:,} files: {gas:,} gas, {size:,} bytes of data"
    wei = [one.wei for one in found if one.wei is not None]
    l1 = [one.l1_wei for one in found if one.l1_wei is not None]
    if not wei:
        said += "; add --rpc and --network for the fees of a network"
    else:
        extra = f"of it at most {ether(sum(l1))} for data on L1" if l1 else "without an L1 data fee"
        said += f"; {ether(sum(wei) + sum(l1))}, {extra}"
    return "\n".join([*lines, said, LEFT_OUT])


def _paid(options: StoreOptions, hours: float, chain: dict[str, object], json_output: bool) -> None:
    """Shows what the transactions of the last `hours` cost."""
    from prime_chain.history import stake_transactions
    from prime_core.ids import Address
    from prime_orchestrator.store import chain as chain_store
    from prime_orchestrator.store import intents, meta, submissions

    since = time.time() - 3600 * hours
    with options.pool(chain) as (settings, store):
        with store.read() as connection:
            chain_id, pools, _ = str(meta.get(connection, meta.SERVES)).split("/")
            mined = intents.mined_since(connection, since, MOST + 1)
            files = submissions.received_since(connection, since)
            roles = {
                account: role
                for role, accounts in (
                    ("trainer", chain_store.trainers(connection)),
                    ("validators", chain_store.ever_appointed(connection)),
                )
                for account in accounts
            }
            named = chain_store.naming(connection, roles, since, MOST + 1)
        client = settings.open_chain(int(chain_id))
        try:
            staked = stake_transactions(client, Address(pools), roles, since)
            named = list(dict.fromkeys([*named, *staked]))
            if max(len(mined), len(named)) > MOST:
                raise UserError(
                    f"the pool has more than {MOST} transactions in {hours:g} hours",
                    hint="choose a shorter period with --hours",
                )
            kinds: dict[str, list[PaidFee]] = defaultdict(list)
            by_others: dict[str, list[PaidFee]] = defaultdict(list)
            ours = {tx_hash for _, tx_hash in mined}
            with progress("transactions") as shown:
                for kind, tx_hash in shown.track(mined):
                    kinds[kind or "nonce used up"].append(_fee(client, tx_hash))
                for tx_hash in shown.track([one for one in named if one not in ours]):
                    fee = _fee(client, tx_hash)
                    if fee.sender in roles:
                        by_others[roles[fee.sender]].append(fee)
        finally:
            client.close()
    total = sum(fee.total for fees in kinds.values() for fee in fees)
    l1 = sum(fee.l1 for fees in kinds.values() for fee in fees)
    if json_output:
        said = {
            "hours": hours, "files": files, "wei": str(total), "l1_wei": str(l1),
            "wei_a_day": str(round(total * DAY_HOURS / hours)), "kinds": _sums(kinds.items()),
            "others": _sums(by_others.items()), "note": NOT_SEEN,
        }  # fmt: skip
        typer.echo(json.dumps(said))
        return
    typer.echo(f"{'kind':16}{'transactions':>14}   cost")
    for kind, fees in sorted(kinds.items(), key=lambda one: -sum(fee.total for fee in one[1])):
        typer.echo(f"{kind:16}{len(fees):>14}   {ether(sum(fee.total for fee in fees))}")
    each = f", {ether(round(total * 1000 / files))} for 1,000 files" if files else ""
    data = f", of it {ether(l1)} for data on L1" if l1 else ""
    typer.echo(
        f"in {hours:g} hours: {ether(total)} for {files} files{each}{data}; "
        f"a day: {ether(round(total * DAY_HOURS / hours))}"
    )
    for role, fees in sorted(by_others.items()):
        typer.echo(
            f"{role}, paid by themselves: {ether(sum(fee.total for fee in fees))} for "
            f"{len(fees)} transactions"
        )
    typer.echo(NOT_SEEN)


def _fee(client: ChainClient, tx_hash: Digest) -> PaidFee:
    fee = client.paid_fee(tx_hash)
    if fee is None:
        raise UserError(
            f"the endpoint has no receipt of {tx_hash}",
            hint="use --rpc with an endpoint that keeps old receipts",
        )
    return fee


def _sums(found: Iterable[tuple[str, list[PaidFee]]]) -> dict[str, dict[str, int | str]]:
    return {
        name: {"transactions": len(fees), "wei": str(sum(fee.total for fee in fees))}
        for name, fees in sorted(found)
    }
