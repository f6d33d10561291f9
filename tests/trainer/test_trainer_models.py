"""Any decoder of the usual kinds, adapters, recomputation: one gradient, one published form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_kit as kit
from safetensors.torch import load_file, save_file
from trainer_kit import block_causal_mask

from prime_core.errors import UserError
from prime_engine.tiny import character_tokenizer
from prime_trainer import attention
from prime_trainer.attention import packed_attention
from prime_trainer.config import ObjectiveSettings
from prime_trainer.context import Context
from prime_trainer.learner import backward
from prime_trainer.loading import empty_policy, fill_weights, load_policy
from prime_trainer.lora import add_adapters
from prime_trainer.model import Policy, shape_of
from prime_trainer.packing import collate
from prime_trainer.parallel import World, published_state
from prime_trainer.publish import export

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def folder_of(kind: str, folder: Path, **changes: object) -> Path:
    """A random model of a kind that people train."""
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def plain_logprobs(policy: Policy, row: kit.Rollout, temperature: float) -> torch.Tensor:
    """One sample alone, by the model's own forward with transformers' own attention."""
    tokens = torch.tensor([[*row.prompt_tokens, *row.output_tokens]])
    policy.lm.set_attn_implementation("eager")
    logits = policy.lm(input_ids=tokens).logits[0, len(row.prompt_tokens) - 1 : -1]
    policy.lm.set_attn_implementation("prime_packed")
    every = torch.log_softmax(logits.float() / temperature, -1)
    return every.gather(1, torch.tensor(row.output_tokens)[:, None])[:, 0]


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama"])
def test_a_packed_sample_is_as_likely_as_it_is_alone(kind: str, tmp_path: Path) -> None:
    policy = load_policy(folder_of(kind, tmp_path / kind), 0.7)
    rows = kit.rows(2, 4)
    zeros = [0.0] * len(rows)
    packed, _ = collate([[3, 5, 0], [1]], rows, zeros, zeros, torch.device("cpu"))
    with torch.no_grad():
        logprobs, _ = policy(packed)
        expected = [plain_logprobs(policy, rows[i], 0.7) for i in (3, 5, 0, 1)]
    torch.testing.assert_close(logprobs, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_attention_by_samples_is_the_masked_attention_of_whole_rows() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, 9, 8, dtype=torch.float64) for _ in range(2))
    sequences = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, -1], [3, 3, 3, 3, 3, -1, -1, -1, -1]])
    segments = ((0, 0, 3), (0, 3, 7), (0, 7, 8), (1, 0, 5))
    found, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, segments=segments, scaling=0.3
    )
    slow = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=block_causal_mask(sequences), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    inside = sequences >= 0
    torch.testing.assert_close(found[inside], slow[inside], rtol=1e-12, atol=1e-12)
    assert (found[~inside] == 0).all()
    (fast,) = torch.autograd.grad(found[inside].square().sum(), query, retain_graph=True)
    (plain,) = torch.autograd.grad(slow[inside].square().sum(), query)
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-12)


def _slow_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor,
    key_starts: torch.Tensor, longest: int, most_keys: int, *, scale: float | None,
    window_size: tuple[int, int], enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """torch's varlen_attn, which runs on GPUs only, by its documentation."""
    assert (starts.diff().max(), key_starts.diff().max()) == (longest, most_keys)
    assert (int(starts[-1]), int(key_starts[-1])) == (len(query), len(key))
    sample, of_key = (
        torch.bucketize(torch.arange(len(part)), bounds, right=True)
        for part, bounds in ((query, starts), (key, key_starts))
    )
    # Places from the ends of samples: the last query attends to the last key.
    place = torch.arange(len(query)) - starts[sample]
    key_place = torch.arange(len(key)) - key_starts[of_key]
    back = place[:, None] - key_place[None, :]
    mask = (back >= 0) & (sample[:, None] == of_key[None, :])
    if window_size[0] >= 0:
        mask &= back <= window_size[0]
    assert window_size[1] == 0
    heads = (part.transpose(0, 1) for part in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    ).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 2])
def test_one_kernel_for_all_samples_is_given_their_bounds(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", _slow_varlen)
    monkeypatch.setattr(attention, "_PADDING", 3)
    query = torch.randn(2, 4, 12, 8, dtype=torch.float64)
    key, value = (torch.randn(2, 2, 12, 8, dtype=torch.float64) for _ in range(2))
    segments = ((0, 0, 3), (0, 3, 7), (1, 0, 2))
    slow, _ = packed_attention(
        torch.nn.Module(), query, key, value, None,
        segments=segments, scaling=0.3, sliding_window=window,
    )  # fmt: skip
    ranks = [Context(rank, 2).pieces(12) for rank in (0, 1)]
    for pieces in (((0, 12),), *ranks):
        own = torch.cat([torch.arange(start, end) for start, end in pieces])
        rows = attention._rows(segments, 2, 12, pieces)
        found = attention._in_one_kernel(query[:, :, own], key, value, rows, 0.3, window)
        assert found.isfinite().all()
        for row, start, end in segments:
            inside = (start <= own) & (own < end)
            torch.testing.assert_close(found[row, inside], slow[row, own[inside]])


def test_a_sliding_window_forgets_what_is_too_far_back() -> None:
    query, key, value = (torch.randn(1, 1, 6, 4) for _ in range(3))
    found, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, segments=((0, 0, 6),), sliding_window=2
    )
    place = torch.arange(6)
    apart = place[:, None] - place[None, :]
    mask = (apart >= 0) & (apart < 2)
    slow = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(found, slow.transpose(1, 2))


