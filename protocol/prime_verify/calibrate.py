"""Measures honest drift and builds a calibration; `orchestrator calibrate` writes and signs it.

    generate   honest files of every setup (setups.py), as a worker builds them
    replay     all of their rows, as a validator does
    fit        each statistic's distribution over rows, over sets of FILE_ROWS rows, and over
               sets of fewer rows with so many tokens (tails.py)
    lies       on cards: rows made with altered weights, and how many of them the limits find

Tiny random models are used in addition to the given ones. It takes minutes on one core. The result
depends on the machine's rounding, so two runs agree approximately, not exactly. A setup that does
not run here is omitted and reported; files that declare it are measured only.
"""

from __future__ import annotations

import logging
import platform
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from prime_core.errors import UnavailableError
from prime_core.known_cards import family_of, is_gpu
from prime_core.run import RunDefinition
from prime_engine.base import Engine
from prime_envs.base import Environment
from prime_envs.registry import environment_for
from prime_verify import replay
from prime_verify.build import plan_rows
from prime_verify.engines import load_engine
from prime_verify.proofs import tails
from prime_verify.proofs.thresholds import (
    FEW_TOKENS,
    FILE_ROWS,
    LEAST_LIE_SETS,
    LIES,
    MAXIMA,
    SCOPES,
    STATISTICS,
    Calibration,
    FewRows,
    FoundLies,
    Reference,
    Scope,
    SetupLimits,
    chance_of_one,
    counted,
    explained,
    few_limits,
    least_ratio,
    wider,
)
from prime_verify.rollout_file import read_rollout_file
from prime_verify.setups import (
    HonestFile,
    Job,
    Setup,
    fitting,
    generate,
    run_of,
    synthetic_lease,
    synthetic_run,
)

__all__ = ["HonestFile", "calibrate", "replay_rows", "synthetic_lease", "synthetic_run"]

log = logging.getLogger(__name__)
BATCH_FILES = {64: 40, 1: 16}
"""Rows per batch → number of files measured (of 64 rows, or 8 in batches of 1) for each model,
dtype and length."""
LENGTHS = (24, 80, 160)
"""Output limits in tokens: rows of one proof window, of three, and of five; FILE_ROWS of the last
can be a long file. A length is omitted if a model has too few positions."""
DTYPES = ("float32", "bfloat16")
REPLAY_DTYPE = "float32"
OTHER_CPUS = (
    (("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"),),
    (("ONEDNN_MAX_CPU_ISA", "AVX2"), ("ATEN_CPU_CAPABILITY", "avx2")),
)
"""Settings under which this machine computes like machines without its newest instructions. Their
files are measured too, in the largest batches, one for every OTHERS_SHARE of the normal ones."""
OTHERS_SHARE = 4
LEAST_VALUES = 10
"""Minimum number of honest values of a statistic. With fewer, none lies in its tail (tails.SHARE)
and the fit may be too tight, so such rows or files get no limits."""
LEAST_SETS = 100
"""Minimum number of honest sets of few rows with so many tokens. With fewer, the fit would be so
wide that it found nothing, and would widen the limits of fewer tokens."""
LIE_FILES = 4
"""Files of 64 rows made with each lie and given model, of the greatest length alone."""


