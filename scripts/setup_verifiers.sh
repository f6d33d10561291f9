#!/usr/bin/env bash
# The package verifiers (some hundred others with it) in a virtual environment of its own, for tests and
# runs that use its tasksets: var/bench/verifiers, or $PRIME_VERIFIERS_HOME. Afterwards:
# export PRIME_VERIFIERS_PYTHON=<that folder>/bin/python
# Nothing of this project is installed there: the adapter hands its child the checkout's own path.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${PRIME_VERIFIERS_HOME:-var/bench/verifiers}
python=$home/bin/python
version=0.4.0
if [ -x "$python" ] && "$python" -I -c '
import sys
from importlib.metadata import version
import verifiers.v1
sys.exit(version("verifiers") != sys.argv[1])' "$version" 2>/dev/null; then
	echo "$home is ready"
	exit 0
fi
"${PYTHON:-python3.11}" -m venv --clear "$home"
"$python" -m pip install -q "verifiers==$version"
"$python" -c "import verifiers.v1"
echo "$home is ready"
