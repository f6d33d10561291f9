"""`prime-node verify FILE`: the validator's own finding on the node's machine, before anything is
sent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from command import prime_node
from node_world import MANAGER, NODE, POOL, NodeWorld, node_world

from prime_core import encoding
from prime_core.ids import Digest
from prime_core.task import Lease, SignedLease
from prime_envs.registry import environment_for
from prime_orchestrator.store import policies
from prime_verify.build import build_rollout_file
from prime_verify.engines import MANIFEST, load_engine
from prime_verify.rollout_file import read_rollout_file, write_rollout_file


@dataclass
class Bench:
    """A node with policy 0 on disk, a lease signed by the manager, and its honest file."""

    world: NodeWorld
    lease: SignedLease
    lease_digest: Digest
    honest: bytes

    def verify(self, data: bytes, *flags: str) -> tuple[int, dict[str, Any]]:
        """What `prime-node verify --json` says of these bytes, with its exit code."""
        file = self.world.folder / "rollouts.parquet"
        file.write_bytes(data)
        lease = self.world.folder / "lease.json"
        lease.write_text(self.lease.model_dump_json())
        done = prime_node(
            *("verify", str(file), "--json", "--orchestrator", self.world.url),
            *("--data", str(self.world.folder / "node"), "--lease", str(lease), *flags),
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("preflight")
    with node_world(folder) as world:
        run = world.backend.context.run
        with world.store.read() as connection:
            row = policies.get(connection, 0)
        assert row is not None
        manifest = row.signed()
        policy = folder / "node" / "policies" / "0"
        shutil.copytree(folder / "model-0", policy)
        (policy / MANIFEST).write_text(manifest.model_dump_json())
        lease = Lease(
            pool=POOL, step=0, node=NODE.address, index=0,
            policy_digest=manifest.manifest.digest(), run_digest=run.digest(), target=2,
            salt=encoding.sha256(b"salt"), deadline=1 << 40,
        )  # fmt: skip
        domain = world.backend.context.domain(lease)
        signed = SignedLease(lease=lease, signature=MANAGER.sign(lease, domain), policy_version=0)
        digest = lease.digest(domain)
        engine = load_engine(policy)
        data = build_rollout_file(signed, digest, run, engine, environment_for(run))
        yield Bench(world, signed, digest, data)


@pytest.mark.slow
def test_an_honest_file_is_accepted_and_every_row_can_be_asked_for(bench: Bench) -> None:
    status, found = bench.verify(bench.honest)
    assert (status, found["outcome"], found["reason"]) == (0, "accepted", "NONE")
    assert found["chance"] is None
    assert found["lease"] == bench.lease_digest
    assert found["setup"] == "plain/1, float32 on cpu"
    assert len(found["rows_replayed"]) == 1  # a quarter of four
    status, found = bench.verify(bench.honest, "--every-row")
    assert found["rows_replayed"] == [0, 1, 2, 3]
    assert found["units"] == sum(
        len(row.output_tokens) for row in read_rollout_file(bench.honest).rows
    )


def test_the_replaying_set_up_is_a_flag(bench: Bench) -> None:
    """The shipped limits are for float32 on a CPU: no other setup judges, and none accuses."""
    _, found = bench.verify(bench.honest, "--dtype", "bfloat16")
    assert (found["outcome"], found["reason"]) == ("abstained", "UNKNOWN_SETUP")
    assert "plain/1, bfloat16 on cpu" in found["detail"]
    _, found = bench.verify(bench.honest, "--device", "gpu")
    assert found["outcome"] == "abstained"
    assert "'gpu' is not a device here" in found["detail"]


def test_a_lie_is_named_with_its_statistics(bench: Bench) -> None:
    file = read_rollout_file(bench.honest)
    rows = [replace(row, logprobs=row.logprobs - 0.5) for row in file.rows]
    status, found = bench.verify(write_rollout_file(rows, file.metadata), "--every-row")
    assert (status, found["outcome"], found["reason"]) == (65, "rejected", "TAMPERED_LOGPROBS")
    assert 0 < found["chance"] < 1e-6
    assert float(found["statistics"]["logprob_max"]) > float(
        found["thresholds"]["file.logprob_max"]
    )


def test_a_damaged_file_is_void_before_anything_is_looked_up(bench: Bench) -> None:
    status, found = bench.verify(bench.honest[:-9])
    assert (status, found["outcome"], found["lease"]) == (65, "void", None)


def test_a_file_for_another_lease_is_refused(bench: Bench) -> None:
    file = read_rollout_file(bench.honest)
    other = write_rollout_file(file.rows, replace(file.metadata, lease="0x" + "11" * 32))
    path = bench.world.folder / "other.parquet"
    path.write_bytes(other)
    done = prime_node(
        *("verify", str(path), "--orchestrator", bench.world.url),
        *("--data", str(bench.world.folder / "node")),
    )
    assert done.returncode == 66
    assert done.stderr.count("\n") <= 2
