"""The part of the `verifiers` adapter that imports verifiers (its v1, 0.4): tasks, conversations
and scores.

Runs in a child (subprocess_grader.py), in the interpreter that has the package; imports none of our
code. A row's conversation is a pure function of the task and the model's turns: the taskset's
environment (`vf.Env.run`) and its toolsets are run from the start, in this process, with the turns
in place of a model. No MCP server is started; a tool is called as its server would call it.

    turn of the model ──► call of a tool?  yes: the tool's result
                                           no:  what the environment says next, if anything

Conversations run where the process can only compute (sandbox/kernel.py), so a tool that opens a
file, a connection or a process, or draws random bytes, gets an error. Coroutines are driven without
an event loop: what waits for anything but the model's next turn is refused. Scoring runs the same
conversation there ("play"); the rewards then get its trace in another process and run no tool.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import inspect
import itertools
import json
import math
import platform
import random
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

MICRO = 1_000_000
MAX_TEXT = 65_536
"""Characters of a message that are returned; a run cuts it at fewer bytes."""
PAST_END = 8
"""Turns for which an environment may ask after the row has ended; each gets none."""
_CHANGING = frozenset(
    (
        *("time", "datetime", "uuid", "secrets", "socket", "ssl", "select", "requests", "httpx"),
        *("urllib", "urllib3", "aiohttp", "openai", "subprocess", "multiprocessing", "threading"),
        *("tempfile", "platform", "getpass"),
    )
)
"""Modules whose use makes a tool's answer depend on more than its arguments."""


class Impure(Exception):  # noqa: N818 - the reason for refusing a taskset, not a failure
    """Why a validator could not repeat what a taskset does; worded to follow "its"."""


def warm(name: str, size: int) -> None:
    """Loads the taskset, and what its tools and rewards import on first use, before any fork."""
    world = _world(name, size)
    if world.refusal():
        return
    task, last = world.tasks[0], {"text": "", "call": None}
    for call in [None, *(_sample(tool, world) for tool in world.tools())]:
        with contextlib.suppress(Exception):  # an empty answer may raise; its imports are done
            _whole(*_started(world, task), [{"text": "", "call": call}, last])
        with contextlib.suppress(Exception):
            asyncio.run(_scored(world, task, _kept(_Played(world, task))))


def answer(request: dict[str, Any]) -> Any:
    """{"do": "describe" | "task" | "step" | "play" | "score", "id", "size", "index", "turns" for
    "step" and "play", "played" (what "play" returned) for "score"} → a JSON value, or for "step"
    and "play" the function that returns it, to be called where it can only compute."""
    world = _world(request["id"], request["size"])
    if request["do"] == "describe":
        return _describe(world)
    task = world.tasks[request["index"]]
    if request["do"] == "task":
        system = task.data.system_prompt
        parts = [system, task.data.prompt_text, world.manual()]
        return {"prompt": "\n\n".join(filter(None, parts)), "key": task.key}
    if request["do"] == "score":
        return asyncio.run(_scored(world, task, request["played"]))
    played, running = _started(world, task)  # a trace draws random bytes for its id
    if request["do"] == "play":
        return lambda: _whole(played, running, request["turns"])
    return lambda: {"said": _said(running, request["turns"])}


# ── the taskset ──────────────────────────────────────────────────────────────────────────────────


