"""Wrong chunks that nodes say a relay sent them: counted, and shown to the operator.

It is a stranger's word. A relay may be slandered, and whoever fetches checks every chunk anyway, so
nothing follows from it here; a node counts once for each relay, and only relays that are announced
when they are named count.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from prime_core.ids import Address

log = logging.getLogger(__name__)

MOST = 256
"""Relays whose counts are kept: for one more, the one that was named first goes."""


class LiesReported:
    """Since this process began: which nodes named which relay, those that fell silent included, of
    the last MOST that were named. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by: dict[str, set[Address]] = {}

    def note(self, node: Address, named: Collection[str], announced: Collection[str]) -> None:
        """A node names liars; `announced` are the relays that count now."""
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
        """Relay → how many nodes named it."""
        with self._lock:
            return {url: len(by) for url, by in self._by.items()}
