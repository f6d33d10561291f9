"""The longest tests start first: `make test-all` does not wait for one worker at the end."""

from __future__ import annotations

import pytest

LONGEST = (
    "test_e2e_smol.py", "test_docs.py", "test_e2e_liars.py", "test_e2e_faults.py",
    "test_e2e_docker.py",
)  # fmt: skip
"""Eleven minutes, two times seven, six, six, and five and a half."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> int:
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=order)
