"""`orchestrator rollouts list|show|export` on a small pool: both databases, folder and bucket."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from judges import Bench, bench, judge_of
from orchestrator_world import START, MakeWorld, Session, World, signer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from devnet.s3 import BUCKET, S3Server
from prime_broadcast.manifest import build_manifest
from prime_core.encoding import sha256
from prime_core.errors import MalformedError, NotFoundError, PrimeError, UserError
from prime_core.ids import Digest
from prime_core.run import MICRO, LengthBudgets
from prime_core.storage.base import digest_key
from prime_core.storage.directory import DirectoryStore
from prime_core.storage.s3 import S3Store
from prime_core.task import SignedLease
from prime_core.verdict import Reason, VerdictRow
from prime_envs.registry import environment_for, environment_ref
from prime_orchestrator import rollouts
from prime_orchestrator.cli.main import app
from prime_orchestrator.store import Store, groups, meta, opinions
from prime_orchestrator.store import batches as store_batches
from prime_orchestrator.store import policies as store_policies
from prime_orchestrator.store.batches import BatchRow
from prime_verify.build import plan_rows
from prime_verify.rollout_file import FileMetadata, FileRow, write_rollout_file

MODEL = Path(__file__).parents[2] / "devnet" / "model"
BUDGETS = LengthBudgets(targets=(2,), penalty_micro=0)


@dataclass
class Pool:
    """A world whose files parse, its validator, and the commands' arguments."""

    world: World
    bench: Bench
    tokenizer: Any
    arguments: tuple[str, ...]

    def hand_in(
        self, session: Session, answers: Sequence[bool | None], lease: SignedLease | None = None
    ) -> Digest:
        """A file of one row an answer, right or wrong, that claims a reward of 0.25 each."""
        lease = lease or self.world.lease(session)
        run, digest = self.world.backend.context.run, self.world.lease_digest(lease)
        plan = plan_rows(
            lease.lease, digest, run, environment_for(run), self.tokenizer, lease.opening
        )
        rows = []
        for row, right in zip(plan, answers, strict=True):
            text = f"..={row.problem.answer if right else 'zzz'}"
            tokens = tuple(self.tokenizer.encode(text, add_special_tokens=False))
            rows.append(
                FileRow(
                    problem_id=row.problem.problem_id, group=row.group, sample=row.sample,
                    prompt_tokens=row.prompt_tokens, output_tokens=tokens,
                    logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
                    target_length=row.target_length, finish_reason="length",
                    policy_version=0, reward=0.25, proofs=b"", sketch=b"",
                )
            )  # fmt: skip
        metadata = FileMetadata(lease=digest, engine="test/1", dtype="float32", device="cpu")
        return self.send(session, write_rollout_file(rows, metadata), lease)

    def send(self, session: Session, data: bytes, lease: Any = None) -> Digest:
        lease = lease or self.world.lease(session)
        assert self.world.upload(session, lease, data).status_code == 204
        answer = self.world.post("/v1/submissions", self.world.claim(session.account, lease, data))
        assert answer.status_code == 200, answer.text
        self.world.clock.advance(1)
        return Digest(answer.json()["receipt"]["submission_digest"])

    def judge(self, reason: Reason = Reason.NONE, answers: Sequence[bool | None] = ()) -> None:
        """The validator's opinion on the oldest file; the verdict follows. None: not graded."""
        job = self.bench.claim()
        assert job is not None
        run = self.world.backend.context.run
        plan = plan_rows(
            job.lease.lease, self.world.lease_digest(job.lease), run, environment_for(run),
            self.tokenizer, job.lease.opening,
        )  # fmt: skip
        rows = [
            VerdictRow(
                problem_id=row.problem.problem_id, group=row.group, sample=row.sample,
                reward_micro=MICRO if right else 0, prompt_tokens=len(row.prompt_tokens),
                output_tokens=len(
                    self.tokenizer.encode(
                        f"..={row.problem.answer if right else 'zzz'}", add_special_tokens=False
                    )
                ),
                ungraded=right is None,
                parts={} if right is None else {"task_micro": MICRO * right},
            )
            for row, right in zip(plan, answers, strict=False)
        ]  # fmt: skip
        self.bench.say(job, reason, rows)
        judge_of(self.world.backend).tick()

    def accepted(self, session: Session, answers: Sequence[bool | None]) -> Digest:
        digest = self.hand_in(session, answers)
        self.judge(answers=answers)
        return digest

    def seal(self, step: int, *taken: tuple[Digest, int]) -> None:
        """A batch of `step` that takes these groups."""
        with self.world.backend.store.begin() as connection:
            store_batches.add(
                connection,
                BatchRow(step, sha256(b"%d" % step), "{}", 2, 0, 0, self.world.clock()),
            )
            assert groups.take(connection, taken, step) == len(taken)

    def run(self, *words: str) -> str:
        return self.orchestrator("rollouts", *words)

    def orchestrator(self, *words: str) -> str:
        done = CliRunner().invoke(app, [*words, *self.arguments])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))

    def listed(self, *words: str) -> list[Any]:
        found: list[Any] = self.json("list", *words)["rollouts"]
        return found


