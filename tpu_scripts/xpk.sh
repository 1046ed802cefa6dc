#!/usr/bin/env bash
# Runs a command as a workload on TPUs of a GKE cluster, with xpk. What was preempted or stopped by
# SIGTERM (exit code 143) is started again; errors of the command (1 and 2) end it.
#
#   tpu_scripts/xpk.sh --cluster=CLUSTER --name=NAME --zone=ZONE --type=v6e-4 --image=IMAGE \
#     --extra=--storage=STORAGE -- \
#     python -m experiments.lra --task=listops --run_dir=/mnt/runs/listops
#
# --cluster=CLUSTER  of xpk
# --name=NAME        of the workload                                        [TPU_NAME]
# --zone=ZONE        of the cluster                                         [TPU_ZONE]
# --project=PROJECT  default: that of `gcloud config`                       [TPU_PROJECT]
# --type=TYPE        TPU type, as the cluster has                           [TPU_TYPE]
# --slices=N         default 1                                              [TPU_SLICES]
# --image=IMAGE      container image with the package and its tpu extra
# --restarts=N       at most so many; default 50
# --env=NAME=VALUE   a variable of the command; may be repeated
# --extra=FLAG       one more flag of xpk; may be repeated
# --dry-run          print the command, run nothing                         [TPU_DRY_RUN=1]
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
cluster='' image='' restarts=50
parse "cluster= name= zone= project= type= slices= image= restarts= env= extra=" "$@"
need cluster name zone type image
need_command

# exec: the container's shell sends SIGTERM to its child, which is to be the command.
run xpk workload create --cluster="$cluster" --workload="$name" --zone="$zone" \
  ${project:+--project="$project"} --tpu-type="$type" --num-slices="$slices" --docker-image="$image" \
  --max-restarts="$restarts" "${extra[@]}" --command="exec $(with_environment)"
