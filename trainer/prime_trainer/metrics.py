"""One JSON line per policy version, written exactly once even if the trainer is killed.

The line is part of the checkpoint that it belongs to. A restart rewrites the checkpoint's line if
the file lacks it, and truncates an incomplete one. A batch that is trained again has a line for
each of its policies.

Alarms are values of a finished step that need a person's attention. They never change the training
itself; the run continues or ends after the step (`alarm_action`).
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_core.errors import UserError
from prime_trainer.disk import writing

if TYPE_CHECKING:
    from prime_core.rollout import Rollout
    from prime_core.run import EnvironmentRef
    from prime_trainer.config import Settings


class Stopwatch:
    """Seconds spent, by name; every wait of the loop has a name."""

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        begins: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._now, self._begins = now, begins
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Calls `begins` with `name`, then adds the block's time to it."""
        self._begins(name)
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start


class MetricsFile:
    """Appends to `path`; call `repair` after a restart."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def repair(self, last: Mapping[str, Any] | None, newest: int) -> None:
        """Drops an incomplete line and lines of versions above `newest`; adds `last`, the
        checkpoint's line, if it is missing.

        Raises UnavailableError on a disk error, leaving the file unchanged.
        """
        with writing("the metrics file", self.path):
            self._repair(last, newest)

    def _repair(self, last: Mapping[str, Any] | None, newest: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = []
        if self.path.is_file():
            text = self.path.read_text()
            whole = text.split("\n")[:-1]
        known = [(self._version(number, line), line) for number, line in enumerate(whole, start=1)]
        kept = [line for version, line in known if version <= newest]
        if last is not None and all(version != last["version"] for version, _ in known):
            kept.append(json.dumps(last))
        staging = self.path.with_name(f".{self.path.name}.tmp")
        staging.write_text("".join(line + "\n" for line in kept))
        staging.replace(self.path)

    def _version(self, number: int, line: str) -> int:
        """The policy version of a line. Raises UserError naming a damaged line: measurements are
        never silently discarded."""
        try:
            return int(json.loads(line)["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"line {number} of {self.path} is not a step's line: {error}",
                hint="correct or move the file; training continues from the checkpoint",
            ) from error

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds a line. Raises UnavailableError on a disk error; `repair` can then restore the line
        from the checkpoint."""
        with (
            writing(f"the metrics of step {line['step']}", self.path),
            self.path.open("a") as file,
        ):
            file.write(json.dumps(line) + "\n")


def read_lines(path: Path, *needed: str) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON objects (the last one may be in progress); none if it
    does not exist. Raises UserError if it cannot be read, or naming a line that is no JSON object
    with the fields `needed`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UserError(f"{path} cannot be read: {why}", hint="name another folder") from error
    found = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):  # texts hold U+2028
        try:
            one = json.loads(line)
            if not isinstance(one, dict):
                raise ValueError("it is no object")
            if missing := [name for name in needed if name not in one]:
                raise ValueError(f"it has no {missing[0]!r}")
        except ValueError as error:
            raise UserError(
                f"line {number} of {path} is damaged: {error}", hint="correct or move the file"
            ) from error
        found.append(one)
    return found


