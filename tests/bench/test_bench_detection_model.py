"""The detection bench on a Hugging Face folder given by path: another family, its own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench import detection, detection_attacks, detection_units, kin, textmodel
from bench.__main__ import main

WORDS = "the seed of a lease says what is drawn, and who looks at it sees whether it was. "
SOME = (
    *("t09", "topp95", "int4", "old10_1e4", "small_model", "half_small"),
    *("early_end", "padded", "paraphrased", "forged_modh", "random10_1e4"),
)


def _llama(folder: Path) -> Path:
    """A checkpoint with a byte-level tokenizer of 300 pieces and two end tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [WORDS],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>", "<stop>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=304, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=320,
        bos_token_id=0, eos_token_id=[1, 2], pad_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Few attacks, short rows, hardly any training: the same path through everything."""
    monkeypatch.setattr(kin, "KIN", tmp_path / "kin")
    monkeypatch.setattr(kin, "SETTLING", 1)
    monkeypatch.setattr(textmodel, "corpus", lambda: textmodel.END.join([WORDS * 30] * 2))
    monkeypatch.setattr(textmodel, "BATCH", 2)
    monkeypatch.setattr(detection_attacks, "smaller", lambda folder: kin.smaller(folder, 2))
    for name in [*detection_attacks.ATTACKS]:
        if name not in SOME:
            monkeypatch.delitem(detection_attacks.ATTACKS, name)
    monkeypatch.setattr(detection_units, "OUTPUT_TOKENS", 40)
    monkeypatch.setattr(detection_units, "FOLDER", tmp_path / "kept")
    monkeypatch.setattr(detection_units.Units.__init__, "__defaults__", (tmp_path / "kept",))
    monkeypatch.setattr("bench.honest_files.VLLM_PYTHON", tmp_path / "none")
    monkeypatch.setattr(detection, "QUICK_SEQUENCES", 32)
    monkeypatch.setattr(detection, "cost_rows", lambda *_: [("validate_ratio_b64", 6.0, "×", 5)])
    return _llama(tmp_path / "llama")


@pytest.mark.soak
def test_every_kind_of_attack_runs_on_a_folder_given_by_path(
    small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["detection", "--quick", "--model", str(small_run), "--device", "cpu"])
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1] for line in said.splitlines()}
    for name in SOME:
        assert {f"caught_{name}", f"caught_{name}_as_vllm", f"tokens_{name}"} <= rows.keys()
    assert rows["honest_rejected"] == "0"
    assert {rows[f"caught_{name}"] for name in ("padded", "forged_modh", "early_end")} == {"1"}


def test_a_folder_without_a_model_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for made in (False, True):  # not there; there, and no model
        if made:
            (tmp_path / "config.json").write_text("{}")
        assert main(["detection", "--quick", "--model", str(tmp_path)]) == 69
        assert "no model" in capsys.readouterr().err.splitlines()[0]


def test_costs_are_stated_by_wall_time_and_for_files_that_are_replayed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "COST_TOKENS", 12)
    clock = iter(range(10_000))
    monkeypatch.setattr(detection, "timed", _counted(clock))
    rows = {row[0]: row for row in detection.cost_rows(_llama(tmp_path / "llama"), "cpu", 2)}
    assert {name: row[3] for name, row in rows.items() if row[3]} == {
        "validate_ratio_b64": 5,
        "validate_ratio_b1": 20,
    }
    assert {"validate_ratio_b64_bf16", "validate_cpu_ratio_b1", "validate_rows_s_bf16"} <= {*rows}
    # Turn n: together, few, validated take 3n, 3n + 1, 3n + 2 seconds by this clock.
    assert rows["validate_ratio_b64"][1] == 1.5 / 3.5
    assert rows["validate_ratio_b1"][1] == 2.5 * 32 / 3.5
    assert rows["validate_cpu_ratio_b64"][1] == 3.0 / 7.0
    assert rows["drawn_flops_bfloat16"][1] == pytest.approx(0.5, abs=0.1)


def _counted(clock: Iterator[int]) -> Callable[[Callable[[], object]], detection.Seconds]:
    def timed(act: Callable[[], object]) -> detection.Seconds:
        act()
        now = next(clock)
        return detection.Seconds(now, 2 * now)

    return timed
