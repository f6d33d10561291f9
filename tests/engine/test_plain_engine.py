"""The plain engine: rows do not depend on their batch, and replay finds what generation did."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_core.errors import MalformedError, UnavailableError
from prime_engine import plain
from prime_engine.base import Generation, GenerationRequest, ReplayRequest
from prime_engine.held import HeldModel
from prime_engine.plain import PlainEngine
from prime_engine.variants import fake_quantize, quantizer
from prime_verify.proofs.sampling_torch import gumbel

PROMPTS = ("06|tate>", "02|ab>", "14|longerword>", ">")


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> PlainEngine:
    return PlainEngine(tiny_folder, noise=gumbel)


def _requests(engine: PlainEngine, count: int = 16, limit: int = 20) -> list[GenerationRequest]:
    prompts = [tuple(engine.tokenizer.encode(p, add_special_tokens=False)) for p in PROMPTS]
    return [
        GenerationRequest(prompts[i % 4], limit + i % 3, i * 104729 - 7919) for i in range(count)
    ]


def _replay(
    engine: PlainEngine, requests: list[GenerationRequest], made: list[Generation], t: float = 1.0
) -> list:
    return engine.replay(
        [
            ReplayRequest(request.prompt_tokens, row.output_tokens, request.noise_seed or 0)
            for request, row in zip(requests, made, strict=True)
        ],
        t,
    )


def test_generation_is_the_textbook_loop_without_cache_or_padding(engine: PlainEngine) -> None:
    requests = _requests(engine, 8)
    for request, row in zip(requests, engine.generate(requests, 0.8), strict=True):
        tokens = list(request.prompt_tokens)
        for position, token in enumerate(row.output_tokens):
            with torch.inference_mode():
                out = engine.model(torch.tensor([tokens]), output_hidden_states=True)
            scaled = out.logits[0, -1] / 0.8
            seed, last = torch.tensor([request.noise_seed]), torch.tensor([len(tokens) - 1])
            noise = gumbel(seed, last, engine.vocabulary)
            assert int((scaled + noise[0]).argmax()) == token
            logprob = float(scaled.log_softmax(0)[token])
            assert row.logprobs[position] == pytest.approx(logprob, abs=1e-4)
            state = out.hidden_states[-1][0, -1].to(torch.bfloat16)
            bits = torch.from_numpy(row.states[position].view(np.int16).copy())
            assert torch.allclose(bits.view(torch.bfloat16).float(), state.float(), rtol=0.02)
            tokens.append(token)


@pytest.mark.parametrize("batch_rows", [1, 5, 64])
def test_rows_do_not_depend_on_their_batch(
    engine: PlainEngine, tiny_folder: Path, batch_rows: int
) -> None:
    requests = _requests(engine)
    other = PlainEngine(tiny_folder, noise=gumbel, batch_rows=batch_rows)
    for one, two in zip(engine.generate(requests, 1.0), other.generate(requests, 1.0), strict=True):
        assert one.output_tokens == two.output_tokens
        assert np.abs(one.logprobs - two.logprobs).max() < 1e-4


def test_generation_repeats_to_the_bit(engine: PlainEngine) -> None:
    requests = _requests(engine)
    for one, two in zip(
        engine.generate(requests, 1.0), engine.generate(requests, 1.0), strict=True
    ):
        assert one.output_tokens == two.output_tokens
        assert np.array_equal(one.logprobs, two.logprobs)
        assert np.array_equal(one.states, two.states)


def test_rows_end_at_an_end_token_or_their_limit(engine: PlainEngine) -> None:
    requests = _requests(engine, 64, limit=30)
    made = engine.generate(requests, 1.5)
    assert {row.finish_reason for row in made} == {"end", "length"}
    for request, row in zip(requests, made, strict=True):
        assert row.states.shape == (len(row.output_tokens), engine.hidden_size)
        assert len(row.logprobs) == len(row.output_tokens)
        ended = row.output_tokens[-1] in engine.end_tokens
        assert ended == (row.finish_reason == "end")
        assert ended or len(row.output_tokens) == request.max_output_tokens
        assert engine.end_tokens.isdisjoint(row.output_tokens[:-1])


def test_a_model_s_own_sampling_settings_change_no_token(
    engine: PlainEngine, tmp_path: Path, tiny_folder: Path
) -> None:
    """Runs sample by temperature alone; only end tokens are read from generation_config.json."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    settings = {"do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 9.0}
    settings["eos_token_id"] = sorted(engine.end_tokens)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    greedy, requests = PlainEngine(folder, noise=gumbel), _requests(engine, 4)
    assert greedy.end_tokens == engine.end_tokens
    for one, other in zip(
        greedy.generate(requests, 1.5), engine.generate(requests, 1.5), strict=True
    ):
        assert one.output_tokens == other.output_tokens
        assert np.array_equal(one.logprobs, other.logprobs)


