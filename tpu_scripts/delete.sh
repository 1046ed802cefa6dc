#!/usr/bin/env bash
# Deletes a TPU with everything on its disks, and ends its costs. Collect first.
#
#   tpu_scripts/delete.sh --name=NAME --zone=ZONE --queued
#
# --name=NAME        of the TPU                                             [TPU_NAME]
# --zone=ZONE        where                                                  [TPU_ZONE]
# --project=PROJECT  default: that of `gcloud config`                       [TPU_PROJECT]
# --queued           if it was created with --queued                        [TPU_QUEUED=1]
# --slices=N         if it was created with more than one                   [TPU_SLICES]
# --dry-run          print the command, run nothing                         [TPU_DRY_RUN=1]
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
parse "name= zone= project= queued slices=" "$@"
need name zone

if [[ $queued ]]; then
  tpus queued-resources delete "$name" --force
else
  tpus tpu-vm delete "$name"
fi
