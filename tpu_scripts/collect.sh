#!/usr/bin/env bash
# Copies results and logs to this machine: from the bucket, or from the workers while they exist.
#
#   tpu_scripts/collect.sh --name=NAME --bucket=gs://BUCKET --to=collected
#
# --to=FOLDER         gets runs/ and log; default: collected/NAME
# --name=NAME         of the TPU                                            [TPU_NAME]
# --bucket=gs://...   that run.sh had; without it, from the workers         [TPU_BUCKET]
# --zone=ZONE         where, for the workers                                [TPU_ZONE]
# --project=PROJECT   default: that of `gcloud config`                      [TPU_PROJECT]
# --slices=N          if it was created with more than one                  [TPU_SLICES]
# --dry-run           print the commands, run nothing                       [TPU_DRY_RUN=1]
#
# From the workers: runs/ is that of the first one, and there is one log for each, WORKER.log.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
to=
parse "to= name= bucket= zone= project= slices=" "$@"
need name
to=${to:-collected/$name}

run mkdir -p "$to"
if [[ $bucket ]]; then
  run gcloud storage cp --quiet "$bucket/$name.tar" "$to/snapshot.tar"
  run tar --extract --file="$to/snapshot.tar" --directory="$to"
  run rm "$to/snapshot.tar"
  exit
fi
need zone
if ((slices > 1)); then
  for ((slice = 0; slice < slices; slice++)); do
    run mkdir -p "$to/slice-$slice" # gcloud names the logs by worker alone
    tpus queued-resources ssh "$name" --node="$slice" --worker=all --command="cat lowrank_attn/log" \
      --output-directory="$to/slice-$slice"
  done
  tpus queued-resources scp --recurse "$name:lowrank_attn/runs" "$to" --node=0 --worker=0
else
  on_workers "cat lowrank_attn/log" --output-directory="$to"
  tpus tpu-vm scp --recurse "$name:lowrank_attn/runs" "$to" --worker=0
fi
