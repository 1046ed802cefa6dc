#!/usr/bin/env bash
# Starts a command in the background on all workers, after setup.sh. The same command again
# continues a run that was stopped; while it runs, it is refused.
#
#   tpu_scripts/run.sh --name=NAME --zone=ZONE --bucket=gs://BUCKET -- \
#     python -m experiments.lra --task=listops --kernel=llops
#
# --name=NAME         of the TPU                                            [TPU_NAME]
# --zone=ZONE         where                                                 [TPU_ZONE]
# --project=PROJECT   default: that of `gcloud config`                      [TPU_PROJECT]
# --slices=N          if it was created with more than one                  [TPU_SLICES]
# --bucket=gs://...   keep runs/ and the log there as NAME.tar every five   [TPU_BUCKET]
#                     minutes and at the end, and begin with what is there
# --env=NAME=VALUE    a variable of the command; may be repeated
# --stop              send SIGTERM to the command instead: it saves and exits with 143
# --dry-run           print the command, run nothing                        [TPU_DRY_RUN=1]
#
# On a worker the command runs in ~/lowrank_attn with its environment activated; ~/lowrank_attn/log
# has its output. Runs must write to runs/, as they do by default.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
stop=
parse "name= zone= project= slices= bucket= env= stop" "$@"
need name zone

if [[ $stop ]]; then
  on_workers "bash lowrank_attn/worker.sh stop"
  exit
fi
need_command
if [[ $bucket ]]; then
  ((slices == 1)) || die "--bucket with --slices=$slices: one process writes runs/, which is of one slice"
  bucket+=/$name.tar
fi
on_workers "bash lowrank_attn/worker.sh start $(quote "$bucket") $(with_environment)"
