#!/usr/bin/env bash
# A PostgreSQL server for tests: `ci_postgres.sh start|standby|stop`. Keeps everything in a temporary folder
# and speaks on a Unix socket there. `start` prints the line to export (PRIME_TEST_POSTGRES_URL). `standby` starts
# a streaming replica of the server on the socket's port 5433, also after `stop-standby`.
set -euo pipefail

STATE=${PRIME_POSTGRES_STATE:-${TMPDIR:-/tmp}/prime-ci-postgres}

say() { printf 'ci_postgres: %s\n' "$*" >&2; }
as_postgres() { if [ "$(id -u)" = 0 ]; then su postgres -s /bin/sh -c "$*"; else sh -c "$*"; fi; }

find_bin() {
  bin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1)
  [ -n "$bin" ] || bin=$(dirname "$(command -v initdb)") || { say "no initdb; on Debian: apt-get install postgresql"; exit 1; }
}

start() {
  find_bin
  mkdir -p "$STATE"
  if [ "$(id -u)" = 0 ]; then chown postgres "$STATE"; fi
  if [ ! -d "$STATE/data" ]; then
    as_postgres "$bin/initdb -D $STATE/data -A trust -U postgres --no-sync -E UTF8" >"$STATE.log" 2>&1 ||
      { tail -n 20 "$STATE.log" >&2; exit 1; }
  fi
  as_postgres "$bin/pg_ctl -D $STATE/data -w -l $STATE/server.log -o '-k $STATE -c listen_addresses= -c fsync=off' start" >"$STATE.log" 2>&1 ||
    { tail -n 20 "$STATE.log" "$STATE/server.log" >&2; exit 1; }
  echo "export PRIME_TEST_POSTGRES_URL='postgresql://postgres@/postgres?host=$STATE'"
}

standby() {
  find_bin
  if [ ! -d "$STATE/standby" ]; then
    as_postgres "$bin/pg_basebackup -h $STATE -U postgres -D $STATE/standby -R -c fast --no-sync" >"$STATE.log" 2>&1 ||
      { tail -n 20 "$STATE.log" >&2; exit 1; }
  fi
  as_postgres "$bin/pg_ctl -D $STATE/standby -w -l $STATE/standby.log -o '-p 5433 -k $STATE -c listen_addresses= -c fsync=off' start" >"$STATE.log" 2>&1 ||
    { tail -n 20 "$STATE.log" "$STATE/standby.log" >&2; exit 1; }
}

stop_standby() {
  find_bin
  as_postgres "$bin/pg_ctl -D $STATE/standby -w -m immediate stop" >/dev/null 2>&1 || true
}

stop() {
  [ -d "$STATE/data" ] || return 0
  find_bin
  [ ! -d "$STATE/standby" ] || stop_standby
  as_postgres "$bin/pg_ctl -D $STATE/data -m immediate stop" >/dev/null 2>&1 || true
  rm -rf "$STATE" "$STATE.log"
}

case "${1:-}" in
  start) start ;;
  standby) standby ;;
  stop-standby) stop_standby ;;
  stop) stop ;;
  *) say "usage: $0 start|standby|stop-standby|stop"; exit 64 ;;
esac
