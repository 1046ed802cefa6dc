#!/usr/bin/env bash
# Creates a TPU, or with --queued asks for one that is created as soon as there is room.
#
#   tpu_scripts/create.sh --name=NAME --zone=ZONE --type=v5litepod-8 --capacity=spot --queued
#
# --name=NAME          of the TPU, and of its queued resource               [TPU_NAME]
# --zone=ZONE          where                                                [TPU_ZONE]
# --project=PROJECT    default: that of `gcloud config`                     [TPU_PROJECT]
# --type=TYPE          accelerator type, such as v5litepod-8 or v6e-8       [TPU_TYPE]
# --version=VERSION    software of the VM; default: that of the type        [TPU_VERSION]
# --capacity=CAPACITY  on-demand (default), spot or reserved                [TPU_CAPACITY]
# --queued             as a queued resource                                 [TPU_QUEUED=1]
# --slices=N           so many slices of the type, queued; default 1        [TPU_SLICES]
# --extra=FLAG         one more flag of gcloud; may be repeated
# --dry-run            print the command, run nothing                       [TPU_DRY_RUN=1]
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
parse "name= zone= project= type= version= capacity= queued slices= extra=" "$@"
need name zone type

case $capacity in
  on-demand) flags=() ;;
  spot | reserved) flags=("--$capacity") ;;
  *) die "--capacity=$capacity: expected on-demand, spot or reserved" ;;
esac
if [[ ! $version ]]; then
  case $type in
    v6e-*) version=v2-alpha-tpuv6e ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v[234]-*) version=tpu-ubuntu2204-base ;;
    tpu7x*) die "--type=$type: the Cloud TPU API ends with v6e; newer chips are on GKE, see xpk.sh" ;;
    *) die "--type=$type has no known software: name it with --version=..." ;;
  esac
fi

if [[ ! $queued ]]; then
  tpus tpu-vm create "$name" --accelerator-type="$type" --version="$version" "${flags[@]}" "${extra[@]}"
  exit
fi
nodes=(--node-id="$name")
if ((slices > 1)); then nodes=(--node-count="$slices" --node-prefix="$name"); fi
tpus queued-resources create "$name" --accelerator-type="$type" --runtime-version="$version" \
  "${nodes[@]}" "${flags[@]}" "${extra[@]}"
