"""What docs/glossary.md retired stays retired: names in Python files, words in all prose."""

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = re.compile(r"(?<![`\w])(anew|beside|nobody|told|whatever|whoever)(?![`\w])", re.IGNORECASE)
"""Not in prose, unless quoted."""
PARTS = re.compile(r"(?:\b|_)(anew|beside|nobody|told|whatever|whoever)(?:_|\b)", re.IGNORECASE)
"""The same words as parts of names."""
PROSE = (
    *("*.md", "docs/**/*.md", "*/README.md", "protocol/**/*.md", "scripts/*", ".ci/*"),
    *("contracts/src/**/*.sol", "tests/contracts/**/*.sol", "tests/contracts/**/*.tree"),
)
RECORDS = {"CHANGELOG.md", "docs/performance.md"}
"""What was written at its time, or out of recorded results."""
FOLDERS = (
    *("protocol", "node", "validator", "orchestrator", "trainer"),
    *("devnet", "bench", "scripts", "tests"),
)


def retired() -> set[str]:
    page = (ROOT / "docs" / "glossary.md").read_text().split("| Was | Is |")[1]
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_no_retired_name_comes_back() -> None:
    names = retired()
    assert {"Shelf", "_walk_in", "FORM", "_lied", "Buried"} <= names
    word = re.compile(rf"\b({'|'.join(names)})\b")
    found = []
    for path in (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text()
        if not word.search(text) and not PARTS.search(text):  # tokenizing all would take 10 s
            continue
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        written = {one.string for one in tokens if one.type == tokenize.NAME}
        used = sorted(one for one in written if one in names or PARTS.search(one))
        found += [f"{path.relative_to(ROOT)}: {', '.join(sorted(used))}"] * bool(used)
        if path.stem in names:
            found.append(str(path.relative_to(ROOT)))
    assert not found, f"see docs/glossary.md: {found}"


def test_no_retired_word_is_in_prose() -> None:
    """Prose: comments and texts of Python files; documents, scripts and contracts as a whole."""
    found = []
    for pattern in PROSE:
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            if path.is_dir() or path.suffix == ".py" or name in RECORDS:
                continue
            lines = enumerate(path.read_text().splitlines(), start=1)
            found += [f"{name}:{number}" for number, line in lines if WORDS.search(line)]
    for path in (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text()
        if path == Path(__file__) or not WORDS.search(text):
            continue
        for one in tokenize.generate_tokens(io.StringIO(text).readline):
            if one.type in (tokenize.COMMENT, tokenize.STRING) and WORDS.search(one.string):
                found.append(f"{path.relative_to(ROOT)}:{one.start[0]}")
    assert not found, f"see docs/glossary.md, Words: {found}"
