"""Tasksets of the package verifiers, where it is; one clear sentence where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from prime_core.errors import UserError
from prime_core.run import MICRO, Conversation, LengthBudgets
from prime_envs.environments import verifiers as verifiers_adapter
from prime_envs.environments.verifiers import VARIABLE, VerifiersEnvironment
from prime_envs.registry import load_environment
from prime_envs.tools import Observation

BUDGETS = LengthBudgets(targets=(100,), penalty_micro=0)
ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "var" / "bench" / "verifiers" / "bin" / "python"

TASKSET = """
import verifiers.v1 as vf

class SayData(vf.TaskData):
    answer: str = ""

class SayTask(vf.Task[SayData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("a defect")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 3)

class SayConfig(vf.TasksetConfig):
    pass

class SayTaskset(vf.Taskset[SayTask, SayConfig]):
    def load(self):
        for word in ("yes", "no", "maybe"):
            yield SayTask(SayData(prompt=f"Say {word}.", system_prompt="Be short.", answer=word))

__all__ = ["SayTaskset"]
"""

SHOP = """
import os
import random
import verifiers.v1 as vf
IMPORTS

class ShopState(vf.State):
    paid: int = 0

class ShopData(vf.TaskData):
    price: int = 0

class Till(vf.Toolset[vf.ToolsetConfig, ShopState]):
    TOOL_PREFIX = None

    async def setup_task(self, task):
        self.price = task.data.price

    @vf.tool
    async def pay(self, amount: int) -> str:
        \"\"\"Pays an amount.\"\"\"
        self.state.paid += amount
        return f"{self.state.paid} of {self.price}"

    @vf.tool
    def odd(self, what: str) -> str:
        \"\"\"Does odd things.\"\"\"
        if what.startswith("/"):
            return str(open(what, "w"))
        if what == "address":
            return repr(object())
        if what == "forever":
            while True:
                pass
        if what == "deep":
            return self.odd(what)
        if what == "long":
            return "x" * 10**7
        if what == "half":
            return "\\ud800"
        if what == "raise half":
            raise ValueError("\\ud800")
        if what == "exit":
            os._exit(3)
        return ODD

class ShopTask(vf.Task[ShopData, ShopState]):
    @classmethod
    def toolsets(cls, config):
        return [Till(vf.ToolsetConfig())]

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.state.paid == self.data.price)

    @vf.reward(weight=0.5)
    async def calls(self, trace: vf.Trace) -> float:
        return float(any(node.message.role == "tool" for node in trace.nodes))

class ShopTaskset(vf.Taskset[ShopTask, vf.TasksetConfig]):
    def load(self):
        for price in (5, 7):
            yield ShopTask(ShopData(prompt=f"Pay {price}.", price=price), self.config.task)

__all__ = ["ShopTaskset"]
"""


def store_source(imports: str, odd: str) -> str:
    return SHOP.replace("IMPORTS", imports).replace("ODD", odd)


NUMBERS = """
import verifiers.v1 as vf

class NumberData(vf.TaskData):
    secret: int = 0

class NumberTask(vf.Task[NumberData]):
    pass

class NumberConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class NumberEnv(vf.Env[NumberConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guess = int(segment.last_reply)
                if guess == task.data.secret:
                    break
                said = "more" if guess < task.data.secret else "less" + "\\ud800" * (guess == 99)
                segment = await interaction.turn(said)
        interaction.trace.record_reward("found", float(not segment.terminated), 1.0)

class NumberTaskset(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self):
        for secret in (3, 9):
            yield NumberTask(NumberData(prompt="Guess.", secret=secret), self.config.task)

__all__ = ["NumberTaskset", "NumberEnv"]
"""


@cache
def _python() -> str:
    """An interpreter that has verifiers; "" if there is none here."""
    for python in (os.environ.get(VARIABLE, ""), str(OWN), sys.executable):
        if python and Path(python).exists():
            look = [python, "-c", "import verifiers.v1"]
            if subprocess.run(look, capture_output=True, check=False).returncode == 0:
                return python
    return ""


@pytest.fixture
def load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., VerifiersEnvironment]]:
    """Loads a taskset from its source."""
    python = _python()
    if not python:
        pytest.skip("verifiers is not installed: scripts/setup_verifiers.sh")
    monkeypatch.setenv(VARIABLE, python)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    opened = []

    def made(name: str, source: str, conversation: Conversation | None) -> VerifiersEnvironment:
        (tmp_path / f"{name}.py").write_text(source)
        environment = load_environment("verifiers", {"environment": name}, BUDGETS)
        assert isinstance(environment, VerifiersEnvironment)
        opened.append(environment)
        environment.require(conversation)
        environment.conversation = conversation
        return environment

    yield made
    for environment in opened:
        environment.close()


TALKS = Conversation(turns=8, tools=(), calls="hermes-1")


def call(name: str, **arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"I call <tool_call>{body}</tool_call>"


@pytest.mark.slow
def test_tools_of_a_taskset_answer_and_its_rewards_read_the_whole_row(
    load: Callable[..., VerifiersEnvironment],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(verifiers_adapter, "TIMEOUT", 8.0)
    taskset = load("prime_shop", store_source(imports="", odd="'fine'"), TALKS)
    problem = taskset.problem(0)
    assert problem.prompt.startswith("Pay 5.")
    assert 'pay({"amount": "integer"}): Pays an amount.' in problem.prompt
    paid = [call("pay", amount=2), call("pay", amount=3)]
    assert taskset.observe(problem, paid[:1]) == Observation("2 of 5")
    assert taskset.observe(problem, paid) == Observation("5 of 5")
    assert taskset.observe(problem, [*paid, "done"]) is None
    score = taskset.check_turns(problem, [*paid, "done"], 9)
    assert (score.task_micro, dict(score.parts)) == (MICRO, {"exact": MICRO, "calls": MICRO})
    assert taskset.check_turns(problem, paid[:1], 9).task_micro == MICRO // 2
    assert taskset.check_turns(problem, ["done"], 9).task_micro == 0

    def said(what: str) -> Observation:
        found = taskset.observe(problem, [call("odd", what=what)])
        assert found is not None
        return found

    assert said("nothing") == Observation("fine")
    made = tmp_path / "made"
    assert said(str(made)).text.startswith("Error executing tool odd: [Errno 13]")
    halves = taskset.check_turns(problem, [call("odd", what="half"), "done"], 9)
    assert halves.uncertain
    assert halves.reason.encode().startswith(b"task 0: ")
    written = [call("odd", what=str(made)), "done"]
    assert taskset.check_turns(problem, written, 9).task_micro == MICRO // 2
    assert not made.exists()
    assert said("deep").text.startswith("Error executing tool odd: maximum recursion")
    assert said("address").exact is False
    assert len(said("long").text) == 65_536
    assert said("exit") == Observation("", exact=False, limit="reached")
    assert "prime_shop, task 0, turn 0: " in caplog.text
    caplog.clear()
    for half in ("half", "raise half"):
        assert said(half) == Observation("", exact=False, limit="reached")
        (line,) = caplog.messages
        assert line == "prime_shop, task 0, turn 0 holds invalid text (surrogates not allowed)"
        caplog.clear()
    assert said("forever") == Observation("", exact=False, limit="reached")
    for wrong, words in (
        ("<tool_call>{</tool_call>", "error: a call is"),
        (call("steal"), "error: there is no tool 'steal'"),
        (call("pay", amount="much"), "Error executing tool pay: wrong arguments: amount"),
    ):
        found = taskset.observe(problem, [wrong])
        assert found is not None
        assert found.text.startswith(words)
    with pytest.raises(UserError, match="has conversations, and the run has none"):
        taskset.require(None)
    with pytest.raises(UserError, match="take named arguments"):
        taskset.require(Conversation(turns=2))
    with pytest.raises(UserError, match="cannot have the tool 'notes-1'"):
        taskset.require(Conversation(turns=2, tools=("notes-1",)))


@pytest.mark.slow
def test_an_environment_of_a_taskset_talks_with_the_model(
    load: Callable[..., VerifiersEnvironment], caplog: pytest.LogCaptureFixture
) -> None:
    numbers = load("prime_numbers", NUMBERS, TALKS)
    problem = numbers.problem(1)
    assert numbers.observe(problem, ["5"]) == Observation("more")
    assert numbers.observe(problem, ["5", "12"]) == Observation("less")
    assert numbers.observe(problem, ["5", "12", "9"]) is None
    assert numbers.check_turns(problem, ["5", "12", "9"], 9).task_micro == MICRO
    assert numbers.check_turns(problem, ["5", "12"], 9).task_micro == 0
    for odd in ("no number", "99"):
        found = numbers.observe(problem, [odd])
        assert found == Observation("", exact=False, limit="reached")
        assert caplog.messages[-1].startswith("prime_numbers, task 1, turn 0")


REFUSED = {
    "prime_clock": (store_source("import time", "''"), "imports time (prime_clock.py, line 5)"),
    "prime_chance": (store_source("", "str(random.random())"), "tool odd says something else"),
    "prime_bytes": (store_source("", "os.urandom(4).hex()"), "tool odd says something else"),
    "prime_box": (
        store_source("", "''").replace(
            "    @classmethod\n", "    NEEDS_CONTAINER = True\n\n    @classmethod\n"
        ),
        "tasks need a container",
    ),
    "prime_judged": (
        NUMBERS.replace("    player:", "    judge: vf.AgentConfig = vf.AgentConfig()\n    player:"),
        "has several models talk",
    ),
    "prime_waits": (
        NUMBERS.replace(
            "segment = await interaction.turn()",
            "import asyncio\n            await asyncio.sleep(1)",
        ),
        "no running event loop",
    ),
    "prime_half": (
        NUMBERS.replace('prompt="Guess."', 'prompt="Guess." + "\\ud800" * (secret == 9)'),
        "task 1 has a prompt or key that is no text",
    ),
    "prime_key": (
        NUMBERS.replace("    pass\n", '    key = "\\udc00"\n', 1),
        "task 0 has a prompt or key that is no text",
    ),
    "prime_numbers": (NUMBERS, ""),
}
REFUSALS = """
import sys
from prime_envs import verifiers_child
for name in sys.argv[1:]:
    print(name, verifiers_child._World(name, 2).refusal())
"""


@pytest.mark.slow
def test_what_cannot_be_repeated_is_refused(tmp_path: Path) -> None:
    python = _python()
    if not python:
        pytest.skip("verifiers is not installed: scripts/setup_verifiers.sh")
    for name, (source, _) in REFUSED.items():
        (tmp_path / f"{name}.py").write_text(source)
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'protocol'}"}
    done = subprocess.run(
        [python, "-c", REFUSALS, *REFUSED], env=os.environ | paths, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    found = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    for name, (_, words) in REFUSED.items():
        assert words in found[name] if words else not found[name], name


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifiersEnvironment]:
    python = _python()
    if not python:
        pytest.skip("verifiers is not installed: scripts/setup_verifiers.sh")
    (tmp_path / "prime_say.py").write_text(TASKSET)
    monkeypatch.setenv(VARIABLE, python)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = load_environment("verifiers", {"environment": "prime_say", "size": 2}, BUDGETS)
    assert isinstance(made, VerifiersEnvironment)
    yield made
    made.close()


@pytest.mark.slow
def test_a_taskset_gives_prompts_and_its_own_rewards(environment: VerifiersEnvironment) -> None:
    assert len(environment) == 2
    problem = environment.problem(0)
    assert environment.prompt_text(problem, 100).startswith(
        "Be short.\n\nSay yes.\n\nThink for 100"
    )
    right = environment.check(problem, "yes", 1)
    assert (right.task_micro, dict(right.parts)) == (MICRO, {"exact": MICRO, "short": 0})
    assert environment.check(problem, "no", 1).task_micro == MICRO // 2
    assert environment.check(problem, "wrong", 1).task_micro == 0
    failed = environment.check(problem, "raise", 1)
    assert (failed.task_micro, failed.uncertain) == (0, True)
    assert "task 0" in failed.reason
    again = load_environment("verifiers", environment.arguments, BUDGETS)
    assert again.digest() == environment.digest()
    again.close()
    with pytest.raises(UserError, match="no_such_taskset"):
        load_environment("verifiers", {"environment": "no_such_taskset"}, BUDGETS)


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    (tmp_path / "verifiers.py").write_text("raise ImportError('as where it is not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="needs the package verifiers") as caught:
        load_environment("verifiers", {"environment": "x"}, BUDGETS)
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize("arguments", [{}, {"environment": 3}, {"environment": "x", "size": 0},
                                       {"environment": "x", "color": "red"}])  # fmt: skip
def test_wrong_arguments_are_refused(arguments: dict[str, int | str]) -> None:
    with pytest.raises(UserError, match="takes `environment`"):
        load_environment("verifiers", arguments, BUDGETS)
