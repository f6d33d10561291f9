"""`orchestrator rewards`: reward roots and tables on chain, by anyone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_chain.amounts import prime
from prime_chain.chain_session import ChainSession, Done, File, Rpc, sends_transactions
from prime_core import ids
from prime_core.command_line import AllowPrivate, Json, Quorum, group
from prime_core.deployment import Deployment
from prime_core.encoding import sha256
from prime_core.errors import NotFoundError, UserError
from prime_core.given import read_given, write_given
from prime_core.ids import Digest, Signature
from prime_core.settlement import BURN_ADDRESS, read_settlement
from prime_core.times import utc
from prime_orchestrator.cli.storage import StoreOptions, with_objects

if TYPE_CHECKING:
    from prime_chain.rewards import Rebuilder

app = group("Reward roots: list those on chain, rebuild one from events and published objects.")
Pool = Annotated[int, typer.Option("--pool", help="Number of the pool.", min=0, max=(1 << 63) - 1)]
Server = Annotated[
    str, typer.Option("--orchestrator", help="URL that serves the run definition and the objects.")
]


@app.command("list")
def list_roots(
    rpc: Rpc,
    deployment: File,
    pool: Pool,
    orchestrator: Server,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
    allow_private: AllowPrivate = None,
) -> None:
    """List every reward root that stands, oldest first."""
    with _rebuilder(rpc, deployment, pool, orchestrator, rpc_quorum, allow_private) as rebuilder:
        rows = [
            {
                "epoch": event.epoch,
                "root": event.root,
                "cumulative_total": str(event.cumulative_total),
                "object": event.object,
                "claimable_at": event.claimable_at,
                "transaction": event.tx_hash,
            }
            for event in rebuilder.posted()
        ]
    if json_output:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        total = prime(int(str(row["cumulative_total"])))
        since = utc(int(str(row["claimable_at"])))
        typer.echo(
            f"epoch {row['epoch']}: {total} in all, root {row['root']}, payable from {since}"
        )
    if not rows:
        typer.echo("no reward root stands yet")


@app.command()
def rebuild(
    rpc: Rpc,
    deployment: File,
    pool: Pool,
    orchestrator: Server,
    epoch: Annotated[
        int | None, typer.Option(help="Epoch of the reward root; the newest if not given.", min=0)
    ] = None,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
    allow_private: AllowPrivate = None,
) -> None:
    """Rebuild a reward root and compare it with the chain's. Also rebuilds the roots before
    it.

    Exits with 1 if they differ. Warns of files that their nodes posted themselves and that no
    settlement has.
    """
    with _rebuilder(rpc, deployment, pool, orchestrator, rpc_quorum, allow_private) as rebuilder:
        standing = rebuilder.posted()
        if epoch is None and not standing:
            raise NotFoundError("no reward root stands yet")
        rebuilt = rebuilder.rebuild(standing[-1].epoch if epoch is None else epoch)
    if json_output:
        typer.echo(json.dumps(rebuilt.as_json()))
    else:
        said = "match" if rebuilt.match else "MISMATCH"
        total = prime(int(rebuilt.settlement.cumulative_total))
        typer.echo(f"epoch {rebuilt.epoch}: {said}; {total} in all")
        for entry in rebuilt.settlement.entries:
            burned = " burned: forfeited by slashes" if entry.node == BURN_ADDRESS else ""
            typer.echo(f"  {entry.node}  {prime(int(entry.cumulative))}{burned}")
        for problem in rebuilt.problems:
            typer.echo(f"  {problem}")
        for one in rebuilt.omitted_files:
            typer.echo(f"  {one.line()}")
    if not rebuilt.match:
        raise typer.Exit(1)


@app.command("explain")
def explain_node(
    rpc: Rpc,
    deployment: File,
    pool: Pool,
    orchestrator: Server,
    node: Annotated[str, typer.Argument(help="Address of the node.")],
    epoch: Annotated[
        int | None, typer.Option(help="Up to this epoch's reward root; the newest.", min=0)
    ] = None,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
    allow_private: AllowPrivate = None,
) -> None:
    """Show what each file of a node earned, or why it did not.

    Exits with 1 if the files do not add up to what the root gives.
    """
    from prime_chain.explain import explain

    target = ids.address(node)
    with _rebuilder(rpc, deployment, pool, orchestrator, rpc_quorum, allow_private) as rebuilder:
        found = explain(rebuilder, target, epoch)
    typer.echo(json.dumps(found.as_json()) if json_output else "\n".join(found.lines()))
    if found.problems:
        raise typer.Exit(1)


@app.command("settle")
def settle_epoch(
    rpc: Rpc,
    deployment: File,
    pool: Pool,
    orchestrator: Server,
    epoch: Annotated[int, typer.Option(help="The last epoch to settle.", min=0)],
    out: Annotated[Path, typer.Option(help="File to write the settlement to.")],
    as_of_block: Annotated[
        int | None,
        typer.Option(
            help="Last block that counts (default: that of the pool's newest event).", min=0
        ),
    ] = None,
    json_output: Json = False,
    rpc_quorum: Quorum = None,
    allow_private: AllowPrivate = None,
) -> None:
    """Compute the settlement of a silent manager. For `validator sign-table`.

    --orchestrator may be a mirror (`prime-node audit mirror`). Every signer must get the same
    digest, so use the same --epoch and --as-of-block. A settlement of more than 10,000 files is a
    head in OUT and pages in OUT.DIGEST; signing and claiming need the head alone.
    """
    from prime_chain.mirror import HttpSource
    from prime_core.transport.client import OrchestratorClient

    with (
        _rebuilder(rpc, deployment, pool, orchestrator, rpc_quorum, allow_private) as rebuilder,
        OrchestratorClient(orchestrator, allow_private=bool(allow_private)) as records,
    ):
        found = rebuilder.settle(epoch, HttpSource(records).submission, as_of_block)
    head, pages = found.published()
    write_given(out, head)
    for page in pages:
        out.with_name(f"{out.name}.{sha256(page)}").write_bytes(page)
    facts = {
        "digest": found.digest(),
        "epoch": found.epoch,
        "as_of_block": found.as_of_block,
        "cumulative_total": found.cumulative_total,
        "files": len(found.files),
    }
    if json_output:
        typer.echo(json.dumps(facts))
        return
    typer.echo(
        f"epoch {found.epoch} as of block {found.as_of_block}: {len(found.files)} files, "
        f"{prime(int(found.cumulative_total))} in all, digest {found.digest()}, in {out}"
    )


@app.command("post-table")
@sends_transactions
def post_table(
    session: ChainSession,
    settlement: Annotated[Path, typer.Argument(help="File of the settlement.")],
    signature: Annotated[list[str], typer.Argument(help="As `validator sign-table` gives it.")],
) -> Done:
    """Post the validators' table for a silent manager. It replaces the reward root. Anyone
    may do this.

    Paid from the pool's free funds, then from the manager's bond.
    """
    table = read_settlement(settlement).table()
    domain = session.deployment.domain_of(table)
    signed: dict[int, Signature] = {}
    for one in map(ids.signature, signature):
        author = table.recover(domain, one)
        role = session.contracts.pools.validator_of(table.pool, author)
        if role is None:
            raise UserError(
                f"{author}, who signed, was never a validator of pool {table.pool}",
                hint="a signature over another settlement recovers to another account",
            )
        signed[role.number] = one
    post = session.contracts.rewards.post_table(table, [signed[n] for n in sorted(signed)])
    session.perform([post])
    facts = {"pool": table.pool, "epoch": table.epoch, "root": table.root}
    return Done(facts, f"the table of epoch {table.epoch} of pool {table.pool} is posted")


@app.command("import")
@with_objects
def import_file(
    options: StoreOptions,
    settlement: Annotated[Path, typer.Argument(help="File of the settlement, from any source.")],
    json_output: Json = False,
) -> None:
    """Put a settlement into the manager's object store. For a table that others posted, or one
    that was lost: `serve` settles no later epoch without it.

    Its digest must be that of a reward root on chain, as `serve` read it. Pages of more than 10,000
    files lie next to the file as SETTLEMENT.DIGEST, as `rewards settle` writes them.
    """
    from prime_orchestrator.context import MAX_OBJECT_BYTES
    from prime_orchestrator.manager.settlement import import_settlement
    from prime_orchestrator.store import backup

    hint = "get it from those who posted the table, or from a mirror: URL/v1/objects/DIGEST"

    def given(path: Path) -> bytes:
        return read_given(path, "settlement", hint, limit=MAX_OBJECT_BYTES)

    head = given(settlement)
    name = sha256(head)

    def part(digest: Digest) -> bytes:
        if digest == name:
            return head
        return given(settlement.with_name(f"{settlement.name}.{digest}"))

    with options.pool() as (settings, store):
        objects = settings.open_objects("", backup.place(store))
        row = import_settlement(store, objects, name, part)
    facts = {"epoch": row.epoch, "digest": name}
    said = f"the settlement of epoch {row.epoch} is in the object store; serve continues with it"
    typer.echo(json.dumps(facts) if json_output else said)


@app.command("claim")
@sends_transactions
def claim(
    session: ChainSession,
    settlement: Annotated[Path, typer.Argument(help="File of the settlement, from any source.")],
    account: Annotated[str, typer.Argument(help="Node or validator.")],
) -> Done:
    """Claim from a copy of the settlement, without the orchestrator."""
    from prime_chain.claims import checked_claim
    from prime_chain.contracts import Claim

    found = read_settlement(settlement)
    payee = ids.address(account)
    cumulative, proof = found.proof(payee)
    paid = session.contracts.rewards.claimed(found.pool, payee)
    one = checked_claim(
        session.contracts, Claim(found.pool, found.epoch, payee, cumulative, tuple(proof))
    )
    session.perform([session.contracts.rewards.claim(one)])
    facts = {"pool": found.pool, "epoch": found.epoch, "paid": str(cumulative - paid)}
    return Done(facts, f"{prime(cumulative - paid)} paid for {payee}")


@contextmanager
def _rebuilder(
    rpc: list[str],
    file: Path,
    pool: int,
    orchestrator: str,
    quorum: int | None,
    allow_private: bool | None,
) -> Iterator[Rebuilder]:
    from prime_chain.client import ChainClient
    from prime_chain.history import read_events
    from prime_chain.rewards import Rebuilder, history_of
    from prime_core.transport.client import OrchestratorClient, run_bytes

    deployment = Deployment.load(file)
    client = ChainClient(rpc, deployment.chain_id, quorum=quorum)
    try:
        events = read_events(
            client, deployment, contracts=("pools", "work", "rewards", "slasher"), pool=pool
        )
        with OrchestratorClient(orchestrator, allow_private=bool(allow_private)) as server:
            runs = history_of(events, pool, partial(run_bytes, server))
            yield Rebuilder(events, deployment, pool, runs, server)
    finally:
        client.close()
