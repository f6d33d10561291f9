"""The number that stands for the values of all statistics, and the check that they agree.

Kept work of the detection bench counts as long as STATISTICS is the same. Code that decides a
statistic may be rewritten, and made faster, without throwing that work away: `values` takes
fixed inputs through proofs, sketches, sampling, both replays, limits and the accusation, and a test
compares what comes out with tests/vectors/statistics.json. After an intended change of a
value, raise STATISTICS and write that file again:

    python -m bench.golden
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256, shake_256
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bench.form import ROOT
from prime_core import seeds
from prime_core.ids import digest
from prime_engine.base import Engine, GenerationRequest, Replay, ReplayRequest
from prime_envs.base import Problem
from prime_verify import replay
from prime_verify.build import PlannedRow, sketch_keys
from prime_verify.engines import load_engine
from prime_verify.proofs import activations, sampling, sketch
from prime_verify.proofs.tails import MICRO, QUANTILES, Tail
from prime_verify.proofs.thresholds import STATISTICS as NAMES
from prime_verify.proofs.thresholds import Limits, Reference, SetupLimits
from prime_verify.rollout_file import FileRow
from prime_verify.setups import synthetic_run

STATISTICS = 2
"""Raised whenever a statistic, a limit or an accusation comes out otherwise for the same input."""
VECTOR = ROOT / "tests" / "vectors" / "statistics.json"
MODEL = ROOT / "devnet" / "model"
HIDDEN, VOCABULARY = 64, 97
LENGTHS = (1, 31, 32, 33, 130, 150, 200, 256, 256, 200)
"""Output tokens of the rows: enough of them for the limits of files, and of long ones."""
LEASE = digest(bytes(range(32)))
Values = dict[str, Any]


def _words(name: str, count: int) -> NDArray[np.uint16]:
    """Fixed 16-bit words, the same everywhere."""
    raw = np.frombuffer(shake_256(name.encode()).digest(2 * count), dtype="<u2")
    return raw.astype(np.uint16)


def _fractions(name: str, count: int, most: float) -> NDArray[np.float32]:
    """float32 [count] from 0 to `most`, exact ones of 2¹⁶ steps."""
    made: NDArray[np.float32] = _words(name, count).astype(np.float32) * np.float32(most / 65536)
    return made


def states(name: str, tokens: int) -> NDArray[np.uint16]:
    """bf16 [tokens, HIDDEN] of either sign over eight powers of two, one dimension far larger."""
    raw = _words(name, tokens * HIDDEN).reshape(tokens, HIDDEN)
    exponent = np.uint16(120) + (raw >> np.uint16(7) & np.uint16(7))
    exponent[:, 5] += np.uint16(5)
    made: NDArray[np.uint16] = raw & np.uint16(0x807F) | exponent << np.uint16(7)
    return made


def moved(bits: NDArray[np.uint16], name: str, one_in: int) -> NDArray[np.uint16]:
    """Flips the last bit of one element in `one_in`."""
    chosen = _words(name, bits.size).reshape(bits.shape) % np.uint16(one_in) == 0
    made: NDArray[np.uint16] = bits ^ chosen.astype(np.uint16)
    return made


@dataclass(frozen=True)
class Recorded:
    """An engine that replays what is written here; some elements are off by a bit."""

    name: str
    one_in: int

    def replay(self, requests: Sequence[ReplayRequest], temperature: float) -> list[Replay]:
        found = []
        for row, request in enumerate(requests):
            count = len(request.output_tokens)
            here = f"{self.name} {row}"
            margins = _fractions(f"{here} margin", count, 6.0 if row == 4 else 0.5)
            margins[_words(f"{here} equal", count) % np.uint16(16) > 0] = 0
            margins[-1] = 0.25 if row == 1 else 0.0
            found.append(
                Replay(
                    logprobs=-_fractions(f"logprob {row}", count, 9.5)
                    - _fractions(f"{here} drift", count, 0.01),
                    winners=np.array(request.output_tokens, dtype=np.int64),
                    margins=margins,
                    rivals=np.array(request.rivals or request.output_tokens, dtype=np.int64),
                    contrasts=_fractions(f"contrast {row}", count, 4.0)
                    + _fractions(f"{here} contrast", count, 0.02),
                    tail_mass=_fractions(f"tail {row}", count, 0.06),
                    end_probability=0.05 if row == 1 else 0.5,
                    states=moved(states(f"states {row}", count), here, self.one_in),
                )
            )
        return found


def _file() -> tuple[list[PlannedRow], list[FileRow]]:
    """A plan, and what a file made in another dtype claims of its rows."""
    plan, rows = [], []
    seed = seeds.lease_seed(LEASE)
    for row, count in enumerate(LENGTHS):
        group, sample = divmod(row, 5)
        output = tuple(int(word) % VOCABULARY for word in _words(f"tokens {row}", count))
        key = seeds.noise_seed(seed, group, sample)
        plan.append(PlannedRow(group, sample, Problem(str(row), row, "", ""), 4, (1, 2, 3), key))
        windows = activations.split_windows(moved(states(f"states {row}", count), f"file {row}", 9))
        keys = sketch_keys(seed, group, sample, output)
        rows.append(
            FileRow(
                problem_id=str(row), group=group, sample=sample, prompt_tokens=(1, 2, 3),
                output_tokens=output, target_length=4,
                logprobs=-_fractions(f"logprob {row}", count, 9.5)
                - _fractions(f"file {row}", count, 3.0 if row == 5 else 0.02),
                finish_reason="end" if row == 1 else "length", policy_version=0, reward=0.0,
                proofs=activations.pack(activations.build(windows)),
                sketch=sketch.pack(sketch.build(windows, keys)),
            )
        )  # fmt: skip
    return plan, rows


def limits(reference: Reference, share: float) -> Limits:
    """Limits of a made-up setup, all statistics alike, `share` times as wide as 1."""
    quantiles = tuple(range(MICRO // 10, MICRO // 10 + len(QUANTILES)))
    tail = Tail(
        count=100, quantiles=quantiles, largest=MICRO, start=MICRO // 2, scale=MICRO // 20,
        limit=round(share * MICRO),
    )  # fmt: skip
    every = dict.fromkeys(NAMES, tail)
    return SetupLimits(
        engine="e", dtype="d", device="cpu", batches=(1,), rows=1, files=1, tokens=1,
        row=every, file=every, long=every,
    ).limits(reference)  # fmt: skip


def _lies(plan: list[PlannedRow], rows: list[FileRow], of: Limits) -> dict[str, str]:
    """Endings of made-up evidence next to true evidence, and of a row that ends early."""
    own, seed = cast(Engine, Recorded("own", 7)), seeds.lease_seed(LEASE)
    windows = activations.split_windows(states("unrelated", LENGTHS[8]))
    keys = sketch_keys(seed, rows[8].group, rows[8].sample, rows[8].output_tokens)
    proofs = activations.pack(activations.build(windows))
    sketches = sketch.pack(sketch.build(windows, keys))
    changes: dict[str, dict[str, Any]] = {
        "proofs": {"proofs": proofs},
        "sketch": {"sketch": sketches},
        "both": {"proofs": proofs, "sketch": sketches},
        "logprobs": {"logprobs": rows[8].logprobs - np.float32(0.5)},
    }
    found = {}
    for name, change in changes.items():
        lying = [*rows[:8], replace(rows[8], **change), *rows[9:]]
        every = range(len(rows))
        replayed = replay.Replayed(
            own, synthetic_run(256), replay.ClaimedRows(LEASE, plan, lying), every, own
        )
        row = replayed.measure()[8]
        sound = replace(row, values={**row.values, "margin_max": 0.0, "margin_mean": 0.0})
        sound = replace(sound, values={**sound.values, "twin_margin": 0.0})
        for of_what, judged in (("", row), (" sound", sound)):
            accusation = replay.accuse([judged], of)
            found[name + of_what] = "" if accusation is None else accusation.reason.name
    claimed = replay.ClaimedRows(LEASE, plan, rows)
    early = replay.Replayed(own, synthetic_run(256), claimed, range(2), own).measure()[1]
    for margin in (0.0, 9.0):
        ended = replace(early, inner_margin=margin)
        ended = replace(ended, values={**ended.values, "margin_max": 9.0})
        accusation = replay.accuse([ended], of)
        found[f"early {margin}"] = "" if accusation is None else accusation.reason.name
    return found


def _plain(found: Mapping[str, float]) -> dict[str, float]:
    """To twelve digits: sums may be rounded otherwise by another numpy."""
    return {name: float(f"{value:.12g}") for name, value in sorted(found.items())}


def _hex(data: bytes) -> str:
    return sha256(data).hexdigest()


def values() -> Values:
    """All that is judged, for fixed inputs; the same on every machine."""
    bits = sampling.noise_bits([1, -7], [0, 300], 1000)
    windows = activations.split_windows(states("alone", 200))
    tied = np.full_like(windows[0], 0x3F80)
    windows += [tied, tied[:130]]
    proofs = activations.build(windows)
    sketches = sketch.build(windows, [bytes([w]) * 32 for w in range(len(windows))])
    plan, rows = _file()
    own, same_dtype = (cast(Engine, Recorded(name, n)) for name, n in (("own", 7), ("twin", 11)))
    claimed, every = replay.ClaimedRows(LEASE, plan, rows), range(len(rows))
    replayed = replay.Replayed(own, synthetic_run(256), claimed, every, same_dtype)
    measured, reference = replayed.measure(), replayed.reference()
    by_window = [replayed.by_window(i) for i in range(len(rows))]
    accusations = {}
    for share in (0.01, 0.3, 0.6, 0.9, 1.2, 3.0, 30.0):
        of = limits(reference, share)
        for scope, judged in (("file", measured), ("few", measured[:3]), ("row", measured[8:9])):
            found = replay.accuse(judged, of)
            accusations[f"{scope} {share}"] = "" if found is None else found.reason.name
    seen, expected = sampling.improbable_tokens(rows[8].logprobs, VOCABULARY)
    single = replay.Replayed(own, synthetic_run(256), claimed, every, own)
    return {
        "noise_bits": _hex(bits.astype("<u4").tobytes()),
        "noise": [round(float(g), 4) for g in sampling.gumbel([1, -7], [0, 300], 5).ravel()],
        "improbable_tokens": _plain({"seen": seen, "expected": expected}),
        "proofs": _hex(b"".join(proofs)),
        "sketches": _hex(sketch.pack(sketches)),
        "file": _hex(b"".join(row.proofs + row.sketch for row in rows)),
        "rows": [
            _plain(row.values)
            | {"tail": row.tail_observed, "expected": round(row.tail_expected, 6)}
            | {"equal": row.equal, "inner": row.inner_margin, "early": row.ends_early}
            for row in measured
        ],
        "same_dtype": [_plain(row.values) for row in single.measure()],
        "together": _plain(replay.combine(measured)),
        "windows": _plain({n: sum(float(one[n].sum()) for one in by_window) for n in by_window[0]}),
        "reference_row": _plain(reference.row),
        "reference_file": _plain(reference.file),
        "limits": _plain(limits(reference, 1.3).named()),
        "chances": _plain(
            {s: limits(reference, 1.3).honest_chance("sketch", 0.05, s, 8) for s in ("row", "file")}
        ),
        "scopes": [list(replay.file_scopes(measured[:n])) for n in range(len(measured) + 1)],
        "accusations": accusations,
        "lies": _lies(plan, rows, limits(reference, 25.0)),
    }  # fmt: skip


def engine_values() -> Values:
    """What the plain engine finds of fixed tokens, and draws by fixed noise, on the demo's trained
    model in either dtype: to be compared with some tolerance, as kernels differ."""
    found: Values = {}
    for dtype in ("float32", "bfloat16"):
        engine = load_engine(MODEL, dtype=dtype)
        output = tuple(int(word) % engine.vocabulary for word in _words("output", 40))
        prompt, other = output[:9], output[20:33]
        asked = [ReplayRequest(prompt, output, 5), ReplayRequest(other, output[:33], -7)]
        for row, made in enumerate(engine.replay(asked, 0.9)):
            some = sketch.bf16_to_float(made.states)[:, ::7].sum(axis=1)
            columns = {
                "logprobs": made.logprobs, "margins": made.margins, "contrasts": made.contrasts,
                "tail_mass": made.tail_mass, "states": some,
            }  # fmt: skip
            found[f"{dtype} {row}"] = {
                name: [float(f"{value:.6g}") for value in column]
                for name, column in columns.items()
            }
        if dtype == "float32":  # in bfloat16 another processor's rounding tips a token
            drawn = engine.generate(
                [GenerationRequest(output[i : i + 9], 12, 5 + i) for i in range(6)], 0.9
            )
            found["float32 drawn"] = [list(made.output_tokens) for made in drawn]
    return found


def main(path: Path = VECTOR) -> int:
    """Writes the vector; not over other values of the same number."""
    made = {"statistics": STATISTICS, "values": values(), "engine": engine_values()}
    if path.exists():
        kept = json.loads(path.read_bytes())
        if kept["statistics"] == STATISTICS and kept["values"] != made["values"]:
            print(f"{path}: other values by the same number; raise STATISTICS", file=sys.stderr)
            return 1
    path.write_text(json.dumps(made) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
