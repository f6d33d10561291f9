"""Exports a finished run as a Hugging Face folder: weights, model card, run definition, curve.

<out>/README.md        model card: base model, training configuration and results
<out>/run.json         the run definition, byte for byte
<out>/policy.json      the signed manifest with which nodes loaded the same bytes
<out>/metrics.jsonl    one line per step;  curve.svg  its rewards
<out>/*                the policy's own files, checked against the manifest
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_broadcast import delta as deltas
from prime_broadcast import layout
from prime_broadcast.manifest import verify_folder
from prime_broadcast.plans import plan_from_anchor
from prime_core.errors import NotFoundError, UnavailableError, UserError
from prime_core.run import RunDefinition
from prime_core.run_file import read_run
from prime_trainer.config import TRAINING_FILE
from prime_trainer.disk import writing
from prime_trainer.metrics import read_lines

WIDTH, HEIGHT, MARGIN = 720, 280, 40


def export_run(data: Path, out: Path, version: int | None = None) -> int:
    """Writes policy `version` (None: the newest published) of the trainer's folder `data` to `out`;
    returns the version. Raises UserError if there is no such policy or `out` already exists."""
    origin = data / "origin"
    known = layout.versions(origin)
    if not known or (version is not None and version not in known):
        wanted = "no policy" if version is None else f"no policy {version}"
        raise UserError(
            f"{wanted} is published in {origin}",
            hint="name the trainer's folder by --data"
            + (f", or one of {known[0]} … {known[-1]} by --version" if known else ""),
        )
    if out.exists():
        raise UserError(f"{out} exists already", hint="name another folder by --out")
    chosen = max(known) if version is None else version
    run_file = data / "run.json"
    run = read_run(run_file)
    try:
        signed = layout.manifest_of(origin, chosen)
    except NotFoundError as error:
        raise UserError(str(error)) from error
    steps = [
        line
        for line in read_lines(data / "metrics.jsonl", "step", "version")
        if line["version"] <= chosen
    ]
    staging = out.with_name(f".{out.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    with writing("the exported run", out):
        staging.mkdir(parents=True)
        write_files(origin, chosen, staging)
        verify_folder(staging, signed.manifest)
        shutil.copyfile(run_file, staging / "run.json")
        (staging / "policy.json").write_text(signed.model_dump_json())
        (staging / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
        (staging / "curve.svg").write_text(curve(steps))
        digest = str(signed.manifest.digest())
        (staging / "README.md").write_text(card(run, chosen, steps, digest, training_of(staging)))
        staging.rename(out)
    return chosen


def write_files(root: Path, version: int, target: Path) -> None:
    """Writes the files of `version` into the folder `target`: copies, or made from the nearest
    anchor and deltas. Raises UnavailableError if neither is there, UntrustedError if what comes of
    it is not the published version; `target` is then to be thrown away."""
    manifest = layout.manifest_of(root, version).manifest
    if not layout.is_thin(root, version):
        folder = layout.version_folder(root, version)
        for entry in manifest.files:
            shutil.copyfile(folder / entry.name, target / entry.name)
        return
    known = {v: layout.manifest_of(root, v).manifest for v in layout.versions(root) if v <= version}
    thin = [v for v in known if layout.is_thin(root, v)]
    plan = plan_from_anchor(manifest, known, thin)
    if plan is None or plan.anchor is None:
        raise UnavailableError(f"no chain of deltas in {root} leads to policy {version}")
    folder, base = layout.version_folder(root, plan.anchor.version), plan.anchor
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=target.parent) as scratch:
        for number, hop in enumerate(plan.hops):
            last = number == len(plan.hops) - 1
            into = target if last else Path(scratch) / str(hop.target.version)
            into.mkdir(exist_ok=True)
            name = f"delta-{hop.entry.base}"
            path = layout.version_folder(root, hop.target.version) / name
            deltas.apply(folder, base, path, hop.target, into)
            if folder.parent == Path(scratch):
                shutil.rmtree(folder)
            folder, base = into, hop.target


def training_of(folder: Path) -> dict[str, Any]:
    """The training configuration stored in a policy's folder; empty for a base model."""
    path = folder / TRAINING_FILE
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def card(
    run: RunDefinition,
    version: int,
    steps: Sequence[dict[str, Any]],
    policy: str,
    training: Mapping[str, Any],
) -> str:
    """The model card, with metadata for model hubs."""
    ref, o = run.environment, training.get("objective")
    objective = "none: the unchanged base model"
    if o is not None:
        objective = (
            f"{o['name']}, advantage {o['advantage']}, ε {o['clip']:g}, δ {o['delta']:g}, "
            f"KL {o['kl']:g}, entropy {o['entropy']:g} (`{TRAINING_FILE}`)"
        )
    rewards = [line["reward"] for line in steps if "reward" in line]
    first, last = (f"{_mean(part):.3f}" for part in (rewards[:8], rewards[-8:]))
    facts = {
        "run definition": f"`{run.digest()}` (`run.json`)",
        "base model": f"`{run.base_model}`",
        "policy manifest": f"`{policy}` (`policy.json`)",
        "environment": f"{ref.name} `{ref.digest}`, {ref.train_size} tasks",
        "objective": objective,
        "batches": f"{len(steps)} of {run.groups_per_batch} groups of {run.samples_per_group}; "
        f"{sum(line.get('rows', 0) for line in steps)} rows",
        "staleness": f"at most {run.max_staleness} policies",
        "mean reward": f"{first} over the first 8 batches, {last} over the last 8 (training "
        "tasks, groups of equal rewards left out)",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [reinforcement-learning, grpo, {ref.name}]
---
# {run.name}, policy {version}

Trained by reinforcement learning on rollouts of untrusted nodes, each verified before it was used.

| | |
|---|---|
{table}

![rewards by step](curve.svg)

Rewards above are those of training batches; for held-out problems run
`trainer evaluate --model . --run run.json --base BASE`.
"""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def curve(steps: Sequence[dict[str, Any]]) -> str:
    """Mean reward of each batch as an SVG line chart."""
    points = [(line["step"], line["reward"]) for line in steps if "reward" in line]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12"><title>Mean reward by step</title>'
    )
    if not points:
        return f'{head}<text x="{MARGIN}" y="{MARGIN}">no step was trained</text></svg>'
    left, right = points[0][0], max(points[-1][0], points[0][0] + 1)
    low, high = min(0.0, *(r for _, r in points)), max(1.0, *(r for _, r in points))

    def place(step: float, reward: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - left) / (right - left)
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (reward - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, reward) for step, reward in points)
    ends = f"{place(left, low).replace(',', ' ')} L {place(right, low).replace(',', ' ')}"
    return (
        f'{head}<path d="M {ends}" stroke="#888" fill="none"/>'
        f'<polyline points="{line}" stroke="#2a6fdb" stroke-width="2" fill="none"/>'
        f'<text x="4" y="{MARGIN}">{high:g}</text><text x="4" y="{HEIGHT - MARGIN}">{low:g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 12}">step {left}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 12}" text-anchor="end">step {right}</text></svg>'
    )
