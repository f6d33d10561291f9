"""`trainer local`: the loop of a run in one process, from a TOML file to a model folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import string
import subprocess
import sys
import threading
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from prime_core.errors import FatalError, PolicyError, UserError
from prime_core.folders import held_alone
from prime_core.gateway import Recording
from prime_core.rollout import Rollout
from prime_core.run import MICRO, Conversation
from prime_core.run_file import read_run
from prime_core.waiting import StoppedError
from prime_engine.tiny import character_tokenizer
from prime_envs.base import Problem, TaskScore
from prime_envs.environments.reverse import Reverse
from prime_envs.registry import BUILT_IN, environment_for
from prime_envs.tools import TOOL_ERROR, Observation
from prime_orchestrator.cli.run import define
from prime_trainer import local as local_module
from prime_trainer.advantages import Judged, judge
from prime_trainer.cli import app
from prime_trainer.config import ObjectiveSettings, Settings, load
from prime_trainer.disk import whole_lines
from prime_trainer.learner import make_learner
from prime_trainer.local import CHECKPOINTS, POOL_ONLY, Local, Made, Options, local_run, run_local
from prime_trainer.metrics import describe_rows, read_lines
from prime_trainer.observe import Observers, flat
from prime_trainer.parallel import World
from prime_trainer.samples import append_samples, chosen_samples, tool_figures
from prime_verify.engines import load_engine

DEMO = Path(__file__).parents[2] / "devnet" / "model"
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards" / "trainer.json"
ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
RUN = """name = "words"
max_output_tokens = 24
samples_per_group = 4
groups_per_lease = 2
groups_per_batch = 2
{more}
[environment]
name = "reverse"
train_size = 1000
heldout_size = 32

[budgets]
targets = [2, 6]
penalty_micro = {penalty}
form = "clip"
"""
TRAINER = """learning_rate = 1e-3
warmup_steps = 0