def test_no_noise_means_the_most_probable_token(engine: PlainEngine) -> None:
    prompt = _requests(engine, 1)[0].prompt_tokens
    (greedy,) = engine.generate([GenerationRequest(prompt, 6, None)], 1.0)
    with torch.inference_mode():
        first = int(engine.model(torch.tensor([prompt])).logits[0, -1].argmax())
    assert greedy.output_tokens[0] == first


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_replay_finds_honest_rows_equal(engine: PlainEngine, temperature: float) -> None:
    requests = _requests(engine, 32)
    made = engine.generate(requests, temperature)
    for row, found in zip(made, _replay(engine, requests, made, temperature), strict=True):
        assert np.array_equal(found.winners, row.output_tokens)
        assert not found.margins.any()
        assert np.abs(found.logprobs - row.logprobs).max() < 1e-4
        assert found.states.shape == row.states.shape
        assert (found.states != row.states).mean() < 0.01
        assert found.end_probability == pytest.approx(np.exp(row.logprobs[-1]), abs=1e-4)
        assert (found.tail_mass >= 0).all()


def test_replay_finds_the_margin_of_a_foreign_token(engine: PlainEngine) -> None:
    requests = _requests(engine, 1)
    made = engine.generate(requests, 1.0)
    tokens = made[0].output_tokens
    foreign = (tokens[1] + 1) % engine.vocabulary
    changed = [Generation((tokens[0], foreign), made[0].logprobs, made[0].states, "length")]
    (found,) = _replay(engine, requests, changed)
    assert found.winners[1] == tokens[1]
    assert found.margins[0] == 0
    assert found.margins[1] > 0


