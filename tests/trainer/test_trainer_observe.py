"""Observers of a run: TensorBoard files, Prometheus metrics, rates, the progress bar."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import trainer_kit as kit
from tensorboardX.proto.event_pb2 import Event

from prime_core.errors import UserError
from prime_core.ids import ZERO_DIGEST, Step
from prime_core.rollout import Rollout
from prime_core.run import MICRO
from prime_trainer.data import TrainingBatch, decode_message, encode_message
from prime_trainer.metrics import Stopwatch, describe_rows
from prime_trainer.observe import (
    WAITS,
    Bar,
    MetricsServer,
    Observers,
    flat,
    peak_flops,
    table_rows,
)
from prime_trainer.parallel import World
from prime_trainer.samples import samples_text
from prime_trainer.train import Trainer


def records(data: bytes) -> Iterator[Event]:
    """The events of a TensorBoard file: length (u64), its CRC, the event, its CRC."""
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_tensorboard_gets_each_steps_numbers(tmp_path: Path) -> None:
    events = tmp_path / "events"
    with Observers.of(kit.settings(tmp_path, tmp_path, tensorboard=events), True) as observers:
        observers.step({"time": 2.0, "step": 300, "reward": 0.5, "seconds": {"fetch": 0.25}})
    (file,) = events.iterdir()
    found = {
        one.summary.value[0].tag: (one.step, one.wall_time, one.summary.value[0].simple_value)
        for one in records(file.read_bytes())
        if one.summary.value
    }
    assert found["reward"] == (300, 2.0, 0.5)
    assert found["seconds/fetch"] == (300, 2.0, 0.25)


SAMPLE = {
    "step": 20, "verdict": "accepted", "staleness": 2, "prompt": "1 | 2\n<b>",
    "turns": ["three", "four"], "tokens": 5, "finish": "end", "reward": 0.25,
    "parts": {"task_micro": 1, "length": 5},
}  # fmt: skip


def test_the_table_says_which_rows_could_not_be_graded() -> None:
    assert [row[0] for row in table_rows([SAMPLE, SAMPLE | {"reward": None}])] == [
        "0.250", "ungraded",
    ]  # fmt: skip


def test_tensorboard_shows_texts_every_few_steps(tmp_path: Path) -> None:
    events = tmp_path / "events"
    settings = kit.settings(tmp_path, tmp_path, tensorboard=events, texts_every=10)
    with Observers.of(settings, True) as observers:
        observers.texts(19, [SAMPLE])
        observers.texts(20, [SAMPLE])
        observers.texts(30, [])
    (file,) = events.iterdir()
    shown = [
        (one.step, one.summary.value[0].tensor.string_val[0].decode())
        for one in records(file.read_bytes())
        if one.summary.value
    ]
    row = (
        "| 0.250 | length 5, task_micro 1 | accepted | 2 | end | 5 | 1 &#124; 2<br>&lt;b> "
        "| three<br><br>four |"
    )
    assert [(step, text.splitlines()[-1]) for step, text in shown] == [(20, row)]


class _Tracker(ModuleType):
    """A tracker that remembers its calls, with the interface of wandb and trackio."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[Any, ...]] = []

    def init(self, *, project: str, config: dict[str, Any]) -> _Tracker:
        if project == "refused":
            raise ValueError("no API key")
        self.calls.append(("init", project, config["learning_rate"]))
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls.append(("log", values, step))

    def Table(self, *, columns: list[str], data: list[list[str]]) -> list[dict[str, str]]:  # noqa: N802
        return [dict(zip(columns, row, strict=True)) for row in data]

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_a_tracker_gets_settings_numbers_and_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = _Tracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    settings = kit.settings(tmp_path, tmp_path, tracker="wandb", tracker_project="mine")
    with Observers.of(settings, True) as observers:
        observers.step({"time": 2.0, "step": 20, "seconds": {"fetch": 0.25}})
        observers.texts(20, [SAMPLE])
    row = {
        "reward": "0.250", "parts": "length 5, task_micro 1", "verdict": "accepted",
        "staleness": "2", "finish": "end", "tokens": "5",
        "prompt": "1 | 2\n<b>", "turns": "three\n\nfour",
    }  # fmt: skip
    numbers = {"time": 2.0, "step": 20.0, "seconds/fetch": 0.25}
    assert tracker.calls == [
        ("init", "mine", settings.learning_rate),
        ("log", numbers, 20),
        ("log", {"rollouts": [row]}, 20),
        ("finish",),
    ]
    tracker.calls.clear()
    with Observers.of(settings, False):
        assert tracker.calls == [], "only rank 0 logs"
    refused = kit.settings(tmp_path, tmp_path, tracker="wandb", tracker_project="refused")
    with pytest.raises(UserError, match="wandb cannot start: no API key"):
        Observers.of(refused, True)


def test_a_lines_numbers_are_flat_and_words_are_left_out() -> None:
    line = {"step": 3, "batch": "0xab", "applied": True, "seconds": {"fetch": 0.5}, "alarms": []}
    assert dict(flat(line)) == {"step": 3.0, "applied": 1.0, "seconds/fetch": 0.5}


