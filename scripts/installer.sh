# Sourced: `install_into PYTHON ARGUMENTS…` installs packages by uv, or by pip where uv cannot be had.
#
# uv is installed into the environment itself, by its pip. It does not read pip's configuration, so
# what matters of it is handed on: indexes, local folders of wheels (a machine's own CPU build of
# torch lies in one), certificates. PRIME_INSTALLER=pip leaves uv out.

pip_setting() { # PYTHON NAME: what pip would use: its environment variable, else its files
  "$1" -m pip --disable-pip-version-check config list 2>/dev/null | "$1" -c '
import ast, sys
name, found = sys.argv[1], {}
for line in sys.stdin:
    key, _, value = line.strip().partition("=")
    section, _, key = key.rpartition(".")
    if key == name and section in ("global", "install", ":env:"):
        found[section] = ast.literal_eval(value)
print(" ".join((found.get(":env:") or found.get("install") or found.get("global") or "").split()))' "$2"
}

hand_on_pip_settings() { # PYTHON
  local value
  value=$(pip_setting "$1" find-links) && [ -n "$value" ] && export UV_FIND_LINKS=${UV_FIND_LINKS:-${value// /,}}
  value=$(pip_setting "$1" index-url) && [ -n "$value" ] && export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$value}
  value=$(pip_setting "$1" extra-index-url) && [ -n "$value" ] && export UV_INDEX=${UV_INDEX:-$value}
  value=$(pip_setting "$1" no-index) && [ -n "$value" ] && export UV_NO_INDEX=${UV_NO_INDEX:-true}
  value=$(pip_setting "$1" cert) && [ -n "$value" ] && export SSL_CERT_FILE=${SSL_CERT_FILE:-$value}
  # As pip does: the best version of all indexes, not the first index that has the name.
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
}

install_into() { # PYTHON ARGUMENTS…
  local python=$1 uv
  shift
  uv=$(dirname "$python")/uv
  if [ "${PRIME_INSTALLER:-uv}" = uv ] && { [ -x "$uv" ] ||
    "$python" -m pip install --quiet --disable-pip-version-check 'uv>=0.9' >/dev/null 2>&1; }; then
    [ -n "${UV_INDEX_STRATEGY:-}" ] || hand_on_pip_settings "$python"
    UV_LINK_MODE=${UV_LINK_MODE:-hardlink} "$uv" pip install --quiet --python "$python" "$@" && return
    echo "uv could not install it (the lines above say why); trying pip" >&2
  fi
  "$python" -m pip install --quiet --disable-pip-version-check "$@"
}
