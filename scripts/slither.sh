#!/bin/sh
# Static analysis of contracts/src by slither: exits 1 on a finding of medium impact or higher.
#
#   scripts/slither.sh [slither's own options, e.g. --json -]
#
# slither pins web3 < 8, so it lives in a virtual environment of its own under var/. What it may
# overlook is said where it stands in the sources (`slither-disable-…`) and argued in docs/contracts.md.
set -e
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
home="$root/var/bench/slither"
if [ ! -x "$home/bin/slither" ]; then
    python3 -m venv "$home" && "$home/bin/pip" install --quiet "slither-analyzer==0.11.6" || {
        echo "slither: cannot be installed here; it needs PyPI (slither-analyzer 0.11.6)" >&2
        exit 69
    }
fi
case $(uname -m) in x86_64 | amd64) arch=amd64 ;; *) arch=arm64 ;; esac
case $(uname -s) in Linux) os=linux ;; *) os=darwin ;; esac
PATH="$root/node_modules/@foundry-rs/forge-$os-$arch/bin:$home/bin:$PATH"
# A copy without the tests: they need not be compiled, and the tree's build folders stay as they are.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/contracts" "$work/tests/contracts"
cp -r "$root/contracts/src" "$work/contracts/src"
cp -r "$root/scripts" "$work/scripts"
cp "$root/foundry.toml" "$work/"
ln -s "$root/node_modules" "$work/node_modules"
ln -s "$root/.venv" "$work/.venv"
cd "$work"
"$home/bin/slither" . --filter-paths "node_modules" --fail-medium "$@"
