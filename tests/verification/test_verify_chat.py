"""A run with a chat template: every party derives the same prompts, and no other is accepted."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prime_core.verdict import Outcome, Reason
from prime_engine.base import Generation
from prime_envs.chat import TEMPLATE_FILE, chat_from
from prime_envs.registry import environment_for
from prime_verify import build
from prime_verify.build import PlannedRow
from prime_verify.calibrate import synthetic_run
from prime_verify.engines import load_engine

TRAINED = Path(__file__).parents[2] / "devnet" / "model"
TEMPLATE = """{% for message in messages %}{{ message.content }}
{%- if message.role == 'system' %}|{% else %}>{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def chatting(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The demo's model with a template, which makes `6|tate>` of a word."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(TRAINED, folder)
    (folder / TEMPLATE_FILE).write_text(TEMPLATE)
    chat = chat_from({"budget": "{tokens}"}, folder)
    run = synthetic_run(24).model_copy(update={"chat": chat, "schema_version": 2})
    return type(world)(run, environment_for(run), load_engine(folder))


def test_prompts_by_the_template_are_accepted(chatting: Any) -> None:
    (first, *_) = plan = chatting.plan(chatting.lease(0))
    text = chatting.engine.tokenizer.decode(first.prompt_tokens)
    assert text == f"{first.target_length}|{first.problem.prompt}>"
    finding = chatting.judge(chatting.honest(0))
    assert finding.outcome is Outcome.ACCEPTED, finding
    assert [row.prompt_tokens for row in finding.table] == [len(p.prompt_tokens) for p in plan]


def _asked(world: Any, how: Any) -> Any:
    """A file of `world` whose rows were asked as `how` says, and say so."""

    def otherwise(plan: Sequence[PlannedRow]) -> list[PlannedRow]:
        return [replace(row, prompt_tokens=tuple(how(row))) for row in plan]

    def generate(plan: list[PlannedRow], engine: Any) -> list[Generation]:
        return build.generate_rows(otherwise(plan), world.run, engine)

    def change(rows: Any, plan: list[PlannedRow], _made: Any) -> Any:
        asked = otherwise(plan)
        return [
            replace(row, prompt_tokens=due.prompt_tokens)
            for row, due in zip(rows, asked, strict=True)
        ]

    return world.made(0, generate=generate, change=change)


def test_a_prompt_without_the_template_is_rejected(chatting: Any) -> None:
    plain = environment_for(synthetic_run(24))
    tokenizer = chatting.engine.tokenizer

    def raw(row: PlannedRow) -> list[int]:
        return plain.prompt_tokens(row.problem, row.target_length, tokenizer)

    finding = chatting.judge(_asked(chatting, raw))
    assert (finding.outcome, finding.reason) == (Outcome.REJECTED, Reason.WRONG_PROMPTS), finding
    assert "row 0 was not asked problem" in finding.detail


def test_a_template_where_the_run_asks_in_plain_text_is_rejected(world: Any, chatting: Any) -> None:
    def by_template(row: PlannedRow) -> list[int]:
        return chatting.environment.prompt_tokens(
            row.problem, row.target_length, chatting.engine.tokenizer
        )

    finding = world.judge(_asked(world, by_template))
    assert (finding.outcome, finding.reason) == (Outcome.REJECTED, Reason.WRONG_PROMPTS), finding
