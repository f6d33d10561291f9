import json
from pathlib import Path

WANTED = {"the": 2, "sea": 2, "is": 3, "wide": 1, "deep": 2, "and": 1, "my": 1, "sleep": 1}


def test_the_counts_are_written() -> None:
    assert Path("/app/counts.json").is_file()


def test_every_word_is_counted() -> None:
    assert json.loads(Path("/app/counts.json").read_text()) == WANTED
