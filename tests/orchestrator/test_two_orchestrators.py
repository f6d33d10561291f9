"""Two `orchestrator serve` on one store: nothing is posted or sealed twice, whichever dies."""

from __future__ import annotations

import signal
import time

import pytest
import sqlalchemy as sa
from operator_kit import NODE, Operator, admit, commit_draws, hand_in, publish, register, until

from prime_core.ids import Digest
from prime_core.messages import Heartbeat, HeartbeatAnswer
from prime_core.transport.client import OrchestratorClient
from prime_orchestrator.store import Store, batches, chain, groups, schema, submissions
from prime_orchestrator.store.groups import GroupRow


def accept(store: Store, digest: Digest) -> None:
    """As a validator's verdict leaves an accepted file of two groups."""
    with store.begin() as connection:
        submissions.change(
            connection, digest, status="accepted", units=10, verdict=digest,
            verdict_table=digest, judged_at=time.time(),
        )  # fmt: skip
        groups.add(
            connection, [GroupRow(digest, n, 0, 2, True, 10**6, time.time()) for n in (0, 1)]
        )


@pytest.mark.slow
def test_two_orchestrators_on_one_store_post_no_root_and_seal_no_batch_twice(
    operator: Operator, empty_database: Store
) -> None:
    """Both answer, one runs the loops. It is killed; the other goes on from the same journal."""
    folder = operator.folder / "second"
    folder.mkdir()
    for name in ("run.json", "password", "manager.json"):
        (folder / name).write_bytes((operator.folder / name).read_bytes())
    second = Operator(folder, operator.deployed, operator.pool)
    shared = {
        "database": empty_database.engine.url.render_as_string(hide_password=False),
        "objects": str(operator.data / "objects"),
    }
    register(operator.deployed, operator.pool)
    child = operator.serve(**shared)
    other = second.serve(**shared)
    try:
        with OrchestratorClient(operator.url, NODE) as client:
            publish(operator, client)
            admit(client)
            beat = Heartbeat(policy_version=0)
            until(lambda: client.post("/v1/heartbeat", beat, HeartbeatAnswer).directive == "work")
            commit_draws(operator, empty_database)
            for number in range(3):
                signed, _ = hand_in(client, f"file {number}".encode())
                accept(empty_database, signed.submission.digest(client.domain("work")))
        child.kill()  # in the middle of its work
        with OrchestratorClient(second.url, NODE) as client:
            commit_draws(operator, empty_database)
            for number in range(3, 6):
                signed, _ = hand_in(client, f"file {number}".encode())
                accept(empty_database, signed.submission.digest(client.domain("work")))

        def settled() -> bool:
            with empty_database.read() as connection:
                rooted = connection.execute(
                    sa.select(sa.func.count())
                    .select_from(
                        schema.submissions.join(
                            schema.roots, schema.roots.c.id == schema.submissions.c.root_id
                        )
                    )
                    .where(schema.roots.c.chain_seq.is_not(None))
                ).scalar_one()
                return rooted == 6 and batches.next_step(connection) == 3

        until(settled, "the settlement")
        assert other.poll() is None
        other.send_signal(signal.SIGTERM)
        assert other.wait(120) == 0
    finally:
        if other.poll() is None:
            other.kill()
        other.wait(120)
        assert other.stdout is not None
        other.stdout.close()

    with empty_database.read() as connection:
        posted = [event.arguments()["root"] for event in chain.events(connection, "RootPosted")]
        trained = [
            (file.submission_digest, group)
            for summary in batches.latest(connection, 10)
            if (row := batches.get(connection, summary.step)) is not None
            for file in row.signed().manifest.files
            for group in file.groups
        ]
        failed = connection.execute(
            sa.select(schema.intents.c.id).where(schema.intents.c.status == "failed")
        ).all()
    assert len(posted) == len(set(posted)), "a root was posted twice"
    assert len(trained) == len(set(trained)) == 12, "each group in one batch"
    assert failed == []
