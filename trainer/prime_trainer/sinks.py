"""Sinks of metrics: where a run's numbers and rollout texts go, apart from its own files."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from prime_core.errors import UserError

COLUMNS = ("reward", "parts", "finish", "tokens", "prompt", "turns")
"""Columns of the table of rollout texts, fields of a line of samples.jsonl."""
TABLE = "rollouts"


class Sink(Protocol):
    """Receives the numbers of each step and, every few steps, texts of its rollouts."""

    def step(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Shows a step's numbers; names are those of observe.flat."""
        ...

    def texts(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        """Shows a table of rollout texts; each row has a value for each of COLUMNS."""
        ...

    def close(self) -> None:
        """Writes what is not written yet."""
        ...


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

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
    UserError if the tracker cannot start.
    """

    def __init__(self, name: str, project: str, config: Mapping[str, Any]) -> None:
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
            f"{sample['reward']:.3f}",
            ", ".join(f"{name} {value}" for name, value in sorted(sample["parts"].items())),
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
