"""Chat templates: what transformers renders, pinned by the run, refused unless deterministic."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core import encoding
from prime_core.errors import PolicyError, UserError
from prime_core.run import MICRO, Chat, LengthBudgets
from prime_engine.tiny import CHARACTERS, character_tokenizer
from prime_envs.base import Problem, TaskScore
from prime_envs.chat import (
    TEMPLATE_FILE,
    chat_from,
    messages_of,
    prompt_of,
    render,
    thinking_tokens,
)
from prime_envs.environments.reasoning_gym import ReasoningGym
from prime_envs.environments.reverse import Reverse

TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('a system prompt comes first') }}
    {%- endif %}
    {{- '[' ~ message['role'] ~ ']' ~ (message.content | trim) ~ eos_token }}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '[assistant]' }}{% generation %}{% endgeneration %}
{% endif %}"""
TOKENIZER = character_tokenizer(CHARACTERS + "[]<>TMSA'", end="\n")
TOKENIZER.chat_template = TEMPLATE
BUDGETS = LengthBudgets(targets=(4, 8), penalty_micro=MICRO // 10, form="exact")
SMOLLM = Path(
    os.environ.get(
        "PRIME_SMOLLM_HOME",
        Path(__file__).parents[2] / "var" / "models" / "smollm2-135m-instruct",
    )
)


def chat(**fields: Any) -> Chat:
    return Chat(template=encoding.sha256(TOKENIZER.chat_template.encode()), **fields)


def folder(root: Path, template: str | None = TEMPLATE) -> Path:
    TOKENIZER.save_pretrained(root)
    (root / TEMPLATE_FILE).unlink()
    if template is not None:
        (root / TEMPLATE_FILE).write_text(template)
    return root


@pytest.mark.parametrize("place", ["system", "user"])
@pytest.mark.parametrize("system", ["", "be short."])
def test_a_prompt_is_what_transformers_makes_of_the_conversation(place: Any, system: str) -> None:
    reverse = Reverse({}, BUDGETS)
    reverse.chat = chat(system=system, budget_in=place)
    problem = reverse.problem(3)
    sentence = "Think for 8 tokens before giving a response."
    conversation = messages_of(reverse.chat, problem.prompt, 8)
    said = {message["role"]: message["content"] for message in conversation}
    assert said[place].endswith(sentence)
    assert said["user"].startswith(problem.prompt)
    assert said.get("system", "").startswith(system)
    assert set(said) == {"user", "system"} - (
        {"system"} if place == "user" and not system else set()
    )
    expected = TOKENIZER.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    assert reverse.prompt_tokens(problem, 8, TOKENIZER) == expected
    reverse.chat = chat(system=system, budget_in=place, budget="")
    assert sentence not in TOKENIZER.decode(reverse.prompt_tokens(problem, 8, TOKENIZER))


def test_a_run_without_chat_asks_in_plain_text_with_any_tokenizer() -> None:
    reverse = Reverse({}, BUDGETS)
    problem = reverse.problem(0)
    plain = TOKENIZER.encode(f"08|{problem.prompt}>", add_special_tokens=False)
    assert reverse.prompt_tokens(problem, 8, TOKENIZER) == plain


def test_a_policy_with_another_template_than_the_run_pins_is_refused() -> None:
    for other in (None, TEMPLATE + " "):
        tokenizer = character_tokenizer()
        tokenizer.chat_template = other
        with pytest.raises(PolicyError, match=r"chat template has digest .* pins"):
            prompt_of(chat(), "tate", 8, tokenizer)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "writes the date (strftime_now)"),
        ("{{ messages }}\n{{ ['a', 'b'] | random }}", "uses random in line 2"),
        ("{{ messages | map('random') | list }}", "uses random"),
        ("{{ lipsum() }}", "uses lipsum"),
        ("{{ messages }}{{ 'a'.upper | string }}", "addresses of memory"),
        ("{% for message in messages %}", "cannot be parsed"),
        ("{{ raise_exception('no system role') }}", "cannot be rendered: no system role"),
        ("{{ messages[9].content.strip() }}", "cannot be rendered"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered"),
        ("{{ messages.append(1) }}", "cannot be rendered"),
        ("{{ messages[0].content }}", "leaves out 'How many days"),
        ("{{ messages[-1].content }}", "leaves out 'be kind'"),
    ],
)
def test_a_template_that_fails_or_is_not_deterministic_is_refused_in_one_sentence(
    tmp_path: Path, template: str, said: str
) -> None:
    with pytest.raises(UserError) as error:
        chat_from({"system": "be kind"}, folder(tmp_path, template))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_with_a_text_for_days_that_it_does_not_know_is_taken(tmp_path: Path) -> None:
    day = "{{ strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' }}"
    made = chat_from({"system": "be kind"}, folder(tmp_path, TEMPLATE + day))
    assert made is not None
    assert render(TEMPLATE + day, [], {}).endswith("26 Jul 2024")


def test_a_run_says_whether_a_chat_model_is_asked_by_its_template(tmp_path: Path) -> None:
    instruct, base = folder(tmp_path / "instruct"), folder(tmp_path / "base", None)
    with pytest.raises(UserError, match="does not say whether its template is used"):
        chat_from(None, instruct)
    assert chat_from({"prompts": "raw"}, instruct) is None
    assert chat_from(None, base) is chat_from({"prompts": "raw"}, base) is None
    with pytest.raises(UserError, match="has no chat template"):
        chat_from({"prompts": "template"}, base)
    made = chat_from({"system": "be kind", "budget_in": "user"}, instruct)
    assert made == chat(system="be kind", budget_in="user")
    for wrong in (
        {"budget": "think a while"}, {"prompts": "raw", "system": "x"}, {"prompts": "jinja"},
        {"style": "x"}, {"system": 3},
    ):  # fmt: skip
        with pytest.raises(UserError, match="chat"):
            chat_from(wrong, instruct)


