"""Predicted output, JSON, format rules, reasoning-gym rows: one answer, of the form asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_core.errors import MalformedError
from prime_core.run import MICRO
from prime_envs.graders import answers
from prime_envs.graders.answers import last_json_object
from prime_envs.graders.base import Grader, grader_class
from prime_envs.graders.families import Families
from prime_envs.graders.formats import RULES, FormatFollowing
from prime_envs.graders.prediction import JsonOutput, OutputPrediction
from prime_envs.reasoning import reasoning_gym
from prime_envs.tasks import Task, parse_task


def task(info: dict[str, Any], solution: str | None = None) -> Task:
    row = {
        "problem_id": "1", "task_type": "t", "prompt": "?", "verification_info": info,
        "gold_standard_solution": solution,
    }  # fmt: skip
    return parse_task(row, "file.jsonl row 1")


PREDICT = task({"code_output": "[1, 2]"})


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ('{"code_output": "[1, 2]"}', 1),
        ('So:\n```json\n{"code_output": "[1, 2]"}\n```', 1),
        ('<think>{"code_output": "x"}</think>{"code_output": "[1, 2]"}', 1),
        ('{"code_output": [1, 2]}', 0),
        ('{"output": "[1, 2]"}', 0),
        ('{"code_output": "[1, 2]", "other": "[2, 1]"}', 0),
        ('{"code_output": "x"} or {"code_output": "[1, 2]"}', 0),
        ('{"code_output": "[1, 2]"} {"code_output": "x"}', 0),
        ('{"code_output": "x", "code_output": "[1, 2]"', 0),
        ('{"code_output": "[1, 2]"} I am sure', 0),
        ('<think>{"code_output": "[1, 2]"}', 0),
        ("[1, 2]", 0),
        ("{" * 50_000, 0),
        ('{"a":' * 5_000, 0),
        ('{"code_output": NaN}', 0),
        ("", 0),
    ],
)
def test_a_predicted_output_is_one_object_at_the_end(text: str, worth: int) -> None:
    grader = OutputPrediction()
    grader.require(PREDICT)
    assert grader.grade(PREDICT, text).task_micro == worth * MICRO


def test_genesys_form_of_predictions_is_read_too() -> None:
    grader = OutputPrediction()
    for gold in ({"output": 3}, 3):
        asked = task({"ground_truth": gold})
        grader.require(asked)
        assert grader.grade(asked, '{"output": 3}').task_micro == MICRO
        assert grader.grade(asked, '{"output": "3"}').task_micro == 0
        assert grader.grade(asked, '{"output": true}').task_micro == 0
        assert grader.grade(asked, grader.gold(asked)).task_micro == MICRO


def test_a_json_answer_counts_its_fields() -> None:
    grader, asked = JsonOutput(), task({"ground_truth": {"a": 1, "b": [1.5, "x"]}})
    grader.require(asked)
    assert grader.grade(asked, grader.gold(asked)).task_micro == MICRO
    half = grader.grade(asked, '{"a": 1, "b": 2}')
    assert (half.task_micro, half.parts) == (0, {"fields": 2, "right": 1})
    assert grader.grade(asked, '{"a": 1, "b": [1.5, "x"], "c": 0}').task_micro == 0


RULE_EXAMPLES: dict[str, tuple[dict[str, Any], str, str]] = {
    "words": ({"least": 2, "most": 3}, "one two", "one"),
    "sentences": ({"least": 2}, "One. Two!", "One"),
    "paragraphs": ({"least": 2}, "a\n\nb", "a\nb"),
    "lines": ({"least": 1, "most": 2}, "a\nb", "a\nb\nc"),
    "bullets": ({"least": 2}, "- a\n* b", "- a\nb"),
    "includes": ({"word": "cat"}, "A CAT.", "A category"),
    "excludes": ({"word": "cat"}, "A category", "A cat"),
    "starts_with": ({"text": "Dear"}, "Dear you", "My dear"),
    "ends_with": ({"text": "Yours"}, "Yours", "Yours."),
    "no_commas": ({}, "a b", "a, b"),
    "upper_case": ({}, "ABC 1", "aBC"),
    "lower_case": ({}, "abc 1", "123"),
    "json": ({"keys": ["a"]}, '{"a": 1}', '{"b": 1}'),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_kept_and_broken(rule: str) -> None:
    options, keeps, breaks = RULE_EXAMPLES[rule]
    asked = task({"rules": [{"rule": rule, **options}, {"rule": "words", "least": 1}]})
    grader = FormatFollowing()
    grader.require(asked)
    assert grader.grade(asked, f"<think>no</think>{keeps}").task_micro == MICRO
    broken = grader.grade(asked, breaks)
    assert broken.task_micro == 0
    assert rule in broken.reason
    assert grader.grade(asked, "").task_micro == 0


@pytest.mark.parametrize(
    "rules",
    [
        [],
        "words",
        [{"rule": "rhymes"}],
        [{"rule": ["words"]}],
        [{"rule": "words"}],
        [{"rule": "words", "least": "two"}],
        [{"rule": "words", "least": True}],
        [{"rule": "includes"}],
        [{"rule": "json", "keys": [1]}],
        [{"rule": "starts_with", "text": ""}],
        [{"rule": "no_commas"}],
        [{"rule": "words", "most": 10}],
        [{"rule": "excludes", "word": "x"}],
    ],
)
def test_rules_that_cannot_be_checked_or_that_silence_keeps_are_refused(rules: Any) -> None:
    with pytest.raises(MalformedError, match=r"file\.jsonl row 1"):
        FormatFollowing().require(task({"rules": rules}))


@pytest.fixture(scope="module")
def families() -> Iterator[Families]:
    made = Families()
    yield made
    made.close()


@pytest.mark.slow
def test_a_familys_row_is_scored_by_the_family(families: Families) -> None:
    entry = reasoning_gym().create_dataset("gcd", seed=5, size=1)[0]
    metadata: Any = entry["metadata"]
    for form in (metadata, json.dumps(metadata, default=str)):
        asked = task({"answer": entry["answer"], "metadata": form})
        families.require(asked)
        assert families.grade(asked, families.gold(asked)).task_micro == MICRO
        assert families.grade(asked, f"Answer: {entry['answer']}").task_micro == MICRO
        gold = entry["answer"]
        for text in (
            "Answer: 0",
            "",
            f"<answer>{gold}</answer><answer>0</answer>",
            f"Answer: 0 Answer: {gold}",
            f"<think>Answer: {gold}",
        ):
            assert families.grade(asked, text).task_micro < MICRO // 2


def test_an_unknown_family_is_the_graders_trouble_and_names_the_row(families: Families) -> None:
    score = families.grade(
        task({"answer": "1", "metadata": {"source_dataset": "nothing"}}), "Answer: 1"
    )
    assert (score.task_micro, score.uncertain) == (0, True)
    assert "file.jsonl row 1" in score.reason


@pytest.mark.parametrize("info", [{"answer": "1"}, {"metadata": {"source_dataset": "gcd"}}])
def test_a_familys_row_without_answer_or_family_is_refused(info: dict[str, Any]) -> None:
    with pytest.raises(MalformedError, match=r"file\.jsonl row 1"):
        Families().require(task(info))


def test_every_task_type_has_a_grader_class() -> None:
    from prime_envs.graders.base import BUILT_IN

    for name in BUILT_IN:
        assert issubclass(grader_class(name), Grader)


class _Reads(json.JSONDecoder):
    """Counts the characters that it reads."""

    read = 0

    def raw_decode(self, text: str, index: int = 0) -> tuple[Any, int]:
        try:
            value, end = super().raw_decode(text, index)
        except json.JSONDecodeError as error:
            self.read += error.pos
            raise
        except (ValueError, RecursionError):
            self.read += len(text)
            raise
        self.read += end
        return value, end


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{a} [b] {c: d} " * 4000 + '{"x": 1}', {"x": 1}),
        ('{"x": ' * 10_000 + "1" + "}" * 5_000, None),
        ('{"x": ' * 10_000 + '{"y": 1}', {"y": 1}),
        ('{"x": ' * 800 + "[" + "1," * 30_000 + "}", None),
        ('{"x": ' * 800 + "[" + "1," * 25_000 + "9" * 4400 + "}", None),
        (('{"x": ' * 800 + "!") * 13 + "}", None),
    ],
)
def test_the_last_object_is_found_without_reading_the_text_again_and_again(
    text: str, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _Reads()
    monkeypatch.setattr(answers, "_DECODER", decoder)
    assert last_json_object(text) == found
    assert decoder.read < 20 * answers.MAX_JSON


def _one_by_one(text: str) -> Any:
    """What last_json_object is, read from each bracket on."""
    body, position, found = text.strip(), 0, list[Any]()
    while (start := body.find("{", position)) >= 0:
        try:
            value, position = json.JSONDecoder().raw_decode(body, start)
            found.append(value)
        except (ValueError, RecursionError):
            position = start + 1
    whole = len(found) == 1 and body[position:] == "" and body.endswith("}")
    return found[0] if whole and "Infinity" not in json.dumps(found[0]) else None


PIECES = (
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        '"a"',
        ":",
        ",",
        "1",
        '{"a":',
        '{"a":1}',
        "{}",
        "\\",
        "\n",
        " ",
        "x",
    ),
    *("-", '"\\""', "[{", "}]", '"{"', "9" * 4301, "9" * 4301 + ".5", '{"a":"', '{"b":[', '{"":'),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=20).map("".join),
    st.sampled_from(("", "}", "{}", '{"x":1}', '{"a":"}"}', '"}')),
)
def test_the_last_object_is_the_one_that_reading_from_each_bracket_finds(
    before: str, end: str
) -> None:
    assert last_json_object(before + end) == _one_by_one(before + end)


def test_an_object_with_a_number_out_of_range_is_none() -> None:
    assert last_json_object('{"a":' + "9" * 400 + ".5}") is None


def test_where_the_stack_ends_the_same_object_is_found() -> None:
    for opening, closing in (('{"a":', "}"), ("[", "]")):
        for closed in (1, 1100):
            for end in ("", "}", ' {"x":1}', '} {"x":1}'):
                text = '{"q":' + opening * 1100 + "1" + closing * closed + end
                assert last_json_object(text) == _one_by_one(text)
