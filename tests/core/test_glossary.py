"""Names that docs/glossary.md retired stay retired, in every Python file."""

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
    assert {"Shelf", "_walk_in"} <= names
    word = re.compile(rf"\b({'|'.join(names)})\b")
    found = []
    for path in (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text()
        if not word.search(text):  # tokenizing every file would take 10 s
            continue
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        used = {one.string for one in tokens if one.type == tokenize.NAME} & names
        found += [f"{path.relative_to(ROOT)}: {', '.join(sorted(used))}"] * bool(used)
        if path.stem in names:
            found.append(str(path.relative_to(ROOT)))
    assert not found, f"see docs/glossary.md: {found}"
