"""What each cheat is expected to gain, against the stake and the share of files that is detected.

Per file, with W the file's pay, S the slash and d the chance that the file is rejected:

    a node that cheats           saves · W − d · (W + S)
    … with a colluding validator the same, with d only where another validator judges as well
    a validator that accepts     the cost of a replay − planted lies × FAULT_FEES fees, but for
      everything unseen          those tolerated (prime_core/fees.py)

`saves` is an upper bound: the share of the work that the cheat avoids, if the work costs all that
it is paid. A cheat that only changes what is trained (another temperature, best of n) earns
nothing and is not listed. Detection rates are those of `python -m bench detection` on bfloat16
files (docs/detection.md): per file with all statistics, and per row alone; and of `python -m bench
few` by limits of few rows, if the run names a shipped calibration that has them. A test holds this
module's numbers to bench/results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prime_chain.amounts import prime
from prime_core.run import RunDefinition
from prime_envs.definition import PROMPT_SHARE, RISK_FACTOR_MICRO
from prime_orchestrator.manager.history import FULL_EVERY, NEWCOMER_FILES
from prime_verify.proofs.thresholds import (
    FILE_ROWS,
    LEAST_TOKENS,
    LONG_TOKENS,
    ROW_COUNTS,
    shipped_as,
)

FILES = 100
"""Number of files over which survival is stated."""
MOST_SURVIVAL = 0.01
"""A cheat should survive FILES files with at most this chance."""
SECOND_EVERY = 16
"""One file in SECOND_EVERY is judged by two validators from the start (validators.AGAIN_ONE_IN)."""
ROW_TOKENS = 256
"""Length of the bench's rows."""

SetUp = Literal["plain", "vllm"]
SET_UPS: tuple[SetUp, ...] = ("plain", "vllm")
"""What a bfloat16 file declares as its engine; vLLM's limits are wider."""


@dataclass(frozen=True)
class Cheat:
    """A way to be paid for less work.

    `saves`: upper bound of the share of the work that it avoids. `tokens`: replayed tokens from
    which one statistic separates it from honest work. `file`, `row`: share of files of 8 rows of
    ROW_TOKENS, and of single such rows, that are rejected, by setup. `few`: for numbers of tokens,
    the share of draws of fewer than FILE_ROWS rows with so many that limits of few rows reject.
    """

    bench: str
    name: str
    saves: float
    tokens: int
    file: tuple[float, float]
    row: tuple[float, float]
    few: tuple[tuple[int, tuple[float, float]], ...] = ()

    def found_in_few(self, set_up: SetUp, tokens: float) -> float:
        """The share that limits of few rows reject of draws with `tokens` tokens."""
        shares = [share[SET_UPS.index(set_up)] for least, share in self.few if least <= tokens]
        return max(shares, default=0.0)


CHEATS = (
    Cheat(
        "int8",
        "8-bit weights",
        0.5,
        256,
        (1.0, 0.0),
        (0.0, 0.0),
        few=(
            (64, (0.6462585034013606, 0.0)),
            (128, (0.8366261398176292, 0.0)),
            (256, (0.8745819397993311, 0.0)),
        ),
    ),
    Cheat("kv8", "an 8-bit cache", 0.5, 256, (1.0, 0.0), (0.0, 0.0)),
    Cheat("old1_1e5", "a policy one small step old", 0.05, 1024, (0.0, 0.0), (0.0, 0.0)),
    Cheat("int4", "4-bit weights", 0.75, 32, (1.0, 1.0), (1.0, 1.0)),
    Cheat("kv4", "a 4-bit cache", 0.75, 32, (1.0, 1.0), (1.0, 1.0)),
    Cheat("forged_by_copy", "proofs by a 4-bit copy", 0.75, 32, (1.0, 1.0), (1.0, 1.0)),
    Cheat("shallow_model", "half the layers", 0.5, 256, (1.0, 1.0), (1.0, 1.0)),
    Cheat(
        "half_small",
        "a small model for half a row",
        0.5,
        256,
        (1.0, 1.0),
        (0.975, 0.9583333333333334),
    ),
    Cheat("small_model", "a small model", 1.0, 128, (1.0, 1.0), (1.0, 1.0)),
    Cheat("foreign5", "5 % foreign tokens", 0.05, 128, (1.0, 1.0), (1.0, 1.0)),
)


def row_tokens(run: RunDefinition) -> float:
    """Expected length of a row: the mean of the run's targets, at most `max_output_tokens`."""
    targets = [min(target, run.max_output_tokens) for target in run.budgets.targets]
    return max(1.0, sum(targets) / len(targets))