@pytest.fixture
def store(either_store: Store) -> Store:
    """The pool's database, of each kind."""
    return either_store


@pytest.fixture
def pool(
    make_world: MakeWorld, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    world = make_world(
        budgets=BUDGETS,
        environment=environment_ref("reverse", {}, BUDGETS, train_size=100, heldout_size=10),
        groups_per_batch=10_000,  # it leases as long as files come in
        detailed_tables=True,
        schema_version=6,
    )
    world.publish(0)
    with store.begin() as connection:
        meta.put(connection, meta.SERVES, f"31337/{secrets.token_hex(8)}/1")
        meta.put(connection, meta.RUN, world.backend.context.run.raw().decode())
    url = store.engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv("PRIME_ORCHESTRATOR_DATABASE", url)
    monkeypatch.setenv("PRIME_ORCHESTRATOR_OBJECTS", str(tmp_path / "objects"))
    validator = bench(world.backend, signer(202), tmp_path, seed=None)
    yield Pool(
        world, validator, AutoTokenizer.from_pretrained(MODEL), ("--data", str(tmp_path / "data"))
    )
    validator.close()


RIGHT, WRONG = True, False


@pytest.mark.slow
def test_the_list_says_what_became_of_every_file_and_group(pool: Pool) -> None:
    one, two, three = (pool.world.member(number) for number in (1, 2, 3))
    trained = pool.accepted(one, [RIGHT, WRONG, WRONG, WRONG])
    stale = pool.accepted(one, [RIGHT, WRONG, RIGHT, WRONG])
    lie = pool.hand_in(two, [RIGHT] * 4)
    pool.judge(Reason.WRONG_SAMPLING)
    broken = pool.send(three, b"no Parquet file")
    pool.judge(Reason.MALFORMED)
    waits = pool.hand_in(three, [WRONG] * 4)
    pool.seal(1, (trained, 0))
    found = {line["id"]: line for line in pool.listed()}
    assert list(found) == [waits, broken, lie, stale, trained], "newest first"

    line = found[trained]
    assert (line["verdict"], line["rows"], line["reward"]) == ("accepted", 4, 0.25)
    assert (line["node"], line["environment"]) == (one.account.address, "reverse")
    assert (line["policy"], line["staleness"]) == (0, 1)
    first, second = line["groups"]
    assert (first["state"], first["batch"], first["staleness"]) == ("sealed", 1, 1)
    assert (second["state"], second["reward"]) == ("dropped", 0.0)
    assert "zero" in second["why"]
    assert [group["state"] for group in found[stale]["groups"]] == ["waiting", "waiting"]
    assert found[lie]["reason"] == "wrong_sampling"
    assert "noise" in found[lie]["why"]
    assert (found[broken]["verdict"], found[broken]["reason"]) == ("void", "malformed")
    assert (found[waits]["verdict"], found[waits]["reward"]) == ("submitted", None)

    assert "1 equal rewards, 1 sealed in 1" in pool.run("list")
    pool.world.publish(2)  # the policy that batch 1 makes
    pool.seal(2)
    text = pool.run("list")
    assert "1 equal rewards, 1 trained in 1" in text
    assert "2 stale" in text, "policy 0 is 3 old at step 3, and the run allows 2"
    assert "wrong_sampling" in text
    assert "\x1b" not in text
    with pool.world.backend.store.begin() as connection:
        opinions.plant(connection, stale, "honest", now=0)
    assert "2 planted" in pool.run("list")


def test_rows_that_were_not_graded_have_no_reward(pool: Pool, tmp_path: Path) -> None:
    file = pool.accepted(pool.world.member(1), [RIGHT, None, None, None])
    (line,) = pool.listed()
    assert (line["rows"], line["reward"]) == (4, 1.0)
    first, second = line["groups"]
    assert (first["ungraded"], first["reward"], first["why"].partition(":")[0]) == (
        1, 1.0, "equal rewards",
    )  # fmt: skip
    assert (second["ungraded"], second["reward"], second["state"]) == (2, None, "dropped")
    assert second["why"] == "not graded: the environment raised"
    said = pool.run("show", file)
    assert "group 0: reward 1.000 without 1 rows that were not graded, dropped" in said
    assert "group 1: no reward, dropped" in said
    assert said.count(": ungraded\n") == 3
    assert "claimed by the node" not in said
    assert [one["reward"] for one in pool.json("show", file)["samples"]] == [1.0, None, None, None]
    out = tmp_path / "set.parquet"
    pool.run("export", "--out", str(out))
    assert pq.read_table(out)["reward"].to_pylist() == [1.0, None, None, None]


@pytest.mark.slow
def test_the_list_is_filtered_and_comes_in_pages(pool: Pool) -> None:
    sessions = [pool.world.member(number) for number in (1, 2)]
    names = [pool.send(sessions[number % 2], b"file %d" % number) for number in range(5)]
    newest = names[::-1]
    page = pool.json("list", "--last", "2")
    seen = [line["id"] for line in page["rollouts"]]
    while page["before"] is not None:
        page = pool.json("list", "--last", "2", "--before", page["before"])
        assert 0 < len(page["rollouts"]) <= 2
        seen += [line["id"] for line in page["rollouts"]]
    assert seen == newest
    assert f"--before {newest[1][:18]}" in pool.run("list", "--last", "2")

    def ids(*words: str) -> list[str]:
        return [line["id"] for line in pool.listed(*words)]

    assert ids("--node", sessions[1].account.address.lower()) == [newest[1], newest[3]]
    assert ids("--verdict", "accepted") == []
    pool.judge(Reason.MALFORMED)
    assert ids("--verdict", "void") == [names[0]]
    begin = "2027-01-15T08:00:0"
    assert ids("--since", f"{begin}3") == newest[:2]
    assert ids("--since", f"{begin}3+00:00", "--verdict", "void") == []
    assert ids("--since", "36500d") == newest
    assert START == 1_800_000_000.0, "which is 2027-01-15T08:00Z"


@pytest.mark.slow
def test_a_file_is_shown_with_texts_rewards_and_verdict(pool: Pool, tmp_path: Path) -> None:
    one, two = pool.world.member(1), pool.world.member(2)
    name = pool.accepted(one, [RIGHT, WRONG, WRONG, WRONG])
    lie = pool.hand_in(two, [RIGHT] * 4)
    pool.judge(Reason.WRONG_SAMPLING)
    found = pool.json("show", name[:10], "--model", str(MODEL), "--grade")
    right, wrong = found["samples"][:2]
    assert right["prompt"].startswith("02|")
    word = right["prompt"][3:-1]
    assert right["turns"] == [f"..={word[::-1]}"]
    assert (right["reward"], right["claimed"], right["reason"]) == (1.0, 0.25, "reversed")
    assert (right["parts"]["task_micro"], wrong["parts"]["task_micro"]) == (MICRO, 0)

    judged = pool.json("show", name)["samples"]
    assert [one["parts"] for one in judged] == [{"task_micro": MICRO}, *[{"task_micro": 0}] * 3]
    text = pool.run("show", name[2:12], "--model", str(MODEL), "--row", "0", "--grade")
    assert f"02|{word}>..={word[::-1]}\n" in text
    assert "reward 1.000 (task_micro 1000000, length 2, target 2; reversed)" in text
    assert "tokens, ended by length" in text
    assert "accepted: nothing was found against it" in text
    assert "row 1" not in text
    assert "\x1b" not in text, "plain where there is no terminal"
    text = pool.run("show", name, "--most", "3")
    assert f"{word}>" not in text, "no texts without a tokenizer"
    assert "1 more rows: --row N or --most 4" in text

    text = pool.run("show", lie)
    assert f"rejected: {Reason.WRONG_SAMPLING.sentence}" in text
    assert "evidence: made by a test" in text
    assert "reward 0.250, claimed by the node and not verified" in text


@pytest.mark.slow
def test_a_file_that_does_not_parse_is_shown_by_its_verdict(pool: Pool) -> None:
    name = pool.send(pool.world.member(1), b"no Parquet file")
    pool.judge(Reason.MALFORMED)
    text = pool.run("show", name)
    assert Reason.MALFORMED.sentence in text
    assert "its rows cannot be shown" in text


@pytest.mark.slow
def test_what_cannot_be_shown_is_one_sentence(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = pool.hand_in(pool.world.member(1), [WRONG] * 4)

    def refused(kind: type[PrimeError], *words: str) -> str:
        with pytest.raises(kind) as caught:
            pool.run(*words)
        return str(caught.value)

    assert "no rollout file of this pool" in refused(NotFoundError, "show", "00000000")
    assert "is not an id" in refused(UserError, "show", "xyz")
    assert "no row 4" in refused(UserError, "show", name, "--row", "4")
    assert "is not a time" in refused(UserError, "list", "--since", "yesterday")
    assert "is not one of submitted" in refused(UserError, "list", "--verdict", "good")
    assert "address" in refused(UserError, "list", "--node", "0x12")
    assert "tokenizer" in refused(UserError, "show", name, "--grade")
    assert "tokenizer" in refused(UserError, "export", "--out", str(tmp_path / "x"), "--grade")
    assert "no tokenizer" in refused(UserError, "show", name, "--model", str(tmp_path))
    objects = pool.world.backend.objects
    assert isinstance(objects, DirectoryStore)
    shutil.rmtree(objects.root)
    assert "is not in the store" in refused(NotFoundError, "show", name)
    with pool.world.backend.store.begin() as connection:
        meta.drop(connection, meta.RUN)
    assert "run definition" in refused(UserError, "list")
    monkeypatch.delenv("PRIME_ORCHESTRATOR_DATABASE")
    for command in (["list"], ["show", name], ["export", "--out", str(tmp_path / "x.parquet")]):
        assert "there is no pool in" in refused(UserError, *command)
    assert not (tmp_path / "data" / "orchestrator.sqlite").exists(), "none is made"


def test_the_tokenizer_must_be_the_runs(pool: Pool, tmp_path: Path) -> None:
    """Another one would show texts that no one wrote."""
    name = pool.hand_in(pool.world.member(1), [WRONG] * 4)
    other = tmp_path / "model"
    shutil.copytree(MODEL, other)
    manifest = build_manifest(other, pool=1, version=0, step=0)
    with pool.world.backend.store.begin() as connection:
        connection.exec_driver_sql("DELETE FROM policies")
        signed = pool.world.manifest(0).model_copy(update={"manifest": manifest})
        store_policies.add(connection, signed, now=0)
    assert pool.json("show", name, "--model", str(other))["samples"][0]["prompt"]
    settings = other / "tokenizer_config.json"
    settings.write_text(settings.read_text() + " ")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not the file"):
        pool.run("show", name, "--model", str(other))


@pytest.mark.slow
def test_an_export_holds_the_accepted_rows_as_the_trainer_gets_them(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pool.world.member(1), pool.world.member(2)
    first = pool.accepted(one, [RIGHT, WRONG, WRONG, WRONG])
    second = pool.accepted(one, [RIGHT, WRONG, RIGHT, WRONG])
    lie = pool.hand_in(two, [RIGHT] * 4)
    pool.judge(Reason.WRONG_SAMPLING)
    pool.send(pool.world.member(3), b"no Parquet file")
    pool.judge(Reason.MALFORMED)
    pool.seal(0, (first, 0))
    pool.world.publish(1)
    monkeypatch.setattr(rollouts, "ROW_GROUP_BYTES", 1)  # a file's rows are written at once
    monkeypatch.setattr(rollouts, "_AT_ONCE", 1)
    out = tmp_path / "set"
    out.mkdir()
    said = pool.run("export", "--out", str(out), "--model", str(MODEL))
    assert said == f"8 rows of 2 files in {out}/rollouts.parquet\n"
    assert [path.name for path in out.iterdir()] == ["rollouts.parquet"]
    file = pq.ParquetFile(out / "rollouts.parquet")
    assert file.num_row_groups == 2
    assert file.metadata.metadata[b"run"].decode() == pool.world.backend.context.run.digest()
    rows = file.read().to_pylist()
    assert [row["file"] for row in rows] == [first] * 4 + [second] * 4
    environment = pool.world.backend.context.run.environment
    assert {row["environment_digest"] for row in rows} == {environment.digest}
    assert [row["reward"] for row in rows] == [1, 0, 0, 0, 1, 0, 1, 0]
    assert {row["claimed_reward"] for row in rows} == {0.25}
    parts = [part for row in rows for part in row["reward_parts"]]
    assert [one["value"] for one in parts] == [MICRO * row["reward"] for row in rows]
    assert [row["group_state"] for row in rows[::2]] == ["trained", "dropped", "waiting", "waiting"]
    assert (rows[0]["batch_step"], rows[0]["staleness"], rows[2]["batch_step"]) == (0, 0, None)
    assert rows[0]["output"] == f"..={rows[0]['prompt'][3:-1][::-1]}"
    assert rows[0]["received_at"].timestamp() == START
    asked = {"role": "user", "content": rows[0]["prompt"], "tool_calls": None, "tool_call_id": None}
    answered = asked | {"role": "assistant", "content": rows[0]["output"]}
    assert rows[0]["messages"] == [asked, answered]
    tokens = pool.tokenizer.encode(rows[0]["output"], add_special_tokens=False)
    assert rows[0]["output_tokens"] == tokens
    assert rows[0]["logprobs"] == [-0.5] * len(tokens)

    with pytest.raises(UserError, match="exists already"):
        pool.run("export", "--out", str(out))
    everything = tmp_path / "all.parquet"
    done = pool.json("export", "--out", str(everything), "--all", "--model", str(MODEL), "--grade")
    assert (done["files"], done["rows"], done["unreadable"]) == (3, 12, 1)
    rejected = [row for row in pq.read_table(everything).to_pylist() if row["file"] == lie]
    assert {(row["reward"], row["reason"]) for row in rejected} == {(None, "wrong_sampling")}
    for row in pq.read_table(everything).to_pylist():
        parts = {part["name"]: part["value"] for part in row["reward_parts"]}
        right = row["file"] == lie or row["reward"] == 1.0
        assert parts == {"task_micro": MICRO * right, "length": 2, "target": 2}
        assert bool(row["reward_reason"])
    later = tmp_path / "later.parquet"
    pool.run("export", "--out", str(later), "--since", "2027-01-15T08:00:01")
    assert {row["file"] for row in pq.read_table(later).to_pylist()} == {second}
    if "PRIME_LM_EVAL_PYTHON" not in os.environ:
        pytest.skip("Hugging Face datasets: scripts/setup_lm_eval.sh, PRIME_LM_EVAL_PYTHON")
    script = (
        "import sys, datasets\n"
        "rows = datasets.load_dataset('parquet', data_files=sys.argv[1:], split='train')\n"
        "rows.to_json(sys.argv[1] + '.jsonl')\n"
    )
    quiet = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    subprocess.run(
        [os.environ["PRIME_LM_EVAL_PYTHON"], "-c", script, str(out / "rollouts.parquet")],
        check=True, env={**os.environ, **quiet},
    )  # fmt: skip
    lines = (out / "rollouts.parquet.jsonl").read_text().splitlines()
    loaded = [json.loads(line) for line in lines]
    for name in sorted(set(rows[0]) - {"received_at"}):
        assert [row[name] for row in loaded] == [row[name] for row in rows], name
    assert [list(row) for row in loaded] == [list(row) for row in rows]


def test_an_export_that_fails_leaves_nothing(pool: Pool, tmp_path: Path) -> None:
    session = pool.world.member(1)
    pool.accepted(session, [RIGHT, WRONG, WRONG, WRONG])
    lost = pool.accepted(session, [RIGHT, WRONG, RIGHT, WRONG])
    objects = pool.world.backend.objects
    with pool.world.backend.store.read() as connection:
        objects.delete(digest_key(rollouts.find(connection, lost, objects)[0].sha256))
    out = tmp_path / "set"
    out.mkdir()
    with pytest.raises(NotFoundError, match=lost):
        pool.run("export", "--out", str(out))
    assert list(out.iterdir()) == []


@pytest.mark.slow
def test_an_accepted_file_that_does_not_parse_is_never_left_out(pool: Pool, tmp_path: Path) -> None:
    damaged = pool.send(pool.world.member(1), b"no Parquet file")
    pool.judge(answers=[RIGHT, WRONG, WRONG, WRONG])
    with pytest.raises(MalformedError, match=damaged):
        pool.run("export", "--out", str(tmp_path / "x.parquet"))


@pytest.mark.slow
def test_the_commands_read_a_bucket(pool: Pool, s3: S3Server, tmp_path: Path) -> None:
    name = pool.accepted(pool.world.member(1), [RIGHT, WRONG, WRONG, WRONG])
    store, objects = pool.world.backend.store, pool.world.backend.objects
    assert isinstance(objects, DirectoryStore)
    with store.read() as connection:
        place = meta.get(connection, meta.SERVES)
    bucket = S3Store(BUCKET, prefix=place or "", endpoint=s3.url)
    for key in objects.keys(""):
        bucket.put_file(key, objects.root / key)
    shutil.rmtree(objects.root)
    flags = ("--s3-bucket", BUCKET, "--s3-endpoint", s3.url)
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("PRIME_ORCHESTRATOR_OBJECTS")
        assert "reward 1.000" in pool.run("show", name, *flags)
        assert "4 rows of 1 files" in pool.run("export", "--out", str(tmp_path / "x"), *flags)
