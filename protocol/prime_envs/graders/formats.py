"""Format-following: rules that a text must satisfy, each checked separately (after IFEval).

verification_info: `rules`, a list of {rule, …}. The answer is the text after the thinking. The
score is 1 if all rules are satisfied, else 0; the parts count them. A task whose rules an empty
text satisfies is rejected, because silence would be paid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from prime_core.errors import MalformedError
from prime_core.run import MICRO
from prime_envs.base import TaskScore
from prime_envs.graders.answers import final_section
from prime_envs.graders.base import Grader
from prime_envs.tasks import Task

MAX_RULES = 32
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_STOP = re.compile(r"[.!?]+")
Rule = Callable[[str, dict[str, Any]], bool]


def _words(text: str) -> int:
    return len(_WORD.findall(text))


def _sentences(text: str) -> int:
    """Counts runs of full stops (`.`, `!`, `?`) before whitespace or the end, with text before
    them. A single pass, because one regular expression takes hours on a long text without a full
    stop."""
    count = begin = 0
    for stop in _STOP.finditer(text):
        ends = text[stop.end() : stop.end() + 1]
        if (not ends or ends.isspace()) and text[begin : stop.start()].strip():
            count += 1
        begin = stop.end()
    return count


def _paragraphs(text: str) -> int:
    return sum(bool(part.strip()) for part in re.split(r"\n\s*\n", text))


def _between(count: int, options: dict[str, Any]) -> bool:
    least, most = options.get("least", 0), options.get("most")
    return bool(count >= least and (most is None or count <= most))


def _is_json(text: str, options: dict[str, Any]) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and set(options["keys"]) <= set(value)


def _occurrences(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word.lower())}(?!\w)", text.lower()))


def _bullets(text: str) -> int:
    return sum(line.lstrip().startswith(("- ", "* ", "• ")) for line in text.splitlines())


RULES: dict[str, tuple[dict[str, type], Rule]] = {
    "words": ({"least": int, "most": int}, lambda t, o: _between(_words(t), o)),
    "sentences": ({"least": int, "most": int}, lambda t, o: _between(_sentences(t), o)),
    "paragraphs": ({"least": int, "most": int}, lambda t, o: _between(_paragraphs(t), o)),
    "lines": (
        {"least": int, "most": int},
        lambda t, o: _between(sum(bool(x.strip()) for x in t.splitlines()), o),
    ),
    "bullets": ({"least": int, "most": int}, lambda t, o: _between(_bullets(t), o)),
    "includes": (
        {"word": str, "least": int, "most": int},
        lambda t, o: _between(_occurrences(t, o["word"]), {"least": 1, **o}),
    ),
    "excludes": ({"word": str}, lambda t, o: _occurrences(t, o["word"]) == 0),
    "starts_with": ({"text": str}, lambda t, o: t.startswith(o["text"])),
    "ends_with": ({"text": str}, lambda t, o: t.endswith(o["text"])),
    "no_commas": ({}, lambda t, o: "," not in t),
    "upper_case": ({}, lambda t, o: t.upper() == t and any(c.isalpha() for c in t)),
    "lower_case": ({}, lambda t, o: t.lower() == t and any(c.isalpha() for c in t)),
    "json": ({"keys": list}, _is_json),
}
"""Rule → (its options and their types, predicate for whether a text satisfies it)."""


class FormatFollowing(Grader):
    """See the module's docstring."""

    version = 1

    def require(self, task: Task) -> None:
        rules = task.verification_info.get("rules")
        if not isinstance(rules, list) or not 1 <= len(rules) <= MAX_RULES:
            raise MalformedError(f"{task.where}: verification_info.rules is not a list of rules")
        for rule in rules:
            self._require_rule(rule, task.where)
        if all(_keeps("", rule) for rule in rules):
            raise MalformedError(f"{task.where}: an empty answer keeps every rule")

    def _require_rule(self, rule: Any, where: str) -> None:
        name = rule.get("rule") if isinstance(rule, dict) else None
        if not isinstance(name, str) or name not in RULES:
            raise MalformedError(f"{where}: there is no rule {name!r}; known are {sorted(RULES)}")
        known, _ = RULES[name]
        for option, value in rule.items():
            if option != "rule" and (
                option not in known or type(value) is not known[option] or value == ""
            ):
                raise MalformedError(f"{where}: the rule {name!r} has no such option {option!r}")
        for option, kind in known.items():
            if kind is not int and option not in rule:
                raise MalformedError(f"{where}: the rule {name!r} needs {option!r}")
        if "least" in known and name != "includes" and not {"least", "most"} & set(rule):
            raise MalformedError(f"{where}: the rule {name!r} needs 'least' or 'most'")
        if name == "json" and not all(isinstance(key, str) for key in rule["keys"]):
            raise MalformedError(f"{where}: the rule 'json' needs 'keys' of text")

    def gold(self, task: Task) -> str | None:
        return task.gold_standard_solution

    def grade(self, task: Task, output_text: str) -> TaskScore:
        rules = task.verification_info["rules"]
        text = final_section(output_text).strip()
        broken = [rule["rule"] for rule in rules if not _keeps(text, rule)]
        parts = {"rules": len(rules), "kept": len(rules) - len(broken)}
        if broken:
            return TaskScore(0, f"breaks {', '.join(map(repr, broken))}", parts=parts)
        return TaskScore(MICRO, f"keeps all {len(rules)} rules", parts=parts)


def _keeps(text: str, rule: dict[str, Any]) -> bool:
    return RULES[rule["rule"]][1](text, rule)
