"""The planner's arithmetic: held against transformers, and against published figures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prime_core.errors import UserError
from prime_engine.held import HeldModel
from prime_engine.sizing import (
    FIXED_BYTES,
    REPLAY_CHUNK,
    REPLAY_LOGITS,
    REPLAY_TOKENS,
    Cards,
    as_fields,
    card_set,
    plan_cards,
    plan_replay,
    read_shape,
    replay_sentence,
)
from prime_engine.vllm import _on_cards
from prime_trainer.planning import Allocations

MODELS = Path(__file__).parents[2] / "docs" / "examples" / "models"
GB = 10**9
SMALL = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 1001, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "llama", "num_key_value_heads": None, "head_dim": 24},
    {"model_type": "mistral", "head_dim": 32},
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "qwen3", "attention_bias": True},
    {"model_type": "qwen3", "head_dim": 16},
]


def test_parameters_are_those_that_transformers_creates(tmp_path: Path) -> None:
    shipped = [json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))]
    assert len(shipped) == 4
    path = tmp_path / "config.json"
    for config in [*shipped, *(SMALL | family for family in FAMILIES)]:
        path.write_text(json.dumps(config))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        created = sum(parameter.numel() for parameter in model.parameters())
        assert read_shape(path).parameters() == created, config


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("qwq-32b", 32_763_876_352),
        ("qwen2.5-7b", 7_615_616_512),
        ("llama-3.1-70b", 70_553_706_496),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameters_are_the_published_ones(model: str, parameters: int) -> None:
    assert read_shape(MODELS / f"{model}.json").parameters() == parameters


@pytest.mark.parametrize(
    ("model", "cards", "size", "ways", "engines", "weights_gb", "cache_tokens"),
    [
        # 5.0 GB of cache a card at 65,536 bytes a token
        ("qwq-32b", 4, 24, 4, 1, 16.4, 76_000),
        ("qwq-32b", 8, 24, 8, 1, 8.2, 400_000),
        ("qwq-32b", 8, 80, 2, 4, 32.8, 1_220_000),
        ("qwen2.5-7b", 1, 24, 1, 1, 15.2, 107_000),
        ("llama-3.1-70b", 8, 80, 4, 2, 35.3, 915_000),
        ("smollm2-135m", 2, 8, 1, 2, 0.27, 570_000),
    ],
)
def test_known_models_on_known_cards(
    model: str, cards: int, size: int, ways: int, engines: int, weights_gb: float, cache_tokens: int
) -> None:
    plan = plan_cards(read_shape(MODELS / f"{model}.json"), cards, size * GB)
    assert (plan.tensor_parallel, plan.engines, plan.idle_cards) == (ways, engines, 0)
    assert plan.weights_per_card == pytest.approx(weights_gb * GB, rel=0.01)
    assert plan.cache_tokens == pytest.approx(cache_tokens, rel=0.03)
    taken = plan.weights_per_card + plan.working_per_card + plan.cache_per_card
    assert taken <= plan.memory_share * size * GB
    assert plan.max_length <= plan.longest_row <= plan.cache_tokens // engines
    assert plan.rows_at_once * plan.max_length <= plan.cache_tokens


def test_a_32b_model_on_four_small_cards_holds_two_rows_of_32768_tokens() -> None:
    plan = plan_cards(read_shape(MODELS / "qwq-32b.json"), 4, 24 * GB)
    assert (plan.max_length, plan.rows_at_once, plan.longest_row) == (32_768, 2, 40_960)
    assert plan.shm_mb == 1024
    assert plan_cards(read_shape(MODELS / "qwen2.5-7b.json"), 1, 24 * GB).shm_mb == 64


def test_cards_that_no_engine_takes_are_idle() -> None:
    plan = plan_cards(read_shape(MODELS / "qwq-32b.json"), 7, 24 * GB)
    assert (plan.tensor_parallel, plan.engines, plan.idle_cards) == (4, 1, 3)


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-7b", "qwq-32b", "llama-3.1-70b"])
@pytest.mark.parametrize(("cards", "size"), [(1, 80), (2, 80), (4, 24), (4, 80), (7, 80), (8, 80)])
def test_the_planner_says_what_the_engine_takes_by_default(
    model: str, cards: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On all cards of one agent, and on the cards that the plan gives to each agent."""
    config = MODELS / f"{model}.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _card: SimpleNamespace(total_memory=size * GB)
    )

    def taken(visible: int, wanted: Cards) -> tuple[int, int]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        return _on_cards(tmp_path, wanted)

    try:
        plan = plan_cards(read_shape(config), cards, size * GB)
    except UserError:
        with pytest.raises(UserError):
            taken(cards, Cards())
        return
    assert taken(cards, Cards())[0] == plan.default_split
    assert taken(cards, Cards(plan.tensor_parallel)) == (plan.tensor_parallel, plan.longest_row)
    assert taken(plan.tensor_parallel, Cards()) == (plan.tensor_parallel, plan.longest_row)


