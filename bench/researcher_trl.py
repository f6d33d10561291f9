"""What a user of TRL writes for the task of docs/examples/run-local.toml (`bench researcher`).

python researcher_trl.py MODEL PROBLEMS.jsonl STEPS
"""

import re
import sys
import tempfile

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model, problems, steps = sys.argv[1:]
torch.set_num_threads(1)


def reward(completions, answer, target, **_):  # type: ignore[no-untyped-def]
    """1 for the word written backwards, less 0.15 a dot too many or too few, but not below 0."""
    found = []
    for text, word, dots in zip(completions, answer, target, strict=True):
        match = re.fullmatch(r"(\.*)=([a-z]+)\n?", text)
        off = abs(dots - len(match[1])) if match and match[2] == word else 7  # no reward
        found.append(max(0.0, 1 - 0.15 * off))
    return found


arguments = GRPOConfig(
    output_dir=tempfile.mkdtemp(prefix="trl-"),
    max_steps=int(steps),
    per_device_train_batch_size=128,
    num_generations=16,
    max_completion_length=40,
    beta=0.0,
    delta=4.0,
    loss_type="grpo",
    learning_rate=3e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=5,
    adam_beta2=0.95,
    max_grad_norm=1.0,
    use_cpu=True,
    bf16=False,
    model_init_kwargs={"dtype": "float32"},
    gradient_checkpointing=False,
    report_to=[],
    disable_tqdm=True,
)
GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=arguments,
    train_dataset=load_dataset("json", data_files=problems, split="train"),
    processing_class=AutoTokenizer.from_pretrained(model),
).train()
