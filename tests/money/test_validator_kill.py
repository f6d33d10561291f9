"""`orchestrator validate` as a process: killed at work and started again, it loses and repeats
nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import sqlalchemy as sa
from court_kit import MODEL, small_run
from money_kit import MANAGER, TRAINER, key, open_shop

from orchestrator.store import meta, schema
from protocol.broadcast.manifest import build_manifest, signed_bytes
from protocol.chain.keystore import save_keystore
from protocol.core.checkpoint import PolicyStatement, SignedManifest
from protocol.environments.registry import environment_for
from protocol.verification.build import build_rollout_file
from protocol.verification.engines import load_engine

FILES = 6
DEADLINE = 240.0


def wait_for(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert process.poll() is None, "the validator ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_validator_goes_on_where_it_was(tmp_path: Path) -> None:
    shop = open_shop(tmp_path, run=small_run())
    shop.now.time = time.time()
    context = shop.context
    place = f"{context.deployment.chain_id}/{context.deployment.contracts.pools}/1"
    with shop.store.begin() as connection:
        meta.put(connection, "serves", place)
        facts = [MANAGER.address, TRAINER.address, context.run.digest()]
        meta.put(connection, "pool_facts", json.dumps(facts))

    folder = tmp_path / "validator" / "policies" / "0"
    folder.mkdir(parents=True)
    for file in MODEL.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    manifest = build_manifest(folder, pool=1, version=0, step=0)
    statement = PolicyStatement(pool=1, version=0, manifest_digest=manifest.digest())
    signature = TRAINER.sign(statement, context.domain(statement))
    signed = SignedManifest(manifest=manifest, signature=signature)
    (folder / "manifest.json").write_bytes(signed_bytes(signed))
    journal = tmp_path / "validator" / "validator.journal.sqlite"
    journal.touch()  # it has run before, and so needs no RPC to judge
    shop.add_policy(signed)

    node, engine = key(10), load_engine(folder)
    environment = environment_for(context.run)
    shop.admit(node)
    for _ in range(FILES):
        shop.submit(
            node,
            make=lambda lease, digest: build_rollout_file(
                lease, digest, context.run, engine, environment
            ),
        )

    context.deployment.save(tmp_path / "deployment.json")
    (tmp_path / "run.json").write_bytes(context.run.canonical())
    save_keystore(tmp_path / "key.json", (0x1003).to_bytes(32, "big"), "secret", light=True)
    (tmp_path / "password").write_text("secret")
    command = [
        *(sys.executable, "-m", "orchestrator.cli", "validate", "--pool", "1"),
        *("--database", shop.url, "--objects", str(tmp_path / "objects")),
        *("--data", str(tmp_path / "validator"), "--run", str(tmp_path / "run.json")),
        *("--deployment", str(tmp_path / "deployment.json"), "--rpc", "http://127.0.0.1:9"),
        *("--wallet", str(tmp_path / "key.json"), "--password-file", str(tmp_path / "password")),
        *("--threads", "1", "--claim-seconds", "3"),
    ]

    def statuses() -> list[str]:
        with shop.store.read() as connection:
            return list(connection.execute(sa.select(schema.submissions.c.status)).scalars())

    def claimed() -> bool:
        with shop.store.read() as connection:
            found = connection.execute(sa.select(schema.jobs.c.status)).scalars()
            return "claimed" in found.all()

    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: "accepted" in statuses() and claimed(), first)
    finally:
        first.kill()
        first.wait()
    left = statuses().count("submitted")
    assert 0 < left < FILES

    second = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: statuses() == ["accepted"] * FILES, second)
        second.send_signal(signal.SIGTERM)
        assert second.wait(120) == 0, "SIGTERM ends it cleanly"
    finally:
        second.kill()
        second.wait()
    with shop.store.read() as connection:
        credits = connection.execute(sa.select(schema.credits)).all()
        groups = connection.execute(sa.select(schema.groups)).all()
    assert len(credits) == FILES
    assert len(groups) == FILES * context.run.groups_per_lease
    shop.store.close()
