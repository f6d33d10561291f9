#!/usr/bin/env bash
# The first start of compose.yaml, in two parts; each may be repeated, also after it was killed.
#   setup.sh keys    passwords, keystores, the orchestrators' settings that name them
#   setup.sh pool    ether for the accounts, contracts, run, pool, buckets
set -euo pipefail
umask 077
KEYS=${PRIME_KEYS:-/keys}
S3_KEYS=${PRIME_S3_KEYS:-/s3-keys}
EXAMPLES=${PRIME_EXAMPLES:-/opt/prime}
RPC=${PRIME_RPC:-http://chain:8545}
S3=${PRIME_S3:-http://s3:8333}
TRIES=${PRIME_SETUP_TRIES:-120}
cd "$KEYS"

retry() { # runs a command until it works, once a second, TRIES times at most
  for ((tries = 0; tries < TRIES; tries++)); do
    if "$@"; then return; fi
    sleep 1
  done
  echo "setup.sh: $1 failed $TRIES times; its last error is above" >&2
  return 1
}

secret() { # writes a new secret into a file, once
  [ -s "$1" ] || { head -c 24 /dev/urandom | base64 | tr '+/' '-_' >"$1.part" && mv "$1.part" "$1"; }
}

account() { # makes the key of an account at the S3 server in a folder, once, and writes it as AWS' programs read it
  secret "$2/s3-$1"
  printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$1" "$(cat "$2/s3-$1")" >"$2/aws-$1"
}

identity() { # prints an account at the S3 server, its key and its rights, as SeaweedFS reads it
  printf '{"name": "%s", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], "actions": [%s]}' "$1" "$1" "$2" "$3"
}

keys() {
  secret password
  secret postgres
  for name in deployer manager validator relay trainer node; do
    [ -s $name.json ] || orchestrator wallet new --out $name.json --password-file password
  done
  echo "allow_relay = [\"$(orchestrator wallet show --wallet relay.json)\"]" >orchestrator.toml
  echo "postgres:5432:*:prime:$(cat postgres)" >pgpass
  account orchestrator .
  account trainer .
  account setup "$S3_KEYS" # may do everything: only the services `pool` and `s3` mount this folder
  # SeaweedFS may run under another user.
  (umask 022; printf '{"identities": [%s,\n%s,\n%s,\n{"name": "anonymous", "actions": ["Read:policies"]}]}\n' \
    "$(identity setup "$(cat "$S3_KEYS/s3-setup")" '"Admin"')" \
    "$(identity orchestrator "$(cat s3-orchestrator)" '"Read:pools", "Write:pools", "List:pools"')" \
    "$(identity trainer "$(cat s3-trainer)" '"Read:policies", "Write:policies", "List:policies"')" >"$S3_KEYS/s3.json")
}

ether() { # gives each account one ether of the local chain
  python - "$RPC" {deployer,manager,validator,relay,trainer,node}.json <<'END'
import json, sys, httpx

for file in sys.argv[2:]:
    params = ["0x" + json.load(open(file))["address"].removeprefix("0x"), hex(10**18)]
    call = {"jsonrpc": "2.0", "id": 1, "method": "anvil_setBalance", "params": params}
    answer = httpx.post(sys.argv[1], json=call).raise_for_status().json()
    assert "error" not in answer, answer
END
}

buckets() { # makes "pools" and "policies"
  AWS_SHARED_CREDENTIALS_FILE=$S3_KEYS/aws-setup python - "$S3" <<'END'
import sys, boto3

s3 = boto3.client("s3", endpoint_url=sys.argv[1], region_name="us-east-1")
for name in {"pools", "policies"} - {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}:
    s3.create_bucket(Bucket=name)
END
}

pool() {
  retry buckets
  [ ! -e ready ] || return 0
  retry ether
  [ -s deployment.json ] || orchestrator deployment deploy --network local --rpc "$RPC" --wallet deployer.json --password-file password \
    --out deployment.json --epoch 60 --validity 300 --slash-window 60 --dispute-window 60 --reward-delay 30 --unbonding 600
  sed 's/^epoch_seconds.*/epoch_seconds = 60/; s/^validity_seconds.*/validity_seconds = 300/' \
    "$EXAMPLES/docs/examples/run-devnet.toml" >run.toml
  [ -s run.json ] || orchestrator run new run.toml --model "$EXAMPLES/devnet/model" --out run.json
  manager="--rpc $RPC --deployment deployment.json --wallet manager.json --password-file password"
  # shellcheck disable=SC2086
  orchestrator pool create --run run.json --trainer "$(orchestrator wallet show --wallet trainer.json)" \
    --validator "$(orchestrator wallet show --wallet validator.json)" --faucet $manager
  shown=$(orchestrator pool show --pool 1 --rpc "$RPC" --deployment deployment.json --json)
  if [[ $shown == *'"free": "0"'* ]]; then # not funded by an earlier try
    # shellcheck disable=SC2086
    orchestrator pool fund --pool 1 --amount 5000 $manager
  fi
  : >ready
}

"$@"
