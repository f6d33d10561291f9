"""Every lie that a devnet node can play, through the real verifier: it ends as its table says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.attacks import ATTACKS
from prime_core.ids import digest
from prime_core.verdict import Outcome, Reason
from prime_engine.variants import VARIANTS
from prime_verify.calibrate import HonestFile
from prime_verify.canaries.lies import LIES
from prime_verify.canaries.scene import Scene
from prime_verify.engines import load_engine
from prime_verify.rollout_file import FileRow, read_rollout_file
from prime_verify.verify import Finding, verify_file

TRAINED = Path(__file__).parents[2] / "devnet" / "model"
LEASES = range(300, 330)
"""A lie that changes few tokens is not in every file; a liar makes many."""
ENDINGS = {Outcome.REJECTED: "slashed", Outcome.VOID: "void", Outcome.ACCEPTED: "unseen"}


@pytest.fixture(scope="module")
def small(world: Any) -> Any:
    """The same world with files of 32 rows, half of them replayed."""
    run = world.run.model_copy(
        update={"groups_per_lease": 4, "samples_per_group": 8, "replay_rows_micro": 500_000}
    )
    return type(world)(run, world.environment, world.engine)


@cache
def _variant(name: str) -> Any:
    return load_engine(TRAINED, prepare=VARIANTS[name])


def _scene(small: Any, number: int) -> Scene:
    lease: HonestFile = small.lease(number)
    return Scene(
        lease.signed,
        lease.lease_digest,
        small.run,
        small.environment,
        small.engine,
        variant=_variant,
        older=lambda: _variant("old1_1e4"),
    )


def _rows(data: bytes) -> list[FileRow]:
    return list(read_rollout_file(data).rows)


def _verified(small: Any, scene: Scene, data: bytes) -> Finding:
    return verify_file(
        data,
        scene.signed,
        scene.digest,
        small.run,
        small.environment,
        small.policies,
        draw_secret=digest(bytes(32)),
        submission_digest=scene.digest,
    )


def _judged(small: Any, name: str, number: int) -> Finding:
    scene = _scene(small, number)
    if name == "copied_earlier":
        before = _scene(small, number - 1)
        scene = replace(scene, earlier=_rows(before.file(before.generate())))
    return _verified(small, scene, LIES[name].make(scene))


@pytest.mark.parametrize("name", sorted(LIES))
def test_a_lie_ends_as_its_table_says(small: Any, name: str) -> None:
    due = LIES[name].ends
    for number in LEASES:
        found = _judged(small, name, number)
        ended = ENDINGS[found.outcome]
        if ended == due:
            break
        assert ended == "unseen", (found.reason, found.detail)
    assert ended == due, (found.reason, found.detail)


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("best_of_4", {Reason.WRONG_SAMPLING}),
        ("copied_proof", {Reason.COPIED_ROWS}),
        ("copied_rows", {Reason.COPIED_ROWS}),
        ("copied_earlier", {Reason.WRONG_SAMPLING, Reason.TWO_HUMPED}),
        ("made_up_proof", {Reason.FORGED_PROOF}),
        ("sign_flip", {Reason.FORGED_PROOF}),
        ("early_end", {Reason.EARLY_END}),
        ("other_prompts", {Reason.WRONG_PROMPTS}),
        ("tampered_reward", {Reason.TAMPERED_REWARD}),
        ("tampered_logprobs", {Reason.TAMPERED_LOGPROBS}),
        ("after_end", {Reason.WRONG_ROWS}),
        ("truncated", {Reason.MALFORMED}),
    ],
)
def test_the_reason_says_which_lie(small: Any, name: str, reasons: set[Reason]) -> None:
    assert _judged(small, name, LEASES[0]).reason in reasons


def test_every_attack_of_the_bench_is_a_way_to_lie() -> None:
    """The devnet's older and smaller models are those that no training is needed for."""
    attacks = {name.replace("random", "old").replace("shallow", "small") for name in ATTACKS}
    assert attacks <= set(LIES)


def test_answers_of_an_earlier_file_to_the_very_same_prompts_are_no_better(small: Any) -> None:
    scene = _scene(small, LEASES[0])
    earlier = _rows(scene.file(scene.generate(flip=1)))  # of a lease with the same prompts
    copied = LIES["copied_earlier"].make(replace(scene, earlier=earlier))
    answers = {tuple(row.prompt_tokens): tuple(row.output_tokens) for row in earlier}
    for row in _rows(copied):
        assert tuple(row.output_tokens) == answers[tuple(row.prompt_tokens)]
    assert _verified(small, scene, copied).reason is Reason.WRONG_SAMPLING


def test_without_a_lie_the_same_file_is_accepted(small: Any) -> None:
    """What the scenes share is honest: only the one step replaced is found."""
    scene = _scene(small, LEASES[0])
    found = _verified(small, scene, scene.file(scene.generate()))
    assert found.outcome is Outcome.ACCEPTED, found.detail
