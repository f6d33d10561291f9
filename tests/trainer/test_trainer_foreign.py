"""Environments of other authors, from PyPI, train: tasks, prompts and graders are their packages'.

- reasoning-gym: its family `spell_backward`, by the environment `reasoning_gym`
- staros-stardata: its lipograms, by the environment `verifiers`. The package has rows and a reward
  function for verifiers before 1; `LIPOGRAMS` is the class that verifiers v1 asks for around them.
- textarena: its game GuessTheNumber-v0, of several turns, by the environment `verifiers`, played by
  that package's own TextArenaEnv. `GUESSES` selects it: the taskset there has other games only,
  and downloads lists of words.
- bfcl-eval: tools, tasks and the checker of states of the Berkeley Function Calling Leaderboard, as
  a toolset, by the environment `verifiers`. `TRADES` is the taskset for its TradingBot, which keeps
  a state between calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from safetensors.torch import load_file

from bench.textmodel import build_model, build_tokenizer
from prime_engine.tiny import character_tokenizer
from prime_envs.environments.verifiers import VARIABLE
from prime_trainer import local as local_module
from prime_trainer.config import load
from prime_trainer.local import Options, run_local
from prime_trainer.metrics import read_lines
from prime_trainer.parallel import World

STEPS = 3
RUN = """name = "foreign"
max_output_tokens = {tokens}
samples_per_group = 8
groups_per_lease = 2
groups_per_batch = 2

[environment]
name = "{name}"
arguments = {arguments}
train_size = {problems}
heldout_size = 2

[budgets]
targets = [8]
penalty_micro = 0
{more}"""
LIPOGRAMS = """
import verifiers.v1 as vf
from stardata.envs.constraint_gym import build_lipogram_dataset, lipogram_reward

class LipogramData(vf.TaskData):
    info: dict

class LipogramTask(vf.Task[LipogramData]):
    @vf.reward
    async def lipogram(self, trace: vf.Trace) -> float:
        return lipogram_reward(trace.last_reply, info=self.data.info)

class LipogramTaskset(vf.Taskset[LipogramTask, vf.TasksetConfig]):
    def load(self):
        for row in build_lipogram_dataset():
            yield LipogramTask(LipogramData(prompt=row["prompt"], info=row["info"]))

__all__ = ["LipogramTaskset"]
"""
SCORES = """
import json, sys
from stardata.envs.constraint_gym import build_lipogram_dataset, lipogram_reward
def shown(text):
    return "".join(sign if sign.isascii() else "<unk>" for sign in text)
rows = {shown(row["prompt"]): row["info"] for row in build_lipogram_dataset()}
for line in sys.stdin:
    asked, answer = json.loads(line)
    [info] = [info for prompt, info in rows.items() if asked.startswith(prompt)]
    print(lipogram_reward(answer, info=info))
"""
"""Scores answers by the package alone. The model reads ASCII only."""
GUESSES = """
import random
import textarena
import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena import TextArenaData, TextArenaEnv, TextArenaTask

class GuessTaskset(vf.Taskset[TextArenaTask, vf.TasksetConfig]):
    def load(self):
        for seed in range(56):
            random.seed(seed)
            game = textarena.make("GuessTheNumber-v0")
            game.reset(num_players=1)
            info = {"game": "GuessTheNumber-v0", "seed": seed}
            prompt = str(game.get_observation()[1])
            yield TextArenaTask(TextArenaData(name=str(seed), prompt=prompt, info=info),
                                self.config.task)

__all__ = ["GuessTaskset", "TextArenaEnv"]
"""
PLAYS = """
import json, random, sys
import textarena
from verifiers.v1.utils import loaders
wanted = loaders.resolve_env_config({"taskset": {"id": "prime_guesses"}})
seeds = {task.key: task.data.info["seed"] for task in loaders.load_environment(wanted).taskset}
for line in sys.stdin:
    problem, turns = json.loads(line)
    random.seed(seeds[problem])
    game = textarena.make("GuessTheNumber-v0")
    game.reset(num_players=1)
    said = []
    for turn in turns:
        game.step(turn)
        if game.state.done:
            break
        said.append(str(game.get_observation()[1]).split("[GAME]")[-1].strip())
    print(json.dumps([game.state.rewards[0] if game.state.done else 0.0, said]))
"""
"""Plays the games of problems by the package alone."""


TRADES = """
import copy
import functools
import itertools
import json
from pathlib import Path
import bfcl_eval
import verifiers.v1 as vf
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.trading_bot import TradingBot
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import state_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

DATA = Path(bfcl_eval.__file__).parent / "data"
FILE = "BFCL_v4_multi_turn_base.json"
NAMES = ("100", "104", "115", "132")
NUMBER = itertools.count()

class TradeState(vf.State):
    calls: list[str] = []

class TradeData(vf.TaskData):
    start: dict
    truth: list[str]

class Broker(vf.Toolset[vf.ToolsetConfig, TradeState]):
    TOOL_PREFIX = None

    async def setup_task(self, task):
        self.bot = TradingBot()
        self.bot._load_scenario(copy.deepcopy(task.data.start["TradingBot"]))