[objective]
name = "dr_grpo"
advantage = "mean"
"""


def written(folder: Path, more: str = "", penalty: int = 150_000) -> Path:
    """A run's TOML in `folder`, with the trainer's settings next to it."""
    folder.mkdir(exist_ok=True)
    source = folder / "run.toml"
    source.write_text(RUN.format(more=more, penalty=penalty))
    (folder / "run.trainer.toml").write_text(TRAINER)
    return source


def command(source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["local", str(source), "--model", str(DEMO), "--out", str(out), *options]
    return subprocess.run(
        [sys.executable, "-m", "prime_trainer.cli", *words],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_one_command_goes_from_a_toml_file_to_a_trained_model(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in"), tmp_path / "out"
    events = tmp_path / "events"
    done = command(
        source, out, "--steps", "3", "--evaluate-every", "2", "--problems", "8",
        "--tensorboard", str(events),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {
        "run.json", "metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "curve.svg", "model",
    }  # fmt: skip

    lines = read_lines(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["applied"] and line["rows"] == 8 for line in lines)
    assert all(line["generated_rows"] % 8 == 0 and line["kl_mismatch"] < 1e-3 for line in lines)
    assert all(0 <= line["pass_1"] <= line["pass_k"] <= 1 for line in lines)
    for line in lines:
        assert line["reward_parts"].keys() == {"task_micro", "length", "target"}
        assert line["reward_parts"]["task_micro"] == pytest.approx(line["task"] * MICRO)
    shown = (DASHBOARD.read_text(), ALERTS.read_text())
    asked = set(re.findall(r"prime_trainer_(\w+)", "\n".join(shown))) - {"waiting"}
    given = {name.partition("/")[0] for name, _ in flat(lines[0])}
    assert asked - given <= {"tokens_s", "tokens_s_wall"}, "the pool's trainer adds these"
    assert [text.split(":")[0] for text in done.stdout.splitlines()] == [
        "policy 0, 8 held-out problems", "step 0", "step 1", "policy 2, 8 held-out problems",
        "step 2", "policy 3, 8 held-out problems", "policy 3",
    ]  # fmt: skip

    run = read_run(out / "run.json", exact=True)
    environment = environment_for(run)
    tokenizer = load_engine(DEMO, threads=1).tokenizer
    samples = read_lines(out / "samples.jsonl")
    assert {sample["step"] for sample in samples} == {0, 1, 2}
    (shown_events,) = events.iterdir()
    assert samples[0]["turns"][0].split("\n")[0].encode() in shown_events.read_bytes()
    for sample in samples:
        problem = environment.problem(int(sample["problem"].removeprefix("reverse-")))
        assert sample["prompt"] == environment.prompt_text(problem, sample["target"])
        tokens = tokenizer.encode(sample["turns"][0], add_special_tokens=False)
        grade = environment.grade(problem, sample["target"], sample["turns"][0], len(tokens))
        assert (grade.reward_micro / MICRO, dict(grade.parts)) == (
            sample["reward"], sample["parts"],
        )  # fmt: skip

    evaluations = read_lines(out / "evaluations.jsonl")
    assert [found["version"] for found in evaluations] == [0, 2, 3]
    gain = evaluations[-1]["reward"]["mean"] - evaluations[0]["reward"]["mean"]
    assert evaluations[-1]["gain"]["reward"]["mean"] == pytest.approx(gain)

    trained = load_file(out / "model" / "model.safetensors")
    base = load_file(DEMO / "model.safetensors")
    assert trained.keys() == base.keys()
    assert any((trained[name] != base[name]).any() for name in base)
    used = json.loads((out / "model" / "trainer.json").read_text())
    assert (used["learning_rate"], used["objective"]["name"]) == (1e-3, "dr_grpo")
    assert load_engine(out / "model", threads=1).vocabulary == len(tokenizer)


def settings_for(out: Path, model: Path = DEMO, **more: Any) -> Settings:
    return load({"model": model, "data": out, "steps": 1, **more})


def test_a_pool_of_the_same_file_has_the_same_run(tmp_path: Path) -> None:
    source = written(tmp_path, more="price_per_unit = 7\nschema_version = 1")
    local = local_run(source, DEMO)
    pool = define({**POOL_ONLY, **tomllib.loads(source.read_text())}, source, DEMO)
    assert local.digest() == pool.digest()
    assert local.price_per_unit == 7


@pytest.mark.slow
def test_answers_that_are_all_rewarded_alike_end_the_run_in_one_sentence(
    tmp_path: Path, model: Path, world: World
) -> None:
    """The model has random weights and never answers a word."""
    run = local_run(written(tmp_path / "in", penalty=0), model)
    out = tmp_path / "out"
    out.mkdir()
    learner = make_learner(run, settings_for(out, model), world)
    local = Local(learner, Options(), Observers.none(), print)
    with pytest.raises(UserError, match=r"step 0: 40 groups of 4 .* in 40 of them all are"):
        local.batch()
    local.close()


def test_a_step_counts_the_tools_answers(tmp_path: Path, world: World) -> None:
    source = written(tmp_path / "in")
    tools = '[conversation]\nturns = 2\ntools = ["calculator-1"]\n'
    source.write_text(source.read_text() + tools)
    run = local_run(source, DEMO)
    assert run.conversation is not None
    learner = make_learner(run, settings_for(tmp_path / "out"), world)
    local = Local(learner, Options(), Observers.none(), lambda _: None)
    line = local.step()
    assert line["tool_calls"] == 0, "this model knows no tool"
    assert "tool_success" not in line
    local.close()


def test_replies_to_calls_are_counted_and_those_that_are_errors() -> None:
    """Also of a verifiers taskset, whose tools the run does not name."""
    signs = string.ascii_letters + string.digits + string.punctuation + " "
    tokenizer = character_tokenizer(signs, end="\n")
    own = Conversation(turns=3, tools=("calculator-1",))
    tasksets = Conversation(turns=3, calls="hermes-1")
    for conversation, call, error in (
        (own, "<calculator>1+1</calculator>", f"{TOOL_ERROR}a number is missing"),
        (tasksets, '<tool_call>{"name": "add"}</tool_call>', "Error executing tool add: no b"),
        (tasksets, "<tool_call>{</tool_call>", f"{TOOL_ERROR}no JSON"),
    ):
        rows = [
            rollout_of(texts, tokenizer)
            for texts in ([call, "2", "b"], [call, error, call, "2", "c"], ["b", error, "c"], ["d"])
        ]
        found = tool_figures(rows, conversation, tokenizer)
        assert found == {"tool_calls": 0.75, "tool_success": pytest.approx(2 / 3)}
    talk = Conversation(turns=3)
    assert tool_figures(rows, None, tokenizer) == tool_figures(rows, talk, tokenizer) == {}


def rollout_of(texts: Sequence[str], tokenizer: Any) -> Rollout:
    """A row whose spans are these texts, the model's first."""
    spans = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    output = [token for span in spans for token in span]
    lengths = tuple(map(len, spans)) if len(spans) > 1 else ()
    return Rollout("reverse-0", 0, 0, [1], output, [0.0] * len(output), 8, "end", 0, 1.0, lengths)


