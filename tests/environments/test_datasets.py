"""Datasets: the published columns are read as they are; what is wrong is named by file and row."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from served import served, served_folder

from prime_core.errors import (
    MalformedError,
    PolicyError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.run import MICRO, LengthBudgets
from prime_core.transport import paced
from prime_core.transport.addresses import public_address
from prime_envs import rows, sources
from prime_envs.environments.tasks import TaskDataset
from prime_envs.registry import environment_ref, load_environment
from prime_envs.rows import Bounds, read_rows
from prime_envs.sources import fetch, file_digest, locate

BUDGETS = LengthBudgets(targets=(1000, 2000), penalty_micro=300, form="exact")


def math_row(number: int, **other: Any) -> dict[str, Any]:
    return {
        "problem_id": f"m-{number}",
        "source": "made",
        "task_type": "verifiable_math",
        "prompt": f"What is {number} + 1?",
        "gold_standard_solution": f"It is \\boxed{{{number + 1}}}.",
        "verification_info": {"ground_truth": str(number + 1)},
        "metadata": {"difficulty": 1},
        **other,
    }


def write(path: Path, found: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def opened(path: Path, **other: int | str) -> TaskDataset:
    return TaskDataset({"sha256": file_digest(path), "path": str(path), **other}, BUDGETS)


def test_genesys_columns_are_graded_with_the_length_reward(tmp_path: Path) -> None:
    data = opened(write(tmp_path / "a.jsonl", [math_row(n) for n in range(20)]))
    for index in range(len(data)):
        problem = data.problem(index)
        task = data.task(index)
        prompt = data.prompt_text(problem, 2000)
        assert prompt == f"{task.prompt}\n\nThink for 2000 tokens before giving a response."
        grade = data.grade(problem, 2000, problem.answer, 1500)
        assert grade.reward_micro == 850_000  # 1 − 0.0003 · 500
        assert grade.parts["task_micro"] == MICRO
        assert data.grade(problem, 2000, "\\boxed{-1}", 2000).reward_micro == 0
    data.close()


def test_intellect_2_columns_are_read_as_they_are(tmp_path: Path) -> None:
    found = [
        {
            "problem_id": "prime_rl_code_7",
            "task_type": "prime_rl_code",
            "prompt": "Double a number. Answer in a ```python block.",
            "verification_info": json.dumps(
                {"fn_name": None, "test_cases": json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})}
            ),
            "solve_rate_qwen_r1_distill_7b": 0.25,
        },
        {
            "problem_id": "verifiable_math_1",
            "task_type": "verifiable_math",
            "prompt": "1+1? Use \\boxed{}.",
            "verification_info": json.dumps({"ground_truth": "2"}),
            "solve_rate_qwen_r1_distill_7b": None,
        },
    ]
    path = tmp_path / "intellect2.parquet"
    pq.write_table(pa.Table.from_pylist(found), path)
    data = opened(path)
    by_id = {data.problem(i).problem_id: data.problem(i) for i in range(2)}
    code = by_id["prime_rl_code_7"]
    assert data.task(code.index).metadata == {"solve_rate_qwen_r1_distill_7b": 0.25}
    answer = "<think>x</think>\n```python\nprint(2 * int(input()))\n```"
    assert data.check(code, answer, 10).task_micro == MICRO
    assert data.check(by_id["verifiable_math_1"], "\\boxed{2}", 10).task_micro == MICRO
    data.close()


def test_parquet_and_jsonl_of_the_same_rows_give_the_same_tasks(tmp_path: Path) -> None:
    found = [math_row(n) for n in range(300)]
    pq.write_table(pa.Table.from_pylist(found), tmp_path / "a.parquet", row_group_size=7)
    one = opened(write(tmp_path / "a.jsonl", found))
    two = opened(tmp_path / "a.parquet")
    assert [one.task(i).plain() for i in range(300)] == [two.task(i).plain() for i in range(300)]
    assert one.digest() != two.digest()  # the file is pinned, not what it says


def test_the_heldout_tail_does_not_follow_the_files_order(tmp_path: Path) -> None:
    data = opened(write(tmp_path / "a.jsonl", [math_row(n) for n in range(200)]))
    numbers = [int(data.problem(i).problem_id[2:]) for i in range(200)]
    assert numbers != sorted(numbers)
    assert 40 < sum(numbers[-20:]) / 20 < 160


def test_the_digest_pins_the_bytes_and_not_the_place(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    here = write(tmp_path / "a.jsonl", [math_row(1)])
    there = write(tmp_path / "b" / "c.jsonl", [math_row(1)])
    assert opened(here).digest() == opened(there).digest()
    assert opened(here).digest() != opened(here, bad_rows="skip").digest()
    other = write(tmp_path / "d.jsonl", [math_row(2)])
    assert opened(here).digest() != opened(other).digest()


def test_a_run_is_made_from_a_dataset_and_refuses_another_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [math_row(n) for n in range(10)])
    arguments: dict[str, int | str] = {"sha256": file_digest(path), "path": str(path)}
    ref = environment_ref("tasks", arguments, BUDGETS, train_size=8, heldout_size=2)
    assert load_environment("tasks", ref.arguments, BUDGETS).digest() == ref.digest
    write(path, [math_row(n) for n in range(11)])
    with pytest.raises(UntrustedError, match="but the run pins"):
        load_environment("tasks", ref.arguments, BUDGETS)
    assert not issubclass(UntrustedError, PolicyError)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (math_row(9, verification_info=None), "verification_info"),
        (math_row(9, verification_info={"ground_truth": ""}), "no answer"),
        (math_row(9, verification_info="{"), "verification_info"),
        (math_row(9, verification_info="[1]"), "verification_info"),
        (math_row(9, verification_info='{"ground_truth": "\\ud800"}'), "invalid text"),
        (math_row(9, prompt=""), "prompt"),
        (math_row(9, prompt=None), "prompt"),
        (math_row(9, prompt="\ud800"), "prompt"),
        (math_row(9, prompt="x" * (1 << 19)), "prompt"),
        (math_row(9, problem_id=None), "problem_id"),
        (math_row(9, problem_id="m-1"), "row 1"),
        (math_row(9, task_type="juggling"), "juggling"),
        (math_row(9, gold_standard_solution=7), "gold_standard_solution"),
        (math_row(9, metadata=3), "metadata"),
        ([1, 2], "columns"),
        ("text", "columns"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_number(tmp_path: Path, bad: Any, named: str) -> None:
    path = write(tmp_path / "tasks.jsonl", [math_row(1), math_row(2), bad, math_row(3)])
    with pytest.raises(MalformedError) as caught:
        opened(path)
    assert "tasks.jsonl row 3" in str(caught.value)
    assert named in str(caught.value)
    data = opened(path, bad_rows="skip")
    assert len(data) == 3
    assert len(data.skipped) == 1
    assert "tasks.jsonl row 3" in data.skipped[0]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"\xff\xfe",
        b'{"problem_id": 1e999}',
        b'{"problem_id": NaN}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"n": ' + b"9" * 10_000 + b"}",
        b'"\\ud800"',
    ],
)
def test_lines_that_are_bombs_are_malformed_and_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(json.dumps(math_row(1)).encode() + b"\n" + line + b"\n")
    with pytest.raises(MalformedError, match=r"tasks\.jsonl row 2"):
        opened(path)


def test_a_file_beyond_its_bounds_is_refused_by_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [math_row(n) for n in range(5)])
    with pytest.raises(MalformedError, match=r"more than 3 rows"):
        list(read_rows(path, Bounds(rows=3)))
    with pytest.raises(MalformedError, match=r"row 1 is longer"):
        list(read_rows(path, Bounds(line_bytes=20)))
    with pytest.raises(MalformedError, match="bytes, at most 20"):
        list(read_rows(path, Bounds(file_bytes=20)))


@pytest.mark.slow
def test_a_parquet_bomb_ends_its_child_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    # 200 MB of one letter in 10,000 rows: a few kilobytes on disk
    table = pa.table({"prompt": pa.array(["x" * 20_000] * 10_000).dictionary_encode()})
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 100_000
    with pytest.raises(MalformedError, match=r"bomb\.parquet row \d+: .* unfolds into more than"):
        list(read_rows(path, Bounds(unpacked_bytes=5 << 20)))
    wide = tmp_path / "wide.parquet"
    pq.write_table(pa.table({"prompt": ["y" * (300 << 20)]}), wide, compression="zstd")
    with pytest.raises(MalformedError, match=r"wide\.parquet row 1"):
        list(read_rows(wide, Bounds(memory_mb=400)))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1", b"nonsense"])
def test_what_is_no_parquet_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.parquet"
    path.write_bytes(content)
    with pytest.raises(MalformedError, match=r"broken\.parquet row 1"):
        list(read_rows(path))


def test_files_that_are_not_there_or_of_no_kind_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        list(read_rows(tmp_path / "none.jsonl"))
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(UserError, match="neither"):
        list(read_rows(tmp_path / "a.csv"))
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(MalformedError, match="no task"):
        opened(empty)


@pytest.mark.parametrize(
    "arguments",
    [{"sha256": "0x12"}, {"sha256": "g" * 66}, {"sha256": "0x" + "0" * 64, "color": "red"},
     {"sha256": "0x" + "0" * 64, "bad_rows": "maybe"}, {}],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_one_sentence(arguments: dict[str, int | str]) -> None:
    with pytest.raises(UserError):
        TaskDataset(arguments, BUDGETS)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A folder behind a web server on a free port."""
    folder = tmp_path / "www"
    folder.mkdir()
    with served_folder(folder) as url:
        yield url, folder


