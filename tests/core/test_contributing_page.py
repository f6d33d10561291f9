"""CONTRIBUTING.md and docs/log.md cite commits of this history, with true counts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
LOG = (ROOT / "docs" / "log.md").read_text()
COMMIT = re.compile(r"\b[0-9a-f]{7}\b")
NO_SOURCE = re.compile(
    r"(tests|docs|snapshots|bench/results)/|protocol/prime_chain/abi/|contracts/storage-layout"
    r"|CHANGELOG\.md|constraints\.txt"
)


def git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def history() -> None:
    """Skips the tests in a tree without its commits: a source archive or a shallow clone."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs a git checkout with its full history")


def test_a_cited_commit_is_in_this_history() -> None:
    cited = set(COMMIT.findall(PAGE)) | set(COMMIT.findall(LOG))
    assert len(cited) > 5
    history = {line[:7] for line in git("rev-list", "HEAD").splitlines()}
    assert cited <= history


@pytest.mark.parametrize(("commit", "count"), re.findall(r"\| `(\w{7})`.*? \| (\d+) \|", PAGE))
def test_the_count_of_a_row_is_every_source_file_of_its_commit(commit: str, count: str) -> None:
    files = git("show", "--format=", "--name-only", commit).splitlines()
    assert len([file for file in files if not NO_SOURCE.match(file)]) == int(count)


def test_a_named_file_exists() -> None:
    names = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|sol))`", PAGE))
    assert len(names) > 10
    existing = [f"/{name}" for name in git("ls-files").splitlines()]
    assert not [name for name in names if not any(one.endswith(f"/{name}") for one in existing)]