@pytest.mark.parametrize("change", ["recompute", "chunks"])
def test_recomputed_activations_and_logits_give_the_same_gradient(
    model: Path, tmp_path: Path, world: World, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = kit.rows()
    plain = kit.learner(model, tmp_path, world)
    backward(plain, rows)
    if change == "chunks":
        monkeypatch.setattr("prime_trainer.model.CHUNK_LOGITS", 64 * 5)
    other = kit.learner(model, tmp_path, world, recompute=change == "recompute")
    backward(other, rows)
    found = kit.relative_difference(kit.gradients(other.policy), kit.gradients(plain.policy))
    assert found < 1e-6


def test_computing_in_bf16_reduces_in_fp32_into_fp32_masters(
    model: Path, tmp_path: Path, world: World
) -> None:
    rows = kit.rows()
    wide, narrow = (kit.learner(model, tmp_path, world, bf16=bf16) for bf16 in (False, True))
    backward(wide, rows)
    backward(narrow, rows)
    found = kit.gradients(narrow.policy)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert {p.dtype for p in narrow.policy.parameters()} == {torch.float32}
    assert 0 < kit.relative_difference(found, kit.gradients(wide.policy)) < 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_a_wide_head_gives_the_logits_of_the_published_weights_without_rounding_them(
    tmp_path: Path, tied: bool
) -> None:
    folder = folder_of("Qwen3", tmp_path / "model", tie_word_embeddings=tied)
    policy = load_policy(folder, 1.0, dtype=torch.bfloat16)
    with torch.no_grad():
        policy.lm.get_output_embeddings().weight.mul_(64)  # logits as large as a trained model's
    rows, zeros = kit.rows(), [0.0] * 12
    packed, _ = collate([[0, 1, 2]], rows, zeros, zeros, torch.device("cpu"))
    states: list[torch.Tensor] = []
    policy.decoder.register_forward_hook(
        lambda *reported: states.append(reported[2].last_hidden_state)
    )
    off = []
    with torch.no_grad():
        for policy.head_fp32 in (False, True):
            found = policy(packed)[0]
            hidden = states[-1].reshape(-1, states[-1].shape[-1])[packed.predict].double()
            logits = hidden @ policy.lm.get_output_embeddings().weight.double().T
            exact = torch.log_softmax(logits, -1).gather(1, packed.targets[:, None])[:, 0]
            off.append(float((found - exact).abs().max()))
    assert off[0] > 1e-2
    assert off[1] < 1e-4


@pytest.mark.parametrize("rank", [0, 4])
def test_a_wide_head_is_trained_in_chunks_as_whole_and_in_wide_numbers_changes_nothing(
    model: Path, tmp_path: Path, world: World, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = kit.rows()
    wanted = {"objective": ObjectiveSettings(kl=0.001), "lora_rank": rank}
    whole = kit.learner(model, tmp_path, world, bf16=True, head_fp32=True, **wanted)
    assert whole.reference is not None
    assert whole.reference.head_fp32
    backward(whole, rows)
    gradients = trained_gradients(whole.policy)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    monkeypatch.setattr("prime_trainer.model.CHUNK_LOGITS", 64 * 5)
    chunked = kit.learner(model, tmp_path, world, bf16=True, head_fp32=True, **wanted)
    backward(chunked, rows)
    # the hidden states' gradients are bf16 for any head
    assert kit.relative_difference(trained_gradients(chunked.policy), gradients) < 1e-2
    plain, asked = (
        kit.learner(model, tmp_path, world, head_fp32=wide, **wanted) for wide in (False, True)
    )
    backward(plain, rows)
    backward(asked, rows)
    one, two = trained_gradients(plain.policy), trained_gradients(asked.policy)
    assert all(torch.equal(one[name], two[name]) for name in one)


def trained_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Every whole gradient of what is trained."""
    frozen = [p for p in policy.parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.grad = torch.zeros_like(parameter)
    return kit.gradients(policy)


def test_only_adapters_are_trained_and_what_is_published_holds_them(
    model: Path, tmp_path: Path, world: World
) -> None:
    learner = kit.learner(model, tmp_path, world, lora_rank=4)
    trained = {name for name, p in learner.policy.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    rows = kit.rows()
    for _ in range(3):
        backward(learner, rows)
        learner.optimizer.step()
        learner.optimizer.zero_grad()
    export(published_state(learner.policy, world), model, tmp_path / "out")
    merged = load_policy(tmp_path / "out", 1.0)
    base = load_policy(model, 1.0)
    zeros = [0.0] * len(rows)
    packed, _ = collate([[0, 1, 2]], rows, zeros, zeros, torch.device("cpu"))
    with torch.no_grad():
        adapted, plain, published = (m(packed)[0] for m in (learner.policy, base, merged))
    assert (adapted - plain).abs().max() > 1e-3  # three steps did something
    # bf16 rounding of the weights is all that is between them
    assert (published - adapted).abs().max() < 0.3 * (adapted - plain).abs().max()
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(
        load_file(model / "model.safetensors")
    )


def adapted_policy(model: Path, dtype: torch.dtype) -> Policy:
    policy = add_adapters(empty_policy(model, 1.0, dtype), rank=4, alpha=8)
    return fill_weights(policy, model, torch.device("cpu"))


def test_merged_adapters_are_the_very_weights_in_wide_numbers(model: Path) -> None:
    from prime_trainer.lora import merged

    policy = adapted_policy(model, torch.float64)
    torch.manual_seed(3)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    plain = load_policy(model, 1.0, dtype=torch.float64)
    plain.lm.load_state_dict(merged(policy.lm.state_dict(), policy.lm))
    rows = kit.rows()
    zeros = [0.0] * len(rows)
    packed, _ = collate([[0, 1]], rows, zeros, zeros, torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(plain(packed)[0], policy(packed)[0], rtol=1e-5, atol=1e-6)


def test_adapters_begin_alike_at_every_start(model: Path) -> None:
    one, two = (adapted_policy(model, torch.float32) for _ in range(2))
    a, b = one.lm.state_dict(), two.lm.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    factors = [a[name] for name in a if name.endswith("lora_A.default.weight")]
    assert not torch.equal(factors[0], factors[-1])
    assert all(factor.any() for factor in factors)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("tokenizer", "no tokenizer"),
        ("weights", "no safetensors weights"),
        ("config", "no config.json"),
        ("dropout", "attention_dropout"),
        ("kind", "cannot be loaded"),
        ("layers", "linear_attention layers"),
        ("shape", "config.json asks for"),
        ("layer", "has no weight model.layers.2"),
    ],
)
def test_a_model_folder_that_cannot_serve_is_named_with_what_it_lacks(
    model: Path, tmp_path: Path, spoil: str, words: str
) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    if spoil == "tokenizer":
        (tmp_path / "tokenizer.json").unlink()
    elif spoil == "weights":
        (tmp_path / "model.safetensors").unlink()
    elif spoil == "config":
        (tmp_path / "config.json").unlink()
    elif spoil == "dropout":
        (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    elif spoil == "shape":
        wider = {"intermediate_size": 2 * config["intermediate_size"]}
        (tmp_path / "config.json").write_text(json.dumps(config | wider))
    elif spoil == "layers":
        mixed = {"layer_types": ["linear_attention", "full_attention"]}
        (tmp_path / "config.json").write_text(json.dumps(config | mixed))
    elif spoil == "layer":
        deeper = {"num_hidden_layers": config["num_hidden_layers"] + 1, "layer_types": None}
        (tmp_path / "config.json").write_text(json.dumps(config | deeper))
    else:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-kind"}))
    with pytest.raises(UserError, match=words):
        load_policy(tmp_path, 1.0)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("Mixtral", {"num_local_experts": 4}),
    ],
)
def test_a_mixture_of_experts_is_refused_by_name(
    kind: str, changes: dict[str, int], tmp_path: Path
) -> None:
    folder = folder_of(kind, tmp_path / "model", **changes)
    words = rf"is a mixture of experts \({'qwen3_moe' if kind == 'Qwen3Moe' else 'mixtral'}\)"
    with pytest.raises(UserError, match=words):
        empty_policy(folder, 1.0)


def test_a_models_costs_come_from_its_configuration(model: Path) -> None:
    policy = load_policy(model, 1.0)
    shape = shape_of(policy.lm.config)
    layers = sum(
        p.numel() for n, p in policy.lm.named_parameters() if ".layers." in n and p.dim() == 2
    )
    assert shape.layer_parameters == layers
    assert shape.head_parameters == policy.lm.lm_head.weight.numel()
    # 6 a parameter and token, and nothing for tokens that are only read
    one = shape.training_flops([10], [4])
    assert one == 6 * (10 * layers + 4 * shape.head_parameters) + 6 * shape.attention_width * 100


def test_a_truncated_weights_file_is_one_sentence(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file({"nothing": torch.zeros(1)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:5])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_policy(tmp_path, 1.0)