def test_a_url_is_fetched_once_and_kept_by_digest(
    site: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = site
    monkeypatch.setenv(sources.VARIABLE, str(tmp_path / "kept"))
    source = write(folder / "tasks.jsonl", [math_row(n) for n in range(3)])
    digest = file_digest(source)
    arguments: dict[str, int | str] = {"sha256": digest, "url": f"{url}/tasks.jsonl"}
    assert len(TaskDataset(arguments, BUDGETS)) == 3
    source.unlink()  # from now on it must come from what was kept
    assert len(TaskDataset(arguments, BUDGETS)) == 3
    assert len(TaskDataset({"sha256": digest}, BUDGETS)) == 3
    kept = tmp_path / "kept" / f"{digest[2:]}.jsonl"
    kept.write_bytes(b"altered")
    with pytest.raises(UntrustedError, match="has digest"):
        TaskDataset(arguments, BUDGETS)


def test_no_url_or_redirect_of_a_run_leads_into_a_private_network(
    site: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = site
    source = write(folder / "tasks.jsonl", [math_row(1)])
    digest = file_digest(source)
    with pytest.raises(UntrustedError, match="private address"):
        fetch(f"{url}/tasks.jsonl", digest, tmp_path / "kept", public_only=True)

    class Redirect(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"{url}/tasks.jsonl")
            self.end_headers()

    def address(host: str) -> str:
        return "127.0.0.1" if host == "public.example" else public_address(host)

    monkeypatch.setattr(paced, "public_address", address)
    with served(Redirect) as other:
        first = f"{other.replace('127.0.0.1', 'public.example')}/tasks.jsonl"
        with pytest.raises(UntrustedError, match="private address"):
            fetch(first, digest, tmp_path / "kept", public_only=True)
        direct = f"{other}/tasks.jsonl"
        assert fetch(direct, digest, tmp_path / "kept").read_bytes() == source.read_bytes()


def test_other_bytes_missing_files_and_endless_ones_are_refused_and_leave_nothing(
    site: tuple[str, Path], tmp_path: Path
) -> None:
    url, folder = site
    write(folder / "tasks.jsonl", [math_row(1)])
    kept = tmp_path / "kept"
    wrong = "0x" + hashlib.sha256(b"other").hexdigest()
    with pytest.raises(UntrustedError, match=wrong):
        locate(wrong, url=f"{url}/tasks.jsonl", folder=kept)
    with pytest.raises(UnavailableError, match="404"):
        locate(wrong, url=f"{url}/none.jsonl", folder=kept)
    with pytest.raises(MalformedError, match="longer"):
        fetch(f"{url}/tasks.jsonl", wrong, kept, limit=10)
    with pytest.raises(UserError, match=r"is not an http\(s\) address"):
        locate(wrong, url="file:///etc/passwd.jsonl", folder=kept)
    with pytest.raises(UserError, match="nothing says where"):
        locate(wrong, folder=kept)
    with pytest.raises(UnavailableError, match="cannot be fetched"):
        locate(wrong, url="http://127.0.0.1:9/x.jsonl", folder=kept)
    for url in ("http://[/x.jsonl", "http:///x.jsonl", "http://☃/x.jsonl"):
        with pytest.raises(UserError, match=r"is not an http\(s\) address"):
            locate(wrong, url=url, folder=kept)
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path), "/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(UserError, match="is no file, "):
            locate(wrong, path=path, folder=kept)
    for path in ("~no-such-user/x.jsonl", "x" * 5000):
        with pytest.raises(UserError, match="cannot be opened"):
            locate(wrong, path=path, folder=kept)
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1/x.jsonl", "http://p\u00f6\u00f6l/x.jsonl"])
def test_an_address_that_no_request_can_hold_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    def redirects(_: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"Location": "http://a:99999/"})

    client = httpx.Client(transport=httpx.MockTransport(redirects))
    monkeypatch.setattr(paced, "paced_client", lambda *_, **__: client)
    with pytest.raises(UnavailableError, match="redirects to an invalid URL"):
        fetch(url, "0x" + "0" * 64, tmp_path)


