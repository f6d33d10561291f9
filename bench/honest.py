"""Honest files of the text model, and their judging as a validator does it: for benches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.textmodel import text_model
from prime_core import encoding
from prime_core.ids import Digest
from prime_core.run import MICRO, RunDefinition
from prime_engine.base import (
    Engine,
    Generation,
    GenerationRequest,
    Replay,
    ReplayRequest,
    StateSink,
)
from prime_envs.base import Environment
from prime_envs.registry import environment_for
from prime_verify import build
from prime_verify.build import PlannedRow
from prime_verify.calibrate import HonestFile, synthetic_lease, synthetic_run
from prime_verify.case import Case
from prime_verify.engines import load_engine
from prime_verify.finding import Finding
from prime_verify.proofs.thresholds import Calibration
from prime_verify.rollout_file import FileRow, write_rollout_file
from prime_verify.verify import verify_file

Change = Callable[[list[FileRow], Sequence[PlannedRow]], list[FileRow]]


@dataclass(frozen=True)
class OnePolicy:
    """An EngineProvider with one policy, and older ones."""

    present: Engine
    older: tuple[tuple[int, Engine], ...] = ()

    def engine(self, version: int, policy_digest: Digest) -> Engine:
        return self.present

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        yield from self.older


@cache
def _load(folder: Path, dtype: str, batch_rows: int, device: str) -> Engine:
    return load_engine(folder, dtype=dtype, device=device, batch_rows=batch_rows, threads=1)


class Remembering:
    """An engine that computes nothing twice in a row: attacks begin alike, and a file's windows are
    looked at after it was judged. What it hands out is shared; no one may change it."""

    KEPT = 6

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._found: OrderedDict[Hashable, list[Any]] = OrderedDict()

    def _once(self, kind: str, requests: Sequence[Any], temperature: float) -> list[Any]:
        key = (kind, tuple(requests), temperature)
        if key not in self._found:
            self._found[key] = getattr(self._engine, kind)(requests, temperature)
            while len(self._found) > self.KEPT:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        return list(self._found[key])

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        temperature: float,
        sink: StateSink | None = None,
    ) -> list[Generation]:
        if sink is not None:  # what went into a sink cannot be handed out again
            return self._engine.generate(requests, temperature, sink)
        return self._once("generate", requests, temperature)

    def replay(self, requests: Sequence[ReplayRequest], temperature: float) -> list[Replay]:
        return self._once("replay", requests, temperature)

    def in_dtype(self, dtype: str) -> Engine:
        found = self._engine.in_dtype(dtype)
        return self if found is self._engine else _remembering(found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


_MEMORIES: dict[int, Remembering] = {}
"""By the engine's id; a remembered engine lives as long as its memory does."""


def _remembering(engine: Engine) -> Engine:
    return _MEMORIES.setdefault(id(engine), Remembering(engine))


@dataclass
class Bench:
    """A run over a model folder (the text model unless given), replayed in float32 on `device`.

    `groups` × `samples` rows a file, `share` of them replayed. `remembering`: engines that compute
    nothing twice; not where seconds are measured.
    """

    max_output_tokens: int
    folder: Path = field(default_factory=text_model)
    groups: int = 4
    samples: int = 16
    share: float = 1.0
    remembering: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.run: RunDefinition = synthetic_run(self.max_output_tokens).model_copy(
            update={
                "replay_rows_micro": round(self.share * MICRO),
                "groups_per_lease": self.groups,
                "samples_per_group": self.samples,
            }
        )
        self.environment: Environment = environment_for(self.run)

    def bare_engine(self, dtype: str = "float32", batch_rows: int = 64) -> Engine:
        return _load(self.folder, dtype, batch_rows, self.device)

    def engine(self, dtype: str = "float32", batch_rows: int = 64) -> Engine:
        bare = self.bare_engine(dtype, batch_rows)
        return _remembering(bare) if self.remembering else bare

    def lease(self, number: int) -> tuple[HonestFile, list[PlannedRow]]:
        lease = synthetic_lease(self.run, number)
        plan = build.plan_rows(
            lease.signed.lease, lease.lease_digest, self.run, self.environment,
            self.engine().tokenizer,
        )  # fmt: skip
        return lease, plan

    def assemble(
        self,
        lease: HonestFile,
        plan: Sequence[PlannedRow],
        generations: Sequence[Generation],
        engine: Engine,
        change: Change | None = None,
    ) -> HonestFile:
        """The file of `generations`, graded and proved honestly; `change` may alter its rows.
        `engine` gives the declared setup."""
        rewards = build.grade_rows(plan, generations, self.environment, engine.tokenizer)
        proofs = build.prove_rows(lease.lease_digest, plan, generations)
        rows = build.assemble_rows(lease.signed, plan, generations, rewards, proofs)
        if change is not None:
            rows = change(rows, plan)
        data = write_rollout_file(rows, build.metadata_of(lease.lease_digest, engine, self.run))
        return replace(lease, data=data)

    def honest(self, number: int, engine: Engine) -> HonestFile:
        lease, plan = self.lease(number)
        return self.assemble(lease, plan, build.generate_rows(plan, self.run, engine), engine)

    def judge(
        self,
        file: HonestFile,
        secret: int = 0,
        older: tuple[tuple[int, Engine], ...] = (),
        calibration: Calibration | None = None,
    ) -> Finding:
        """What a validator finds of `file`, by `calibration` (None: the shipped one)."""
        return verify_file(
            Case(
                file.data,
                file.signed,
                file.lease_digest,
                self.run,
                self.environment,
                OnePolicy(self.engine(), older),
                draw_secret=encoding.sha256(b"bench" + secret.to_bytes(8, "big")),
                submission_digest=file.lease_digest,
                calibration=calibration,
            )
        )
