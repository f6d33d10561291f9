"""docs/exit-codes.md and the tree of errors say the same."""

from __future__ import annotations

import re
from pathlib import Path

import prime_chain.errors
import prime_core.errors as tree
from prime_core.errors import PrimeError

PAGE = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (?:`(\w+)`|–) \| (.+) \|$", PAGE, re.M)


def kinds(error: type[PrimeError]) -> set[type[PrimeError]]:
    """The error and all that derive from it."""
    return {error}.union(*(kinds(one) for one in error.__subclasses__()))


def test_every_error_of_the_tree_is_in_the_page_with_its_code() -> None:
    reported = {name: int(code) for code, name, _ in ROWS if name}
    own = {kind for kind in kinds(PrimeError) if kind.__module__ == tree.__name__}
    assert reported == {kind.__name__: kind.exit_code for kind in own}
    assert len(own) == 10


def test_errors_of_the_rooms_end_with_a_code_of_the_page() -> None:
    reported = {int(code) for code, _, _ in ROWS}
    assert prime_chain.errors.ChainRevertedError in kinds(PrimeError)
    for kind in kinds(PrimeError):
        assert kind.exit_code in reported, kind


def test_no_exit_code_has_two_meanings() -> None:
    unnamed = [int(code) for code, name, _ in ROWS if not name]
    assert unnamed == [0, 2, 130]
    assert not set(unnamed) & {kind.exit_code for kind in kinds(PrimeError)}