def test_a_mixture_s_reward_is_stated_for_each_part(tmp_path: Path, world: World) -> None:
    source = written(tmp_path / "in")
    parts = "".join(
        f'[[environment.parts]]\nname = "reverse"\nlabel = "{label}"\n'
        f"arguments = {{ shortest = {letters}, longest = {letters} }}\n"
        for label, letters in (("short", 3), ("long", 5))
    )
    mixed = source.read_text().replace('name = "reverse"', 'name = "mixture"')
    source.write_text(mixed.replace("\n[budgets]", f"{parts}\n[budgets]"))
    run = local_run(source, DEMO).model_copy(update={"groups_per_lease": 16})
    learner = make_learner(run, settings_for(tmp_path / "out"), world)
    local = Local(learner, Options(), Observers.none(), lambda _: None)
    batch, made = local.batch()
    assert made.figures(run.samples_per_group)["reward_by_environment"].keys() == {"short", "long"}
    line = describe_rows(batch.rollouts, 0, run.environment)
    rewards: dict[str, list[float]] = {}
    for row in batch.rollouts:
        rewards.setdefault(row.problem_id.split("/")[0], []).append(row.reward)
    assert line["reward_by_environment"] == {
        part: pytest.approx(sum(values) / len(values)) for part, values in rewards.items()
    }
    assert sum(line["share_by_environment"].values()) == pytest.approx(1)
    local.close()


