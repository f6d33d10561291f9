"""What an audit makes of policies and published objects that are not as they should be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_core.encoding import sha256
from prime_core.errors import MalformedError, UnavailableError, UntrustedError
from prime_core.ids import Digest
from prime_node.audit import _values
from prime_verify.engines import FetchedEngines


def test_a_policy_that_cannot_be_fetched_is_no_judgement(tmp_path: Path) -> None:
    def ensure(version: int, digest: Digest) -> None:
        raise UntrustedError("it is published as another than the lease names")

    engines = FetchedEngines(tmp_path, ensure)
    with pytest.raises(UnavailableError, match="policy 3 cannot be fetched: it is published as"):
        engines.engine(3, sha256(b"policy"))


@pytest.mark.parametrize("data", [b"", b"<html>", b"\xff", b"[" * 10_000, b'{"a": 1} more'])
def test_a_published_object_that_is_not_json_is_malformed(data: bytes) -> None:
    """Anyone may publish evidence."""
    library: Any = SimpleNamespace(object=lambda name, limit: data)
    with pytest.raises(MalformedError, match="is not JSON"):
        _values(library, sha256(data))
