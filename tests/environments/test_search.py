"""The tool search-1: the same bytes in every process, bounded, over the pinned corpus only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_core.errors import MalformedError, UntrustedError, UserError
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.run import Conversation, Corpus
from prime_envs import search, sources, tools
from prime_envs.search import HIT_BYTES, HITS, NOTHING, SearchIndex
from prime_envs.sources import file_digest
from prime_verify.calibrate import synthetic_run

TOWNS = Path(__file__).parents[2] / "docs" / "examples" / "towns-corpus.jsonl"


def searching(path: Path, digest: Digest | None = None) -> Conversation:
    corpus = Corpus(sha256=digest or file_digest(path), path=str(path))
    return Conversation(turns=4, tools=("search-1", "calculator-1"), corpus=corpus)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(query: str, conversation: Conversation) -> str:
    index = tools.load_tools(conversation)
    found = tools.answer([f"I look: <search>{query}</search>"], conversation, index)
    assert found is not None
    assert found.exact
    return found.text


def test_a_search_finds_the_document_that_answers() -> None:
    found = asked("library of Sunwick", searching(TOWNS))
    hits = found.split("\n\n")
    assert len(hits) == HITS
    title, text = hits[0].split("\n")
    number, _, town = title.partition(" ")
    assert town == "Sunwick"
    row = json.loads(TOWNS.read_text().splitlines()[int(number.strip("[]")) - 1])
    assert (row["title"], row["text"]) == (town, text)
    assert asked("zebra", searching(TOWNS)) == asked("", searching(TOWNS)) == NOTHING


@pytest.mark.slow
def test_every_process_answers_with_the_same_bytes() -> None:
    """Another hash seed gives the library another order of its vocabulary."""
    queries = ["harbor bridge built", "MILL of marby 1700", "the the of", "lighthouse"]
    program = (
        "import json, sys; from prime_core.run import Corpus; from prime_envs.search import *\n"
        "index = load_index(Corpus.model_validate_json(sys.argv[1]))\n"
        "print(json.dumps([index.search(query) for query in json.loads(sys.argv[2])]))"
    )
    corpus = searching(TOWNS).corpus
    assert corpus is not None
    said = {
        subprocess.run(
            [sys.executable, "-c", program, corpus.model_dump_json(), json.dumps(queries)],
            env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    index = search.load_index(corpus)
    assert said == {json.dumps([index.search(query) for query in queries]) + "\n"}


def test_equal_scores_go_by_number() -> None:
    index = SearchIndex([("", "a b"), ("", "c c d"), ("", "a b"), ("", "a c"), ("", "a b")])
    assert index.search("b").split("\n")[::3] == ["[1]", "[3]", "[5]"]
    assert index.search("C").split("\n")[::3] == ["[2]", "[4]"]


def test_words_are_split_alike_by_every_unicode_table() -> None:
    index = SearchIndex([("", "Ärger über ﬁnanzen"), ("", "ärger")])
    assert index.search("ärger").startswith("[2]")
    assert index.search("Ärger").startswith("[1]")


def test_a_result_is_bounded() -> None:
    index = SearchIndex([("é" * 5000, "é " * 100_000)] * 9)
    found = index.search(("é " * 100_000) + "é" * 5000)
    assert len(found.encode()) < HITS * (HIT_BYTES + 300)
    assert index.search("unknown " * search.MAX_WORDS + "é") == NOTHING, "later words do not count"


def test_a_corpus_of_another_digest_is_refused_in_one_sentence() -> None:
    with pytest.raises(UntrustedError) as caught:
        tools.load_tools(searching(TOWNS, ZERO_DIGEST))
    assert str(caught.value) == (
        f"{TOWNS} has digest {file_digest(TOWNS)}, but the run pins {ZERO_DIGEST}"
    )


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"title": "a"}, "row 2 is not a document"),
        ({"text": "…!?".replace("…", "")}, "row 2 is not a document"),
        ({"text": 7}, "row 2 is not a document"),
        (["a"], "row 2 is not a document"),
        ({"text": "a", "title": 7}, "row 2 is not a document"),
        ({"text": "half \ud800"}, "row 2"),
    ],
)
def test_a_bad_document_is_named(tmp_path: Path, row: Any, problem: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"text": "good"}, row)
    with pytest.raises(MalformedError, match=rf"bad\.jsonl {problem}"):
        tools.load_tools(searching(path))


def test_tool_and_corpus_go_together() -> None:
    corpus = searching(TOWNS).corpus
    for tool, given in (("search-1", None), ("calculator-1", corpus)):
        with pytest.raises(UserError, match="go together"):
            tools.load_tools(Conversation(turns=2, tools=(tool,), corpus=given))


def test_another_version_of_the_library_is_refused_by_name(monkeypatch: Any) -> None:
    monkeypatch.setattr(search, "BM25S", "0.0.1")
    with pytest.raises(UserError, match=r"needs bm25s 0\.0\.1; 0\.3\.16 is"):
        tools.load_tools(searching(TOWNS))


def test_an_agent_brings_the_corpus_to_a_worker_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "corpus.jsonl", {"text": "the answer"})
    run = synthetic_run(64).model_copy(
        update={"conversation": searching(path), "schema_version": 3}
    )
    folder = tmp_path / "policies" / "datasets"
    sources.bring_files(run, folder)
    path.unlink()  # the container does not see it
    monkeypatch.setenv(sources.VARIABLE, str(folder))
    assert run.conversation is not None
    assert asked("answer", run.conversation) == "[1]\nthe answer"