def test_a_template_in_the_tokenizer_s_settings_is_found_too(tmp_path: Path) -> None:
    settings = folder(tmp_path, None) / "tokenizer_config.json"
    found = json.loads(settings.read_text())
    several = [{"name": "tools", "template": "{{ x }}"}, {"name": "default", "template": TEMPLATE}]
    for template in (TEMPLATE, several):
        settings.write_text(json.dumps(found | {"chat_template": template}))
        assert chat_from({}, tmp_path) == chat()


def test_a_template_that_no_tokenizer_takes_by_default_is_named_and_never_passed_over(
    tmp_path: Path,
) -> None:
    """A chat model gets raw prompts by choice only."""
    named = folder(tmp_path / "named", None)
    settings = named / "tokenizer_config.json"
    several = [{"name": "tools", "template": TEMPLATE}]
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": several}))
    processors = folder(tmp_path / "processors", None)
    (processors / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    more = folder(tmp_path / "more", None)
    (more / "additional_chat_templates").mkdir()
    (more / "additional_chat_templates" / "tools.jinja").write_text(TEMPLATE)
    for model, place in (
        (named, "tokenizer_config.json"),
        (processors, "chat_template.json"),
        (more, "additional_chat_templates"),
    ):
        for values in (None, {"system": "be kind"}):
            with pytest.raises(UserError, match=f"chat template in {place}, but none") as error:
                chat_from(values, model)
            assert 'prompts = "raw"' in error.value.hint
        assert chat_from({"prompts": "raw"}, model) is None
        (model / TEMPLATE_FILE).write_text(TEMPLATE)
        assert chat_from({}, model) == chat()


@given(
    before=st.text("ab<th", max_size=9),
    after=st.text("ab</k>", max_size=9),
    opened=st.booleans(),
    began=st.booleans(),
    ended=st.booleans(),
)
def test_thinking_is_counted_up_to_the_end_of_its_span(
    before: str, after: str, opened: bool, began: bool, ended: bool
) -> None:
    head = ("<think>" if began else "") + before + ("</think>" if ended else "")
    tokens = TOKENIZER.encode(head + after, add_special_tokens=False)
    expected = len(head) if ended else len(tokens) if opened or began else 0
    assert thinking_tokens(TOKENIZER, tokens, opened) == expected


class _Says(ReasoningGym):
    """Right if the text that is graded is `answer`."""

    may_give_up = False

    def __init__(self) -> None:
        self.arguments, self.budgets = {}, BUDGETS

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        return TaskScore(MICRO if output_text == problem.answer else 0, output_text)


def test_a_length_reward_may_count_thinking_alone() -> None:
    environment, problem = _Says(), Problem("p", 0, "why", "<think>ab</think>c")
    tokens = TOKENIZER.encode("<think>ab</think>c\n", add_special_tokens=False)
    for length, counted in (("output", 19), ("thinking", 17)):
        environment.chat = chat(length=length)
        grade = environment.grade_output(problem, 8, tokens, TOKENIZER)
        assert grade.parts["length"] == counted
    assert "End with a line `Answer:`" in environment.question(problem)


def test_thinking_that_the_template_has_begun_is_part_of_the_answer() -> None:
    tokenizer = character_tokenizer(CHARACTERS + "[]<>TMSA'", end="\n")
    tokenizer.chat_template = TEMPLATE.replace("[assistant]", "[assistant]<think>")
    environment, problem = _Says(), Problem("p", 0, "why", "<think>ab</think>c")
    environment.chat = Chat(
        template=encoding.sha256(tokenizer.chat_template.encode()), length="thinking"
    )
    tokens = tokenizer.encode("ab</think>c\n", add_special_tokens=False)
    grade = environment.grade_output(problem, 10, tokens, tokenizer)
    assert (grade.parts["task_micro"], grade.parts["length"]) == (MICRO, 10)
    unended = environment.grade_output(problem, 10, tokens[:4], tokenizer)
    assert unended.parts["length"] == 4


@pytest.mark.skipif(not (SMOLLM / "ready").exists(), reason="no SmolLM2 (scripts/setup_smollm.sh)")
def test_smollm_answers_by_its_template_and_ends_where_its_turn_ends() -> None:
    from prime_engine.base import GenerationRequest
    from prime_verify.engines import load_engine

    engine = load_engine(SMOLLM, threads=1)
    pinned = chat_from({"budget": ""}, SMOLLM)
    assert pinned is not None
    question = "What is 7+5?"
    prompt = prompt_of(pinned, question, 0, engine.tokenizer)
    tokens = engine.tokenizer.encode(prompt, add_special_tokens=False)
    assert tokens == engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    (made,) = engine.generate([GenerationRequest(tuple(tokens), 24, None)], 1.0)
    assert "12" in engine.tokenizer.decode(made.output_tokens)
    assert made.finish_reason == "end"
    assert engine.tokenizer.decode(made.output_tokens[-1:]) == "<|im_end|>"
