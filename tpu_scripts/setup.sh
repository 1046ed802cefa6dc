#!/usr/bin/env bash
# Installs the package with the `tpu` extra on all workers, from a revision of a Git repository or
# from a wheel. Run again, it installs over what is there.
#
#   tpu_scripts/setup.sh --name=NAME --zone=ZONE --wheel=dist/lowrank_attn-0.1.0-py3-none-any.whl
#
# --name=NAME        of the TPU                                             [TPU_NAME]
# --zone=ZONE        where                                                  [TPU_ZONE]
# --project=PROJECT  default: that of `gcloud config`                       [TPU_PROJECT]
# --slices=N         if it was created with more than one                   [TPU_SLICES]
# --wheel=FILE       from `pip wheel --no-deps --wheel-dir=dist .`          [TPU_WHEEL]
# --repository=URL   that the workers can read; default: origin here        [TPU_REPOSITORY]
# --revision=REV     commit, tag or branch in it; default: HEAD here        [TPU_REVISION]
# --dry-run          print the commands, run nothing                        [TPU_DRY_RUN=1]
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
parse "name= zone= project= slices= wheel= repository= revision=" "$@"
need name zone

files=("$here/worker.sh")
if [[ $wheel ]]; then
  [[ ! ($repository || $revision) ]] || die "--wheel and --repository, --revision: choose one of them"
  [[ -f $wheel ]] || die "--wheel=$wheel is no file"
  files+=("$wheel")
  package=${wheel##*/}
else
  repository=${repository:-$(git -C "$here" remote get-url origin)} || die "--wheel=... or --repository=... is needed"
  revision=${revision:-$(git -C "$here" rev-parse HEAD)}
  package=git+$repository@$revision
fi

on_workers "mkdir -p lowrank_attn"
if ((slices > 1)); then
  tpus queued-resources scp "${files[@]}" "$name:lowrank_attn/" --node=all --worker=all
else
  tpus tpu-vm scp "${files[@]}" "$name:lowrank_attn/" --worker=all
fi
on_workers "$(quote bash lowrank_attn/worker.sh setup "$package")"
