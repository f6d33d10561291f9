"""Scores answers with the task code of lm-evaluation-harness (lm_eval).

Runs in a child (subprocess_grader.py), in the interpreter that has the package; imports none of our
code. Answers are scored where the process can only compute (sandbox/kernel.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

MICRO = 1_000_000


def warm(task: str) -> None:
    """Imports what scoring `task` (a name in SCORERS) needs, before any fork. Raises LookupError if
    the NLTK data that IFEval needs is missing."""
    if task != "ifeval":
        SCORERS[task](EXAMPLES[task])()
        return
    import nltk

    nltk.data.find("tokenizers/punkt_tab")  # otherwise lm_eval would download it
    from langdetect import DetectorFactory, detect
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    DetectorFactory.seed = 0  # its answers would otherwise vary
    detect("One sentence in English.")
    for name, kind in INSTRUCTION_DICT.items():
        with contextlib.suppress(Exception):  # some need arguments; their imports are done
            instruction = kind(name)
            instruction.build_description()
            instruction.check_following("One sentence. Another one.")


def answer(request: dict[str, Any]) -> Any:
    """{"task": "describe"} → versions and IFEval's instruction names; else {"task", "response",
    …} → the function that returns {"micro": the score in millionths, "parts": …, "reason"}."""
    if request["task"] == "describe":
        return _describe(request["of"])
    return SCORERS[request["task"]](request)


def _describe(task: str) -> dict[str, Any]:
    found: dict[str, Any] = {"version": version("lm_eval"), "instructions": []}
    if task == "ifeval":
        from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

        found["instructions"] = sorted(INSTRUCTION_DICT)
    return found


def _aime(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """`answers`: the spellings of the right integer."""
    from lm_eval.tasks.aime.utils import process_results

    def score() -> dict[str, Any]:
        right = any(
            process_results({"answer": gold}, [request["response"]])["exact_match"]
            for gold in request["answers"]
        )
        return {"micro": MICRO * right, "parts": {}, "reason": ""}

    return score


def _gpqa(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """`choices`: four texts; `letter`: "(A)" to "(D)". The filter flexible-extract of the task
    gpqa_diamond_cot_zeroshot reads the choice."""
    from lm_eval.filters.extraction import MultiChoiceRegexFilter

    chosen = MultiChoiceRegexFilter(
        regex_pattern=r"(\([A-Z]\))", group_select=-1, ignore_case=True, ignore_punctuation=True
    )

    def score() -> dict[str, Any]:
        ((found,),) = chosen.apply([[request["response"]]], [{"choices": request["choices"]}])
        micro = MICRO * (found == request["letter"])
        return {"micro": micro, "parts": {}, "reason": f"it chose {found}"[:80]}

    return score


def _gsm8k(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """`target`: the dataset's answer, which ends in "#### N". Filter flexible-extract and metric
    are those of the task gsm8k."""
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    numbers = RegexFilter(regex_pattern=r"(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1)
    ignored = [",", r"\$", "(?s).*#### ", r"\.$"]

    def score() -> dict[str, Any]:
        ((found,),) = numbers.apply([[request["response"]]], [{}])
        right = exact_match_hf_evaluate([found], [request["target"]], ignored, ignore_case=True)
        micro = MICRO * bool(right["exact_match"])
        return {"micro": micro, "parts": {}, "reason": f"it answered {found}"[:80]}

    return score


def _ifeval(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """`doc`: a row of the dataset. The score is the strict one of the whole prompt."""
    from lm_eval.tasks.ifeval.utils import process_results

    def score() -> dict[str, Any]:
        found = process_results(request["doc"], [request["response"]])
        strict, loose = found["inst_level_strict_acc"], found["inst_level_loose_acc"]
        names = request["doc"]["instruction_id_list"]
        broken = [name for name, kept in zip(names, strict, strict=True) if not kept]
        parts = {
            "instructions": len(strict),
            "followed": sum(strict),
            "followed_loosely": sum(loose),
            "loose_micro": MICRO * bool(found["prompt_level_loose_acc"]),
        }
        micro = MICRO * bool(found["prompt_level_strict_acc"])
        reason = json.dumps(broken)[:200] if broken else ""
        return {"micro": micro, "parts": parts, "reason": reason}

    return score


SCORERS = {"aime": _aime, "gpqa": _gpqa, "gsm8k": _gsm8k, "ifeval": _ifeval}
EXAMPLES: dict[str, dict[str, Any]] = {
    "aime": {"response": "\\boxed{7}", "answers": ["7"]},
    "gpqa": {"response": "(A)", "choices": ["one", "two", "three", "four"], "letter": "(A)"},
    "gsm8k": {"response": "It is 7.", "target": "#### 7"},
}
