"""Every lie that a devnet node can play, through the real verifier: it ends as its table says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.conversations import registered
from bench.detection_attacks import ATTACKS
from devnet.kinds import LIES, LongScene
from prime_core.ids import digest
from prime_core.run import Conversation
from prime_core.verdict import Outcome, Reason
from prime_engine.variants import VARIANTS
from prime_envs.registry import environment_for, environment_ref
from prime_verify.calibrate import HonestFile
from prime_verify.canaries.scene import Text
from prime_verify.case import Case
from prime_verify.engines import load_engine
from prime_verify.finding import Finding
from prime_verify.rollout_file import FileRow, read_rollout_file
from prime_verify.verify import verify_file

TRAINED = Path(__file__).parents[2] / "devnet" / "model"
LEASES = range(300, 400)
"""A lie that changes few tokens is not in every file (one step of 1e-5: in 6 of 100). A liar makes
many files."""
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


def _scene(small: Any, number: int) -> LongScene:
    lease: HonestFile = small.lease(number)
    return LongScene(
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


def _verified(small: Any, scene: LongScene, data: bytes) -> Finding:
    return verify_file(
        Case(
            data,
            scene.signed,
            scene.digest,
            small.run,
            small.environment,
            small.policies,
            draw_secret=digest(bytes(32)),
            submission_digest=scene.digest,
        )
    )


def _judged(small: Any, name: str, number: int) -> Finding:
    scene = _scene(small, number)
    if name == "copied_earlier":
        before = _scene(small, number - 1)
        scene = replace(scene, earlier=_rows(before.file(before.generate())))
    return _verified(small, scene, LIES[name].make(scene))


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def talking(small: Any) -> Iterator[Any]:
    """The same world in conversations of three turns."""
    with registered():
        run = small.run.model_copy(
            update={
                "environment": environment_ref(
                    "words", {}, small.run.budgets, train_size=100, heldout_size=0
                ),
                "conversation": Conversation(turns=3),
                "max_output_tokens": 64,
                "schema_version": 3,
            }
        )
        yield type(small)(run, environment_for(run), small.engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["t11", "greedy", "other_seed", "best_of_4", "int4", "small_model", "half_small", "foreign5",
     "early_end", "padded", "tampered_reward", "tampered_logprobs", "copied_rows", "made_up_proof",
     "sign_flip", "after_end"],
)  # fmt: skip
def test_lies_go_on_past_the_first_turn(talking: Any, name: str) -> None:
    due, several = LIES[name].ends, False
    for number in LEASES:
        scene = _scene(talking, number)
        data = LIES[name].make(scene)
        several = several or any(len(row.spans) > 1 for row in _rows(data))
        found = _verified(talking, scene, data)
        if ENDINGS[found.outcome] == due:
            break
        assert found.outcome is Outcome.ACCEPTED, (found.reason, found.detail)
    assert ENDINGS[found.outcome] == due, (found.reason, found.detail)
    assert found.reason is not Reason.WRONG_OBSERVATION
    assert several or name == "greedy"  # its first turns do not end


def test_a_conversation_without_a_lie_is_accepted(talking: Any) -> None:
    scene = _scene(talking, LEASES[0])
    honest = scene.generate()
    made = scene.file(honest)
    assert _verified(talking, scene, made).outcome is Outcome.ACCEPTED
    texts = [Text(one.output_tokens, one.spans) for one in honest]
    scored = _verified(talking, scene, scene.file(scene.score(texts)))
    assert scored.outcome is Outcome.ACCEPTED, scored.detail


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("best_of_4", {Reason.WRONG_SAMPLING}),
        ("copied_proof", {Reason.COPIED_ROWS}),
        ("copied_rows", {Reason.COPIED_ROWS}),
        ("copied_earlier", {Reason.WRONG_SAMPLING, Reason.IMPROBABLE_TOKENS}),
        ("forged_const", {Reason.FORGED_PROOF}),
        ("forged_modh", {Reason.FORGED_PROOF}),
        ("int4", {Reason.WRONG_ACTIVATIONS, Reason.WRONG_SAMPLING, Reason.WRONG_SKETCH}),
        ("made_up_proof", {Reason.FORGED_PROOF}),
        ("sign_flip", {Reason.FORGED_PROOF}),
        ("early_end", {Reason.EARLY_END}),
        ("greedy", {Reason.WRONG_SAMPLING}),
        ("other_seed", {Reason.WRONG_SAMPLING}),
        ("other_prompts", {Reason.WRONG_PROMPTS}),
        ("other_targets", {Reason.WRONG_TARGETS}),
        ("paraphrased", {Reason.WRONG_ACTIVATIONS, Reason.WRONG_SAMPLING, Reason.WRONG_SKETCH}),
        ("t11", {Reason.WRONG_SAMPLING, Reason.TAMPERED_LOGPROBS}),
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
