"""What the exact class finds: `python -m bench exact [--json] [--quick]`.

The demo's model makes files of 16 rows of up to 24 tokens, of which a validator of the same class
draws four. The class counts as proven. For each dtype and each of int8 (8-bit weights), kv8 (8-bit
cache) and random1_1e6 (weights moved by 1e-6, as one optimizer step moves them, in random
directions):

    proved_X      share of files rejected whose proof passes X made; the tokens are honest
    statistics_X  share of files rejected that X sampled and proved, in leases without a class
    mixed_X_N     share of nodes found within N files whose tokens and states are X's, while the
                  leased policy made the proof passes
    scored_X_N    the same, but the leased policy computes the states of X's tokens too: only the
                  sampling margins are left to find it, and few short rows have one
    honest_held   share of honest files that are not accepted
    saved_int8    share of CPU time that 8-bit weights save a node that makes its proof passes
                  honestly (SmolLM2-135M-Instruct, float32; only with its folder PRIME_SMOLLM_HOME)

A node is found if one of its files is rejected, or, from history.LEAST_FILES files on, if the sums
of its statistics are beyond those of as many honest files as the bench makes (manager/history.py).
Its files are then replayed whole; sums alone never slash.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from bench.form import ROOT, Row
from bench.honest import Bench, OnePolicy
from prime_core import encoding
from prime_core.draws import SaltOpening
from prime_core.ids import ZERO_ADDRESS, ZERO_DIGEST
from prime_core.verdict import Outcome
from prime_engine.base import Engine, Generation, GenerationRequest, ReplayRequest
from prime_engine.variants import VARIANTS
from prime_orchestrator.manager import history
from prime_orchestrator.store.drift import DriftRow
from prime_verify import build
from prime_verify.build import PlannedRow
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
NODE_FILES, QUICK_NODE_FILES = (1, 10, 100), (1, 2)
"""N of the rows `mixed_…_N` and `scored_…_N`. The largest is how many files of a kind are made."""
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
    states: Literal["decoder", "prover"] = "decoder",
    exact: bool = True,
) -> HonestFile:
    """A file whose tokens `decoder` sampled and whose proof passes `prover` made; "" is the leased
    policy. `states`: which of them computed the states in the activation proofs and sketches.
    Without `exact` its lease names no class, and it holds what the prover would state."""
    lease, plan = bench.lease(number)
    named = _engine(dtype).numeric_class().digest() if exact else None
    opening = SaltOpening(random=ZERO_DIGEST, draws=ZERO_DIGEST, numeric_class=named)
    signed = lease.signed.model_copy(update={"opening": opening})
    rows, proofs = build.generate_proved(
        lease.lease_digest, plan, bench.run, _engine(dtype, decoder)
    )
    if states == "prover":
        scored = _scored(_engine(dtype, prover), plan, rows, bench.run.temperature)
        proofs = build.prove_rows(lease.lease_digest, plan, scored)
    rows, digests = build.prove_exactly(
        lease.lease_digest, plan, bench.run, _engine(dtype, prover), rows
    )
    rewards = build.grade_rows(plan, rows, bench.environment, _engine(dtype).tokenizer)
    filled = build.assemble_rows(signed, plan, rows, rewards, proofs, digests if exact else [])
    described = build.metadata_of(lease.lease_digest, _engine(dtype), bench.run, named)
    return replace(lease, signed=signed, data=write_rollout_file(filled, described))


def _scored(
    engine: Engine, plan: Sequence[PlannedRow], rows: Sequence[Generation], temperature: float
) -> list[Generation]:
    """The same tokens with the states that `engine` has for them."""
    replays = engine.replay(
        [
            ReplayRequest(planned.prompt_tokens, row.output_tokens, planned.noise_seed)
            for planned, row in zip(plan, rows, strict=True)
        ],
        temperature,
    )
    return [replace(row, states=found.states) for row, found in zip(rows, replays, strict=True)]


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
    """Returns the rows. Files must be rejected if other weights made their proof passes."""
    return list(_rows(*((QUICK_FILES, QUICK_NODE_FILES) if quick else (FILES, NODE_FILES))))


def _rows(files: int, node_files: Sequence[int]) -> Iterator[Row]:
    bench = Bench(24, MODEL, groups=2, samples=8, share=0.25)

    def found(make: Callable[[int], HonestFile], count: int, first: int = 0) -> list[Finding]:
        return [judged(bench, make(number), number) for number in range(first, first + count)]

    def rejected(findings: Sequence[Finding]) -> float:
        return sum(map(_rejected, findings)) / len(findings)

    most = max(node_files)
    for dtype in DTYPES:
        make = partial(made, bench, dtype=dtype)
        honest = found(make, most, first=most)
        held = sum(finding.outcome is not Outcome.ACCEPTED for finding in honest) / most
        yield Row(f"honest_held_{dtype}", held, f"of {most} files", 0.0)
        for lie in LIES:
            proved = rejected(found(partial(make, prover=lie), files))
            yield Row(f"proved_{lie}_{dtype}", proved, f"of {files} files", 1.0, "higher")
            alone = rejected(found(partial(make, decoder=lie, prover=lie, exact=False), files))
            yield Row(f"statistics_{lie}_{dtype}", alone, f"of {files} files")
            for name, states in (("mixed", "decoder"), ("scored", "prover")):
                lied = found(partial(make, decoder=lie, states=states), most)
                for n in node_files:
                    nodes = [lied[at : at + n] for at in range(0, most, n)]
                    share = sum(_node_found(node, honest) for node in nodes) / len(nodes)
                    yield Row(f"{name}_{lie}_{dtype}_{n}", share, f"of {len(nodes)} nodes")
    folder = os.environ.get("PRIME_SMOLLM_HOME")
    if folder and files == FILES:
        yield Row("saved_int8", saved(Path(folder)), "of the CPU time of rows and proof passes")


def _rejected(finding: Finding) -> bool:
    return finding.outcome is Outcome.REJECTED


def _node_found(files: Sequence[Finding], honest: Sequence[Finding]) -> bool:
    """Whether a node with these files is found, next to other nodes with `honest` ones."""
    if any(map(_rejected, files)):
        return True
    excess = (_excess(files, honest, name) for name in files[0].shares())
    return any(found is not None and found > history.MOST_EXCESS for found in excess)


def _excess(files: Sequence[Finding], honest: Sequence[Finding], name: str) -> float | None:
    """By how much the node's files exceed the others' in a statistic; all files are of one kind."""
    own, others = _sums(files, name), _sums(honest, name)
    everyone = (
        own.files + others.files, own.total + others.total, own.squares + others.squares
    )  # fmt: skip
    return history.excess([own], {(own.setup, own.kind, name): everyone})


def _sums(files: Sequence[Finding], statistic: str) -> DriftRow:
    shares = [finding.shares()[statistic] for finding in files]
    squares = sum(share * share for share in shares)
    return DriftRow(ZERO_ADDRESS, files[0].setup, "", statistic, len(files), sum(shares), squares)


def saved(folder: Path, rows: int = 16, tokens: int = 96) -> float:
    """The share of CPU time that dynamic 8-bit linear layers of torch save: `rows` rows of `tokens`
    tokens in one batch, and their proof passes by the true weights."""
    from torch import nn
    from torch.ao.quantization import quantize_dynamic

    def quantize(model: Any) -> None:
        head = model.get_output_embeddings()
        names = {
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }
        quantize_dynamic(model, names, inplace=True)

    plain = load_engine(folder, dtype="float32", threads=1)
    quick = load_engine(folder, dtype="float32", threads=1, prepare=quantize)
    asked = [GenerationRequest((1 + row,) * 8, tokens, row) for row in range(rows)]

    def seconds(work: Callable[[], Any]) -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    for engine in (plain, quick):
        engine.generate(asked[:1], 1.0)  # warms up
    honest = seconds(lambda: plain.generate(asked, 1.0))
    lying = seconds(lambda: quick.generate(asked, 1.0))
    made = plain.generate(asked, 1.0)
    proofs = seconds(
        lambda: [
            plain.proof_pass(one.prompt_tokens, row.output_tokens, 1.0)
            for one, row in zip(asked, made, strict=True)
        ]
    )
    return (honest - lying) / (honest + proofs)
