"""Evaluates a pool's policies on held-out problems while the pool trains: `trainer follow`.

It fetches every n-th policy as any reader does, needs no key, and runs on any machine. A policy
that is superseded while another one is evaluated is left out.

    <data>/policies/            the last policies, verified on arrival
    <data>/evaluations.jsonl    one line for each evaluated policy
    <data>/answers/             graded answers of the policy in work, to go on after an interruption
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prime_broadcast.access import Passes, ephemeral_signer
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import Trust
from prime_broadcast.pool import Policies, PoolNames
from prime_broadcast.sources import SourceBook
from prime_core.checkpoint import SignedManifest
from prime_core.messages import Status
from prime_core.transport.client import OrchestratorClient
from prime_core.waiting import StoppedError
from prime_trainer.disk import whole_lines, writing
from prime_trainer.evaluate import evaluate
from prime_trainer.feed import PoolFacts, insist, pool_facts
from prime_trainer.metrics import read_lines
from prime_trainer.observe import Sink, flat
from prime_trainer.sampling import Sampling, recorded

KEPT = 2
"""Policies on disk: the last one is the base of the next one's delta."""


@dataclass(frozen=True)
class Options:
    """`every`: evaluates policies whose version is a multiple of it; `until`: ends after a policy
    of at least this version; `poll`: seconds between two questions for new policies; for the others
    see evaluate."""

    data: Path
    every: int = 5
    until: int | None = None
    problems: int = 64
    samples: int = 1
    seed: int = 0
    poll: float = 5.0
    sampling: Sampling = field(default_factory=Sampling)


def follow(
    client: OrchestratorClient,
    options: Options,
    sinks: list[Sink],
    stop: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Evaluates policies until the last one that `options` ask for; without end if they name none.

    Raises StoppedError, UserError if the run holds out fewer problems or its gateway and the
    cassette do not go together, UntrustedError if a policy is not the trainer's, and the errors of
    `evaluate`.
    """
    facts = insist(lambda: pool_facts(client, None), stop, "the pool's facts", pause=options.poll)
    recorded(facts.run, options.sampling.cassette)
    trust = Trust(facts.info.trainer, facts.domain("pools"), facts.info.pool)
    passes = Passes(ephemeral_signer(), facts.domain("registry"))
    book = SourceBook(passes=passes, public_only=not client.allows_private)
    folder = PolicyFolder(options.data / "policies", trust, book=book)
    policies = Policies(folder, PoolNames(client), keep=KEPT)
    record = options.data / "evaluations.jsonl"
    with writing("the evaluations", record):
        whole_lines(record)
    last = max((line["version"] for line in read_lines(record, "version")), default=-1)
    while options.until is None or last < options.until:
        version = due(_latest(client, options, stop), last, options.every)
        if version is None:
            if stop.wait(options.poll):
                raise StoppedError
            continue
        last = version
        line = _evaluated(client, policies, version, options, stop)
        with writing("the evaluation", record), record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        numbers = {f"heldout/{name}": value for name, value in flat(line["found"])}
        for sink in sinks:
            sink.step(version, line["time"], numbers)
        found = line["found"]
        say(
            f"policy {version}, {options.problems} held-out problems: "
            f"reward {found['reward']['mean']:.3f}, correct {found['pass_1']['mean']:.3f}"
        )


def due(latest: int | None, last: int, every: int) -> int | None:
    """The newest version up to `latest` that is a multiple of `every` and above `last`, if any."""
    if latest is None:
        return None
    newest = latest - latest % every
    return newest if newest > last else None


def _latest(client: OrchestratorClient, options: Options, stop: threading.Event) -> int | None:
    def ask() -> Status:
        return client.get("/v1/status", Status)

    return insist(ask, stop, "the pool's status", pause=options.poll).latest_version


def _evaluated(
    client: OrchestratorClient,
    policies: Policies,
    version: int,
    options: Options,
    stop: threading.Event,
) -> dict[str, Any]:
    """Fetches and evaluates one policy; returns its line."""

    def fetch() -> tuple[PoolFacts, Path]:
        signed: SignedManifest = client.get(f"/v1/policies/{version}", SignedManifest)
        return pool_facts(client, None), policies.ensure(version, signed.manifest.digest())

    facts, folder = insist(fetch, stop, f"policy {version}", pause=options.poll)
    answers = options.data / "answers" / str(version)

    def progress(answered: int) -> None:
        options.sampling.progress(answered)
        if stop.is_set():
            raise StoppedError

    found = evaluate(
        folder, facts.run, problems=options.problems, seed=options.seed, samples=options.samples,
        sampling=replace(options.sampling, answers=answers, progress=progress),
    )  # fmt: skip
    shutil.rmtree(answers)
    return {"version": version, "time": time.time(), "found": found.as_json()}
