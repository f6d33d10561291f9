"""The peer's side of `bench trainer`, run by the interpreter of TRL's own environment.

    python trl_worker.py MODEL ROWS.json    → one line "ready", then for every line on stdin
                                              ("step padded" or "step trimmed") its seconds

TRL's GRPOTrainer computes its own loss (`_compute_loss`) on the completions of ROWS, accelerate's
backward, and a step of its AdamW. Batches as TRL makes them: prompts padded on the left and
completions on the right to the longest of the whole generation batch, then cut into micro-batches;
"trimmed" is kinder than TRL and pads each micro-batch to its own longest.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import torch


def main() -> None:
    model, rows_file = sys.argv[1], sys.argv[2]
    torch.set_num_threads(1)
    with open(rows_file) as file:  # noqa: PTH123 - this file runs alone
        work = json.load(file)
    trainer, tokenizer = make_trainer(model, work)
    padded = batches(work, tokenizer.pad_token_id, trimmed=False)
    trimmed = batches(work, tokenizer.pad_token_id, trimmed=True)
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        step(trainer, trimmed if "trimmed" in line else padded)
        print(time.perf_counter() - start, flush=True)


def make_trainer(model: str, work: dict) -> tuple:  # type: ignore[type-arg]
    """GRPOTrainer over the model folder, ready to compute losses."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    micro = work["micro_rows"]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=len(work["rows"]) // micro,
        num_generations=work["samples"],
        max_completion_length=work["max_output_tokens"],
        beta=0.0,
        epsilon=0.2,
        delta=4.0,
        loss_type="grpo",
        learning_rate=1e-5,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * work["samples"]}),
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
    return trainer, tokenizer


def batches(work: dict, pad: int, *, trimmed: bool) -> list:  # type: ignore[type-arg]
    """Micro-batches of padded tensors, shuffled as TRL shuffles."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(work["rows"]), generator=generator).tolist()
    rows = [work["rows"][i] for i in order]
    found = []
    for start in range(0, len(rows), work["micro_rows"]):
        micro = rows[start : start + work["micro_rows"]]
        span = micro if trimmed else rows
        left = max(len(row["prompt"]) for row in span)
        right = max(len(row["output"]) for row in span)
        found.append(
            {
                "prompt_ids": torch.tensor(
                    [[pad] * (left - len(r["prompt"])) + r["prompt"] for r in micro]
                ),
                "prompt_mask": torch.tensor(
                    [[0] * (left - len(r["prompt"])) + [1] * len(r["prompt"]) for r in micro]
                ),
                "completion_ids": torch.tensor(
                    [r["output"] + [pad] * (right - len(r["output"])) for r in micro]
                ),
                "completion_mask": torch.tensor(
                    [[1] * len(r["output"]) + [0] * (right - len(r["output"])) for r in micro]
                ),
                "old_per_token_logps": torch.tensor(
                    [r["logprobs"] + [0.0] * (right - len(r["logprobs"])) for r in micro]
                ),
                "advantages": torch.tensor([r["advantage"] for r in micro]),
                "num_items_in_batch": torch.tensor(sum(len(r["output"]) for r in rows)),
            }
        )
    return found


def step(trainer, micro_batches) -> None:  # type: ignore[no-untyped-def]
    """Loss and backward of every micro-batch, clip, one optimizer step."""
    for inputs in micro_batches:
        trainer.accelerator.backward(trainer._compute_loss(trainer.model, inputs))
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
