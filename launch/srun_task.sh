#!/usr/bin/env bash
# One process of a run, as a task of Slurm's srun, without torchrun. From the repository root, in an allocation:
#
#   srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 bash launch/srun_task.sh --config configs/pretrain/olmo2-1b.yaml key=value ...
#
# Slurm's variables become those that launchers set: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The
# last two may be set before srun; by default the tasks meet on the first node, at a port of this step's own. Nothing starts a task
# again: that is what launch/slurm.sbatch is for, which starts torchrun once per node.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

[[ -n "${SLURM_PROCID:-}" && -n "${SLURM_STEP_NUM_TASKS:-}" ]] ||
  fail "not a task of srun: srun --nodes N --ntasks-per-node M bash launch/srun_task.sh --config configs/pretrain/olmo2-1b.yaml"
(($# > 0)) || fail "no arguments for pretrain/run.py: give at least --config configs/pretrain/olmo2-1b.yaml"

# "2(x3),1" says 2, 2, 2, 1: the tasks of each node.
tasks_of_node() { # NUMBER TASKS
  local part times node=0
  local -a parts
  IFS=, read -ra parts <<<"$2"
  for part in "${parts[@]}"; do
    times=1
    [[ "$part" =~ ^[0-9]+\(x([0-9]+)\)$ ]] && times=${BASH_REMATCH[1]}
    node=$((node + times))
    if ((node > $1)); then
      echo "${part%%(*}"
      return
    fi
  done
  fail "Slurm's list of tasks, $2, has no node $1"
}

RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS
LOCAL_WORLD_SIZE=$(tasks_of_node "$SLURM_NODEID" "$SLURM_STEP_TASKS_PER_NODE")
# Other than a number or an id, such as -1 or NoDevFiles, hides all GPUs: a run on the CPU.
if ((LOCAL_WORLD_SIZE > 1)) && [[ "${CUDA_VISIBLE_DEVICES:-}" =~ ^([0-9]+|GPU-[^,]+|MIG-[^,]+)$ ]]; then
  fail "this task sees one GPU of its node (CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES); ask for --gpus-per-node in place of --gpus-per-task, and --gpu-bind=none"
fi
if [[ -z "${MASTER_ADDR:-}" ]]; then
  hosts=$(scontrol show hostnames "$SLURM_STEP_NODELIST") || fail "scontrol cannot say which nodes $SLURM_STEP_NODELIST are; set MASTER_ADDR before srun"
  MASTER_ADDR=${hosts%%$'\n'*}
fi
MASTER_PORT=${MASTER_PORT:-$((10000 + (SLURM_JOB_ID * 7 + SLURM_STEP_ID) % 20000))}
# As torchrun does: without it each process would take all cores.
((LOCAL_WORLD_SIZE == 1)) || OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT ${OMP_NUM_THREADS:+OMP_NUM_THREADS}
python=$(command -v python || command -v python3) || fail "there is no python in PATH; activate the environment of the run"
exec "$python" "$(dirname "${BASH_SOURCE[0]}")/../pretrain/run.py" "$@"
