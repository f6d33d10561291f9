"""The committed checkpoint is what the script says, and leaves something to learn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="pip install 'prime-open[trainer]'")

from devnet import model as demo  # noqa: E402
from devnet.plan import Plan, run_definition  # noqa: E402
from prime_core.ids import ZERO_DIGEST  # noqa: E402
from prime_trainer.evaluate import evaluate  # noqa: E402
from prime_trainer.loading import load_policy  # noqa: E402


def test_the_committed_checkpoint_is_small_and_of_the_scripts_shape(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert demo.main(["--out", str(folder)]) == 0
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10 << 20
    committed = load_policy(folder, 1.0).lm
    fresh = demo.fresh_model(demo.build_tokenizer())
    shapes = {name: tensor.shape for name, tensor in fresh.state_dict().items()}
    assert {name: tensor.shape for name, tensor in committed.state_dict().items()} == shapes
    assert 500_000 <= sum(p.numel() for p in fresh.parameters()) <= 3_000_000
    assert demo.main(["--out", str(folder)]) == 64  # nothing is overwritten


def test_it_reverses_words_it_never_saw_but_misses_the_length() -> None:
    run = run_definition(Plan(root=Path()), ZERO_DIGEST)
    found = evaluate(demo.COMMITTED, run, problems=256, seed=0)
    assert found.task.mean > 0.9
    assert 0.3 < found.reward.mean < 0.5
    assert evaluate(demo.COMMITTED, run, problems=256, seed=0) == found
    assert evaluate(demo.COMMITTED, run, problems=256, seed=1) != found


def test_no_word_of_the_warm_start_is_held_out_by_the_run() -> None:
    run = run_definition(Plan(root=Path()), ZERO_DIGEST)
    assert len(demo.training_words()) <= run.environment.train_size


def test_the_tokenizer_gives_back_what_it_was_given() -> None:
    tokenizer = demo.build_tokenizer()
    text = "".join(random.Random(0).choices(demo.CHARACTERS, k=200))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
