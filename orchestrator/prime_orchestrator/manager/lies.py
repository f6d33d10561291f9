"""Counts reports by nodes that a relay sent them wrong chunks, for the operator.

The reports are unverified and may be slander, and readers check every chunk anyway, so they have no
consequences here. A node counts once per relay, and only currently announced relays count.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from prime_core.ids import Address

log = logging.getLogger(__name__)

MOST = 256
"""Number of relays whose counts are kept; beyond it, the one first reported is dropped."""


class LiesReported:
    """Records since process start which nodes reported which relay, for the last MOST relays,
    including nodes that have gone silent. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by: dict[str, set[Address]] = {}

    def note(self, node: Address, named: Collection[str], announced: Collection[str]) -> None:
        """Records a node's reports; `announced` are the relays that count now."""
        known = {url.rstrip("/"): url for url in announced}
        new = []
        with self._lock:
            for url in {known[one] for one in named if one in known}:
                by = self._by.setdefault(url, set())
                if node not in by:
                    by.add(node)
                    new.append(url)
            for url in list(self._by)[:-MOST]:
                del self._by[url]
        for url in sorted(new):
            log.warning("node %s says that the relay %s sent it a wrong chunk", node, url)

    def counts(self) -> dict[str, int]:
        """Returns how many nodes reported each relay."""
        with self._lock:
            return {url: len(by) for url, by in self._by.items()}
