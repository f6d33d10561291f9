#!/usr/bin/env bash
# lm-evaluation-harness (some eighty packages with it, no torch) in a virtual environment of its own, for
# `trainer benchmark`: var/bench/lm_eval, or $PRIME_LM_EVAL_HOME. IFEval counts sentences with NLTK's data
# punkt_tab, which the wheel of llama-index-core carries. Afterwards:
# export PRIME_LM_EVAL_PYTHON=<that folder>/bin/python
# Nothing of this project is installed there: the adapter hands its child the checkout's own path.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${PRIME_LM_EVAL_HOME:-var/bench/lm_eval}
python=$home/bin/python
wanted=lm_eval==0.4.13 data=llama-index-core==0.14.25
if [ -x "$python" ] && "$python" -I -c '
import sys
from importlib.metadata import version
import nltk
nltk.data.find("tokenizers/punkt_tab")
sys.exit(sys.argv[1] != "lm_eval==" + version("lm_eval"))' "$wanted" 2>/dev/null; then
	echo "$home is ready"
	exit 0
fi
"${PYTHON:-python3.11}" -m venv --clear "$home"
"$python" -m pip install -q "${wanted/lm_eval/lm_eval[ifeval]}"
"$python" -m pip download -q --no-deps --dest "$home/wheel" "$data"
"$python" - "$home" <<'EOF'
import shutil, sys, zipfile
from pathlib import Path

home = Path(sys.argv[1])
(wheel,) = (home / "wheel").glob("*.whl")
inside = "llama_index/core/_static/nltk_cache/"
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.startswith(inside + "tokenizers/punkt_tab/english/") and not name.endswith("/"):
            target = home / "nltk_data" / name.removeprefix(inside)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
shutil.rmtree(home / "wheel")
EOF
"$python" -c 'import nltk; nltk.data.find("tokenizers/punkt_tab/english")'
echo "$home is ready"
