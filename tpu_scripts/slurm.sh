#!/usr/bin/env bash
# Submits a command to SLURM: one process with the GPUs of one node. Before its time limit the run
# is stopped with SIGTERM, saves, and the job goes back to the queue, where it continues.
#
#   tpu_scripts/slurm.sh --name=NAME --gpus=8 --time=04:00:00 --extra=--partition=PARTITION -- \
#     .venv/bin/python -m experiments.lra --task=listops --kernel=llops
#
# --name=NAME       of the job; its log is NAME-JOB.log                     [TPU_NAME]
# --gpus=N          of the node; default 1
# --time=TIME       limit of one turn in SLURM's notation; default 04:00:00
# --notice=SECONDS  from SIGTERM to the limit; default 300
# --env=NAME=VALUE  a variable of the command; may be repeated
# --extra=FLAG      one more flag of sbatch; may be repeated
# --dry-run         print the command, run nothing                          [TPU_DRY_RUN=1]
#
# Submit from the folder in which the command is to run, on a file system that the nodes share.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
gpus=1 time=04:00:00 notice=300
parse "name= gpus= time= notice= env= extra=" "$@"
need name
need_command

if ((${#env[@]})); then command=(env "${env[@]}" "${command[@]}"); fi
run sbatch --job-name="$name" --nodes=1 --ntasks=1 --gpus-per-node="$gpus" --time="$time" \
  --signal="B:USR1@$notice" --requeue --open-mode=append --output="$name-%j.log" "${extra[@]}" \
  "$here/slurm_job.sh" "${command[@]}"
