#!/bin/bash
# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
#
# Trains on two hosts that ssh reaches, over a link that this script makes slow
# until it ends; pods exchange parameters seldom (docs/slow_links.md):
#
#   examples/pods/slow_link.sh host1 host2
#   RATE=50mbit DELAY=20ms examples/pods/slow_link.sh host1 host2 -- \
#     --gin_file=recipes/quickstart.gin --gin_file=exchange/slow_link.gin \
#     --gin.MODEL_DIR='"runs/mine"' --gin.DCN_DTYPE='"float32"'
#
# RATE and DELAY are those of each direction. Only packets between the two hosts
# are slow. The hosts need iproute2, a kernel with netem, and `sudo` without a
# password for `tc`; what else ssh.sh needs is said there.

set -eu
rate=${RATE:-200mbit} delay=${DELAY:-50ms}
if (($# < 2)) || [[ $1 == -- || $2 == -- || ${3:---} != -- ]]; then
  echo "usage: slow_link.sh HOST HOST [-- arguments of palm_mtf train]" >&2
  exit 2
fi
hosts=("$1" "$2")
shift $(($# > 2 ? 3 : 2))
# DCN_DTYPE in place of that of pods/cluster.gin, which ssh.sh adds.
(($#)) || set -- --gin_file=recipes/quickstart.gin \
  --gin_file=exchange/slow_link.gin --gin.MODEL_DIR='"runs/slow_link"' \
  --gin.DCN_DTYPE='"float32"'

# Runs commands in bash on a host. With line ends, @Q would quote for bash only.
on() {
  local commands=${2//$'\n'/ }
  ssh -4 -o BatchMode=yes "$1" bash -c "${commands@Q}" </dev/null
}

# A host's address is the third word of its SSH_CONNECTION.
# shellcheck disable=SC2016
own='set -- $SSH_CONNECTION && echo "$3"'
addresses=("$(on "${hosts[0]}" "$own")" "$(on "${hosts[1]}" "$own")")

# For a host, and the address of the other: sets DEV to the device between them,
# and runs commands. Of the four bands, only the filter uses the last.
with_device() {
  on "$1" "DEV=\$(ip -o route get $2 | sed 's/.* dev \([^ ]*\).*/\1/') && $3"
}
limit() {
  with_device "$1" "$2" "
    sudo -n tc qdisc replace dev \$DEV root handle 1: prio bands 4 &&
    sudo -n tc qdisc replace dev \$DEV parent 1:4 handle 40: \
      netem delay $delay rate $rate limit 100000 &&
    sudo -n tc filter replace dev \$DEV parent 1: protocol ip prio 1 \
      u32 match ip dst $2/32 flowid 1:4"
}
free() { with_device "$1" "$2" "sudo -n tc qdisc del dev \$DEV root"; }

trap 'free "${hosts[0]}" "${addresses[1]}" || true
  free "${hosts[1]}" "${addresses[0]}" || true' EXIT
limit "${hosts[0]}" "${addresses[1]}"
limit "${hosts[1]}" "${addresses[0]}"
"$(dirname "$0")/ssh.sh" "${hosts[@]}" -- "$@" &
run=$!
trap 'kill "$run" || true; wait "$run"; exit $?' INT TERM HUP
wait "$run"
