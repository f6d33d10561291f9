"""Search over the corpus that a run pins by digest: the tool search-1.

A corpus is a JSONL or Parquet file with one document per row: `text` and, optionally, `title`.
BM25 scores come from bm25s in one pinned version. They are bit-stable: words are split by ASCII
rules, which no Unicode table changes; terms are added in the order of the query; every operation
is one that IEEE 754 defines, except the logarithm, which is rounded to float32. Equal scores are
ordered by document number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prime_core.errors import MalformedError, UserError
from prime_core.run import Corpus
from prime_envs.rows import Bounds, read_rows
from prime_envs.sources import locate
from prime_envs.tasks import require_text

BM25S = "0.3.16"
BOUNDS = Bounds(file_bytes=64 << 20, unpacked_bytes=128 << 20, line_bytes=1 << 20, rows=200_000)
MAX_WORDS = 64
"""Words of a query that count."""
HITS = 3
HIT_BYTES = 1000
"""Maximum UTF-8 length of a document's text in a result."""
TITLE_BYTES = 200
NOTHING = "nothing found"
_WORD = re.compile(r"[0-9a-z\x80-\U0010ffff]+")
_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


class SearchIndex:
    """BM25 over documents, given as pairs of title and text. Every text contains a word."""

    def __init__(self, documents: Sequence[tuple[str, str]]) -> None:
        import bm25s

        self._documents = list(documents)
        # numba, if installed, would compile other code.
        self._index: Any = bm25s.BM25(
            k1=1.5, b=0.75, method="lucene", dtype="float32",
            backend="numpy", csc_backend="numpy", auto_compile=False,
        )  # fmt: skip
        words = [_words(f"{title} {text}") for title, text in self._documents]
        self._index.index(words, show_progress=False)

    def search(self, query: str) -> str:
        """The best documents for the query, at most HITS, each with its number, title and the
        beginning of its text."""
        known = self._index.get_tokens_ids(_words(query)[:MAX_WORDS])
        if not known:
            return NOTHING
        scores = self._index.get_scores_from_ids(known)
        best = (-scores).argsort(kind="stable")[:HITS]
        return "\n\n".join(self._shown(int(number)) for number in best if scores[number] > 0)

    def _shown(self, number: int) -> str:
        title, text = self._documents[number]
        head = f"[{number + 1}] {_cut(title, TITLE_BYTES)}".rstrip()
        return f"{head}\n{_cut(text, HIT_BYTES)}"


def load_index(corpus: Corpus) -> SearchIndex:
    """Finds the corpus, as a dataset is found (sources.py), and builds its index.

    Raises UserError (no file, no bm25s), UntrustedError (another digest), UnavailableError (cannot
    be fetched), MalformedError naming file and row.
    """
    _require_bm25s()
    path = locate(corpus.sha256, path=corpus.path, url=corpus.url)
    documents = [_document(row, where) for where, row in read_rows(path, BOUNDS)]
    if not documents:
        raise MalformedError(f"{path.name} holds no document")
    return SearchIndex(documents)


def _require_bm25s() -> None:
    try:
        found = version("bm25s")
    except PackageNotFoundError:
        found = None
    if found != BM25S:
        raise UserError(
            f"the tool search-1 needs bm25s {BM25S}; {found or 'none'} is installed",
            hint="pip install 'prime-open[search-tool]'",
        )


def _document(row: Any, where: str) -> tuple[str, str]:
    title, text = (row.get("title") or "", row.get("text")) if isinstance(row, dict) else ("", None)
    if not isinstance(title, str) or not isinstance(text, str) or not _words(text):
        raise MalformedError(f"{where} is not a document: it needs a `text` with words in it")
    require_text([title, text], where)
    return " ".join(title.split()), text.strip()


def _words(text: str) -> list[str]:
    """The words of a text: runs of ASCII letters and digits and of all other characters beyond
    ASCII. Only ASCII is put in lower case."""
    return _WORD.findall(text.translate(_LOWER))


def _cut(text: str, most: int) -> str:
    return text.encode()[:most].decode(errors="ignore")
