"""The settling bench's epoch holds up: the auditor agrees with the root, and a claim is proven."""

from __future__ import annotations

import pytest

from bench import settling

pytestmark = [pytest.mark.postgres, pytest.mark.soak]


def test_an_epoch_is_settled_rebuilt_and_claimed() -> None:
    rows = {row.name: row for row in settling.run(quick=True, files=settling.A_ROOT + 100)}
    assert {name for name in rows if name.endswith("_s")} == {
        "settle_1100_s", "settle_1100_files_s", "rebuild_1100_s",
    }  # fmt: skip
    assert rows["claim_1100_ms"].value > 0
    assert all(row.value > 0 for name, row in rows.items() if name.endswith(("_mib", "_s")))
