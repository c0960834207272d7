#!/usr/bin/env bash
# Start this node's share of a run over several nodes. The same command on every node:
#
#   NODES=2 GPUS=8 HEAD=host[:port] bash launch/torchrun_multinode.sh --config configs/pretrain/olmo2-1b.yaml key=value ...
#
#   NODES         how many nodes, or FEWEST:MOST for a run that goes on with the nodes that are there (required)
#   HEAD          host[:port] of the node that holds the rendezvous, port 29500 by default (required)
#   GPUS          processes per node; the GPUs that nvidia-smi lists by default
#   NODE_RANK     0 on the head, above elsewhere: says which node holds the rendezvous. Needed where HEAD does not resolve to
#                 an address of the head itself (containers, several interfaces); otherwise torchrun finds out
#   LOCAL_ADDR    this node's address as the others reach it, where its host name does not resolve to it (one node: 127.0.0.1)
#   RUN_ID        name of the rendezvous, the same on all nodes (default: pretrain)
#   MAX_RESTARTS  how often all processes are started again after one dies; each new checkpoint of the run begins the count anew (default: 3)
#   SHUTDOWN_TIMEOUT  seconds that a process told to stop has for its last checkpoint (default: 300)
#   JOIN_SECONDS  longest wait for the nodes to gather, at the start and after a node was lost (default: 600)
#   TORCHRUN      the torchrun to use (default: this project's, pretrain/distributed/agent.py, which says what it waits for)
#
# After a restart the run continues from its newest checkpoint (run.resume=auto). Exit codes: 0, the run has come to its end; 75, it was told to
# stop and is saved; 76, it failed, but has gained a checkpoint since this script began, so that another start may get further; else it failed.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}
positive() { # NAME VALUE
  [[ "$2" =~ ^[1-9][0-9]{0,8}$ ]] || fail "$1=$2 is not a positive number"
}

[[ -n "${NODES:-}" ]] || fail "NODES is not set: NODES=2 GPUS=8 HEAD=host[:port] bash launch/torchrun_multinode.sh --config configs/pretrain/olmo2-1b.yaml"
[[ -n "${HEAD:-}" ]] || fail "HEAD is not set: name the node that holds the rendezvous, the same on all nodes: HEAD=host[:port]"
(($# > 0)) || fail "no arguments for pretrain/run.py: give at least --config configs/pretrain/olmo2-1b.yaml"
if [[ -z "${GPUS:-}" ]]; then
  GPUS=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || GPUS=0
  ((GPUS > 0)) || fail "GPUS is not set and nvidia-smi lists none: set GPUS to the number of processes per node"
fi
if [[ "$NODES" == *:* ]]; then
  positive NODES "${NODES%%:*}"
  positive NODES "${NODES#*:}"
  ((${NODES%%:*} <= ${NODES#*:})) || fail "NODES=$NODES: the fewest nodes come first, then the most"
else
  positive NODES "$NODES"
fi
most=${NODES#*:}
positive JOIN_SECONDS "${JOIN_SECONDS:=600}"
positive GPUS "$GPUS"
[[ "${MAX_RESTARTS:=3}" =~ ^[0-9]{1,9}$ ]] || fail "MAX_RESTARTS=$MAX_RESTARTS is not a number"
[[ "${SHUTDOWN_TIMEOUT:=300}" =~ ^[0-9]{1,9}$ ]] || fail "SHUTDOWN_TIMEOUT=$SHUTDOWN_TIMEOUT is not a number of seconds"
case "$HEAD" in
  \[*\]:*) endpoint=$HEAD ;;  # [IPv6]:port
  \[*\]) endpoint=$HEAD:29500 ;;
  *:*:*) fail "HEAD=$HEAD: write an IPv6 address in brackets: [$HEAD]:29500" ;;
  *:*) endpoint=$HEAD ;;
  *) endpoint=$HEAD:29500 ;;
esac
port=${endpoint##*:}
[[ "$port" =~ ^[1-9][0-9]{0,4}$ ]] && ((port <= 65535)) || fail "HEAD=$HEAD: the port is not a number in 1..65535"

options=(--nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts "$MAX_RESTARTS" --rdzv-id "${RUN_ID:-pretrain}"
  --rdzv-backend c10d --rdzv-endpoint "$endpoint")
# torchrun's own limits: of the wait for all nodes, and of the wait for the head to listen.
limits=join_timeout=$JOIN_SECONDS,read_timeout=$JOIN_SECONDS
if [[ -n "${NODE_RANK:-}" ]]; then
  # 10#: 08 is a number of ten, and not of eight.
  if ! [[ "$NODE_RANK" =~ ^[0-9]{1,9}$ ]] || ((10#$NODE_RANK >= most)); then
    fail "NODE_RANK=$NODE_RANK is not in 0..$((most - 1))"
  fi
  # c10d numbers the nodes itself; the rank only decides who listens.
  limits+=,is_host=$((10#$NODE_RANK == 0))
fi
options+=(--rdzv-conf "$limits")
# torchrun tells the processes to meet at this host's name, and a container need not be able to resolve its own.
[[ "$NODES" != 1 ]] || LOCAL_ADDR=${LOCAL_ADDR:-127.0.0.1}
[[ -z "${LOCAL_ADDR:-}" ]] || options+=(--local-addr "$LOCAL_ADDR")

# Each attempt's workers meet in a store of their own: in torchrun's they would find the addresses of the dead attempt.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$SHUTDOWN_TIMEOUT
package=$(dirname "${BASH_SOURCE[0]}")/../pretrain
torchrun=("${TORCHRUN:-}")
if [[ -z "${TORCHRUN:-}" ]]; then
  python=$(command -v python || command -v python3) || fail "there is no python in PATH; activate the environment of the run"
  torchrun=("$python" "$package/distributed/agent.py")
fi
exec "${torchrun[@]}" "${options[@]}" "$package/run.py" "$@"
