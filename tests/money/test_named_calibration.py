"""A calibration that a run names: who answers for it, and by whose replays it holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from money_kit import FAKE_DEPLOYMENT, MANAGER, TRAINER, key

from prime_core.calibration import CalibrationStatement
from prime_core.checkpoint import PolicyStatement
from prime_core.errors import MalformedError, UntrustedError, UserError
from prime_core.ids import Digest
from prime_core.storage.base import digest_key, put_object
from prime_core.storage.directory import DirectoryStore
from prime_engine.base import cpu_name
from prime_node.audit import run_calibration as named_by
from prime_orchestrator.context import PoolContext
from prime_validator.pool import PoolOnChain, check_replay, run_calibration
from prime_verify.proofs.thresholds import newest, parse_signed, shipped
from prime_verify.setups import synthetic_run

LIAR, OTHER = key(99), key(98)


class _Published:
    """The orchestrator's objects, as a validator gets them."""

    def __init__(self, objects: DirectoryStore) -> None:
        self._objects = objects

    def object(self, digest: Digest) -> bytes:
        return self._objects.get(digest_key(digest), 1 << 20)


@dataclass(frozen=True)
class _Library:
    """The orchestrator's objects, as an auditor gets them."""

    objects: DirectoryStore

    def object(self, digest: Digest, limit: int) -> bytes:
        return self.objects.get(digest_key(digest), limit)


def test_the_run_s_own_calibration_comes_from_the_object_store_signed_by_the_manager(
    tmp_path: Path,
) -> None:
    objects = DirectoryStore(tmp_path)
    context = PoolContext(
        deployment=FAKE_DEPLOYMENT, pool=1, manager=MANAGER.address, run=synthetic_run(5)
    )
    domain = context.domain(CalibrationStatement)
    bare = shipped().model_copy(update={"source": "this pool's machines"})
    own = bare.sign(MANAGER, domain, 1)
    both = own.sign(OTHER, domain, 2, second=True)
    assert both == bare.sign(OTHER, domain, 2, second=True).sign(MANAGER, domain, 1)
    assert both.second is not None
    twice = bare.sign(MANAGER, domain, 1, second=True)
    forged_second = both.second.model_copy(update={"signer": LIAR.address})
    elsewhere = bare.model_copy(update={"source": "another one"}).sign(
        OTHER, domain, 2, second=True
    )
    moved = shipped().sign(MANAGER, domain, 1).model_copy(update={"source": "elsewhere"})
    forged = bare.sign(LIAR, domain, 1)
    assert forged.signed is not None
    under_its_name = forged.signed.model_copy(update={"signer": MANAGER.address})
    cases = [
        (own, ""),
        (both, ""),
        (bare.sign(OTHER, domain, 2, second=True), "is not signed"),
        (own.model_copy(update={"second": twice.second}), "both signatures"),
        (own.model_copy(update={"second": forged_second}), f"by {LIAR.address}, whom it names"),
        (own.model_copy(update={"second": elsewhere.second}), f"by {OTHER.address}, whom it names"),
        (bare, "is not signed"),
        (forged, f"by {LIAR.address}, not by the pool's manager"),
        (forged.model_copy(update={"signed": under_its_name}), "whom it names"),
        (bare.sign(MANAGER, context.domain(PolicyStatement), 1), "whom it names"),
        (moved, "is not signed by"),
    ]
    library: Any = _Library(objects)
    pool = PoolOnChain(
        context.deployment, context.pool, context.manager, TRAINER.address, context.run
    )
    api: Any = _Published(objects)
    assert run_calibration(pool, api) is None
    for one in (shipped(), newest()):
        run = context.run.model_copy(update={"calibration": one.digest()})
        assert run_calibration(replace(pool, run=run), api) is one, "which everyone has"
        assert named_by(run, library, MANAGER.address, domain) is one
    for object_, refused in cases:
        run = context.run.model_copy(update={"calibration": object_.digest()})
        here = replace(pool, run=run)
        with pytest.raises(UserError, match="calibration is not published"):
            run_calibration(here, api)
        assert put_object(objects, object_.canonical()) == object_.digest()
        if not refused:
            found = run_calibration(here, api)
            assert found == named_by(run, library, MANAGER.address, domain) == object_
            continue
        with pytest.raises(UserError, match=refused):
            run_calibration(here, api)
        with pytest.raises(UntrustedError, match=refused):
            named_by(run, library, MANAGER.address, domain)


def test_one_party_cannot_give_both_signatures_and_a_change_takes_both_again() -> None:
    domain = FAKE_DEPLOYMENT.domain_of(CalibrationStatement)
    both = shipped().sign(OTHER, domain, 1, second=True).sign(MANAGER, domain, 1)
    for signer, second in ((MANAGER, True), (OTHER, False)):
        with pytest.raises(UserError, match="has signed this calibration already"):
            both.sign(signer, domain, 2, second=second)
    both.sign(MANAGER, domain, 2).check_signature(MANAGER.address, domain)
    assert both.unsigned() == shipped()
    changed = both.model_copy(update={"source": "changed"}).sign(MANAGER, domain, 2)
    with pytest.raises(UntrustedError, match=f"by {OTHER.address}, whom it names"):
        changed.check_signature(MANAGER.address, domain)


def test_a_validator_that_could_judge_nothing_by_the_runs_calibration_does_not_start() -> None:
    assert check_replay(shipped(), "float32", "cpu") == ""
    for device in ("cpu", "cuda"):
        with pytest.raises(UserError, match=f"on cpu, not in bfloat16 on {device}"):
            check_replay(shipped(), "bfloat16", device)
    of_a_card = shipped().model_copy(update={"replay_device": "an H200"})
    with pytest.raises(UserError, match="on an H200, not in float32 on cpu"):
        check_replay(of_a_card, "float32", "cpu")


def test_a_validator_on_an_unmeasured_card_starts_and_says_what_it_cannot_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = check_replay(shipped(), "float32", "cuda:7")
    assert "this validator replays on cuda:7: it accepts files within their limits" in said
    assert "rejects none; to judge them, replay on cpu" in said
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100 PCIe")
    assert "replays on NVIDIA H100 PCIe" in check_replay(shipped(), "float32", "cuda")
    of_family = shipped().model_copy(update={"replay_device": "NVIDIA H100 80GB HBM3"})
    assert check_replay(of_family, "float32", "cuda") == ""


def test_an_unmeasured_processor_judges_nothing_and_is_not_called_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [cpu_name(), shipped().replay_device] == ["cpu", "cpu"]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_name() == "cpu aarch64"
    with pytest.raises(UserError, match="on cpu, not in float32 on cpu aarch64"):
        check_replay(shipped(), "float32", "cpu")
    measured = shipped().model_copy(update={"replay_device": "cpu aarch64"})
    check_replay(measured, "float32", "cpu")


@pytest.mark.parametrize("raw", [b"{}", b"not json", b"[1]"])
def test_an_object_that_is_no_calibration_is_none(raw: bytes) -> None:
    domain = FAKE_DEPLOYMENT.domain_of(CalibrationStatement)
    with pytest.raises(MalformedError, match="is not a calibration"):
        parse_signed(raw, MANAGER.address, domain)
    signed = shipped().sign(MANAGER, domain, 1)
    assert parse_signed(signed.canonical(), MANAGER.address, domain) == signed
    with pytest.raises(MalformedError, match="canonical"):
        parse_signed(signed.canonical() + b" ", MANAGER.address, domain)
