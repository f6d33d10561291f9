"""The corpus tests/vectors/malformed: each file ends in its reason, within 500 MB.

All are judged, as a validator does it, by one child process with limits of memory and processor
time set by the kernel.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[1] / "vectors" / "malformed"
INDEX: dict[str, str] = json.loads((CORPUS / "index.json").read_text())
MEGABYTES = 500
CPU_SECONDS_EACH = 2
CPU_SECONDS = CPU_SECONDS_EACH * len(INDEX)

JUDGE = """
import json, sys
from time import process_time
from pathlib import Path
from resource import RLIMIT_AS, setrlimit
from prime_core.ids import ZERO_DIGEST
from prime_envs.registry import environment_for
from prime_verify.setups import synthetic_lease, synthetic_run
from prime_verify.case import Case
from prime_verify.verify import verify_file

class Policies:
    def engine(self, version, digest):
        raise AssertionError("a policy was asked for")
    earlier = engine

run = synthetic_run(24)
lease, environment = synthetic_lease(run, 1), environment_for(run)
held = int(Path("/proc/self/statm").read_text().split()[0]) * 4096  # libraries, before any file
setrlimit(RLIMIT_AS, (held + int(sys.argv[2]) * 1_000_000,) * 2)
found = {}
for path in sorted(Path(sys.argv[1]).glob("*.bin")):
    started = process_time()
    finding = verify_file(Case(
        path.read_bytes(), lease.signed, lease.lease_digest, run, environment, Policies(),
        draw_secret=ZERO_DIGEST, submission_digest=ZERO_DIGEST,
    ))
    found[path.stem] = finding.reason.name, process_time() - started
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[str, float]]:
    """Reason and processor seconds of each file."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))

    done = subprocess.run(
        [sys.executable, "-c", JUDGE, str(CORPUS), str(MEGABYTES)],
        capture_output=True, text=True, check=False, timeout=280, preexec_fn=limit,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (reason, seconds) for name, (reason, seconds) in json.loads(done.stdout).items()}


def test_every_file_of_the_corpus_is_indexed() -> None:
    assert {path.stem for path in CORPUS.glob("*.bin")} == set(INDEX)


@pytest.mark.parametrize("name", sorted(INDEX))
def test_a_malformed_file_ends_in_its_reason(
    found: dict[str, tuple[str, float]], name: str
) -> None:
    reason, seconds = found[name]
    assert reason == INDEX[name]
    assert seconds <= CPU_SECONDS_EACH
