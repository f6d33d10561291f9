"""For tests that start a chain of their own: skipped, by name, where there is no anvil."""

from __future__ import annotations

import pytest

from devnet.chain import find_anvil
from prime_core.errors import UserError


def _anvil_is_here() -> bool:
    try:
        find_anvil()
    except UserError:
        return False
    return True


needs_anvil = pytest.mark.skipif(not _anvil_is_here(), reason="needs anvil: make setup")