def test_groups_left_over_are_trained_while_they_are_fresh(tmp_path: Path, world: World) -> None:
    """Three of five groups a lease are left over, and the next step takes two of them."""
    source = written(tmp_path / "in", more="max_staleness = 1")
    run = local_run(source, DEMO).model_copy(update={"groups_per_lease": 6})
    learner = make_learner(run, settings_for(tmp_path / "out"), world)
    local = Local(learner, Options(), Observers.none(), lambda _: None)
    first, made = local.batch()
    assert made.groups == 6
    left = {group.key for group in local.waiting}
    assert len(left) == made.groups - made.alike - 2
    local.version = 1
    second, made = local.batch()
    assert made == Made()
    assert set(second.keys) <= left
    assert not set(second.keys) & set(first.keys)
    local.version = 2
    local.waiting = local.waiting[:1]
    third, made = local.batch()
    assert made.groups
    assert not set(third.keys) & left
    local.close()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"steps": None}, "the number of steps is not given"),
        ({"problems": 33}, "33 held-out problems were asked for; the run holds out 32"),
        ({"seed": 1 << 32}, "the seed 4294967296 is not in 0"),
        ({"full": True}, "is not empty"),
        ({"toml": "style = 3"}, "is not a run: style"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    source, out = written(tmp_path / "in", more=more.get("toml", "")), tmp_path / "out"
    if more.get("full"):
        written(out)
    settings = settings_for(out).model_copy(update={"steps": more.get("steps", 1)})
    options = Options(problems=more.get("problems", 32), seed=more.get("seed", 0))
    before = sorted(out.rglob("*"))
    with pytest.raises(UserError, match=said):
        run_local(source, settings, options, threading.Event())
    assert sorted(out.rglob("*")) == before


@pytest.mark.usefixtures("_one_process_group")
def test_a_mistake_that_ends_a_run_before_its_first_step_can_be_corrected(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in"), tmp_path / "out"
    right = source.read_text()
    source.write_text(right.replace("train_size = 1000", "train_size = 100000"))
    options = Options(evaluate_every=0, threads=1)
    watched = settings_for(out).model_copy(update={"tensorboard": out / "board"})
    with pytest.raises(PolicyError, match="The run wants 100000"):
        run_local(source, watched, options, threading.Event())
    assert list((out / "board").iterdir())
    (out / "run.json").unlink()  # a start may end before it is written
    source.write_text(right)
    run_local(source, settings_for(out), options, threading.Event())
    assert read_run(out / "run.json").environment.train_size == 1000
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "run.json").touch()
    with pytest.raises(UserError, match="is not empty"):
        run_local(source, settings_for(tmp_path / "own"), options, threading.Event())
    (tmp_path / "two" / CHECKPOINTS).mkdir(parents=True)
    with (
        held_alone(tmp_path / "two" / CHECKPOINTS, "trainer local"),
        pytest.raises(UserError, match="works in") as error,
    ):
        run_local(source, settings_for(tmp_path / "two"), options, threading.Event())
    assert "another --out" in error.value.hint


def test_samples_of_a_step_are_shown_with_what_their_rewards_are_made_of(tmp_path: Path) -> None:
    lines = [
        {
            "step": step, "policy": step, "problem": f"reverse-{number}", "target": 2,
            "prompt": "02|tate>", "turns": ["..=etat"], "tokens": 8, "finish": "end",
            "reason": "right", "reward": number / 4,
            "parts": {"task_micro": 1_000_000, "length": 2},
        }
        for step in (0, 1)
        for number in (2, 4, 1)
    ]  # fmt: skip
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def shown(*options: str) -> str:
        found = CliRunner().invoke(app, ["samples", str(tmp_path), *options])
        assert found.exit_code == 0, found.output
        return found.stdout

    best = shown("--step", "0", "--order", "best", "--count", "2")
    first = (
        "step 0, policy 0 (0 old), reverse-4: reward 1.000 (task_micro 1000000, length 2; right)"
    )
    assert first in best
    assert best.index("reverse-4") < best.index("reverse-2")
    assert "reverse-1" not in best
    assert best.count("02|tate>..=etat\n8 tokens, ended by end") == 2
    worst = [json.loads(line) for line in shown("--order", "worst", "--json").splitlines()]
    assert worst == [lines[5], lines[3], lines[4]]
    raised = lines[0] | {"step": 2, "reward": None, "finish": "ungraded", "reason": "it raised"}
    (tmp_path / "samples.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (raised, lines[0] | {"step": 2}))
    )
    for order in ("best", "worst"):
        graded, ungraded = shown("--order", order).split("\n\n")
        assert ": reward 0.500 (" in graded
        assert ": ungraded (task_micro 1000000, length 2; it raised)" in ungraded
        assert ungraded.endswith("\n8 tokens\n")
    text = "one line\u2028of text\x85\N{PARAGRAPH SEPARATOR}"
    (tmp_path / "samples.jsonl").unlink()
    append_samples(tmp_path, [lines[0] | {"prompt": text}])
    (read,) = chosen_samples(tmp_path, step=None, order="written", count=9)
    assert read["prompt"] == text
    assert len(whole_lines(tmp_path / "samples.jsonl")) == 1
    (tmp_path / "samples.jsonl").write_text(json.dumps(lines[0]) + "\n")
    for folder, step, said in ((tmp_path, 7, "of step 7"), (tmp_path / "absent", None, "samples")):
        with pytest.raises(UserError, match=f"has no .*{said}"):
            chosen_samples(folder, step=step, order="best", count=1)


STEPS = 4


@pytest.fixture(scope="module")
def _one_process_group(world: World) -> Any:
    """Runs of this module are in the tests' own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_module, "joined_world", lambda: nullcontext(world))
        yield


def resumable(source: Path, out: Path, *, resume: bool = False, **more: Any) -> Path:
    """A run whose leases leave groups over for later steps."""
    options = Options(evaluate_every=2, problems=8, checkpoint_every=2, resume=resume, **more)
    settings = settings_for(out).model_copy(update={"steps": STEPS})
    return run_local(source, settings, options, threading.Event(), lambda _: None)


def results(out: Path) -> dict[str, Any]:
    """Everything that a run leaves, but for times and its folder's name."""
    metrics = read_lines(out / "metrics.jsonl")
    for line in metrics:
        for name in ("time", "seconds", "tokens_s", "tokens_s_wall"):
            line.pop(name, None)
    evaluations = read_lines(out / "evaluations.jsonl")
    for line in evaluations:
        del line["model"]
    return {
        "files": sorted(path.name for path in out.iterdir()),
        "metrics": metrics,
        "samples": read_lines(out / "samples.jsonl"),
        "evaluations": evaluations,
        "weights": (out / "model" / "model.safetensors").read_bytes(),
    }


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, _one_process_group: None
) -> tuple[Path, dict[str, Any]]:
    """A run's TOML, and what it leaves if nothing interrupts it."""
    folder = tmp_path_factory.mktemp("whole")
    source = written(folder / "in", more="max_staleness = 2")
    source.write_text(source.read_text().replace("groups_per_lease = 2", "groups_per_lease = 3"))
    resumable(source, folder / "out")
    return source, results(folder / "out")


