#!/bin/bash
# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
#
# Trains on hosts that ssh reaches without a password, one pod per host:
#
#   examples/pods/ssh.sh host1 host2
#   examples/pods/ssh.sh host1 host2 -- --gin_file=recipes/quickstart.gin \
#     --gin.MODEL_DIR='"runs/mine"'
#
# Each host has this checkout with its .venv at the same path. After "--" come
# arguments of `palm_mtf train`. The same command resumes a run. DEVICES=2
# before it gives each pod two devices, for a MESH_SHAPE of two.
# Other hosts of the network can reach the servers: read docs/pods.md.

set -eu
PATH="$PWD/.venv/bin:$PATH"
hosts=()
while (($#)) && [[ $1 != -- ]]; do
  hosts+=("$1")
  shift
done
if ((${#hosts[@]} == 0)); then
  echo "usage: ssh.sh HOST... [-- arguments of palm_mtf train]" >&2
  exit 2
fi
(($# == 0)) || shift
(($#)) || set -- --gin_file=recipes/quickstart.gin \
  --gin.MODEL_DIR='"runs/ssh"'

# Runs on a host. SSH_CONNECTION has the addresses of both ends: the client's
# first, the host's third. The end of stdin, which is the end of this script or
# of the connection, stops the server.
# shellcheck disable=SC2016
serve="cd ${PWD@Q} && "'PATH="$PWD/.venv/bin:$PATH" && exec 3<&0 &&
  set -- $SSH_CONNECTION && echo "client $1" &&
  { (cat && kill $$) <&3 >/dev/null 2>&1 & } &&
  exec palm_mtf pods serve --listen "$3:0" --devices '"${DEVICES:-1}"
serve=${serve//$'\n'/}

# A server on each host, at a free port. A server prints "serving 1 devices on
# ADDRESS:PORT" once it answers. If one ends, all end.
coproc SERVERS {
  trap '' INT HUP
  for host in "${hosts[@]}"; do
    ssh -4 -o BatchMode=yes "$host" bash -c "${serve@Q}" <&0 &
  done
  wait -n || true
  mapfile -t connections < <(jobs -p)
  kill "${connections[@]}" 2>/dev/null || true
  wait
}
servers=$SERVERS_PID
exec 3<&"${SERVERS[0]}" 4>&"${SERVERS[1]}"-
trap 'exec 4>&-; wait "$servers" || true' EXIT

client_address="" islands=()
while ((${#islands[@]} < ${#hosts[@]})) && read -r line <&3; do
  case $line in
    client*) client_address=${line##* } ;;
    serving*" on "*) islands+=("[\"${line##* }\"]") ;;
  esac
done
if ((${#islands[@]} < ${#hosts[@]})); then
  echo "${#islands[@]} of ${#hosts[@]} servers started; see above" >&2
  exit 1
fi

palm_mtf train "$@" --gin_file=pods/cluster.gin --gin.NUM_PODS="${#hosts[@]}" \
  --gin.ISLANDS="[$(IFS=, && echo "${islands[*]}")]" \
  --gin.CLIENT_ADDRESS="\"$client_address\"" &
client=$!
trap 'kill "$client" || true; wait "$client"; exit $?' INT TERM HUP
wait "$client"
