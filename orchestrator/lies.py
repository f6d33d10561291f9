"""Wrong chunks that nodes say a relay sent them: counted, and shown to the operator.

It is a stranger's word. A relay may be slandered, and whoever fetches checks every chunk anyway, so
nothing follows from it here; a node counts once for each relay, and only relays that are announced
count.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from protocol.core.ids import Address

log = logging.getLogger(__name__)


class LiesReported:
    """Since this process began: which nodes named which relay. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by: dict[str, set[Address]] = {}

    def note(self, node: Address, named: Collection[str], announced: Collection[str]) -> None:
        """A node names liars; `announced` are all relays that count now, others are forgotten."""
        known = {url.rstrip("/"): url for url in announced}
        new = []
        with self._lock:
            self._by = {url: by for url, by in self._by.items() if url in announced}
            for url in {known[one] for one in named if one in known}:
                by = self._by.setdefault(url, set())
                if node not in by:
                    by.add(node)
                    new.append(url)
        for url in sorted(new):
            log.warning("node %s says that the relay %s sent it a wrong chunk", node, url)

    def counts(self) -> dict[str, int]:
        """Relay → how many nodes named it."""
        with self._lock:
            return {url: len(by) for url, by in self._by.items()}
