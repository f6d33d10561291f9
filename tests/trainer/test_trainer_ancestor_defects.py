"""The eleven defects of the ancestor's published code, each named by the rule that it broke.

Each test shows first that the defect would be seen (a copy of the defect, or the spoilt input),
then that ours holds the rule.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trainer_kit as kit
from trainer_kit import full_state

from prime_broadcast.publish import publish
from prime_core import seeds
from prime_core.batch import SignedBatch
from prime_core.encoding import sha256
from prime_core.errors import (
    FatalError,
    MalformedError,
    PolicyError,
    UnavailableError,
    UntrustedError,
)
from prime_core.ids import ZERO_DIGEST, Step
from prime_trainer import checkpoint
from prime_trainer.advantages import judge
from prime_trainer.checkpoint import TrainerState
from prime_trainer.config import ObjectiveSettings
from prime_trainer.data import TrainingBatch, assemble
from prime_trainer.feed import Prefetcher
from prime_trainer.learner import backward, train_step
from prime_trainer.loss import Tokens, kl_estimate, policy_loss
from prime_trainer.metrics import Stopwatch
from prime_trainer.packing import Plan, collate, plan
from prime_trainer.parallel import World
from prime_trainer.publish import export

RUN = kit.run_definition(groups=8)
STEP = 4


def batch(rows: list[kit.Rollout], step: int = 0) -> TrainingBatch:
    groups = tuple(tuple(rows[i : i + 4]) for i in range(0, len(rows), 4))
    return TrainingBatch(Step(step), ZERO_DIGEST, groups, ())


def test_1_the_kl_term_pulls_the_policy_towards_its_reference() -> None:
    # Defect: computed from detached tensors, it did nothing for months.
    reference = torch.tensor([-1.5, -0.5])

    def pull(detached: bool) -> torch.Tensor:
        logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        seen = logprobs.detach() if detached else logprobs
        (kl_estimate(seen, reference, "k3").sum() + 0.0 * logprobs.sum()).backward()
        assert logprobs.grad is not None
        return logprobs.grad

    assert (pull(detached=True) == 0).all()
    # Likelier than the reference has it: down. Less likely: up.
    assert pull(detached=False)[0] > 0 > pull(detached=False)[1]
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(logprobs.detach(), torch.zeros(2), torch.ones(2), reference)
    policy_loss(logprobs, torch.zeros(2), tokens, ObjectiveSettings(kl=0.1)).loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).all()


def test_2_every_sample_is_on_one_rank_in_one_micro_batch() -> None:
    # Defect: rebalancing filled a short rank with a copy of a micro-batch, loss and all.
    sizes = [7, 30, 12, 25, 9, 3, 18]
    found = plan(sizes, ranks=3, row_tokens=32, micro_tokens=32)

    def planned(of: Plan) -> Counter[int]:
        return Counter(s for rank in of.ranks for micro in rank for row in micro for s in row)

    longest = max(found.ranks, key=lambda rank: sum(bool(m) for m in rank))
    copied = tuple(
        tuple(mine or theirs for mine, theirs in zip(rank, longest, strict=True))
        for rank in found.ranks
    )
    assert planned(found) == Counter(range(len(sizes)))
    if any(not micro for rank in found.ranks for micro in rank):
        assert planned(replace(found, ranks=copied)) != planned(found)


def test_2_a_rank_without_work_adds_nothing_to_the_gradient(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world)
    empty, tokens = collate([], [], [], [], world.device)
    logprobs, entropy = learner.policy(empty)
    loss = policy_loss(logprobs, entropy, tokens, learner.objective).loss
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(float(g.abs().sum()) == 0.0 for g in kit.gradients(learner.policy).values())


def test_3_the_ratio_is_against_the_policy_that_generated(
    model: Path, tmp_path: Path, world: World
) -> None:
    # Defect: "old" log-probabilities came from the trainer's current weights, so every ratio was 1.
    rows = kit.rows()
    current = kit.learner(model, tmp_path, world)
    found = backward(current, rows)
    assert abs(found["ratio"] - 1.0) > 0.05
    wanted = ObjectiveSettings(ratio="proximal", importance_cap=1000.0)
    decoupled = kit.learner(model, tmp_path, world, objective=wanted)
    other = backward(decoupled, rows)
    assert other["ratio"] == pytest.approx(1.0, abs=1e-6)  # what the ancestor saw …
    assert other["kl_old"] > 0.01  # … while the policies were far apart, and are corrected for
    plain = {n: g / g.norm() for n, g in kit.gradients(current.policy).items() if g.norm() > 0}
    assert plain


def test_4_no_row_is_dropped_from_one_list_only() -> None:
    # Defect: over-long prompts left one list, and every later reward sat on the wrong sample.
    rows = kit.rows(3, 4, seed=2, longest=30)
    judged = judge([rows[i : i + 4] for i in range(0, 12, 4)], ObjectiveSettings(overlong="mask"))
    assert len(judged.advantages) == len(judged.counted) == len(rows)
    micro = [[11, 0], [5]]
    values = [float(i) for i in range(len(rows))]
    packed, tokens = collate(micro, rows, values, values, torch.device("cpu"))
    samples = packed.sequences.flatten()[packed.predict].tolist()
    assert tokens.advantages.tolist() == samples
    assert tokens.weights.tolist() == samples


def test_5_a_batch_is_the_list_that_was_signed_not_what_lies_about() -> None:
    # Defect: ranks listed a live directory, unsorted; rows were duplicated or skipped.
    objects = kit.Objects()
    signed = kit.seal(
        [
            kit.seal_file(objects, kit.rows(2, 4, seed=s, version=STEP), [0, 1], STEP)
            for s in (1, 2)
        ],
        STEP,
        RUN,
    )
    before = assemble(signed, STEP, kit.rules(RUN), objects.fetch)
    kit.seal_file(objects, kit.rows(2, 4, seed=9, version=STEP), [0, 1], STEP)  # came meanwhile
    objects.by_digest = dict(sorted(objects.by_digest.items(), reverse=True))
    assert assemble(signed, STEP, kit.rules(RUN), objects.fetch) == before
    backwards = signed.manifest.model_copy(update={"files": signed.manifest.files[::-1]})
    signature = kit.MANAGER.sign(backwards.statement(), kit.DOMAIN)
    unsorted = SignedBatch(manifest=backwards, signature=signature)
    with pytest.raises(MalformedError, match="not sorted"):
        assemble(unsorted, STEP, kit.rules(RUN), objects.fetch)


def test_6_targets_and_noise_follow_from_the_lease_not_from_the_node() -> None:
    # Defect: the node chose target length and seed: the cheap length, the best of many.
    seed, other = sha256(b"lease"), sha256(b"another lease")
    assert seeds.target_lengths(seed, 8, (2, 6, 10)) == seeds.target_lengths(seed, 8, (2, 6, 10))
    assert seeds.target_lengths(seed, 64, (2, 6)) != seeds.target_lengths(other, 64, (2, 6))
    keys = {seeds.noise_seed(seed, group, sample) for group in range(8) for sample in range(16)}
    assert len(keys) == 8 * 16
    assert not keys & {seeds.noise_seed(other, g, s) for g in range(8) for s in range(16)}


def test_7_rewards_are_the_validators_and_versions_are_bounded() -> None:
    # Defect: the node's own rewards were believed, and the policy's version ignored.
    objects = kit.Objects()
    rows = kit.rows(2, 4, seed=1, version=STEP)
    signed = kit.seal([kit.seal_file(objects, rows, [0, 1], STEP)], STEP, RUN)
    found = assemble(signed, STEP, kit.rules(RUN), objects.fetch)
    reported = 0.123  # what kit.file_of writes for every row
    assert all(row.reward != reported for row in found.rollouts)
    assert [r.reward for r in found.rollouts] == pytest.approx([r.reward for r in rows], abs=1e-6)
    for version in (STEP - RUN.max_staleness - 1, STEP + 1):
        old = kit.rows(2, 4, seed=1, version=version)
        signed = kit.seal([kit.seal_file(objects, old, [0, 1], STEP)], STEP, RUN)
        with pytest.raises(PolicyError, match="old at step"):
            assemble(signed, STEP, kit.rules(RUN), objects.fetch)


def test_8_a_download_that_fails_in_the_background_fails_the_loop() -> None:
    # Defect: a prefetcher swallowed the error and marked the file as fetched.
    tries = iter([UnavailableError("the object is not here"), None])

    def produce(step: int, watch: Stopwatch) -> TrainingBatch:
        error = next(tries)
        if error is not None:
            raise error
        return batch(kit.rows(), step)

    prefetcher = Prefetcher(produce, limit=1)
    try:
        with pytest.raises(UnavailableError, match="not here"):
            prefetcher.take(0)
        assert prefetcher.take(0).batch.step == 0  # asked again, not marked as had
    finally:
        prefetcher.close()


def test_9_checkpoints_are_named_by_global_rank(model: Path, tmp_path: Path, world: World) -> None:
    # Defect: named by local rank, two machines on one file system overwrote each other's. (That two
    # ranks write two files is in test_trainer_ranks; here: the name holds the global one.)
    learner = kit.learner(model, tmp_path, world)
    state = TrainerState(RUN.digest(), step=1)
    checkpoint.save(tmp_path, state, learner.policy, learner.optimizer, world)
    names = {p.name for p in (tmp_path / "checkpoints" / "1").iterdir()}
    assert f"__{world.rank}_0.distcp" in names
    written = json.loads((tmp_path / "checkpoints" / "1" / checkpoint.STATE_NAME).read_text())
    assert written["ranks"] == world.size


def test_10_weights_have_a_signed_manifest_and_every_chunk_a_digest(
    model: Path, tmp_path: Path
) -> None:
    # Defect: no signature, no digest of a shard: one bad shard cost the whole file.
    manifest = publish(model, tmp_path / "origin", pool=7, version=0, step=0, delta_from=0)
    assert all(file.chunks for file in manifest.files)
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    for path in model.iterdir():
        (spoilt / path.name).write_bytes(path.read_bytes())
    data = bytearray((spoilt / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (spoilt / "model.safetensors").write_bytes(data)
    other = publish(spoilt, tmp_path / "other", pool=7, version=0, step=0, delta_from=0)
    one = {f.name: f.chunks for f in manifest.files}["model.safetensors"]
    two = {f.name: f.chunks for f in other.files}["model.safetensors"]
    assert sum(a != b for a, b in zip(one, two, strict=True)) == 1  # only the chunk that is bad
    assert manifest.digest() != other.digest()  # which is what the trainer signs


@pytest.mark.parametrize("where", ["loss", "weights"])
def test_11_nothing_that_is_not_finite_is_stepped_or_published(
    model: Path, tmp_path: Path, world: World, where: str
) -> None:
    # Defect: no guard: NaN weights would have been broadcast.
    learner = kit.learner(model, tmp_path, world)
    before = full_state(learner.policy)
    if where == "loss":
        rows = kit.rows()
        rows[0] = replace(rows[0], logprobs=(math.nan,) * len(rows[0].logprobs))
        assert train_step(learner, batch(rows), Stopwatch())["applied"] is False
        after = full_state(learner.policy)
        assert all(torch.equal(before[name], after[name]) for name in before)
    else:
        name = next(iter(before))
        before[name].view(-1)[0] = math.nan
        with pytest.raises(FatalError, match="not finite"):
            export(before, model, tmp_path / "export")
        assert not (tmp_path / "export").exists()


def test_a_batch_signed_by_anybody_else_is_not_trained() -> None:
    objects = kit.Objects()
    rows = kit.rows(2, 4, version=STEP)
    signed = kit.seal([kit.seal_file(objects, rows, [0, 1], STEP)], STEP, RUN, signer=kit.STRANGER)
    with pytest.raises(UntrustedError, match="not the manager"):
        assemble(signed, STEP, kit.rules(RUN), objects.fetch)


def test_the_prefetcher_holds_one_batch_ahead_and_never_goes_beyond_the_limit() -> None:
    asked: list[int] = []
    second = threading.Event()

    def produce(step: int, watch: Stopwatch) -> TrainingBatch:
        asked.append(step)
        if step == 1:
            second.set()
        return batch(kit.rows(), step)

    prefetcher = Prefetcher(produce, limit=3)
    try:
        assert prefetcher.take(0).batch.step == 0
        assert second.wait(120)  # batch 1 is on its way although no one asked
        assert asked == [0, 1]  # and batch 2 is not
        assert [prefetcher.take(s).batch.step for s in (1, 2)] == [1, 2]
    finally:
        prefetcher.close()
    assert asked == [0, 1, 2]