@dataclass
class Measured:
    """Honest ratios of one setup's rows and files, by statistic. `lies`: lie → sets of FILE_ROWS
    rows that were made with it, each with its reference."""

    ratios: dict[Scope, dict[str, list[float]]] = field(
        default_factory=lambda: {scope: defaultdict(list) for scope in SCOPES}
    )
    few: dict[int, dict[str, list[float]]] = field(
        default_factory=lambda: {tokens: defaultdict(list) for tokens in FEW_TOKENS}
    )
    batches: set[int] = field(default_factory=set)
    device: str = ""
    engine: str = ""
    rows: int = 0
    files: int = 0
    tokens: int = 0
    lies: dict[str, list[tuple[Sequence[replay.RowStatistics], Reference]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(
        self,
        found: Sequence[replay.RowStatistics],
        drifts: Sequence[replay.RowStatistics],
        reference: Reference | None = None,
    ) -> None:
        """Adds one file: its rows, and the drift of each (empty as of Replayed.drifts).
        `reference`: that of all rows, where each one's drift is unknown; then nothing is learned of
        few rows."""
        self.files += 1
        self.rows += len(found)
        self.tokens += sum(row.tokens for row in found)
        for start in range(0, len(found), FILE_ROWS):
            whole = slice(start, start + FILE_ROWS)
            members, of_set = found[whole], reference or replay.reference_of(drifts[whole])
            together = replay.combine(members)
            for name in STATISTICS:
                scale = explained(name, of_set.row)
                self.ratios["row"][name] += [row.values[name] / scale for row in members]
                for scope in replay.file_scopes(members):
                    ratio = together[name] / explained(name, of_set.file)
                    self.ratios[scope][name].append(ratio)
        if reference is not None:
            return
        for tokens, ratios in self.few.items():
            for few in few_rows([row.tokens for row in found], tokens):
                together, of_set = replay.combine(found[few]), replay.reference_of(drifts[few])
                for name in STATISTICS:
                    if name not in MAXIMA:
                        ratios[name].append(together[name] / explained(name, of_set.file))

    def add_lie(
        self,
        lie: str,
        found: Sequence[replay.RowStatistics],
        drifts: Sequence[replay.RowStatistics],
    ) -> None:
        """Adds the rows of a file that was made with a lie, and the drift of each."""
        for start in range(0, len(found), FILE_ROWS):
            whole = slice(start, start + FILE_ROWS)
            self.lies[lie].append((found[whole], replay.reference_of(drifts[whole])))

    def found_by(self, setup: SetupLimits) -> SetupLimits:
        """Returns the limits with what they find of the lies that were measured."""
        return setup.model_copy(
            update={
                "lies": tuple(
                    FoundLies(
                        lie=lie,
                        sets=len(sets),
                        found=sum(
                            replay.accuse(rows, setup.limits(reference)) is not None
                            for rows, reference in sets
                        ),
                    )
                    for lie, sets in sorted(self.lies.items())
                )
            }
        )


def few_rows(lengths: Sequence[int], tokens: int) -> list[slice]:
    """Disjoint sets of consecutive rows, each as small as has `tokens` tokens (as counted) and
    smaller than FILE_ROWS; none for rows of which FILE_ROWS have fewer tokens."""
    found, start = [], 0
    for end in range(1, len(lengths) + 1):
        if sum(map(counted, lengths[start:end])) >= tokens:
            found.append(slice(start, end))
            start = end
        elif end - start == FILE_ROWS - 1:
            start = end
    return found


def replay_rows(
    honest: HonestFile, run: RunDefinition, environment: Environment, verifier: Engine
) -> tuple[list[replay.RowStatistics], list[replay.RowStatistics]]:
    """Returns the statistics of all rows of a file, as a validator's engine measures them, and the
    drift of each that the file's dtype explains (none if it is the verifier's)."""
    file = read_rollout_file(honest.data)
    plan = plan_rows(honest.signed.lease, honest.lease_digest, run, environment, verifier.tokenizer)
    claimed = replay.ClaimedRows(honest.lease_digest, plan, file.rows)
    found, drifts = [], []
    for start in range(0, len(file.rows), FILE_ROWS):
        numbers = range(start, start + FILE_ROWS)
        same_dtype = verifier.in_dtype(file.metadata.dtype)
        replays = replay.Replayed(verifier, run, claimed, numbers, same_dtype)
        found += replays.measure()
        drifts += replays.drifts()
    return found, drifts


def limits_of(dtype: str, measured: Measured) -> SetupLimits:
    """The limits of a setup that generates in `dtype`, from its honest rows and files."""
    file = _fit(dtype, "file", measured.ratios["file"])
    return SetupLimits(
        engine=measured.engine,
        dtype=dtype,
        device=measured.device,
        batches=tuple(sorted(measured.batches)),
        rows=measured.rows,
        files=measured.files,
        tokens=measured.tokens,
        row=_fit(dtype, "row", measured.ratios["row"]),
        file=file,
        long=_fit(dtype, "long", measured.ratios["long"]),
        few=few_of(dtype, [measured], file),
    )


def few_of(
    dtype: str, groups: Sequence[Measured], file: Mapping[str, tails.Tail]
) -> tuple[FewRows, ...]:
    """The limits of few rows of a setup that generates in `dtype`, from `groups` of models and
    machines (tails.fit_groups). None is tighter than those of whole files, `file`, for which more
    models may have been measured. Groups with fewer than LEAST_VALUES values do not count, and
    numbers of tokens with fewer than LEAST_SETS sets get no limits: limits of fewer tokens hold."""

    def fit(tokens: int) -> dict[str, tails.Tail]:
        found = {}
        for name in STATISTICS:
            values = [group.few.get(tokens, {}).get(name, []) for group in groups]
            enough = [one for one in values if len(one) >= LEAST_VALUES]
            if sum(map(len, enough)) >= LEAST_SETS:
                least = least_ratio(name, dtype, REPLAY_DTYPE)
                found[name] = tails.fit_groups(enough, chance_of_one("few"), least)
        return found

    return few_limits({tokens: fit(tokens) for tokens in FEW_TOKENS}, file)


def _fit(dtype: str, scope: Scope, ratios: Mapping[str, Sequence[float]]) -> dict[str, tails.Tail]:
    return {
        name: tails.fit(found, chance_of_one(scope), least_ratio(name, dtype, REPLAY_DTYPE))
        for name, found in ratios.items()
        if len(found) >= LEAST_VALUES
    }


def calibrate(
    models: Sequence[Path],
    *,
    python_of: dict[str, Path | None],
    device: str = "cpu",
    replay_device: str | None = None,
    dtypes: Sequence[str] | None = None,
    scale: float = 1.0,
    keep: Calibration | None = None,
) -> tuple[Calibration, list[str]]:
    """Returns (calibration, what it lacks with the reason: setups that do not run here, long
    files).

    `keep`: an earlier calibration (of another machine or other engines) whose setups are kept; for
    a setup measured again, each statistic gets the wider of both limits. So does a measured card
    whose family has a kept setup without lies (an observed one), which it replaces. `python_of`:
    engine → its interpreter (None: this one). `scale` multiplies the number of files. Every setup
    is measured on each of `models` and on tiny random ones, generated on `device` and replayed in
    float32 on `replay_device` (None: the same). On a card, files with LIES are made with `models`
    too (with the tiny ones if there are none), and each setup states what its final limits find of
    them.
    Raises UnavailableError if a model does not load, no setup runs, or `keep` is for replays by
    another setup.
    """
    measured: dict[tuple[str, str], Measured] = defaultdict(Measured)
    left_out: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = [*models, *tiny_models(Path(scratch))]
        replay_on = replay_device or device
        verifiers = {model: load_engine(model, device=replay_on, threads=1) for model in folders}
        verifier = next(iter(verifiers.values()))
        if keep and not keep.replayed_by(verifier.name, REPLAY_DTYPE, verifier.device):
            raise UnavailableError(
                f"the calibration to keep is for replays by {keep.replay_engine} in "
                f"{keep.replay_dtype} on {keep.replay_device}, this one for {verifier.name} in "
                f"{REPLAY_DTYPE} on {verifier.device}"
            )
        others = OTHER_CPUS if device == "cpu" else ()
        for engine, python in python_of.items():
            for dtype, settings in product(dtypes or DTYPES, ((), *others)):
                setup = Setup(engine, dtype, device, python, settings)
                share = scale / OTHERS_SHARE if settings else scale
                try:
                    _measure(setup, verifiers, share, measured[engine, dtype])
                    if is_gpu(measured[engine, dtype].device):
                        liars = {one: verifiers[one] for one in models or folders}
                        measure_lies(setup, liars, scale, measured[engine, dtype])
                except UnavailableError as error:
                    log.warning("left out: %s", error)
                    left_out.append(str(error))
    setups = [limits_of(dtype, found) for (_, dtype), found in measured.items() if found.files]
    for one in setups:
        if not one.long:
            left_out.append(
                f"{one.engine} {one.dtype} on {one.device}: fewer than {LEAST_VALUES} long "
                "files were measured, so that they are held to the limits of any file alone"
            )
    if not setups:
        raise UnavailableError("no setup runs here: " + "; ".join(left_out))
    source = ", ".join([*(model.name for model in models), "2 tiny random models"])
    source += f"; {platform.machine()}, {device}"
    if keep is not None:
        again = {(setup.engine, setup.dtype, setup.device): setup for setup in setups}
        for kept in keep.setups:
            key = _replaced_by(kept, setups)
            again[key] = wider(again[key], kept) if key in again else kept
        setups = list(again.values())
        source = source if keep.source == source else f"{source}; kept: {keep.source}"
    lies = {(found.engine, dtype, found.device): found for (_, dtype), found in measured.items()}
    setups = [
        lies[key].found_by(one) if (key := (one.engine, one.dtype, one.device)) in lies else one
        for one in setups
    ]
    calibration = Calibration(
        replay_engine=verifier.name,
        replay_dtype=REPLAY_DTYPE,
        replay_device=verifier.device,
        source=source,
        setups=tuple(sorted(setups, key=lambda s: (s.engine, s.dtype, s.device))),
    )
    return calibration, left_out


def _replaced_by(kept: SetupLimits, measured: Sequence[SetupLimits]) -> tuple[str, str, str]:
    """Returns (engine, dtype, device) of the measured setup that a kept one becomes part of: its
    own, or, for a card without lies, which would keep its family from accusing, one of its
    family."""
    devices = [
        one.device
        for one in measured
        if (one.engine, one.dtype) == (kept.engine, kept.dtype)
        and family_of(one.device) == family_of(kept.device)
    ]
    stays = kept.device in devices or kept.lies or not is_gpu(kept.device) or not devices
    return kept.engine, kept.dtype, kept.device if stays else devices[0]


def _measure(setup: Setup, verifiers: dict[Path, Engine], scale: float, into: Measured) -> None:
    jobs = [
        Job(model, batch_rows, max(1, round(files * scale)))
        for model in verifiers
        for batch_rows, files in BATCH_FILES.items()
        if not setup.settings or batch_rows == max(BATCH_FILES)
    ]
    log.info("%s: %d files a length", setup.words, sum(job.files for job in jobs))
    for job, length, honest in generate(setup, jobs, LENGTHS):
        run = run_of(job, length)
        into.add(*replay_rows(honest, run, environment_for(run), verifiers[job.model]))
        made = read_rollout_file(honest.data).metadata
        into.engine, into.device = made.engine, made.device
        into.batches.add(job.batch_rows)


def measure_lies(setup: Setup, verifiers: dict[Path, Engine], scale: float, into: Measured) -> None:
    """Makes and replays files with each of LIES on each model: sets of FILE_ROWS rows of the
    greatest length. Raises UnavailableError if the setup does not run here."""
    from prime_engine.variants import write_variant

    files = max(-(-LEAST_LIE_SETS * FILE_ROWS // max(BATCH_FILES)), round(LIE_FILES * scale))
    for lie, (model, verifier) in product(LIES, verifiers.items()):
        log.info("%s: %d files with %s", setup.words, files, lie)
        with tempfile.TemporaryDirectory() as scratch:
            altered = write_variant(model, lie, Path(scratch) / "altered")
            job = Job(altered, max(BATCH_FILES), files)
            for _, length, made in generate(setup, [job], fitting(altered, LENGTHS)[-1:]):
                run = run_of(job, length)
                into.add_lie(lie, *replay_rows(made, run, environment_for(run), verifier))


def tiny_models(folder: Path) -> list[Path]:
    """Writes two models with random weights into `folder`."""
    from prime_engine.tiny import write_tiny_model

    return [
        write_tiny_model(folder / "small", seed=1, hidden=128),
        write_tiny_model(folder / "deep", seed=2, hidden=128, layers=6, logit_scale=4.0),
    ]