def file_pay(run: RunDefinition) -> float:
    """Expected pay of a file for its generated tokens, in wei."""
    return run.rows_per_lease * row_tokens(run) * run.price_per_unit


def detected(cheat: Cheat, set_up: SetUp, rows: int, tokens: float, *, few: bool = False) -> float:
    """Chance that a file is rejected if `rows` of its rows are replayed, of `tokens` each.

    Too few tokens for any statistic to tell count as 0. Files with at least FILE_ROWS rows and
    LONG_TOKENS tokens are judged by the limits that the bench measured; of others only the rates
    of single rows are known, taken per ROW_TOKENS tokens, and, if there are limits of `few` rows,
    theirs. More rows show no less.
    """
    index, replayed = SET_UPS.index(set_up), rows * tokens
    together = cheat.found_in_few(set_up, rows * min(tokens, ROW_COUNTS)) if few else 0.0
    if replayed < cheat.tokens:
        return together
    alone = 1.0 - math.pow(1.0 - cheat.row[index], replayed / ROW_TOKENS)
    if rows >= FILE_ROWS and replayed >= LONG_TOKENS:
        together = max(together, cheat.file[index])
    return max(alone, together)


def judges_few(run: RunDefinition, set_up: SetUp) -> bool:
    """Whether the run names a shipped calibration with limits of few rows for bfloat16 files of
    this setup. Of a calibration of its own nothing is known."""
    named = shipped_as(run.calibration)
    setup = named and named.setup(f"{set_up}/1", "bfloat16", "cpu")
    return bool(setup and setup.few)


@dataclass(frozen=True)
class Prospect:
    """What a cheat may expect in a run. `detection`: chance that a file is rejected. `gain`: wei
    per file, compared to honest work. `survival`: chance that none of a new node's first FILES
    files is rejected."""

    cheat: Cheat
    set_up: SetUp
    detection: float
    gain: float
    survival: float

    @property
    def pays(self) -> bool:
        return self.gain > 0


def prospect(
    run: RunDefinition, cheat: Cheat, set_up: SetUp, *, judged_honestly: float = 1.0
) -> Prospect:
    """Evaluates a cheat. `judged_honestly` is the share of files that an honest validator judges.

    Follows prime_orchestrator.manager.history: a new node's files are drawn at twice the run's
    share, and later one file in FULL_EVERY is replayed whole.
    """
    rows, tokens = run.rows_per_lease, row_tokens(run)
    floor, few = run.least_drawn(rows), judges_few(run, set_up)
    least = math.ceil(LEAST_TOKENS / tokens)

    def chance(drawn: int) -> float:
        drawn = min(rows, max(drawn, least))
        return judged_honestly * detected(cheat, set_up, drawn, tokens, few=few)

    usual = chance(floor) + (chance(rows) - chance(floor)) / FULL_EVERY
    new = chance(2 * floor)
    pay, slash = file_pay(run), min(run.slash_amount, run.stake_per_seat)
    return Prospect(
        cheat=cheat,
        set_up=set_up,
        detection=usual,
        gain=cheat.saves * pay - usual * (pay + slash),
        survival=(1.0 - new) ** NEWCOMER_FILES * (1.0 - usual) ** (FILES - NEWCOMER_FILES),
    )


def prospects(run: RunDefinition, *, judged_honestly: float = 1.0) -> Iterator[Prospect]:
    """Evaluates every cheat under both setups."""
    for cheat in CHEATS:
        for set_up in SET_UPS:
            yield prospect(run, cheat, set_up, judged_honestly=judged_honestly)


def honest_share(validators: int) -> float:
    """Share of files that an honest validator judges if one of `validators` accepts all it gets:
    those assigned to others, and of its own those that two judge from the start."""
    own = 1.0 / max(1, validators)
    return (1.0 - own) + (own / SECOND_EVERY if validators > 1 else 0.0)


@dataclass(frozen=True)
class Finding:
    """Cheats that pay or survive in a run and need the same change.

    `gain` is the largest of theirs in wei per file (0 if none pays), `survival` the largest chance
    to pass FILES files. `change` says what to set; empty if no setting helps.
    """

    cheats: tuple[str, ...]
    set_up: SetUp
    gain: int
    survival: float
    change: str

    def as_json(self) -> dict[str, Any]:
        facts = {"cheats": list(self.cheats), "gain": str(self.gain), "text": str(self)}
        return asdict(self) | facts

    def __str__(self) -> str:
        engine = {"plain": "the plain engine's", "vllm": "vLLM's"}[self.set_up]
        gain = f"gains up to {prime(self.gain)} a file" if self.gain else "gains nothing"
        return (
            f"{', '.join(self.cheats)}, declared as {engine} bfloat16: each {gain} and passes "
            f"{FILES} files with a chance of up to {100 * self.survival:.0f} %; "
            + (self.change or "no setting finds it; the gain is bounded by the pay of a file")
        )