def tool_of(method):
    @functools.wraps(method)
    def call(self, **arguments):
        self.state.calls.append(f"{method.__name__}(**{arguments!r})")
        return method(self.bot, **arguments)
    return vf.tool(call)

for name in ("add_to_watchlist", "fund_account", "get_watchlist"):
    setattr(Broker, name, tool_of(getattr(TradingBot, name)))

class TradeTask(vf.Task[TradeData, TradeState]):
    @classmethod
    def toolsets(cls, config):
        return [Broker(vf.ToolsetConfig())]

    @vf.reward
    async def state(self, trace: vf.Trace) -> float:
        made, truth = (
            execute_multi_turn_func_call(
                calls, self.data.start, ["TradingBot"], f"row{next(NUMBER)}", self.data.name
            )[1]
            for calls in (trace.state.calls, self.data.truth)
        )
        return float(state_checker(made, truth)["valid"])

def rows(path):
    found = map(json.loads, path.read_text().splitlines())
    return {row["id"]: row for row in found if row["id"].endswith(NAMES)}

class TradeTaskset(vf.Taskset[TradeTask, vf.TasksetConfig]):
    def load(self):
        answers = rows(DATA / "possible_answer" / FILE)
        for name, row in rows(DATA / FILE).items():
            asked = " ".join(turn[0]["content"] for turn in row["question"])
            truth = sum(answers[name]["ground_truth"], [])
            data = TradeData(name=name, prompt=asked, start=row["initial_config"], truth=truth)
            yield TradeTask(data, self.config.task)

__all__ = ["TradeTaskset"]
"""
DEALS = """
import copy, json, re, sys
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.trading_bot import TradingBot
from verifiers.v1.utils import loaders
wanted = loaders.resolve_env_config({"taskset": {"id": "prime_trades"}})
tasks = {task.key: task.data for task in loaders.load_environment(wanted).taskset}
for line in sys.stdin:
    problem, turns = json.loads(line)
    bots = TradingBot(), TradingBot()
    for bot in bots:
        bot._load_scenario(copy.deepcopy(tasks[problem].start["TradingBot"]))
    said = []
    for turn in filter(None, map(re.compile("<tool_call>(.*?)</tool_call>").search, turns)):
        call = json.loads(turn[1])
        arguments = {k: v if k == "stock" else float(v) for k, v in call["arguments"].items()}
        said.append(json.dumps(getattr(bots[0], call["name"])(**arguments), indent=2))
    for call in tasks[problem].truth:
        eval("bots[1]." + call)
    states = [{k: v for k, v in vars(bot).items() if k[0] != "_"} for bot in bots]
    print(json.dumps([float(states[0] == states[1]), said]))