def test_a_plan_of_several_engines_names_their_agents() -> None:
    def agents(cards: int, size: int) -> str:
        plan = plan_cards(read_shape(MODELS / "qwq-32b.json"), cards, size * GB)
        return str(dict(as_fields(plan))["agents"])

    assert agents(8, 80) == (
        "4, each with 2 cards as its gpus; without settings, one agent runs one engine on 8 cards"
    )
    assert agents(4, 24) == "1, without settings"


def test_key_value_heads_are_repeated_where_there_are_more_cards() -> None:
    shape = read_shape(MODELS / "qwen2.5-7b.json")  # 4 key-value heads
    assert shape.cache_bytes(14) == shape.cache_bytes(4) == shape.cache_bytes(1) // 4
    assert "4 key-value heads cannot be split over 14 cards" in shape.split_problem(14)
    assert shape.split_problem(4) == ""


@pytest.mark.parametrize(
    ("cards", "size", "ways", "words"),
    [
        (4, 24, 3, "its 40 attention heads cannot be split over 3 cards"),
        (2, 24, 4, "tensor-parallel size 4 needs more than 2 cards"),
        (2, 24, 0, "with tensor-parallel size 2 its weights take 32.8 GB of each card"),
        (3, 24, 0, "; its 40 attention heads cannot be split over 3 cards"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    cards: int, size: int, ways: int, words: str
) -> None:
    shape = read_shape(MODELS / "qwq-32b.json")
    with pytest.raises(UserError) as caught:
        plan_cards(shape, cards, size * GB, tensor_parallel=ways)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not a readable config.json"),
        ("[]", "describes a None model"),
        ('{"model_type": "mamba"}', "describes a 'mamba' model"),
        (json.dumps(SMALL | {"model_type": "llama", "vocab_size": "many"}), "vocab_size is 'many'"),
        (json.dumps(SMALL | {"model_type": "llama", "hidden_size": 0}), "hidden_size is 0"),
    ],
)
def test_a_config_without_sizes_is_refused(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=words):
        read_shape(tmp_path)


def test_sets_of_cards() -> None:
    assert card_set("4x24GB") == (4, 24 * GB)
    assert card_set("80GB") == (1, 80 * GB)
    assert card_set("2 x 24GiB") == (2, 24 << 30)
    for text in ("4", "0x24GB", "4x0GB", "4x24", "four"):
        with pytest.raises(UserError, match="names no cards"):
            card_set(text)


def _without_scores(query: torch.Tensor, *_: Any, attn_mask: Any = None, **__: Any) -> torch.Tensor:
    """Attention as a card's kernels allocate for it: the mask in the dtype of the states, and no
    scores."""
    if attn_mask is not None:
        attn_mask.to(query.dtype)
    return torch.empty_like(query)


@pytest.mark.parametrize("tokens", [REPLAY_TOKENS, 32_768])
@pytest.mark.parametrize("model", ["qwq-32b", "qwen2.5-7b"])
def test_a_replay_takes_what_was_planned_next_to_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, tokens: int
) -> None:
    """Counted with shapes only. Two layers, because they are computed one after the other."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", _without_scores)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)
    meta, config = torch.device("meta"), json.loads((MODELS / f"{model}.json").read_text())
    shallow = config | {"num_hidden_layers": 2, "max_window_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shallow))
    with meta:
        empty = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16
        )
    monkeypatch.setattr("prime_engine.held._load", lambda *_: (empty, {torch.bfloat16}))
    held, counted = HeldModel(tmp_path, [meta], None), Allocations()
    fits = tokens <= REPLAY_TOKENS
    with counted.counting(), torch.inference_mode():
        ids = torch.zeros((1, tokens), dtype=torch.int64, device=meta)
        chunk = tokens if fits else REPLAY_CHUNK
        parts = held.prefill(ids, torch.float32, chunk, cached=not fits)
        states = torch.cat(parts, dim=1)
        del parts
        head = held.head(torch.float32)
        assert head(states[0, : REPLAY_LOGITS // held.vocabulary]).dtype is torch.float32
    planned = read_shape(tmp_path / "config.json").replay_bytes(tokens) - FIXED_BYTES
    assert 0.8 * planned < counted.peak < planned


@pytest.mark.parametrize(
    ("model", "cards", "size", "policies"),
    [
        ("qwq-32b", 1, 48, 0), ("qwq-32b", 1, 80, 1), ("qwq-32b", 1, 141, 1),
        ("qwq-32b", 2, 80, 2), ("qwq-32b", 2, 48, 1), ("qwq-32b", 3, 24, 0),
        ("qwq-32b", 4, 24, 1), ("qwen2.5-7b", 1, 24, 1), ("qwen2.5-7b", 1, 16, 0),
    ],
)  # fmt: skip
def test_cards_that_verify_a_model(model: str, cards: int, size: int, policies: int) -> None:
    plan = plan_replay(read_shape(MODELS / f"{model}.json"), cards, size * GB)
    assert plan.policies == policies
    assert ("cannot" in replay_sentence(plan)) == (policies == 0)


def test_the_parts_of_a_model_are_all_its_parameters() -> None:
    for path in MODELS.glob("*.json"):
        shape = read_shape(path)
        assert sum(shape.parts()) == shape.parameters()
        assert len(shape.parts()) == shape.layers + 2
