"""What the exact class finds: `python -m bench exact [--json] [--quick]`.

The demo's model makes files of 16 rows of up to 24 tokens, of which a validator of the same class
draws four. The class counts as proven. For each dtype and each of int8 (8-bit weights), kv8 (8-bit
cache) and random1_1e6 (weights moved by 1e-6, as one optimizer step moves them, in random
directions):

    proved_X      share of files rejected whose proof passes X made; the tokens are honest
    statistics_X  share of files rejected that X sampled and proved, in leases without a class
    mixed_X       share of files rejected whose tokens X sampled, while the leased policy made the
                  proof passes. Nothing in a proof pass shows it: only margins do
    honest_held   share of honest files that are not accepted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

from bench.form import ROOT, Row
from bench.honest import Bench, OnePolicy
from prime_core import encoding
from prime_core.draws import SaltOpening
from prime_core.ids import ZERO_DIGEST
from prime_core.verdict import Outcome
from prime_engine.base import Engine
from prime_engine.variants import VARIANTS
from prime_verify import build
from prime_verify.case import Case
from prime_verify.engines import load_engine
from prime_verify.finding import Finding
from prime_verify.proofs.thresholds import Calibration, ProvenClass, shipped
from prime_verify.rollout_file import write_rollout_file
from prime_verify.setups import HonestFile
from prime_verify.verify import verify_file

PACKAGES = ("numpy", "torch", "transformers")
MODEL = ROOT / "devnet" / "model"
FILES, QUICK_FILES = 40, 2
DTYPES = ("float32", "bfloat16")
LIES = {"int8": "int8", "kv8": "kv8", "random1_1e6": "old1_1e6"}
"""Name of the rows → name in VARIANTS."""


@cache
def _engine(dtype: str, lie: str = "") -> Engine:
    prepare = VARIANTS[LIES[lie]] if lie else None
    return load_engine(MODEL, dtype=dtype, threads=1, prepare=prepare)


@cache
def _proven() -> Calibration:
    found = tuple(
        ProvenClass(key=_engine(dtype).numeric_class().key, rows=10_000, providers=3, longest=64)
        for dtype in DTYPES
    )
    return shipped().model_copy(update={"proven": found})


def made(
    bench: Bench,
    number: int,
    *,
    dtype: str,
    decoder: str = "",
    prover: str = "",
    exact: bool = True,
) -> HonestFile:
    """A file whose tokens `decoder` sampled and whose proof passes `prover` made; "" is the leased
    policy. Without `exact` its lease names no class, and it holds what the prover would state."""
    lease, plan = bench.lease(number)
    named = _engine(dtype).numeric_class().digest() if exact else None
    opening = SaltOpening(random=ZERO_DIGEST, draws=ZERO_DIGEST, numeric_class=named)
    signed = lease.signed.model_copy(update={"opening": opening})
    rows, proofs = build.generate_proved(
        lease.lease_digest, plan, bench.run, _engine(dtype, decoder)
    )
    rows, digests = build.prove_exactly(
        lease.lease_digest, plan, bench.run, _engine(dtype, prover), rows
    )
    rewards = build.grade_rows(plan, rows, bench.environment, _engine(dtype).tokenizer)
    filled = build.assemble_rows(signed, plan, rows, rewards, proofs, digests if exact else [])
    described = build.metadata_of(lease.lease_digest, _engine(dtype), bench.run, named)
    return replace(lease, signed=signed, data=write_rollout_file(filled, described))


def judged(bench: Bench, file: HonestFile, number: int) -> Finding:
    """The finding of a validator of the file's class."""
    return verify_file(
        Case(
            file.data,
            file.signed,
            file.lease_digest,
            bench.run,
            bench.environment,
            OnePolicy(_engine("float32")),
            draw_secret=encoding.sha256(b"bench" + number.to_bytes(8, "big")),
            submission_digest=file.lease_digest,
            calibration=_proven(),
        )
    )


def run(quick: bool) -> list[Row]:
    """Yields the rows. Files must be rejected if other weights made their proof passes."""
    return list(_rows(QUICK_FILES if quick else FILES))


def _rows(files: int) -> Iterator[Row]:
    bench = Bench(24, MODEL, groups=2, samples=8, share=0.25)

    def share(make: Callable[[int], HonestFile], counts: Callable[[Finding], bool]) -> float:
        found = [judged(bench, make(number), number) for number in range(files)]
        return sum(map(counts, found)) / files

    def rejected(finding: Finding) -> bool:
        return finding.outcome is Outcome.REJECTED

    def held(finding: Finding) -> bool:
        return finding.outcome is not Outcome.ACCEPTED

    for dtype in DTYPES:
        make = partial(made, bench, dtype=dtype)
        yield Row(f"honest_held_{dtype}", share(make, held), f"of {files} files", 0.0)
        for lie in LIES:
            proved = share(partial(make, prover=lie), rejected)
            yield Row(f"proved_{lie}_{dtype}", proved, f"of {files} files", 1.0, "higher")
            alone = share(partial(make, decoder=lie, prover=lie, exact=False), rejected)
            yield Row(f"statistics_{lie}_{dtype}", alone, f"of {files} files")
            mixed = share(partial(make, decoder=lie), rejected)
            yield Row(f"mixed_{lie}_{dtype}", mixed, f"of {files} files")