def findings(run: RunDefinition) -> list[Finding]:
    """Returns the cheats that pay in a run or survive FILES files with more than MOST_SURVIVAL,
    grouped by what to change."""
    grouped: dict[tuple[SetUp, str], list[Prospect]] = {}
    for found in prospects(run):
        if found.pays or found.survival > MOST_SURVIVAL:
            change = _change(run, found.cheat, found.set_up)
            grouped.setdefault((found.set_up, change), []).append(found)
    return [
        Finding(
            cheats=tuple(one.cheat.name for one in group),
            set_up=set_up,
            gain=max(0, *(int(one.gain) for one in group)),
            survival=max(one.survival for one in group),
            change=change,
        )
        for (set_up, change), group in grouped.items()
    ]


def _change(run: RunDefinition, cheat: Cheat, set_up: SetUp) -> str:
    """The smallest change by which a cheat neither pays nor survives; empty if none is known.

    Tries the slash alone, then longer leases. A larger share of rows is not tried: the files that
    are replayed whole already find what it would find, in time.
    """
    longer = [run.groups_per_lease * 2**power for power in range(1, 8)]
    tries = [{}, *({"groups_per_lease": groups} for groups in longer if groups <= 1024)]
    for values in tries:
        changed = run.model_copy(update=values)
        after = prospect(changed, cheat, set_up)
        if after.survival > MOST_SURVIVAL:
            continue
        if after.pays:
            pay = file_pay(changed)
            needed = int(cheat.saves * pay / after.detection - pay) + 1
            values = values | {"slash_amount": needed}
            if needed > run.stake_per_seat:
                values["stake_per_seat"] = needed
        return "set " + ", ".join(f"{name} = {value}" for name, value in values.items())
    return ""


def warnings(run: RunDefinition) -> list[dict[str, Any]]:
    """Returns what an operator should know before a pool is created, as JSON; `text` is the
    sentence."""
    found = [one.as_json() for one in findings(run)]
    text = (
        "a validator that accepts every file unseen loses fees only by planted lies: plant files "
        "with `serve --planted`"
    )
    if not run.price_per_judged_file:
        text += ", and set price_per_judged_file to at least what a replay costs"
    found.append({"cheats": ["accepting every file"], "text": text})
    if run.price_per_unit and not run.risk_factor_micro:
        text = (
            "a provider may hold leases and unjudged files that are worth more than its stake: set "
            f"risk_factor_micro, such as {RISK_FACTOR_MICRO} (millionths of the stake)"
        )
        found.append({"cheats": ["more work at risk than stake"], "text": text})
    prefill = run.price_per_unit // PROMPT_SHARE
    if prefill and not run.price_per_prompt_token:
        text = (
            "prompts are not paid, so dropping leases with long ones pays: set "
            f"price_per_prompt_token, such as {prefill} (1/{PROMPT_SHARE} of price_per_unit)"
        )
        found.append({"cheats": ["dropping leases with long prompts"], "text": text})
    return found


def table(run: RunDefinition, validators: int) -> str:
    """Returns a Markdown table of every cheat's prospects in a run: per setup the detection rate
    of a file, the gain as a share of a file's pay, also if one of the `validators` accepts all it
    gets, and the chance to pass FILES files."""
    pay, share = file_pay(run), honest_share(validators)
    lines = [
        f"| cheat | saves | found | gain | gain, 1 of {validators} validators colluding "
        f"| passes {FILES} files |",
        "|---|---|---|---|---|---|",
    ]
    for cheat in CHEATS:
        alone = [prospect(run, cheat, set_up) for set_up in SET_UPS]
        helped = [prospect(run, cheat, set_up, judged_honestly=share) for set_up in SET_UPS]
        columns = (
            " · ".join(f"{100 * one.detection:.3g} %" for one in alone),
            " · ".join(f"{one.gain / pay:+,.2f}" for one in alone),
            " · ".join(f"{one.gain / pay:+,.2f}" for one in helped),
            " · ".join(f"{100 * one.survival:.1f} %" for one in alone),
        )
        lines.append(f"| {cheat.name} | {cheat.saves:g} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"
