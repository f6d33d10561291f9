"""Names of the tests' modules: pytest imports them by their file name alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def test_no_two_modules_of_the_tests_share_a_name() -> None:
    names = Counter(path.stem for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, files in names.items() if files > 1] == []
