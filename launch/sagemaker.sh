#!/usr/bin/env bash
# The entry of a SageMaker training container (launch/targets/sagemaker.yaml): its arguments go to pretrain/run.py.
#
# SageMaker says in /opt/ml/input/config/resourceconfig.json which hosts there are and which one this is (docs.aws.amazon.com, "How Amazon SageMaker
# Provides Training Information"). Runs lie in /opt/ml/checkpoints, which SageMaker copies to S3 and back, or, with several hosts, on the file system of the
# channel `shared`, which all of them see. When an instance is reclaimed (spot), SageMaker sends SIGTERM 120 s before.
#
#   GPUS                 processes per host (set by the template)
#   SAGEMAKER_BASE_DIR   in place of /opt/ml, as in SageMaker's own toolkit
set -euo pipefail
base=${SAGEMAKER_BASE_DIR:-/opt/ml}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "error: $1" >&2
  mkdir -p "$base/output"
  echo "$1" > "$base/output/failure" # shown by SageMaker as FailureReason
  exit 1
}

resources=$base/input/config/resourceconfig.json
[[ -f "$resources" ]] || fail "$resources is missing: this script is for a SageMaker training container"
# shellcheck disable=SC2016
read -r NODES NODE_RANK head host interface < <(python - "$resources" <<'PYTHON'
import json, sys
said = json.load(open(sys.argv[1]))
hosts = sorted(said["hosts"])
print(len(hosts), hosts.index(said["current_host"]), hosts[0], said["current_host"], said.get("network_interface_name", "-"))
PYTHON
) || fail "$resources has no hosts and current_host"
((NODES > 1)) || head=127.0.0.1 host=127.0.0.1
export NODES NODE_RANK HEAD=$head:29500 LOCAL_ADDR=$host SHUTDOWN_TIMEOUT=${SHUTDOWN_TIMEOUT:-100}
if [[ "$interface" != - && "$NODES" -gt 1 ]]; then
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
fi

runs=$base/checkpoints
if ((NODES > 1)); then
  runs=$base/input/data/shared/runs
  [[ -d "$base/input/data/shared" ]] || fail "$NODES hosts need a file system that all of them see: --set file_system=... of launch/targets/sagemaker.yaml"
fi
mkdir -p "$runs"
began=$(date +%s)

bash launch/torchrun_multinode.sh "$@" "run.dir=$runs" &
run=$!
stopped=""
trap 'stopped=yes; kill -TERM "$run"' TERM
status=0
wait "$run" || status=$?
while kill -0 "$run" 2>/dev/null; do # a trapped signal ended `wait` before the run ended
  status=0
  wait "$run" || status=$?
done
if [[ -n "$stopped" ]]; then
  echo "SIGTERM: the run has stopped; the same job continues from its checkpoint; after its end, another one does (--set job_name=...)"
elif ((status != 0)); then
  # What an earlier job of the run has ended by is not the reason: only a status of this start counts.
  reason=$(find "$runs" -name status.json -newermt "@$began" -exec python -c '
import json, sys
said = json.load(open(sys.argv[1]))
print(said["reason"] or "" if said["state"] == "failed" else "", end="")' {} \; || true)
  fail "${reason:-the run ended with exit code $status; its log says why}"
fi
exit "$status"
