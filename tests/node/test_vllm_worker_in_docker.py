"""vLLM's worker in its container, one lease end to end, and the validator's judgement of its file.

The image is made from the environment of scripts/setup_vllm.sh. The container has no network and
no writable root but /tmp, as every task's.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from judges import arm, bench
from node_world import NODE, VALIDATOR, NodeWorld, node_world, until

from prime_core.ids import Digest
from prime_core.storage.base import digest_key
from prime_core.task import Task
from prime_core.verdict import Reason
from prime_node.runtime.docker import LABEL
from prime_verify.engines import FolderEngines, load_engine
from prime_verify.rollout_file import read_rollout_file

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("PRIME_VLLM_PYTHON", ROOT / "var/engines/vllm/bin/python"))
MISSING = "vLLM is not installed: scripts/setup_vllm.sh"
COMMAND = ("python", "-m", "prime_node.worker", "--engine", "vllm")
pytestmark = [
    pytest.mark.docker,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason=MISSING),
]


@pytest.fixture(scope="module")
def image(engine: docker.DockerClient) -> Iterator[str]:
    """Id of a freshly built image of vLLM's worker."""
    script = ROOT / "deploy" / "build_image.py"
    built = subprocess.run(
        [PYTHON, script, "worker-vllm", "--tag", "prime-test-vllm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-3000:]
    yield built.stdout.strip()
    engine.images.remove("prime-test-vllm", force=True)


def test_vllm_s_image_makes_a_file_that_the_validator_accepts(
    image: str, docker_node: docker.DockerClient, tmp_path: Path
) -> None:
    task = Task(image=image, command=COMMAND, memory_mb=6144, pids=256)
    run = {"max_output_tokens": 24, "samples_per_group": 4, "replay_rows_micro": 1_000_000}
    with node_world(tmp_path, model=ROOT / "devnet" / "model", task=task, **run) as world:
        agent = world.join(runtime="docker")

        def lives_and(condition: bool) -> bool:
            assert agent.poll() is None, world.log()[-3000:] + world.worker_log()[-3000:]
            return condition

        until(lambda: lives_and(world.node_status() == "admitted"), "it solved its challenge", 120)
        world.admit()
        until(lambda: lives_and(bool(world.submissions())), "a file comes from the container", 300)
        (container,) = docker_node.containers.list(filters={"label": f"{LABEL}={NODE.address}"})
        configured = container.attrs["HostConfig"]
        assert configured["NetworkMode"] == "none"
        assert configured["ReadonlyRootfs"]
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(120) == 0

        submitted = world.submissions()[0]
        data = world.backend.objects.get(digest_key(Digest(submitted["sha256"])), 1 << 20)
        file = read_rollout_file(data)
        made = file.metadata
        assert (made.engine, made.dtype, made.device) == ("vllm/1", "float32", "cpu")
        assert len(file.rows) == world.backend.context.run.rows_per_lease
        judged = judge(world, Digest(submitted["digest"]))
        assert (judged["status"], judged["reason"]) == ("accepted", Reason.NONE)
        assert judged["units"] == sum(len(row.output_tokens) for row in file.rows)


def judge(world: NodeWorld, submission: Digest) -> dict[str, object]:
    """Lets a validator judge until `submission` has its verdict; its row."""
    folder = world.folder / "validator"
    engines = FolderEngines(folder / "policies", load_engine)
    validator = arm(
        bench(world.backend, VALIDATOR, folder, seed=None), folder / "policies", engines
    )
    while submission not in validator.judged:
        assert validator.judge_next() is not None, "nothing is left to judge"
    (row,) = (row for row in world.submissions() if row["digest"] == submission)
    return dict(row)