def describe_rows(rollouts: Sequence[Rollout], step: int, source: EnvironmentRef) -> dict[str, Any]:
    """Statistics of a batch's rows: reward and share by target, and by part if the run's
    environment `source` is a mixture; components of the reward, passes; staleness, lengths,
    endings. Rows that could not be graded are left out.

    `length_error`: mean distance between the number of generated tokens and the target, by target.
    (An environment may count only a part of them; `trainer evaluate` uses its unit.)
    """
    limited = sum(row.finish_reason == "tool_limit" for row in rollouts) / len(rollouts)
    passes = _passes(rollouts)
    rollouts = [row for row in rollouts if row.finish_reason != "ungraded"]
    by_target: dict[int, list[float]] = {}
    by_part: dict[str, list[float]] = {}
    apart: dict[int, list[int]] = {}
    components: dict[str, list[int]] = {}
    for row in rollouts:
        for name, value in row.parts.items():
            components.setdefault(name, []).append(value)
        by_target.setdefault(row.target_length, []).append(row.reward)
        if source.parts:
            by_part.setdefault(source.source_of(row.problem_id), []).append(row.reward)
        off = abs(row.generated - row.target_length)
        apart.setdefault(row.target_length, []).append(off)
    count = len(rollouts)
    mean = sum(row.reward for row in rollouts) / count
    return {
        "rows": count,
        "reward": mean,
        "reward_deviation": math.sqrt(sum((row.reward - mean) ** 2 for row in rollouts) / count),
        "reward_by_target": {
            str(target): sum(values) / len(values) for target, values in sorted(by_target.items())
        },
        "share_by_target": {
            str(target): len(values) / count for target, values in sorted(by_target.items())
        },
        **_by_part(by_part, count),
        **passes,
        **(
            {"reward_parts": {n: sum(some) / len(some) for n, some in sorted(components.items())}}
            if components
            else {}
        ),
        "length_error": {
            str(target): sum(values) / len(values) for target, values in sorted(apart.items())
        },
        "staleness_mean": sum(step - row.policy_version for row in rollouts) / count,
        "staleness": {
            str(age): rows
            for age, rows in sorted(Counter(step - row.policy_version for row in rollouts).items())
        },
        "output_tokens": sum(row.generated for row in rollouts),
        "output_tokens_mean": sum(row.generated for row in rollouts) / count,
        "turns_mean": sum(len(row.spans[::2]) or 1 for row in rollouts) / count,
        "cut_at_limit": sum(row.finish_reason == "length" for row in rollouts) / count,
        "cut_at_tool_limit": limited,
    }


def _passes(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The share of rows that answer correctly, and of groups with such a row; empty for rows
    without components of rewards. Groups follow one another, each by sample number."""
    from prime_core.run import MICRO

    groups: list[list[bool]] = []
    for row in rollouts:
        if row.sample == 0 or not groups:
            groups.append([])
        if "task_micro" in row.parts:
            groups[-1].append(row.parts["task_micro"] >= MICRO)
    known = [group for group in groups if group]
    if not known:
        return {}
    rows = [passed for group in known for passed in group]
    return {
        "pass_1": sum(rows) / len(rows),
        "pass_k": sum(map(any, known)) / len(known),
    }


def _by_part(rewards: Mapping[str, Sequence[float]], count: int) -> dict[str, dict[str, float]]:
    """Reward and share of each part of a mixture; empty without parts."""
    if not rewards:
        return {}
    return {
        "reward_by_environment": {
            part: sum(values) / len(values) for part, values in sorted(rewards.items())
        },
        "share_by_environment": {
            part: len(values) / count for part, values in sorted(rewards.items())
        },
    }


def alarms_of(line: Mapping[str, Any], settings: Settings) -> list[str]:
    """One phrase for each limit that the step's line exceeds; a non-finite value (stored as text)
    exceeds every limit."""
    found = []
    stale = line.get("kl_mismatch_stale", {})
    values = {name: line.get(name) for name in ("kl_old", "kl_mismatch", "kl_reference")}
    values |= {f"kl_mismatch_stale/{age}": value for age, value in stale.items()}
    limited = [("ratio_max", line.get("ratio_max"), settings.alarm_ratio)]
    limited += [(name, value, settings.alarm_kl) for name, value in values.items()]
    for name, value, limit in limited:
        if value is not None and (isinstance(value, str) or value > limit):
            found.append(f"{name} {_short(value)} above {limit:g}")
    entropy = line.get("entropy")
    if entropy is not None and (isinstance(entropy, str) or entropy < settings.alarm_entropy):
        found.append(f"entropy {_short(entropy)} below {settings.alarm_entropy:g}")
    if line.get("applied") is False:
        found.append(f"no step was taken: gradient norm {_short(line.get('gradient_norm'))}")
    return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
