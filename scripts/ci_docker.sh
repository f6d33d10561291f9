#!/usr/bin/env bash
# A Docker engine for tests, started by hand: `ci_docker.sh start|stop|status`.
# Needs root and the packages docker.io and iptables; keeps everything in a temporary folder.
# `start` prints the line to export (DOCKER_HOST); where an engine answers already, it prints
# nothing and starts nothing.
set -euo pipefail

STATE=${PRIME_DOCKER_STATE:-${TMPDIR:-/tmp}/prime-ci-docker}
SOCKET="unix://$STATE/docker.sock"

say() { printf 'ci_docker: %s\n' "$*" >&2; }

start() {
  if docker info >/dev/null 2>&1; then return; fi
  if DOCKER_HOST=$SOCKET docker info >/dev/null 2>&1; then
    echo "export DOCKER_HOST=$SOCKET"
    return
  fi
  command -v dockerd >/dev/null || { say "no dockerd; on Debian: apt-get install docker.io iptables"; exit 1; }
  [ "$(id -u)" = 0 ] || { say "starting an engine needs root"; exit 1; }
  mkdir -p "$STATE"
  # iptables rules and forwarding are put back by `stop`.
  iptables-save >"$STATE/iptables.before" 2>/dev/null || true
  cat /proc/sys/net/ipv4/ip_forward >"$STATE/ip_forward.before"
  nohup dockerd --data-root "$STATE/data" --exec-root "$STATE/exec" \
    --pidfile "$STATE/dockerd.pid" --host "$SOCKET" >"$STATE/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 150); do
    if DOCKER_HOST=$SOCKET docker info >/dev/null 2>&1; then
      echo "export DOCKER_HOST=$SOCKET"
      return
    fi
    sleep 0.2
  done
  say "the engine did not come up; its last words:"
  tail -n 20 "$STATE/dockerd.log" >&2
  exit 1
}

stop() {
  [ -f "$STATE/dockerd.pid" ] || { rm -rf "$STATE"; return; }
  local pid
  pid=$(cat "$STATE/dockerd.pid")
  kill "$pid" 2>/dev/null || true
  for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
  if [ -s "$STATE/iptables.before" ]; then iptables-restore <"$STATE/iptables.before" || true; fi
  cat "$STATE/ip_forward.before" >/proc/sys/net/ipv4/ip_forward 2>/dev/null || true
  ip link delete docker0 2>/dev/null || true
  { grep -F " $STATE/" /proc/mounts || true; } | awk '{print $2}' | sort -r | xargs -r umount 2>/dev/null || true
  rm -rf "$STATE"
}

case "${1:-}" in
  start) start ;;
  stop) stop ;;
  status) DOCKER_HOST=$SOCKET docker info --format '{{.ServerVersion}} {{.Driver}}' ;;
  *) say "usage: $0 start|stop|status"; exit 64 ;;
esac