"""
"""Makes the calls of rows by the package alone, and compares the states."""


def hermes(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALLS = (
    hermes("add_to_watchlist", stock="QUAS"),
    hermes("add_to_watchlist", stock="AMZN"),
    hermes("fund_account", amount="2203.4"),
    hermes("get_watchlist"),
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of 95 characters, which can read the packages' long prompts."""
    folder = tmp_path_factory.mktemp("reader")
    tokenizer = build_tokenizer()
    build_model(len(tokenizer), hidden=64, layers=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained(
    folder: Path,
    name: str,
    arguments: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    *,
    steps: int = STEPS,
    tokens: int = 24,
    problems: int = 48,
    more: str = "",
) -> list[dict[str, Any]]:
    """Trains `steps` policies; returns all rows generated, and checks that each step changed the
    weights. `tokens`: of a row at most; `problems` to train on; `more`: further tables."""
    monkeypatch.setattr(local_module, "joined_world", lambda: nullcontext(world))
    source, out = folder / "run.toml", folder / "out"
    source.write_text(
        RUN.format(name=name, arguments=arguments, tokens=tokens, problems=problems, more=more)
    )
    settings = load({"model": model, "data": out, "steps": steps, "learning_rate": 3e-3,
                     "warmup_steps": 0})  # fmt: skip
    options = Options(evaluate_every=0, samples=10**6, threads=1)
    run_local(source, settings, options, threading.Event(), lambda _: None)
    lines = read_lines(out / "metrics.jsonl")
    assert [line["applied"] for line in lines] == [True] * steps
    assert all(line["gradient_norm"] > 0 for line in lines)
    before, after = (load_file(at / "model.safetensors") for at in (model, out / "model"))
    assert any((before[key] != after[key]).any() for key in before)
    samples = read_lines(out / "samples.jsonl")
    assert {sample["policy"] for sample in samples} == set(range(steps))
    return samples


def interpreter(package: str, module: str) -> str:
    """The interpreter that has verifiers and `package`; skips the test if there is none."""
    python = os.environ.get(VARIABLE, "")
    look = [python, "-c", f"import verifiers.v1, {module}"]
    if not python or subprocess.run(look, capture_output=True, check=False).returncode != 0:
        pytest.skip(
            f"verifiers and {package} are not installed: scripts/setup_verifiers.sh, and "
            f"{VARIABLE}=<its folder>/bin/python"
        )
    return python


@pytest.mark.slow
def test_reasoning_gym_trains_by_its_own_scorer(
    tmp_path: Path, reader: Path, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    family = '{ family = "spell_backward", seed = 7 }'
    samples = trained(tmp_path, "reasoning_gym", family, reader, monkeypatch, world)
    dataset = reasoning_gym.create_dataset("spell_backward", seed=7, size=1_000_000)
    for sample in samples:
        entry = dataset[int(sample["problem"].rpartition("-")[2])]
        assert sample["prompt"].startswith(entry["question"])
        answer = [line.strip() for line in sample["turns"][0].splitlines() if line.strip()][-1:]
        own = dataset.score_answer(answer[0], entry) if answer else 0.0
        assert sample["reward"] == pytest.approx(own, abs=1e-6), sample
    assert len({sample["reward"] for sample in samples}) > 1


@pytest.mark.soak
def test_a_package_of_prosody_graders_trains_through_the_verifiers_adapter(
    tmp_path: Path, reader: Path, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    python = interpreter("staros-stardata", "stardata.envs.constraint_gym")
    (tmp_path / "prime_lipograms.py").write_text(LIPOGRAMS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    taskset = '{ environment = "prime_lipograms" }'
    samples = trained(tmp_path, "verifiers", taskset, reader, monkeypatch, world)
    asked = [json.dumps([sample["prompt"], sample["turns"][0]]) + "\n" for sample in samples]
    scored = subprocess.run(
        [python, "-c", SCORES], input="".join(asked), capture_output=True, text=True, check=True
    )
    own = [float(line) for line in scored.stdout.split()]
    assert [sample["reward"] for sample in samples] == pytest.approx(own, abs=1e-6)
    assert len(set(own)) > 1


@pytest.mark.soak
def test_a_game_of_several_turns_trains_through_the_verifiers_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """The model writes the digits 1 and 2 only, so that some of its guesses are numbers."""
    python = interpreter("textarena", "textarena")
    model, tokenizer = tmp_path / "digits", character_tokenizer("\n12?")
    build_model(len(tokenizer), hidden=64, layers=2).save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "prime_guesses.py").write_text(GUESSES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    samples = trained(
        tmp_path, "verifiers", '{ environment = "prime_guesses" }', model, monkeypatch, world,
        steps=1, tokens=460, more='[conversation]\nturns = 4\ntools = []\ncalls = "hermes-1"\n',
    )  # fmt: skip
    asked = [json.dumps([one["problem"], one["turns"][::2]]) + "\n" for one in samples]
    played = subprocess.run(
        [python, "-c", PLAYS], input="".join(asked), capture_output=True, text=True, check=True
    )
    own = [json.loads(line) for line in played.stdout.splitlines()]
    assert [one["reward"] for one in samples] == pytest.approx([reward for reward, _ in own])
    assert len({reward for reward, _ in own}) > 1
    for sample, (_, said) in zip(samples, own, strict=True):
        shown = ["".join(sign if sign in "12" else "?" for sign in text) for text in said]
        assert sample["turns"][1::2] == shown[: len(sample["turns"]) // 2]
    assert max(len(sample["turns"]) for sample in samples) >= 5


@pytest.mark.slow
def test_tools_of_another_author_train_through_the_verifiers_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """Each of the model's tokens is a call, so that some of its calls are right."""
    python = interpreter("bfcl-eval", "bfcl_eval")
    model, tokenizer = tmp_path / "caller", character_tokenizer("\n?", words=CALLS)
    built = build_model(len(tokenizer), hidden=64, layers=2)
    built.config.max_position_embeddings = 4096
    built.save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "prime_trades.py").write_text(TRADES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    samples = trained(
        tmp_path, "verifiers", '{ environment = "prime_trades" }', model, monkeypatch, world,
        steps=1, tokens=900, problems=2,
        more='[conversation]\nturns = 3\ntools = []\ncalls = "hermes-1"\n',
    )  # fmt: skip
    asked = [json.dumps([one["problem"], one["turns"][::2]]) + "\n" for one in samples]
    dealt = subprocess.run(
        [python, "-c", DEALS], input="".join(asked), capture_output=True, text=True, check=True
    )
    own = [json.loads(line) for line in dealt.stdout.splitlines()]
    assert [one["reward"] for one in samples] == [reward for reward, _ in own]
    assert len({reward for reward, _ in own}) > 1
    for sample, (_, said) in zip(samples, own, strict=True):
        shown = ["?" * len(text.replace("\n", "")) for text in said]
        assert sample["turns"][1::2] == shown[: len(sample["turns"]) // 2]
    assert max(len(sample["turns"]) for sample in samples) >= 5
    (line,) = read_lines(tmp_path / "out" / "metrics.jsonl")
    replies = sum(len(sample["turns"]) // 2 for sample in samples)
    assert line["tool_calls"] == replies / len(samples)
    assert "tool_success" in line
