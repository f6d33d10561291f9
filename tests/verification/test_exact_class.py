"""The exact class: proof passes are compared bit for bit, and only proven classes accuse."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prime_core.draws import SaltOpening
from prime_core.encoding import sha256
from prime_core.errors import UnavailableError, UserError
from prime_core.ids import ZERO_DIGEST
from prime_core.verdict import Outcome, Reason
from prime_engine.exact import PROOF_CHUNK, NumericClass
from prime_engine.plain import PlainEngine
from prime_engine.tiny import write_tiny_model
from prime_engine.variants import VARIANTS
from prime_validator.juror import PoolReplays
from prime_validator.settings import JurorSettings
from prime_verify import build
from prime_verify.audit_compare import other_class
from prime_verify.calibrate import HonestFile, synthetic_run
from prime_verify.engines import load_engine
from prime_verify.proofs.sampling_torch import gumbel
from prime_verify.proofs.thresholds import Calibration, ProvenClass, shipped
from prime_verify.provers import Provers, provers_here
from prime_verify.rollout_file import read_rollout_file, write_rollout_file

TRAINED = Path(__file__).parents[2] / "devnet" / "model"

DTYPES = ("float32", "bfloat16")


@cache
def _engine(dtype: str, variant: str = "") -> PlainEngine:
    prepare = VARIANTS[variant] if variant else None
    return PlainEngine(TRAINED, noise=gumbel, dtype=dtype, prepare=prepare)


@pytest.fixture(scope="module")
def small(world: Any) -> Any:
    """Leases of 16 rows, of which 4 are drawn."""
    run = synthetic_run(24, groups=2, samples=8)
    return type(world)(run, world.environment, world.engine)


def _calibration(*keys: str) -> Calibration:
    proven = tuple(ProvenClass(key=key, rows=10_000, providers=3, longest=256) for key in keys)
    return shipped().model_copy(update={"proven": proven})


@cache
def _proven() -> Calibration:
    return _calibration(*(_engine(dtype).numeric_class().key for dtype in DTYPES))


def _lease(small: Any, number: int, dtype: str) -> HonestFile:
    """A lease in the exact class of the honest engine of `dtype`."""
    lease = small.lease(number)
    opening = SaltOpening(
        random=ZERO_DIGEST,
        draws=ZERO_DIGEST,
        numeric_class=_engine(dtype).numeric_class().digest(),
    )
    return replace(lease, signed=lease.signed.model_copy(update={"opening": opening}))


def _honest(small: Any, number: int, dtype: str) -> HonestFile:
    lease = _lease(small, number, dtype)
    data = build.build_rollout_file(
        lease.signed, lease.lease_digest, small.run, _engine(dtype), small.environment
    )
    return replace(lease, data=data)


def _proved_by(small: Any, number: int, dtype: str, variant: str, decoder: str = "") -> HonestFile:
    """A file whose proof pass used altered weights, and whose decoding those of `decoder`."""
    lease = _lease(small, number, dtype)
    liar = _engine(dtype, variant)
    plan = small.plan(lease)
    made, proofs = build.generate_proved(
        lease.lease_digest, plan, small.run, _engine(dtype, decoder)
    )
    made, digests = build.prove_exactly(lease.lease_digest, plan, small.run, liar, made)
    rewards = build.grade_rows(plan, made, small.environment, liar.tokenizer)
    rows = build.assemble_rows(lease.signed, plan, made, rewards, proofs, digests)
    described = build.metadata_of(lease.lease_digest, liar, small.run, lease.signed.numeric_class())
    return replace(lease, data=write_rollout_file(rows, described))


def _changed(file: HonestFile, change: Callable[[list], list]) -> HonestFile:
    found = read_rollout_file(file.data)
    return replace(file, data=write_rollout_file(change(list(found.rows)), found.metadata))


@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_files_are_accepted_and_hold_the_log_probabilities_of_the_proof_pass(
    small: Any, dtype: str
) -> None:
    for number in range(400, 404):
        file = _honest(small, number, dtype)
        found = small.judge(file, secret=number, calibration=_proven())
        assert found.outcome is Outcome.ACCEPTED, found
        assert found.statistics["exact_rows"] == len(found.rows_drawn) >= 4
        assert found.statistics["exact_mismatches"] == 0
        row = read_rollout_file(file.data).rows[5]
        parts = _engine(dtype).proof_pass(row.prompt_tokens, row.output_tokens, 1.0)
        logprobs = np.concatenate([values for values, _ in parts])
        assert logprobs.tobytes() == row.logprobs.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["int8", "kv8", "old1_1e6"])
def test_every_file_whose_proof_pass_used_other_weights_is_rejected(
    small: Any, dtype: str, variant: str
) -> None:
    """Decoding is honest, so that statistics find nothing."""
    for number in range(410, 413):
        file = _proved_by(small, number, dtype, variant)
        found = small.judge(file, secret=number, calibration=_proven())
        assert found.outcome is Outcome.REJECTED, found
        assert found.reason is Reason.WRONG_PROOF_PASS or variant != "old1_1e6", found
        assert found.statistics["exact_mismatches"] == found.statistics["exact_rows"]


def test_a_false_statement_of_engine_or_dtype_does_not_prevent_the_comparison(small: Any) -> None:
    file = _proved_by(small, 415, "float32", "old1_1e6")
    content = read_rollout_file(file.data)
    for stated in ({"dtype": "bfloat16"}, {"engine": "vllm/1"}):
        metadata = replace(content.metadata, **stated)
        other = replace(file, data=write_rollout_file(content.rows, metadata))
        found = small.judge(other, calibration=_proven())
        assert found.reason is Reason.WRONG_PROOF_PASS, (stated, found)


def test_a_class_that_is_not_proven_never_accuses(small: Any) -> None:
    file = _proved_by(small, 420, "float32", "old1_1e6")
    found = small.judge(file)
    assert (found.outcome, found.reason) == (Outcome.VOID, Reason.UNPROVEN_MISMATCH)
    assert found.statistics["exact_mismatches"] == 4
    assert "not proven" in found.detail


def _flip(row: Any, window: int) -> Any:
    digests = bytearray(row.digests)
    digests[16 * window] ^= 1
    return replace(row, digests=bytes(digests))


def test_one_row_or_later_windows_are_void_and_two_first_windows_are_evidence(small: Any) -> None:
    honest = _honest(small, 430, "float32")
    drawn = small.judge(honest, calibration=_proven()).rows_drawn

    def judged(changes: dict[int, Callable[[Any], Any]]) -> Reason:
        file = _changed(
            honest,
            lambda rows: [changes.get(n, lambda row: row)(row) for n, row in enumerate(rows)],
        )
        return small.judge(file, calibration=_proven()).reason

    assert judged({drawn[0]: lambda row: _flip(row, 0)}) is Reason.UNPROVEN_MISMATCH
    assert judged({n: lambda row: _flip(row, 0) for n in drawn[:2]}) is Reason.WRONG_PROOF_PASS
    undrawn = next(n for n in range(16) if n not in drawn)
    assert judged({undrawn: lambda row: _flip(row, 0)}) is Reason.NONE

    def nudged(row: Any) -> Any:
        """The last log-probability moved by one unit in the last place."""
        values = row.logprobs.copy()
        values[-1] = np.nextafter(values[-1], np.float32(-1e9), dtype=np.float32)
        return replace(row, logprobs=values)

    assert judged({drawn[0]: nudged}) is Reason.UNPROVEN_MISMATCH
    assert judged(dict.fromkeys(drawn[:2], nudged)) is Reason.TAMPERED_LOGPROBS


def test_windows_after_the_first_do_not_accuse() -> None:
    from prime_verify.proofs.exact import Committed, compare

    logprobs = np.zeros(40, dtype=np.float32)
    own = [Committed(logprobs, bytes(32))] * 3
    found = compare([3, 5, 9], [40] * 3, [bytes(16) + b"x" * 16] * 3, [logprobs] * 3, own)
    assert (found.first, found.rows) == ((), (3, 5, 9))
    ruling = found.ruling(40)
    assert ruling is not None
    assert ruling[0] is Reason.UNPROVEN_MISMATCH


@pytest.mark.parametrize(
    ("lengths", "longest", "expected"),
    [
        ([40, 40, 41], 40, Reason.WRONG_PROOF_PASS),
        ([40, 41, 41], 40, Reason.UNPROVEN_MISMATCH),
        ([40, 41, 41], 41, Reason.WRONG_PROOF_PASS),
        ([1, 1, 1], 0, Reason.UNPROVEN_MISMATCH),
    ],
)
def test_rows_longer_than_those_that_proved_the_class_do_not_accuse(
    lengths: list[int], longest: int, expected: Reason
) -> None:
    from prime_verify.proofs.exact import Committed, compare

    logprobs = np.zeros(40, dtype=np.float32)
    own = [Committed(logprobs, bytes(32))] * 3
    ruling = compare([3, 5, 9], lengths, [b"x" * 32] * 3, [logprobs] * 3, own).ruling(longest)
    assert ruling is not None
    assert ruling[0] is expected


def test_a_file_of_longer_rows_than_those_that_proved_its_class_is_void(small: Any) -> None:
    file = _proved_by(small, 421, "float32", "old1_1e6")
    (class_, *_) = _proven().proven
    short = shipped().model_copy(update={"proven": (class_.model_copy(update={"longest": 1}),)})
    found = small.judge(file, calibration=short)
    assert found.reason is Reason.UNPROVEN_MISMATCH, found
    assert "up to 1 tokens" in found.detail
    assert small.judge(file, calibration=_proven()).reason is Reason.WRONG_PROOF_PASS


def test_a_validator_of_another_class_judges_by_statistics(small: Any) -> None:
    """The lease names a class that this machine does not have: the file is paid all the same."""
    file = _proved_by(small, 440, "float32", "")
    other = file.signed.opening.model_copy(update={"numeric_class": "0x" + "ab" * 32})
    signed = file.signed.model_copy(update={"opening": other})
    content = read_rollout_file(file.data)
    metadata = replace(content.metadata, numeric_class="0x" + "ab" * 32)
    moved = replace(file, signed=signed, data=write_rollout_file(content.rows, metadata))
    found = small.judge(moved, calibration=_proven())
    assert found.outcome is Outcome.ACCEPTED
    assert "exact_rows" not in found.statistics
    lacks = other_class(signed, found)
    assert f"/v1/classes/{'0x' + 'ab' * 32} " in lacks, "an auditor learns what it needs"
    assert other_class(small.lease(440).signed, found) == "", (
        "a lease without a class lacks nothing"
    )
    own = _honest(small, 441, "float32")
    assert other_class(own.signed, small.judge(own, calibration=_proven())) == ""


OTHER = NumericClass({"engine": "another"}, sha256(b"another"))


class _Prover:
    """An engine of the class OTHER in float32, and of another class in other dtypes."""

    def __init__(self, dtype: str, positions: int, short_of_memory: bool) -> None:
        self.positions = positions
        self._dtype = dtype
        self._short = short_of_memory

    def numeric_class(self) -> NumericClass:
        return OTHER if self._dtype == "float32" else replace(OTHER, fingerprint=ZERO_DIGEST)

    def proof_pass(self, *row: Any) -> Any:
        if self._short:
            raise MemoryError
        return _engine("float32").proof_pass(*row)


class _Provers(Provers):
    """Stands in for those of vLLM; `loads`: the dtypes in which a policy was asked for."""

    def __init__(self, positions: int = 256, short: str = "") -> None:
        super().__init__(TRAINED, load=load_engine)
        self.loads: list[str] = []
        self.closed = 0
        self._positions, self._short = positions, short

    def _engine(self, version: int, policy_digest: str, dtype: str) -> Any:
        self.loads.append(dtype)
        if self._short == "loading":
            raise MemoryError
        return _Prover(dtype, self._positions, self._short == "proving")

    def _close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module")
def of_other(small: Any) -> HonestFile:
    """A float32 file of the class OTHER."""
    file = _proved_by(small, 440, "float32", "")
    opening = file.signed.opening.model_copy(update={"numeric_class": OTHER.digest()})
    signed = file.signed.model_copy(update={"opening": opening})
    content = read_rollout_file(file.data)
    metadata = replace(content.metadata, numeric_class=OTHER.digest())
    return replace(file, signed=signed, data=write_rollout_file(content.rows, metadata))


def _stating(file: HonestFile, dtype: str) -> HonestFile:
    content = read_rollout_file(file.data)
    return replace(
        file, data=write_rollout_file(content.rows, replace(content.metadata, dtype=dtype))
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_engine_repeats_the_proof_pass_of_files_that_state_any_dtype(
    small: Any, of_other: HonestFile, dtype: str
) -> None:
    provers, file = _Provers(), _stating(of_other, dtype)
    for loads in ([dtype, "float32"], ["float32"]):
        provers.loads = []
        found = small.judge(file, calibration=_proven(), provers=provers)
        assert found.outcome is Outcome.ACCEPTED, found
        assert found.statistics["exact_rows"] == len(found.rows_drawn)
        assert provers.loads == list(dict.fromkeys(loads)), "a class is measured once"


@pytest.mark.parametrize(
    ("positions", "short", "closed"), [(8, "", 0), (256, "loading", 2), (256, "proving", 1)]
)
def test_statistics_judge_if_the_other_engine_holds_no_rows_of_this_length_or_lacks_memory(
    small: Any, of_other: HonestFile, positions: int, short: str, closed: int
) -> None:
    provers = _Provers(positions, short)
    found = small.judge(of_other, calibration=_proven(), provers=provers)
    assert found.outcome is Outcome.ACCEPTED, found
    assert "exact_rows" not in found.statistics
    assert provers.closed == closed


def test_a_dtype_that_the_file_does_not_state_needs_no_memory(
    small: Any, of_other: HonestFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = PlainEngine.in_dtype

    def in_dtype(self: PlainEngine, dtype: str) -> PlainEngine:
        if dtype != self.dtype:
            raise MemoryError
        return usual(self, dtype)

    monkeypatch.setattr(PlainEngine, "in_dtype", in_dtype)
    found = small.judge(of_other, calibration=_proven())
    assert found.outcome is Outcome.ACCEPTED, found
    stated = small.judge(_stating(of_other, "bfloat16"), calibration=_proven())
    assert stated.reason is Reason.OUT_OF_RESOURCES


@pytest.mark.parametrize("facts", [{}, {"threads": "64"}])
def test_the_judging_engine_is_not_measured_for_a_class_whose_facts_are_others(
    small: Any, of_other: HonestFile, monkeypatch: pytest.MonkeyPatch, facts: dict[str, str]
) -> None:
    def measure(self: PlainEngine) -> NumericClass:
        raise AssertionError("the pool says that the class is another")

    monkeypatch.setattr(PlainEngine, "numeric_class", measure)
    theirs = NumericClass({**_engine("float32").facts(), **facts}, ZERO_DIGEST) if facts else OTHER
    found = small.judge(of_other, calibration=_proven(), known_class=lambda digest: theirs)
    assert found.outcome is Outcome.ACCEPTED, found
    assert "exact_rows" not in found.statistics


def test_a_foreign_class_that_is_known_loads_one_policy_and_no_later_one() -> None:
    """Facts do not depend on the policy."""
    facts = {"engine": "vllm/1", "dtype": "float32", "threads": "1"}
    own = NumericClass(facts, ZERO_DIGEST)
    theirs = NumericClass(facts | {"threads": "64"}, ZERO_DIGEST)
    loads: list[tuple[int, str]] = []

    class Own(Provers):
        def _engine(self, version: int, policy_digest: str, dtype: str) -> Any:
            loads.append((version, dtype))
            return SimpleNamespace(numeric_class=lambda: own, positions=256)

    provers = Own(TRAINED, load=load_engine)
    for version in range(3):
        named = theirs.digest(), version, ZERO_DIGEST, "bfloat16", 8
        with provers.of_class(*named, theirs) as found:
            assert found is None
    assert loads == [(0, "float32")]
    with provers.of_class(own.digest(), 3, ZERO_DIGEST, "bfloat16", 8, own) as found:
        assert found is not None
    assert loads == [(0, "float32"), (3, "float32")]


def test_a_process_has_one_engine_for_proof_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    class Engines:
        def __init__(self, root: Path, *arguments: Any, **named: Any) -> None:
            self._name = root.name

        def engine(self, version: int, policy_digest: str) -> str:
            if self._name not in loaded:
                loaded.append(self._name)
            return self._name

        def close(self) -> None:
            loaded.remove(self._name)

    monkeypatch.setattr("prime_verify.provers.FolderEngines", Engines)
    one, other = (Provers(Path(name), load=load_engine) for name in ("one", "other"))
    for provers, name in ((one, "one"), (other, "other"), (one, "one")):
        with provers.using(0, ZERO_DIGEST, "float32"):
            assert loaded == [name]
    other.close()
    assert loaded == ["one"]
    one.close()
    assert loaded == []


def test_a_juror_frees_the_engine_of_an_audit_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    provers, slash = _Provers(), SimpleNamespace(leaf=ZERO_DIGEST, pool=1)

    def fails(*_arguments: Any) -> None:
        raise UnavailableError("no source answers")

    for name, made in (
        ("read_slashes", lambda *_: [slash]), ("announced", lambda *_: {}),
        ("open_sources", lambda *_, **__: nullcontext([])), ("read_events", lambda *_, **__: []),
        ("audit_slash", fails),
    ):  # fmt: skip
        monkeypatch.setattr(f"prime_validator.juror.{name}", made)
    parts: Any = SimpleNamespace(provers=provers)
    monkeypatch.setattr(PoolReplays, "_setting", lambda *_: parts)
    settings = JurorSettings(data=tmp_path)
    replays = PoolReplays(settings, parts, parts, parts, load_engine, now=lambda: 0.0)
    with pytest.raises(UnavailableError):
        replays.audit(ZERO_DIGEST, ZERO_DIGEST)
    assert provers.closed == 1


def test_a_file_states_the_class_of_its_lease_and_no_other(small: Any) -> None:
    exact, plain = _honest(small, 450, "float32"), small.honest(451)
    for file, lease in ((exact, small.lease(450)), (plain, _lease(small, 451, "float32"))):
        found = small.judge(replace(file, signed=lease.signed), calibration=_proven())
        assert found.reason is Reason.WRONG_CLASS, found
    cut = _changed(exact, lambda rows: [replace(rows[0], digests=b""), *rows[1:]])
    assert small.judge(cut, calibration=_proven()).reason is Reason.MALFORMED
    long = _changed(exact, lambda rows: [replace(rows[0], digests=bytes(64)), *rows[1:]])
    assert small.judge(long, calibration=_proven()).reason is Reason.OVERSIZED


def test_a_node_whose_weights_are_others_is_not_of_the_class(small: Any) -> None:
    lease = _lease(small, 460, "float32")
    liar = _engine("float32", "int8")
    assert liar.numeric_class().key == _engine("float32").numeric_class().key
    with pytest.raises(UnavailableError, match="exact class"):
        build.build_rollout_file(
            lease.signed, lease.lease_digest, small.run, liar, small.environment
        )


def test_classes_differ_by_dtype_and_by_every_weight_and_not_by_the_batch() -> None:
    one = _engine("float32").numeric_class()
    assert load_engine(TRAINED, batch_rows=1).numeric_class() == one
    assert _engine("bfloat16").numeric_class().key != one.key
    fingerprints = {one.fingerprint} | {
        _engine("float32", name).numeric_class().fingerprint for name in ("int8", "old1_1e6")
    }
    assert len(fingerprints) == 3


def test_a_pass_over_several_chunks_is_that_of_one_prefill_up_to_rounding(tmp_path: Path) -> None:
    engine = load_engine(write_tiny_model(tmp_path, positions=3 * PROOF_CHUNK))
    prompt, output = [5] * (PROOF_CHUNK - 7), [(3 * i) % 40 for i in range(PROOF_CHUNK + 60)]
    parts = list(engine.proof_pass(prompt, output, 0.7))
    assert len(parts) == 3
    logprobs = np.concatenate([values for values, _ in parts])
    states = np.concatenate([rows for _, rows in parts]).view(np.float32)
    with torch.inference_mode():
        whole = engine.model.model(torch.tensor([prompt + output[:-1]])).last_hidden_state[0]
        expected = whole[len(prompt) - 1 :]
        scaled = (engine.model.lm_head(expected) / 0.7).log_softmax(dim=1)
    chosen = scaled.gather(1, torch.tensor(output)[:, None])[:, 0]
    np.testing.assert_allclose(states, expected.numpy(), atol=1e-4)
    np.testing.assert_allclose(logprobs, chosen.numpy(), atol=1e-4)


def test_without_vllm_its_proof_passes_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prime_verify.provers.has_vllm", lambda: False)
    with pytest.raises(UserError, match="only by an interpreter that has vLLM"):
        Provers(TRAINED)
    assert provers_here(TRAINED, device="cpu") is None, "an auditor judges by statistics"


def test_the_salt_binds_the_class() -> None:
    """No opening with a class has the salt of one without for any seed of its problems."""
    one, other = "0x" + "11" * 32, "0x" + "22" * 32
    openings = [
        SaltOpening(random=ZERO_DIGEST, draws=ZERO_DIGEST, problems=problems, numeric_class=named)
        for problems in (None, one, other)
        for named in (None, one, other)
    ]
    assert len({opening.salt() for opening in openings}) == len(openings)


def test_an_image_is_part_of_the_class_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine("float32")
    assert engine.facts()["image"] == "none"
    keys = set()
    for image in ("", "one/worker@sha256:ab", "another/worker@sha256:ab", "sha256:cd"):
        monkeypatch.setenv("PRIME_IMAGE", image)
        keys.add(NumericClass(engine.facts(), ZERO_DIGEST).key)
    assert len(keys) == 3, "a mirror of the registry serves the same image"


def test_files_of_exact_classes_are_summed_apart_from_others(small: Any) -> None:
    """Their log-probabilities are closer to the replay: an honest node without a class would stand
    out among them, by 14 standard errors after 12 files."""
    exact, plain = _honest(small, 480, "float32"), small.lease(480)
    made = _engine("float32")
    data = build.build_rollout_file(
        plain.signed, plain.lease_digest, small.run, made, small.environment
    )
    setups = [small.judge(one).setup for one in (exact, replace(plain, data=data))]
    assert setups == [f"plain/1 float32 {made.device} exact", f"plain/1 float32 {made.device}"]


@pytest.mark.soak
def test_settings_that_change_bits_but_no_version_change_the_key() -> None:
    """A calibration proves keys. Otherwise rows of one kind of machine would prove another kind,
    whose bits differ."""
    program = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from prime_verify.engines import load_engine; from pathlib import Path\n"
        "print(load_engine(Path(sys.argv[1])).numeric_class().key)"
    )

    def key(**settings: str) -> str:
        command = [sys.executable, "-c", program, str(TRAINED)]
        found = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, check=True
        )
        return found.stdout.strip()

    if not torch.backends.mkl.is_available():
        pytest.skip("torch without MKL has no such setting")
    assert key(MKL_CBWR="COMPATIBLE") != key() == key()