@pytest.fixture
def _signals() -> Any:
    """The first Ctrl-C leaves the second one to the system: it is given back."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(
    "at",
    [pytest.param(1, marks=pytest.mark.slow)]
    + [pytest.param(at, marks=pytest.mark.soak) for at in (0, 3)],
)
def test_a_run_stopped_while_it_generates_goes_on_as_if_it_had_not_been(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    source, expected = whole
    generate = local_module.generate_rows

    def pressed(*arguments: Any, **named: Any) -> Any:
        """Ctrl-C, with rows generated already."""
        found = generate(*arguments, **named)
        if len(read_lines(tmp_path / "metrics.jsonl")) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(local_module, "generate_rows", pressed)
        generated = [line for line in expected["metrics"] if line["generated_rows"]]
        assert at in [line["step"] for line in generated]
        with pytest.raises(StoppedError, match=f"stopped at policy {at} of 4.* --resume"):
            resumable(source, tmp_path)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == at, "the step was not begun"
    resumable(source, tmp_path, resume=True)
    assert results(tmp_path) == expected


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies in its fourth step, after the third one's lines are written."""
    source, expected = whole
    train = local_module.train_step

    def dies(learner: Any, batch: Any, watch: Any) -> Any:
        if batch.step == 3:
            raise RuntimeError("killed")
        return train(learner, batch, watch)

    with monkeypatch.context() as patched:
        patched.setattr(local_module, "train_step", dies)
        with pytest.raises(RuntimeError, match="killed"):
            resumable(source, tmp_path)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3
    resumable(source, tmp_path, resume=True)
    assert results(tmp_path) == expected


