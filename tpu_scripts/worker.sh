#!/usr/bin/env bash
# What runs on a worker, in ~/lowrank_attn; setup.sh copies it there.
#
#   worker.sh setup PACKAGE           installs a wheel in this folder, or git+URL@REVISION
#   worker.sh start OBJECT COMMAND... in the background; OBJECT is gs://... for snapshots, or ''
#   worker.sh status                  state=none, running, lost (its machine restarted) or exit code
#   worker.sh stop                    SIGTERM to the command
#
# A snapshot is runs/ and log as one object, so it is there in whole or not at all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
every=${SNAPSHOT_SECONDS:-300} # between snapshots

setup() {
  [[ $1 == git+* ]] || set -- "file://$PWD/$1"
  python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --allow-existing --python=3.12 .venv
  python3 -m uv pip install --quiet --python=.venv/bin/python --reinstall-package=lowrank-attn \
    "lowrank-attn[tpu] @ $1"
  .venv/bin/python -c 'import jax, lowrank_attn; print("installed with jax", jax.__version__)'
}

status() {
  if [[ -f exit_code ]]; then
    echo "state=$(<exit_code)"
  elif [[ ! -f pid ]]; then
    echo state=none
  elif grep -q supervise "/proc/$(<pid)/cmdline" 2>/dev/null; then
    echo state=running
  else
    echo state=lost
  fi
}

stop() {
  if [[ $(status) == state=running ]]; then kill -TERM "-$(<pid)"; fi
}

start() { # OBJECT COMMAND...
  if [[ $(status) == state=running ]]; then
    echo "error: the command that was started before still runs here" >&2
    exit 1
  fi
  if [[ $HOSTNAME == *-w-[1-9]* ]]; then set -- '' "${@:2}"; fi # the first worker writes the results
  if [[ $1 && ! -d runs ]]; then restore "$1"; fi
  rm -f exit_code
  setsid bash worker.sh supervise "$@" >>log 2>&1 </dev/null &
  echo $! >pid
}

restore() { # OBJECT
  local message
  if message=$(gcloud storage ls "$1" 2>&1); then
    gcloud storage cp --quiet "$1" snapshot.tar
    rm -rf snapshot
    mkdir snapshot
    tar --extract --file=snapshot.tar --directory=snapshot
    mv snapshot/log log
    mv snapshot/runs runs
  elif [[ $message != *"matched no objects"* ]]; then
    # Starting anew would replace the snapshot.
    echo "error: $1 cannot be read: $message" >&2
    exit 1
  fi
}

save() { # OBJECT
  local code=0
  [[ -d runs ]] || return 0
  # Hard links keep the files of checkpoints that the run deletes meanwhile.
  rm -rf snapshot && mkdir snapshot && cp --archive --link runs log snapshot/ || return
  # Code 1: a file grew. Only logs do, and a run drops their rows after its checkpoint.
  tar --create --file=snapshot.tar --directory=snapshot --exclude='*.orbax-checkpoint-tmp*' runs log || code=$?
  rm -rf snapshot
  ((code <= 1)) && gcloud storage cp --quiet snapshot.tar "$1"
}

save_regularly() { # OBJECT: until SIGTERM, which lets a snapshot end
  trap 'kill "$!"; exit' TERM
  while true; do
    sleep "$every" &
    wait "$!"
    save "$1" || echo "no snapshot this time" >&2
  done
}

supervise() { # OBJECT COMMAND...: in a process group of its own, so that signals reach the command
  local object=$1 code signalled saver
  trap 'signalled=1' TERM INT
  PATH=$PWD/.venv/bin:$PATH "${@:2}" &
  local command=$!
  if [[ $object ]]; then
    save_regularly "$object" &
    saver=$!
  fi
  while
    code=0 signalled=''
    wait "$command" || code=$?
    [[ $signalled ]]
  do :; done
  if [[ $object ]]; then
    kill "$saver" 2>/dev/null || true
    wait "$saver" || true
    save "$object" || echo "error: the last snapshot failed: runs/ is on this worker only" >&2
  fi
  echo "$code" >exit_code
}

"$@"