class _World:
    """A taskset with its environment and the first `size` tasks."""

    def __init__(self, name: str, size: int) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils import loaders

        self.name = name
        self.env: Any = loaders.load_environment(
            loaders.resolve_env_config({"taskset": {"id": name}})
        )
        self.tasks: list[Any] = list(itertools.islice(iter(self.env.taskset), size))
        self.seats = list(agent_config_fields(self.env.config))
        self.module: ModuleType = loaders.import_taskset(name)

    def toolsets(self) -> list[Any]:
        """Fresh tool servers, for one conversation."""
        task = self.tasks[0]
        shared = self.env.taskset.toolsets(self.env.taskset.config)
        return [*type(task).toolsets(task.config), *shared]

    def tools(self, toolsets: Sequence[Any] | None = None) -> dict[str, tuple[Any, Any]]:
        """Functions of the tools and their argument models, by the name that a model writes."""
        from mcp.server.mcpserver.utilities.func_metadata import func_metadata
        from verifiers.v1.utils.decorators import discover_decorated

        found = {}
        for toolset in self.toolsets() if toolsets is None else toolsets:
            for function in discover_decorated(toolset, "tool"):
                word = getattr(function, "tool_name", None) or function.__name__
                server = toolset.server_name
                found[f"{server}_{word}" if server else word] = function, func_metadata(function)
        return found

    def manual(self) -> str:
        """What the prompt says about the tools; "" without tools."""
        lines = []
        for name, (function, about) in self.tools().items():
            schema = about.arg_model.model_json_schema(by_alias=True).get("properties", {})
            shown = {key: value.get("type", "any") for key, value in schema.items()}
            said = inspect.cleandoc(function.__doc__ or "")
            lines.append(f"{name}({json.dumps(shown)}): {said}")
        return "Tools:\n" + "\n".join(lines) if lines else ""

    def talks(self) -> bool:
        """Whether the environment itself may say something after a turn."""
        from verifiers.v1.envs.single_agent import SingleAgentEnv

        return type(self.env) is not SingleAgentEnv

    def refusal(self) -> str:
        """Why the taskset cannot be used, worded to follow "its"; "" if it can be."""
        try:
            self._require_pure()
        except Impure as error:
            return str(error)
        return ""

    def _require_pure(self) -> None:
        from verifiers.v1.env import Env
        from verifiers.v1.mcp import Toolset
        from verifiers.v1.runtimes import SubprocessConfig
        from verifiers.v1.task import Task
        from verifiers.v1.utils.decorators import discover_decorated

        if not self.tasks:
            raise Impure("taskset is empty")
        several = self.talks() or bool(self.toolsets())
        for hook in ("setup", "finalize", "start"):
            if getattr(type(self.env), hook) is not getattr(Env, hook):
                raise Impure(f"environment does more than talk (it has a `{hook}`)")
        if len(self.seats) != 1:
            raise Impure("environment has several models talk, and a validator repeats one")
        for task in self.tasks:
            kind = type(task)
            if kind.NEEDS_CONTAINER:
                raise Impure("tasks need a container")
            if task.plugged_judges():
                raise Impure("answers are judged by a model, which a validator could not repeat")
            for hook in ("setup", "finalize", "stage_verifier"):
                if getattr(kind, hook) is not getattr(Task, hook):
                    raise Impure(f"tasks prepare a machine (they have a `{hook}`)")
            rewards = task.hooks("reward")
            if not rewards and not self.talks():
                raise Impure("tasks have no reward")
            if any(_requires(reward, "runtime") for reward in rewards):
                raise Impure("rewards look at a running machine")
            if several and (task.hooks("stop") or discover_decorated(task, "intercept")):
                raise Impure("tasks end or change conversations by rules of their own")
        for number, task in enumerate(self.tasks):
            try:
                texts = (task.data.system_prompt, task.data.prompt_text, str(task.key))
                "".join(filter(None, texts)).encode()
            except ValueError as error:  # half of a surrogate pair
                raise Impure(
                    f"task {number} has a prompt or key that is no text: {error}"
                ) from error
        if isinstance(self.tasks[0].data.prompt, list | None):
            raise Impure("prompts are not texts")
        for toolset in self.toolsets():
            config = toolset.config
            if type(toolset).register is not Toolset.register:
                raise Impure(f"toolset {type(toolset).__name__} registers tools by itself")
            local = isinstance(config.runtime, SubprocessConfig) and not config.url
            if not local or getattr(config, "colocated", False):
                raise Impure(f"toolset {type(toolset).__name__} runs on another machine")
        if several:
            _require_no_clocks(self.module)
            self._require_repeatable()

    def _require_repeatable(self) -> None:
        """Tries each tool, and a first turn, twice."""
        task = self.tasks[0]
        for call in [None, *(_sample(tool, self) for tool in self.tools())]:
            turns = [{"text": "", "call": call}]
            one, other = (self._tried(task, turns, chance) for chance in (0, 1))
            if one != other:
                what = "environment" if call is None else f"tool {call['name']}"
                raise Impure(f"{what} says something else when it is asked again")

    def _tried(self, task: Any, turns: Sequence[dict[str, Any]], chance: int) -> str | None:
        try:
            return _said(_started(self, task, chance)[1], turns)
        except Exception as error:
            if isinstance(error, Impure) or "event loop" in str(error):
                raise Impure(f"steps wait for more than the model's turn: {error}") from error
            return f"{type(error).__name__}: {error}"