def test_replay_is_the_same_however_it_is_chunked(
    engine: PlainEngine, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = _requests(engine)
    made = engine.generate(requests, 1.0)
    monkeypatch.setattr(plain, "CPU_PREFILL", 60)
    monkeypatch.setattr(plain, "CPU_LOGITS", 5 * engine.vocabulary)
    small = PlainEngine(tiny_folder, noise=gumbel)
    for one, two in zip(
        _replay(engine, requests, made), _replay(small, requests, made), strict=True
    ):
        assert np.abs(one.logprobs - two.logprobs).max() < 1e-4
        assert np.array_equal(one.winners, two.winners)
        assert np.abs(one.tail_mass - two.tail_mass).max() < 1e-5


def test_bfloat16_drifts_only_a_little(engine: PlainEngine, tiny_folder: Path) -> None:
    half = engine.in_dtype("bfloat16")
    assert half is engine.in_dtype("bfloat16")
    assert engine.in_dtype("float32") is engine
    assert (half.name, half.dtype, half.device) == ("plain/1", "bfloat16", "cpu")
    requests = _requests(engine, 32)
    made = half.generate(requests, 1.0)
    margins = np.concatenate([found.margins for found in _replay(engine, requests, made)])
    assert (margins > 0).mean() < 0.05
    assert margins.max() < 0.5


def test_generation_releases_weights_in_another_dtype_before_it_loads_its_own(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card, whose engine holds the weights as they are in the files until it generates."""
    half = PlainEngine(tiny_folder, noise=gumbel).in_dtype("bfloat16")
    assert isinstance(half, PlainEngine)
    before, attempts = weakref.ref(half._held), []

    def load(*given: Any) -> HeldModel:
        attempts.append(before() is None)
        if len(attempts) == 1:
            raise MemoryError("the card is full")
        return HeldModel(*given)

    requests = _requests(half, 2)
    monkeypatch.setattr(plain, "HeldModel", load)
    with pytest.raises(MemoryError, match="the card is full"):
        half.generate(requests, 1.0)
    assert half._held.dtype is torch.float32  # replays go on with the former ones
    made = half.generate(requests, 1.0)
    assert half._held.dtype is torch.bfloat16
    assert attempts == [True, True, True]
    expected = PlainEngine(tiny_folder, noise=gumbel, dtype="bfloat16").generate(requests, 1.0)
    assert [one.output_tokens for one in made] == [one.output_tokens for one in expected]


def test_quantizing_changes_weights_but_not_the_head(
    tiny_folder: Path, engine: PlainEngine
) -> None:
    lossy = PlainEngine(tiny_folder, noise=gumbel, prepare=quantizer(4))
    honest, rounded = dict(engine.model.named_parameters()), dict(lossy.model.named_parameters())
    assert torch.equal(honest["lm_head.weight"], rounded["lm_head.weight"])
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(honest[name], rounded[name])
    assert (honest[name] - rounded[name]).abs().max() < honest[name].abs().max() / 7


def test_fake_quantization_has_the_levels_of_its_bits() -> None:
    weight = torch.randn(8, 70, generator=torch.Generator().manual_seed(0))
    rounded = fake_quantize(weight, bits=4, group=32)
    assert rounded.shape == weight.shape
    for row in rounded[:, :32]:
        assert len(row.unique()) <= 15
    assert torch.equal(fake_quantize(rounded, bits=4, group=32), rounded)


@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        ((), (1,)),
        ((1,), ()),
        ((10_000,), (1,)),
        ((1,), (10_000,)),
        ((-1,), (1,)),
        ((1,), (1,) * 600),
    ],
)
def test_rows_that_cannot_run_are_malformed(
    engine: PlainEngine, prompt: tuple[int, ...], output: tuple[int, ...]
) -> None:
    with pytest.raises(MalformedError):
        engine.replay([ReplayRequest(prompt, output, 0)], 1.0)


def test_a_folder_that_holds_no_fit_model_is_unavailable(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        PlainEngine(tmp_path, noise=gumbel)
    with pytest.raises(UnavailableError):
        PlainEngine(tiny_folder, noise=gumbel, dtype="float16")
    other = tmp_path / "gemma"
    shutil.copytree(tiny_folder, other)
    config = json.loads((other / "config.json").read_text())
    for family in ("gemma2", "qwen3_moe"):
        (other / "config.json").write_text(json.dumps({**config, "model_type": family}))
        words = f"does not run '{family}', only llama, mistral, qwen2, qwen3$"
        with pytest.raises(UnavailableError, match=words):
            PlainEngine(other, noise=gumbel)


def test_a_truncated_weight_file_is_unavailable(tiny_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UnavailableError):
        PlainEngine(broken, noise=gumbel)


def test_missing_weights_are_never_replaced_by_random_ones(
    tiny_folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    gap = tmp_path / "gap"
    shutil.copytree(tiny_folder, gap)
    weights = load_file(gap / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, gap / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnavailableError, match="up_proj"):
        PlainEngine(gap, noise=gumbel)


def test_contrasts_are_differences_of_log_probabilities_to_the_rival(engine: PlainEngine) -> None:
    (request,) = _requests(engine, 1)
    (made,) = engine.generate([request], 1.0)
    seed = request.noise_seed or 0
    tokens = made.output_tokens
    (first,) = engine.replay([ReplayRequest(request.prompt_tokens, tokens, seed)], 1.0)
    assert (first.rivals != tokens).all()
    rivals = tuple(first.rivals.tolist())
    (again,) = engine.replay([ReplayRequest(request.prompt_tokens, tokens, seed, rivals)], 1.0)
    assert np.array_equal(again.contrasts, first.contrasts)
    (same,) = engine.replay([ReplayRequest(request.prompt_tokens, tokens, seed, tokens)], 1.0)
    assert not same.contrasts.any()
    with pytest.raises(MalformedError):
        engine.replay([ReplayRequest(request.prompt_tokens, tokens, seed, rivals[1:])], 1.0)