def test_a_disk_without_room_for_a_dataset_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", [math_row(1)])
    arguments: dict[str, int | str] = {"sha256": file_digest(path), "path": str(path)}

    def full(**_: object) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkstemp", full)
        with pytest.raises(UnavailableError, match="No space left on device"):
            sources.bring(arguments, tmp_path / "policies")
        with pytest.raises(UnavailableError, match="No space left on device"):
            fetch("http://127.0.0.1:9/x.jsonl", "0x" + "0" * 64, tmp_path)
    assert sources.bring(arguments, tmp_path / "policies") is not None


def test_an_unpacking_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "slow.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    monkeypatch.setattr(rows, "MAX_SECONDS", 0.01)
    with pytest.raises(MalformedError, match=r"slow\.parquet took more than"):
        list(read_rows(path))


def test_an_agent_brings_the_dataset_to_a_worker_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", [math_row(n) for n in range(3)])
    arguments: dict[str, int | str] = {"sha256": file_digest(path), "path": str(path)}
    brought = sources.bring(arguments, tmp_path / "policies" / "datasets")
    assert brought is not None
    assert brought.stat().st_mode & 0o444 == 0o444
    assert sources.bring(arguments, brought.parent) == brought
    with pytest.raises(UntrustedError, match="names the local file"):
        sources.bring({"path": "/dev/zero"}, brought.parent, allow_path=False)
    path.unlink()  # the container does not see it
    monkeypatch.setenv(sources.VARIABLE, str(brought.parent))
    assert len(TaskDataset(arguments, BUDGETS)) == 3
    assert sources.bring({}, tmp_path / "none") is None
    assert not (tmp_path / "none").exists()
    brought.write_bytes(b"altered")
    with pytest.raises(UntrustedError):
        sources.bring(arguments, brought.parent)