def _requires(function: Callable[..., Any], name: str) -> bool:
    found = inspect.signature(function).parameters.get(name)
    return found is not None and found.default is inspect.Parameter.empty


def _require_no_clocks(module: ModuleType) -> None:
    """Refuses sources of the taskset's package that import what reads clocks, chance or devices.
    Those of verifiers itself pass."""
    for path in _sources(module):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [] if node.level else [node.module or ""]
            for name in names:
                if name.partition(".")[0] in _CHANGING:
                    raise Impure(
                        f"code imports {name} ({path.name}, line {node.lineno}), so it may answer "
                        "differently another time"
                    )


def _sources(module: ModuleType) -> list[Path]:
    """The Python files of a module's top-level package; none for verifiers: its version counts."""
    top = module.__name__.partition(".")[0]
    if top == "verifiers":
        return []
    file = getattr(sys.modules[top], "__file__", None)
    assert file is not None
    whole = Path(file)
    return sorted(whole.parent.rglob("*.py")) if whole.name == "__init__.py" else [whole]


def _sample(name: str, world: _World) -> dict[str, Any]:
    """A call of a tool with made-up arguments."""
    _, about = world.tools()[name]
    schema = about.arg_model.model_json_schema(by_alias=True)
    asked = schema.get("required", [])
    return {"name": name, "arguments": {key: "1" for key in schema["properties"] if key in asked}}


@lru_cache(maxsize=1)
def _world(name: str, size: int) -> _World:
    return _World(name, size)


def _describe(world: _World) -> dict[str, Any]:
    from importlib.metadata import distributions, version

    if refusal := world.refusal():
        return {"refused": refusal}
    digest = hashlib.sha256(b"".join(task.hash.encode() for task in world.tasks))
    code = hashlib.sha256()
    for path in _sources(world.module):
        code.update(hashlib.sha256(path.read_bytes()).digest())
    installed = sorted({f"{one.name}=={one.version}" for one in distributions()})
    machine = json.dumps([platform.python_version(), *installed])
    return {
        "count": len(world.tasks),
        "digest": f"0x{digest.hexdigest()}",
        "code": f"0x{code.hexdigest()}",
        "version": version("verifiers"),
        "installed": f"0x{hashlib.sha256(machine.encode()).hexdigest()}",
        "tools": sorted(world.tools()),
        "talks": world.talks(),
    }


# ── a conversation ───────────────────────────────────────────────────────────────────────────────


class _Next:
    """Awaiting it hands `said` to the driver and returns the model's next turn (None: the row has
    ended)."""

    def __init__(self, said: str | None) -> None:
        self.said = said

    def __await__(self) -> Generator[_Next, dict[str, Any] | None, dict[str, Any] | None]:
        return (yield self)


