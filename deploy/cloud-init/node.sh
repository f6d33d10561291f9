#!/usr/bin/env bash
# Prints the cloud-init user data of a fleet of nodes: every machine that starts with it installs the
# agent, makes a key of its own and joins the pool for the owner's account.
#   node.sh ORCHESTRATOR_URL RPC_URL OWNER_ADDRESS [PACKAGE] > user-data.yaml
# PACKAGE is what pip installs, by default prime-open[node]; a wheel's URL is possible.
# The owner takes each machine in: `prime-node join` logs what that account has to sign, and waits.
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: $0 ORCHESTRATOR_URL RPC_URL OWNER_ADDRESS [PACKAGE]" >&2; exit 64; }
for value in "$@"; do
  [[ $value =~ ^[][A-Za-z0-9:/.,@=_~+?\&%-]+$ ]] || { echo "$0: $value has a character that does not belong there" >&2; exit 64; }
done
[[ $3 =~ ^0x[0-9a-fA-F]{40}$ ]] || { echo "$0: $3 is not an address" >&2; exit 64; }
unit=$(dirname "$0")/../systemd/prime-node.service

cat <<END
#cloud-config
package_update: true
packages: [docker.io, python3-venv]
write_files:
  - path: /etc/prime/node.toml
    permissions: "0644"
    content: |
      orchestrator = "$1"
      rpc = ["$2"]
      provider = "$3"
  - path: /etc/systemd/system/prime-node.service
    permissions: "0644"
    content: |
$(sed 's/^/      /' "$unit")
runcmd:
  - [python3, -m, venv, /opt/prime]
  - [/opt/prime/bin/pip, install, --no-cache-dir, "${4:-prime-open[node]}"]
  - [sh, -c, "umask 077; [ -s /etc/prime/node.password ] || head -c 24 /dev/urandom | base64 > /etc/prime/node.password"]
  - [sh, -c, "[ -s /etc/prime/node.json ] || /opt/prime/bin/prime-node wallet new --out /etc/prime/node.json --password-file /etc/prime/node.password"]
  - [systemctl, enable, --now, prime-node]
final_message: "prime-node is installed; journalctl --unit prime-node says what the owner has to sign"
END