def test_the_metrics_page_shows_the_newest_step_and_what_is_waited_for() -> None:
    server = MetricsServer(0)
    try:
        server.show({"reward": 0.5, "seconds/fetch": 0.25, "seconds/plan": 0.125})
        server.waits("wait_batch")
        page = httpx.get(server.url)
        assert page.headers["content-type"].startswith("text/plain")
        assert "prime_trainer_reward 0.5\n" in page.text
        assert 'prime_trainer_seconds{part="fetch"} 0.25\n' in page.text
        assert page.text.count("# TYPE prime_trainer_seconds gauge") == 1
        assert page.text.count("# HELP prime_trainer_seconds ") == 1
        assert 'prime_trainer_waiting{for="wait_batch"} 1' in page.text
        with pytest.raises(UserError, match="cannot be served"):
            MetricsServer(int(server.url.split(":")[2].split("/")[0]))
    finally:
        server.stop()


def test_rates_are_of_computing_and_of_the_whole_step(tmp_path: Path) -> None:
    observers = Observers(peak=1e9)
    seconds = {"forward_backward": 3.0, "optimizer": 1.0, "wait_batch": 4.0}
    line = {"seconds": seconds, "tokens": 400, "flops": 2e9}
    observers.complete(line, ranks=2)
    assert line["tokens_s"] == 100.0
    assert line["tokens_s_wall"] == 50.0
    assert line["mfu"] == pytest.approx(2e9 / (4.0 * 1e9 * 2))
    skipped = {"seconds": {"wait_batch": 1.0}}
    observers.complete(skipped, ranks=1)
    assert "tokens_s" not in skipped


def test_a_devices_peak_is_its_own_name_longest_first_or_what_the_run_says(tmp_path: Path) -> None:
    settings = kit.settings(tmp_path, tmp_path)
    assert peak_flops(settings, "NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops(settings, "NVIDIA H100 PCIe") == 756e12
    assert peak_flops(settings, "cpu") is None
    assert peak_flops(kit.settings(tmp_path, tmp_path, peak_tflops=2.0), "cpu") == 2e12


def test_every_wait_is_announced_before_it_begins() -> None:
    reported: list[str] = []
    watch = Stopwatch(now=iter([0.0, 2.0, 2.0, 5.0]).__next__, begins=reported.append)
    with watch.timed("wait_batch"):
        assert reported == ["wait_batch"]
    with watch.timed("plan"):
        pass
    assert watch.seconds == {"wait_batch": 2.0, "plan": 3.0}


def test_the_bar_has_a_word_for_each_of_the_loops_waits() -> None:
    assert {"wait_batch", "share", "plan", "collate", "forward_backward", "statistics",
            "optimizer", "wait_kept", "snapshot", "proximal", "mismatch"} == set(WAITS)  # fmt: skip
    bar = Bar(10)
    bar.say("wait_batch")
    bar.step({"step": 3, "version": 4, "reward": 0.25})
    (task,) = bar._progress.tasks
    assert task.completed == 4
    assert task.fields["waits"] == WAITS["wait_batch"]
    assert "0.250" in task.fields["reward"]


def test_texts_and_metrics_of_a_batch_have_the_components_of_each_reward(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world)
    run = learner.run
    info = SimpleNamespace(pool=kit.POOL, manager=kit.MANAGER.address)
    facts = SimpleNamespace(run=run, info=info, domain=lambda _: kit.DOMAIN)
    trainer = Trainer(learner, facts, None, None, threading.Event())  # type: ignore[arg-type]
    group = tuple(
        Rollout(
            "p", 0, sample, [1, 2], [3, 4], [-0.5] * 2, 2, "end", 9, float(sample == 0),
            parts={"task_micro": MICRO * (sample == 0), "length": 2},
        )
        for sample in range(4)
    )  # fmt: skip
    sent = encode_message(TrainingBatch(Step(10), ZERO_DIGEST, (group,), ((ZERO_DIGEST, 0),)))
    batch = decode_message(sent)
    assert isinstance(batch, TrainingBatch)
    found = describe_rows(batch.rollouts, 10, run.environment)
    assert found["reward_parts"] == {"length": 2.0, "task_micro": MICRO / 4}
    assert (found["pass_1"], found["pass_k"], found["cut_at_tool_limit"]) == (0.25, 1.0, 0.0)
    assert found["reward_deviation"] == pytest.approx(3**0.5 / 4)
    lines = trainer.texts(batch, 10)
    trainer.keeper.shutdown()
    assert [line["verdict"] for line in lines] == ["accepted"] * 4
    assert {line["staleness"] for line in lines} == {1}
    assert [line["parts"]["task_micro"] for line in lines] == [MICRO, 0, 0, 0]
    shown = samples_text(lines[:1], lambda text, _: text)
    assert shown.startswith("step 10, policy 9 (1 old), accepted, ")
    assert "task_micro 1000000" in shown
