"""Observers of a run: a progress bar, Prometheus metrics, sinks such as TensorBoard.

Each shows the step's line of metrics, which does not depend on the observers.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from prime_core.errors import UserError
from prime_core.folders import make_folder
from prime_trainer.config import TRAINING, Settings

COMPUTE = ("proximal", "forward_backward", "statistics", "optimizer")
"""Names in the step's line for compute on the device."""
PEAK_TFLOPS = {
    "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0,
    "A10G": 70.0, "L4": 121.0, "RTX 4090": 165.0, "RTX 3090": 71.0, "T4": 65.0,
}  # fmt: skip
"""Dense bf16 (T4: fp16) tensor peaks from vendor data sheets, by a substring of the device's name;
the longest match counts."""

UNITS = {
    "background": "seconds", "seconds": "seconds", "time": "seconds since 1970",
    "tokens": "tokens", "output_tokens": "tokens", "output_tokens_mean": "tokens",
    "length_error": "tokens", "tokens_s": "tokens per second", "tokens_s_wall": "tokens per second",
    "flops": "operations", "entropy": "nats", "kl_mismatch": "nats",
    "kl_mismatch_stale": "nats", "kl_old": "nats", "kl_reference": "nats",
    "reward": "reward", "reward_by_target": "reward",
    "reward_by_environment": "reward", "turns_mean": "turns",
    "groups": "groups", "optimizer_steps": "steps", "rows": "rows", "staleness": "rows",
    "staleness_mean": "policy versions", "step": "steps", "version": "policy versions",
    "applied": "0 or 1",
}  # fmt: skip
"""Units of a step's numbers by the first part of their name. The others have none."""
WAITS = {
    "wait_batch": "waiting for a sealed batch",
    "share": "sharing the batch with every rank",
    "mismatch": "scoring stale rows by their own policies",
    "proximal": "scoring the batch by the present policy",
    "plan": "planning the batch",
    "collate": "computing the gradient",
    "statistics": "computing the gradient",
    "forward_backward": "computing the gradient",
    "optimizer": "stepping",
    "wait_kept": "waiting for the last checkpoint and publication",
    "snapshot": "copying the weights",
}
COLUMNS = ("reward", "parts", "verdict", "staleness", "finish", "tokens", "prompt", "turns")
"""Columns of the table of rollout texts, fields of a line of samples.jsonl."""
TABLE = "rollouts"
TRACKERS = ("wandb", "trackio")


