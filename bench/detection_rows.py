"""A file's rows, replayed for the detection bench: window by window, and each judged alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.honest import Bench
from prime_core.errors import MalformedError
from prime_core.verdict import Outcome
from prime_verify import replay
from prime_verify.checks import (
    RulingError,
    check_humps,
    check_proofs,
    check_rewards,
    check_rows,
)
from prime_verify.proofs.thresholds import shipped
from prime_verify.rollout_file import read_rollout_file
from prime_verify.setups import HonestFile


class FileRows:
    """All rows of a file, replayed once (not at all if its proofs do not even decode)."""

    def __init__(self, bench: Bench, file: HonestFile) -> None:
        self._bench, self._signed = bench, file.signed
        made = read_rollout_file(file.data)
        self._rows, self._device, self._dtype = made.rows, made.metadata.device, made.metadata.dtype
        _, self._plan = bench.lease(file.signed.lease.index)
        engine = bench.engine()
        self._replayed: replay.Replayed | None = None
        self._measured: list[replay.RowStatistics] = []
        try:
            self._replayed = replay.Replayed(
                engine, bench.run, file.lease_digest, range(len(self._rows)), self._plan,
                self._rows, engine.twin(self._dtype),
            )  # fmt: skip
            self._measured = self._replayed.measure()
            self._reference = self._replayed.reference()
        except MalformedError:
            self._replayed = None

    def series(self) -> dict[str, NDArray[np.float64]] | None:
        """Statistic → value of each window of the file, in order: [windows]."""
        if self._replayed is None:
            return None
        parts = [self._replayed.by_window(i) for i in range(len(self._rows))]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def alone(self, engine: str) -> list[bool] | None:
        """Of each row, whether it is caught by nothing but itself, declared as made by `engine`:
        by a check before the replay, or beyond a row's limits. None for a set-up without limits."""
        setup = shipped().setup(engine, self._dtype, self._device)
        if setup is None:
            return None
        refuted = [self._refuted(i) for i in range(len(self._rows))]
        if self._replayed is None:
            return refuted
        limits = setup.limits(self._reference)
        return [
            early or replay.accuse([row], limits) is not None
            for early, row in zip(refuted, self._measured, strict=True)
        ]

    def _refuted(self, i: int) -> bool:
        rows, plan, engine = [self._rows[i]], [self._plan[i]], self._bench.engine()
        try:
            check_rows(rows, plan, self._signed, self._bench.run, engine)
            check_proofs(rows, engine)
            check_humps(rows, engine)
            check_rewards(rows, plan, self._bench.environment, engine)
        except RulingError as ruling:
            return ruling.reason.outcome is Outcome.REJECTED
        return False
