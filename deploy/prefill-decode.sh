#!/usr/bin/env bash
# Servers that prefill (PREFILL, 2), servers that decode (DECODE, 2) and the router before them, on one machine:
#   deploy/prefill-decode.sh ARTIFACT [OPTION OF ling3-runner serve]...
# ARTIFACT was built with --snapshots. States go through shared memory; `--transfer http` fetches them from the servers instead.
# The router listens at PORT (8000), the servers at the ports behind it; PORT=0 takes any that are free. Prints a role
# and an address for each server, then the router's address once clients may connect. The router goes on without a
# server that ends. SIGTERM or SIGINT ends the router, which lets its calls end, and then the servers.
set -euo pipefail
artifact=${1:?expected an artifact, found no argument}
shift
port=${PORT:-8000} roles=() servers=() urls=() router=
for ((n = 0; n < ${PREFILL:-2}; n++)); do roles+=(prefill); done
for ((n = 0; n < ${DECODE:-2}; n++)); do roles+=(decode); done
said=$(mktemp -d)

stop() {
  set +e
  [ -z "$router" ] || { kill "$router" && wait "$router"; } 2> /dev/null
  [ ${#servers[@]} = 0 ] || { kill "${servers[@]}" && wait; } 2> /dev/null
  rm -r "$said"
}
trap stop EXIT
trap 'exit 0' TERM INT

for n in "${!roles[@]}"; do
  : > "$said/$n" # there before anything reads it
  ling3-runner serve "$artifact" --transfer shm --role "${roles[n]}" --port $((port ? port + n + 1 : 0)) \
    "$@" > "$said/$n" &
  servers+=($!)
done
for n in "${!roles[@]}"; do
  until read -r url < "$said/$n"; do
    kill -0 "${servers[n]}" # a server that cannot start ends all
    sleep 0.1
  done
  echo "${roles[n]} $url"
  urls+=("--${roles[n]}" "$url")
done
ling3-runner route "${urls[@]}" --port "$port" &
router=$!
wait "$router"
