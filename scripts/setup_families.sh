#!/usr/bin/env bash
# reasoning-gym into an environment: setup_families.sh PYTHON [further arguments of pip install].
# It wants pycosat, for one family of puzzles; that comes as C source only. A machine without a
# compiler gets every other family (protocol/prime_envs/reasoning.py).
set -euo pipefail
python=$1
shift
. "$(dirname "$0")/installer.sh"
install=(install_into "$python" "$@")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if "${install[@]}" pycosat >"$scratch/pycosat.log" 2>&1; then
  "${install[@]}" 'reasoning-gym>=0.1.25,<0.2'
  exit
fi
tail -n 3 "$scratch/pycosat.log" >&2
echo "pycosat was not built (no C compiler?): the puzzle family zebra_puzzles is left out." >&2
"${install[@]}" --no-deps 'reasoning-gym>=0.1.25,<0.2'
"$python" -c '
from importlib.metadata import requires
for line in requires("reasoning-gym"):
    if "extra ==" not in line and not line.startswith("pycosat"):
        print(line)' >"$scratch/families.txt"
"${install[@]}" --requirement "$scratch/families.txt"
