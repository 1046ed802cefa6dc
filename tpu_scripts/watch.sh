#!/usr/bin/env bash
# Keeps a command going until it has ended: creates the TPU if there is none, sets it up, runs the
# command, and after a preemption does all of it again; the same command continues from the bucket.
#
#   tpu_scripts/watch.sh --name=NAME --zone=ZONE --type=v5litepod-8 --capacity=spot --queued \
#     --wheel=dist/FILE.whl --bucket=gs://BUCKET -- \
#     python -m experiments.lra --task=listops --kernel=llops
#
# Flags of create.sh, setup.sh and run.sh, and
# --poll=SECONDS  between two looks at the state; default 60
# --tries=N       end when so many steps in a row have failed; default 10
# --delete        delete the TPU when the command has ended with 0; needs --bucket
# --dry-run       print the commands of a TPU that is not there yet, run nothing
#
# Ends with the exit code of the command. To stop it, end this script first, then run.sh --stop.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
poll=60 tries=10 delete=
parse "name= zone= project= type= version= capacity= queued slices= extra= wheel= repository= \
revision= bucket= env= poll= tries= delete" "$@"
need name zone type
need_command
[[ ! $delete || $bucket ]] || die "--delete without --bucket would delete the results"
[[ $wheel || $revision ]] || revision=$(git -C "$here" rev-parse HEAD) # the same after a preemption
export TPU_NAME=$name TPU_ZONE=$zone TPU_PROJECT=$project TPU_TYPE=$type TPU_VERSION=$version \
  TPU_CAPACITY=$capacity TPU_QUEUED=$queued TPU_SLICES=$slices TPU_WHEEL=$wheel \
  TPU_REPOSITORY=$repository TPU_REVISION=$revision TPU_BUCKET=$bucket TPU_DRY_RUN=$dry_run

create() { "$here/create.sh" "${extra[@]/#/--extra=}"; }
setup() { "$here/setup.sh"; }
start() { "$here/run.sh" "${env[@]/#/--env=}" -- "${command[@]}"; }
workers() { on_workers "bash lowrank_attn/worker.sh status 2>/dev/null || echo state=none"; }

describe() {
  if [[ $queued ]]; then
    tpus queued-resources describe "$name" --format='value(state.state)'
  else
    tpus tpu-vm describe "$name" --format='value(state)'
  fi
}

step() { # one look, and what follows from it; sets ended to the exit code of a command that has ended
  local state message code=0
  message=$(mktemp)
  state=$(describe 2>"$message") || code=$?
  if ((code)) && grep -q NOT_FOUND "$message"; then state=ABSENT code=0; else cat "$message" >&2; fi
  rm "$message"
  ((code == 0)) || return "$code"
  say "$state"
  case $state in
    ABSENT) create ;;
    READY | ACTIVE) tend ;;
    PREEMPTED | TERMINATED | SUSPENDED) "$here/delete.sh" ;;
    FAILED) die "the request has failed: gcloud compute tpus queued-resources describe $name says why" ;;
    *) ;; # on its way: CREATING, WAITING_FOR_RESOURCES, PROVISIONING, SUSPENDING, DELETING, ...
  esac
}

tend() {
  local report states state
  report=$(workers) || return
  states=$(grep -o 'state=[a-z0-9]*' <<<"$report" | sort -u) || return
  states=${states//state=/}
  say "workers:" "${states//$'\n'/, }"
  for state in $states; do
    case $state in
      0 | 143 | none | lost | running) ;;
      *) ended=$state ;;
    esac
  done
  [[ ! $ended ]] || return 0
  case $states in
    *running*) ;;
    0) ended=0 ;;
    *none*) setup && start ;;
    *) start ;; # stopped by SIGTERM, or with its machine
  esac
}

say() { echo "$(date +%FT%T) $name" "$@" >&2; }

if [[ $dry_run ]]; then
  for part in describe create setup start workers; do "$part"; done
  if [[ $delete ]]; then "$here/delete.sh"; fi
  exit
fi
ended='' failures=0
while true; do
  if step; then
    failures=0
  else
    code=$?
    failures=$((failures + 1))
    say "failed with exit code $code, $failures in a row"
    ((failures < tries)) || exit "$code"
  fi
  if [[ $ended ]]; then break; fi
  sleep "$poll"
done
say "the command has ended with exit code $ended"
if [[ $delete && $ended == 0 ]]; then "$here/delete.sh"; fi
exit "$ended"