class _Played:
    """The one agent of an environment, played by a row's turns: `run` and `interaction` as in
    verifiers.v1.agent. Leaving the interaction scores nothing: see `_scored`."""

    def __init__(self, world: _World, task: Any) -> None:
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask

        self.trace: Any = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=AgentInfo(config=AgentConfig()),
        )
        self.trace.state = state_cls(type(task))()
        self._task = task
        self._toolsets = world.toolsets()
        self._tools = world.tools(self._toolsets)
        self._add("user", task.data.prompt_text)

    async def run(self, task: Any, **_: Any) -> Any:
        async with self.interaction(task):
            await self.turn()
        return self.trace

    def interaction(self, task: Any, **_: Any) -> _Played:
        if task is not self._task:
            raise Impure("the environment gives the model another task than the row's")
        return self

    async def __aenter__(self) -> _Played:
        for toolset in self._toolsets:
            if toolset._state_cls is type(self.trace.state):
                toolset._inert_state = self.trace.state
            await toolset.setup()
            await toolset.setup_task(self._task)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is left open."""

    async def turn(self, message: str | None = None) -> Any:
        """Plays turns until one makes no call; a Segment as in verifiers.v1.agent."""
        from verifiers.v1.agent import Segment

        if message is not None:
            self._add("user", message)
        said, first = message, len(self.trace.nodes)
        while (played := await _Next(said)) is not None:
            text, call = played["text"], played["call"]
            if call is None:
                self._add("assistant", text)
                messages = [node.message for node in self.trace.nodes[first:]]
                return Segment(messages=messages, root_reply=text)
            said = await self._called(text, call)
        return Segment(messages=[], terminated=True)

    async def _called(self, text: str, call: dict[str, Any]) -> str:
        from mcp.server.mcpserver.utilities.func_metadata import FuncMetadata
        from pydantic import ValidationError
        from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage

        number = f"call_{len(self.trace.nodes)}"
        name, arguments = call.get("name", ""), call.get("arguments", {})
        asked = ToolCall(id=number, name=name, arguments=json.dumps(arguments))
        self._add("", AssistantMessage(content=text, tool_calls=[asked]), sampled=True)
        if "problem" in call:
            said = f"error: {call['problem']}"
        elif name not in self._tools:
            said = f"error: there is no tool {name[:64]!a}"
        else:
            function, about = self._tools[name]
            assert isinstance(about, FuncMetadata)
            try:
                result = function(**about.validate_arguments(arguments))
                if inspect.isawaitable(result):
                    result = await result
                content = about.convert_result(result).content
                said = "\n".join(getattr(block, "text", "") for block in content)
            except (Impure, MemoryError):
                raise
            except ValidationError as error:  # its own words differ between versions of pydantic
                places = {".".join(map(str, one["loc"])) for one in error.errors()}
                said = f"Error executing tool {name}: wrong arguments: {', '.join(sorted(places))}"
            except Exception as error:  # as an MCP server answers
                said = f"Error executing tool {name}: {error}"
        said = said[:MAX_TEXT]
        self._add("", ToolMessage(tool_call_id=number, content=said, name=name or None))
        return said

    def _add(self, role: str, message: Any, sampled: bool = False) -> None:
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.types import AssistantMessage, UserMessage

        if role:
            kind = UserMessage if role == "user" else AssistantMessage
            message, sampled = kind(content=message), role == "assistant"
        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(MessageNode(parent=parent, message=message, sampled=sampled, timestamp=0.0))


class _Agents:
    """An environment's agents: the one seat."""

    def __init__(self, seat: str, played: _Played) -> None:
        setattr(self, seat, played)


def _started(
    world: _World, task: Any, chance: int = 0
) -> tuple[_Played, Coroutine[Any, Any, None]]:
    random.seed(f"{task.key} {chance}")
    played = _Played(world, task)
    return played, world.env.run(task, _Agents(world.seats[0], played))


def _said(running: Coroutine[Any, Any, None], turns: Sequence[dict[str, Any] | None]) -> str | None:
    """What is said after the last of the model's turns; None if that ends the row."""
    try:
        waiting = running.send(None)
        for turn in turns:
            if not isinstance(waiting, _Next):
                raise Impure("the environment waits for something else than the model")
            waiting = running.send(turn)
    except StopIteration:
        return None
    finally:
        running.close()
    if not isinstance(waiting, _Next):
        raise Impure("the environment waits for something else than the model")
    return (waiting.said or "")[:MAX_TEXT]


def _whole(
    played: _Played, running: Coroutine[Any, Any, None], turns: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Plays a whole row, and returns its trace; the environment may ask PAST_END more times."""
    if _said(running, [*turns, *[None] * PAST_END]) is not None:
        raise Impure("the environment goes on after the row has ended")
    return _kept(played)


def _kept(played: _Played) -> dict[str, str]:
    """What the rewards need of a conversation, as JSON: its trace and its state."""
    trace = played.trace
    return {
        "trace": trace.model_dump_json(exclude={"task", "agent"}),
        "state": trace.state.model_dump_json(),
    }


async def _scored(world: _World, task: Any, kept: dict[str, str]) -> dict[str, Any]:
    """The rewards of a whole row, from its conversation (`_kept`)."""
    empty = _Played(world, task).trace
    known = {"task": empty.task, "agent": empty.agent}
    trace = type(empty).model_validate({**json.loads(kept["trace"]), **known})
    trace.state = type(empty.state).model_validate_json(kept["state"])
    await task.score(trace)
    parts = {}
    for name, reward in sorted(trace.rewards.items()):
        if reward is None or not math.isfinite(reward.score):
            raise ValueError(f"the reward {name!r} gave no number")
        parts[str(name)] = round(reward.score * MICRO)
    if not parts:
        raise ValueError("no reward was given")
    total = min(1.0, max(0.0, float(trace.reward)))
    return {"score": round(total * MICRO), "parts": parts}