class Sink(Protocol):
    """Receives the numbers of each step and, every few steps, texts of its rollouts."""

    def step(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Shows a step's numbers; names are those of `flat`."""
        ...

    def texts(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        """Shows a table of rollout texts; each row has a value for each of COLUMNS."""
        ...

    def close(self) -> None:
        """Writes what is not written yet."""
        ...


class TensorBoard:
    """Event files in a folder. Raises UserError if it cannot be written to."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        make_folder(folder)
        self._writer = SummaryWriter(str(folder))

    def step(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """See Sink.step."""
        for tag, value in numbers.items():
            self._writer.add_scalar(tag, value, step, time)
        self._writer.flush()

    def texts(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        """See Sink.texts. TensorBoard shows it as a Markdown table."""
        lines = [COLUMNS, ["---"] * len(COLUMNS), *([_cell(text) for text in row] for row in rows)]
        self._writer.add_text(TABLE, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
        self._writer.flush()

    def close(self) -> None:
        """See Sink.close."""
        self._writer.close()


class Tracker:
    """An experiment tracker with the interface of Weights & Biases: wandb or trackio.

    Its own environment variables say where runs go (WANDB_MODE, WANDB_DIR, TRACKIO_DIR …). Raises
    UserError if there is no such tracker, or it cannot start.
    """

    def __init__(self, name: str, project: str, config: Mapping[str, Any]) -> None:
        if name not in TRACKERS:
            raise UserError(
                f"there is no tracker {name!r}", hint=f"--tracker is {' or '.join(TRACKERS)}"
            )
        self._module = importlib.import_module(name)
        try:
            self._run = self._module.init(project=project, config=dict(config))
        except Exception as error:  # each tracker has its own errors
            raise UserError(
                f"the tracker {name} cannot start: {error}",
                hint="log in, set WANDB_MODE=offline, or leave out --tracker",
            ) from error

    def step(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """See Sink.step."""
        self._run.log(dict(numbers), step=step)

    def texts(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        """See Sink.texts."""
        table = self._module.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({TABLE: table}, step=step)

    def close(self) -> None:
        """See Sink.close."""
        self._run.finish()


def table_rows(samples: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows of the table of rollout texts from lines of samples.jsonl."""
    return [
        [
            "ungraded" if sample["reward"] is None else f"{sample['reward']:.3f}",
            ", ".join(f"{name} {value}" for name, value in sorted(sample["parts"].items())),
            str(sample["verdict"]),
            str(sample["staleness"]),
            str(sample["finish"]),
            str(sample["tokens"]),
            str(sample["prompt"]),
            "\n\n".join(sample["turns"]),
        ]
        for sample in samples
    ]


def _cell(text: str) -> str:
    """Text inside a cell of a Markdown table."""
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return safe.replace("\n", "<br>")


class Bar:
    """A rich progress bar; `total` None shows steps without an end."""

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[reward]}{task.fields[waits]}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("train", total=total, reward="", waits="starting")

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def say(self, name: str) -> None:
        """Shows what the loop waits for; `name` is its name in the step's line."""
        self._progress.update(self._task, waits=WAITS.get(name, name))

    def step(self, line: Mapping[str, Any]) -> None:
        """Shows a saved step. Uses the absolute step number, so that a resumed run continues from
        its step."""
        reward = f"reward {line['reward']:.3f} · " if "reward" in line else ""
        self._progress.update(self._task, completed=line["step"] + 1, reward=reward)


def peak_flops(settings: Settings, device_name: str) -> float | None:
    """Peak operations per second of one device; None if the device is unknown."""
    if settings.peak_tflops:
        return settings.peak_tflops * 1e12
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if name in device_name:
            return PEAK_TFLOPS[name] * 1e12
    return None


class Observers:
    """All observers of a run. `waiting` and `step` may be called from different threads."""

    def __init__(self, peak: float | None = None, now: Callable[[], float] = time.time) -> None:
        self.bar: Bar | None = None
        self.sinks: list[Sink] = []
        self._texts_every = 0
        self.server: MetricsServer | None = None
        self._peak, self._now = peak, now
        self._background: dict[str, float] = {}

    @classmethod
    def none(cls) -> Observers:
        """No observers."""
        return cls()

    @classmethod
    def of(cls, settings: Settings, leads: bool) -> Observers:
        """The observers selected in the settings; only rank 0 has any.

        Raises UserError if the metrics port is in use or a tracker cannot start.
        """
        import torch

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        found = cls(peak_flops(settings, name))
        if not leads:
            return found
        if settings.progress and sys.stderr.isatty():
            found.bar = Bar(settings.steps)
        if settings.tensorboard is not None:
            found.sinks.append(TensorBoard(settings.tensorboard))
        if settings.tracker is not None:
            config = settings.model_dump(mode="json", include=set(TRAINING))
            found.sinks.append(Tracker(settings.tracker, settings.tracker_project, config))
        found._texts_every = settings.texts_every
        if settings.metrics_port is not None:
            found.server = MetricsServer(settings.metrics_port, settings.metrics_host)
        return found

    def __enter__(self) -> Observers:
        if self.bar is not None:
            self.bar.start()
        if self.server is not None:
            print(f"metrics: {self.server.url}", flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self.bar is not None:
            self.bar.stop()
        for sink in self.sinks:
            sink.close()
        if self.server is not None:
            self.server.stop()

    def waiting(self, name: str) -> None:
        """Shows what the loop now waits for or works on."""
        if self.bar is not None:
            self.bar.say(name)
        if self.server is not None:
            self.server.waits(name)

    def background(self, seconds: Mapping[str, float]) -> None:
        """Adds seconds of a background thread's work, by name."""
        for name, value in seconds.items():
            self._background[name] = self._background.get(name, 0.0) + value

    def taken_background(self) -> dict[str, float]:
        """Returns and resets the seconds added by `background`."""
        found, self._background = self._background, {}
        return found

    def complete(self, line: dict[str, Any], ranks: int) -> None:
        """Adds rates to a step's line: tokens per second of compute and of the whole step, and MFU
        if the device's peak is known."""
        compute = sum(line["seconds"].get(name, 0.0) for name in COMPUTE)
        whole = sum(line["seconds"].values())
        if not compute or "tokens" not in line:
            return
        line["tokens_s"] = line["tokens"] / compute
        line["tokens_s_wall"] = line["tokens"] / whole
        if self._peak:
            line["mfu"] = line["flops"] / (compute * self._peak * ranks)

    def step(self, line: Mapping[str, Any]) -> None:
        """Shows a step's line, after it was written to the metrics file."""
        numbers = dict(flat(line))
        if self.bar is not None:
            self.bar.step(line)
        for sink in self.sinks:
            sink.step(line["step"], line["time"], numbers)
        if self.server is not None:
            self.server.show(numbers)

    def texts(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Shows lines of samples.jsonl as a table, every `texts_every` steps."""
        if samples and self._texts_every and step % self._texts_every == 0:
            rows = table_rows(samples)
            for sink in self.sinks:
                sink.texts(step, rows)


def flat(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields (name, number) for every number in a step's line. Nested names are joined by
    slashes."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float):
            yield prefix + name, float(value)


class MetricsServer:
    """Serves GET /metrics with the newest step's numbers, from a thread."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Starts serving on `port` (0: any free one) of the address `host`. Raises UserError if
        that cannot be bound."""
        self._numbers: Mapping[str, float] = {}
        self._waiting = "start"
        self._host = host
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise UserError(
                f"the metrics cannot be served on {host}:{port}: {error.strerror}",
                hint="name another --metrics-port, or 0 for any free one",
            ) from error

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._server.server_port}/metrics"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def show(self, numbers: Mapping[str, float]) -> None:
        """Replaces the served numbers; names are those of `flat`."""
        self._numbers = numbers

    def waits(self, name: str) -> None:
        """Sets what the loop waits for."""
        self._waiting = name

    def collect(self) -> Iterator[Metric]:
        """Yields one gauge per number. The part of a name after its first slash becomes a label."""
        families: dict[str, GaugeMetricFamily] = {}
        for name, value in sorted(self._numbers.items()):
            outer, _, part = name.partition("/")
            family = families.get(outer)
            if family is None:
                unit = UNITS.get(outer, "none")
                about = f"{outer} of the newest step (docs/learning.md). Unit: {unit}."
                labels = ["part"] if part else []
                family = GaugeMetricFamily(f"prime_trainer_{outer}", about, labels=labels)
                families[outer] = family
            family.add_metric([part] if part else [], value)
        yield from families.values()
        waiting = GaugeMetricFamily(
            "prime_trainer_waiting",
            "1: the trainer works at this or waits for it. Unit: 0 or 1.",
            labels=["for"],
        )
        waiting.add_metric([self._waiting], 1)
        yield waiting
