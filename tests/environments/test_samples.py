"""How a sample's text is taken apart and printed."""

from __future__ import annotations

import pytest

from prime_envs.samples import reward_text, sample_text, spans, styled


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("ask ", "say", [("answer", "say")]),
        ("ask ", "<think>so</think>say", [("thinking", "<think>so</think>"), ("answer", "say")]),
        ("ask <think>\n", "so</think>say", [("thinking", "so</think>"), ("answer", "say")]),
        ("ask ", "a<think>cut", [("answer", "a"), ("thinking", "<think>cut")]),
        ("ask ", "a</think>b", [("answer", "a</think>b")]),
        ("ask ", "", []),
    ],
)
def test_thinking_goes_from_its_tag_to_its_end(
    prompt: str, output: str, expected: list[tuple[str, str]]
) -> None:
    assert spans(prompt, [output]) == [("prompt", prompt), *expected]


def test_thinking_has_a_color_of_its_own_and_strangers_have_none() -> None:
    text = sample_text("ask\n", ["<think>so</think>\x1b[2J"], tokens=3, finish="end", style=styled)
    assert text == (
        "\x1b[2mask\n\x1b[0m\x1b[36m<think>so</think>\x1b[0m\\x1b[2J\n3 tokens, ended by end"
    )


def test_a_reward_is_shown_with_its_components() -> None:
    assert reward_text(0.5, {"task_micro": 7, "length": 2}, "fine") == (
        "reward 0.500 (task_micro 7, length 2; fine)"
    )
    assert reward_text(0.5, {}, "") == "reward 0.500"
    assert reward_text(None, {}, "the environment raised") == "ungraded (the environment raised)"


def test_turns_of_the_environment_stand_between_those_of_the_model() -> None:
    assert spans("ask", ["5", "higher", "<think>so</think>7"]) == [
        ("prompt", "ask"), ("answer", "5"), ("environment", "higher"),
        ("thinking", "<think>so</think>"), ("answer", "7"),
    ]  # fmt: skip