@pytest.mark.slow
def test_what_cannot_be_resumed_is_refused(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    source, out = whole[0], tmp_path / "out"
    with pytest.raises(UserError, match="holds no run to continue"):
        resumable(source, out, resume=True)
    with pytest.raises(UserError, match="is finished"):
        resumable(source, source.parent.parent / "out", resume=True)
    stop = threading.Event()

    def say(text: str) -> None:
        if text.startswith("step 0"):
            stop.set()

    settings = settings_for(out).model_copy(update={"steps": STEPS})
    with pytest.raises(StoppedError):
        run_local(source, settings, Options(problems=8), stop, say)
    with pytest.raises(UserError, match="another run"):
        resumable(written(tmp_path / "other"), out, resume=True)
    with pytest.raises(UserError, match="--seed 0 --problems 8"):
        resumable(source, out, resume=True, seed=1)
    with pytest.raises(UserError, match=r"not empty.*"):
        resumable(source, out)
    (out / "checkpoints" / "local-1.json").write_text("{}")
    with pytest.raises(FatalError, match=r"local-1\.json is damaged"):
        resumable(source, out, resume=True)
    shutil.rmtree(out / "checkpoints" / "1")
    assert resumable(source, out, resume=True).is_dir(), "without a checkpoint it begins again"


@pytest.mark.slow
def test_ctrl_c_is_one_sentence_and_130(tmp_path: Path) -> None:
    source, out = written(tmp_path / "in"), tmp_path / "out"
    words = ["local", str(source), "--model", str(DEMO), "--out", str(out), "--steps", "100000"]
    child = subprocess.Popen(
        [sys.executable, "-m", "prime_trainer.cli", *words, "--evaluate-every", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={name: word for name, word in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("step 0")
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=300)[1]
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == 130, said
    (line,) = [line for line in said.splitlines() if line.startswith("trainer: ")]
    number = int(line.split()[4])
    assert line.startswith(f"trainer: stopped at policy {number} of 100000, which is kept in")
    assert "Traceback" not in said
    assert (out / "checkpoints" / str(number)).is_dir()
    assert (out / "policies" / str(number) / "model.safetensors").is_file()


GATEWAY = """[conversation]
turns = 2
tools = ["fetch-1"]
[conversation.gateway]
url = "http://127.0.0.1:1"
key = "0x1111111111111111111111111111111111111111"
tools = ["fetch-1"]
"""


class FetchesWords(Reverse):
    """Every turn asks for one of two pages: the length of the model's word, odd or even."""

    name = "fetches_words"

    def observe(self, problem: Problem, turns: Any) -> Observation | None:
        page = len(turns[-1]) % 2
        return Reverse.observe(self, problem, [f"<fetch>page {page}</fetch>"])

    def observation_text(self, said: str) -> str:
        return said


@pytest.mark.slow
@pytest.mark.usefixtures("_one_process_group")
def test_a_run_with_a_gateway_trains_offline_from_a_cassette(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded request is answered; a row that makes another one ends as `tool_limit`."""
    monkeypatch.setitem(BUILT_IN, "fetches_words", __name__)
    source = written(tmp_path / "in", GATEWAY)
    source.write_text(source.read_text().replace('"reverse"', '"fetches_words"'))
    tape = tmp_path / "tape.jsonl"
    line = Recording(step=0, tool="fetch-1", arguments={"input": "page 0"}, text="04|word>")
    tape.write_text(line.model_dump_json() + "\n")

    def settings(out: str) -> Settings:
        flags = {"model": DEMO, "data": tmp_path / out, "steps": 1}
        return load(flags, source.with_suffix(".trainer.toml"))

    options = Options(evaluate_every=0, samples=1000, threads=1)
    with pytest.raises(UserError, match="ask a gateway"):
        run_local(source, settings("none"), options, threading.Event())
    assert not any((tmp_path / "none").iterdir())
    run_local(source, settings("out"), replace(options, cassette=tape), threading.Event())
    samples = read_lines(tmp_path / "out" / "samples.jsonl")
    said = {turn for one in samples for turn in one["turns"][1::2]}
    assert said == {"04|word>"}
    unanswered = [one for one in samples if one["finish"] == "tool_limit"]
    assert unanswered
    assert all(len(one["turns"]) == 1 for one in unanswered)
    [step] = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert step["applied"]


class RaisesAtTimes(Reverse):
    """A plugin with an error: it fails on words of an odd length."""

    name = "raises_at_times"
    tools_may_give_up = True  # as of a plugin: here, it is named among those built in

    def observe(self, problem: Problem, turns: Any) -> Observation | None:
        if len(turns[-1]) % 2:
            raise ZeroDivisionError("there is no half letter")
        return None


@pytest.mark.usefixtures("_one_process_group")
def test_an_environment_that_raises_ends_rows_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(BUILT_IN, "raises_at_times", __name__)
    source = written(tmp_path / "in", "[conversation]\nturns = 2\n")
    source.write_text(source.read_text().replace('"reverse"', '"raises_at_times"'))
    flags = {"model": DEMO, "data": tmp_path / "out", "steps": 1}
    settings = load(flags, source.with_suffix(".trainer.toml"))
    options = Options(evaluate_every=0, samples=1000, threads=1)
    run_local(source, settings, options, threading.Event())
    samples = read_lines(tmp_path / "out" / "samples.jsonl")
    assert {one["finish"] for one in samples} >= {"end", "tool_limit"}
    said = next(text for text in caplog.messages if "ZeroDivisionError" in text)
    assert re.match(r"problem reverse-\d+, turn 0: the environment raises_at_times raised", said)
    [step] = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert step["applied"]


class RewardsItsLimits(RaisesAtTimes):
    """Only rows that `observe` ends have a reward."""

    name = "rewards_its_limits"

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        return TaskScore(MICRO * (len(output_text) % 2), "by its length")


def test_rows_that_a_limit_ended_make_no_difference_in_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    monkeypatch.setitem(BUILT_IN, "rewards_its_limits", __name__)
    monkeypatch.setattr(local_module, "MOST_GENERATED", 2)
    source = written(tmp_path / "in", "[conversation]\nturns = 2\n", penalty=0)
    source.write_text(source.read_text().replace('"reverse"', '"rewards_its_limits"'))
    (tmp_path / "out").mkdir()
    learner = make_learner(local_run(source, DEMO), settings_for(tmp_path / "out"), world)
    local = Local(learner, Options(), Observers.none(), lambda _: None)
    with pytest.raises(UserError, match=r"4 groups of 4 .* in 4 of them all are rewarded alike"):
        local.batch()
    local.close()
    shown = chosen_samples(tmp_path / "out", step=None, order="written", count=99)
    assert len(shown) == Options().samples, "the rows that taught nothing can be read"


class FailsToGrade(Reverse):
    """A plugin with an error: it cannot grade answers of an odd length."""

    name = "fails_to_grade"

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        if len(output_text) % 2:
            raise ZeroDivisionError("there is no half letter")
        return super().check(problem, output_text, output_tokens)


def run_of(
    plugin: type[Reverse], folder: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int
) -> tuple[Path, Settings, Options]:
    """A run of that environment, evaluated at each step, with its trainer's settings."""
    monkeypatch.setattr("prime_envs.registry.environment_class", lambda name: plugin)
    source = written(folder / "in")
    source.write_text(source.read_text().replace('"reverse"', f'"{plugin.name}"'))
    flags = {"model": DEMO, "data": folder / "out", "steps": steps}
    settings = load(flags, source.with_suffix(".trainer.toml"))
    return source, settings, Options(evaluate_every=1, problems=16, samples=1000, threads=1)


@pytest.mark.usefixtures("_one_process_group")
def test_rows_that_an_environment_cannot_grade_are_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, settings, options = run_of(FailsToGrade, tmp_path, monkeypatch, steps=1)
    counted: list[tuple[Rollout, bool]] = []

    def watched(groups: Sequence[Sequence[Rollout]], objective: ObjectiveSettings) -> Judged:
        found = judge(groups, objective)
        counted.extend(zip((row for group in groups for row in group), found.counted, strict=True))
        return found

    monkeypatch.setattr("prime_trainer.learner.judge", watched)
    run_local(source, settings, options, threading.Event())
    samples = read_lines(tmp_path / "out" / "samples.jsonl")
    assert {one["finish"] for one in samples} >= {"end", "ungraded"}
    for one in samples:
        assert (one["finish"] == "ungraded") == bool(len(one["turns"][0]) % 2), one
        assert (one["finish"] == "ungraded") == (one["reward"] is None), one
    assert {row.finish_reason != "ungraded" for row, _ in counted} == {True, False}
    assert all(kept == (row.finish_reason != "ungraded") for row, kept in counted)
    said = next(text for text in caplog.messages if "ZeroDivisionError" in text)
    assert re.match(r"problem reverse-\d+, turn 0: the environment fails_to_grade raised", said)
    [step] = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert step["applied"]
    graded = [row.reward for row, kept in counted if kept]
    assert step["rows"] == len(graded) < len(counted)
    assert step["reward"] == pytest.approx(sum(graded) / len(graded))
    evaluations = read_lines(tmp_path / "out" / "evaluations.jsonl")
    assert all(0 < one["reward"]["count"] < 16 for one in evaluations)


class FailsToAsk(Reverse):
    """A plugin with errors: it lacks every fourth problem, and cannot word one of the others."""

    name = "fails_to_ask"

    def problem(self, index: int) -> Problem:
        if index % 4 == 1:
            raise KeyError("the row has no question")
        return super().problem(index)

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        if problem.index % 4 == 2:
            raise ValueError("the row has no words")
        return super().prompt_text(problem, target_length)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_process_group")
def test_problems_that_an_environment_cannot_ask_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, settings, options = run_of(FailsToAsk, tmp_path, monkeypatch, steps=2)
    stop = threading.Event()

    def stop_after_a_step(line: str) -> None:
        if line.startswith("step 0"):
            stop.set()

    with pytest.raises(StoppedError):
        run_local(source, settings, options, stop, stop_after_a_step)
    run_local(source, settings, replace(options, resume=True), threading.Event())
    samples = read_lines(tmp_path / "out" / "samples.jsonl")
    ungraded = [one for one in samples if one["finish"] == "ungraded"]
    assert 0 < len(ungraded) < len(samples)
    assert {(one["problem"], one["prompt"]) for one in ungraded} == {("unasked", "<unk>")}
    said = " ".join(caplog.messages)
    for error in ("KeyError('the row has no question')", "ValueError('the row has no words')"):
        assert f"the environment fails_to_ask raised {error} when problem " in said
    steps = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert [step["applied"] for step in steps] == [True, True]
    evaluations = read_lines(tmp_path / "out" / "evaluations.jsonl")
    assert all(0 < one["reward"]["count"] < 16 for one in evaluations)
