#!/usr/bin/env bash
# The job that slurm.sh submits: runs a command as one step. SIGUSR1, which SLURM sends to this
# script before the time limit, stops the command by SIGTERM; if that saved (143), the job is requeued.
set -euo pipefail

stopping=''
trap 'signalled=1 stopping=1; scancel --signal=TERM "$SLURM_JOB_ID.0" || true' USR1
srun "$@" &
step=$!
while
  code=0 signalled=''
  wait "$step" || code=$?
  [[ $signalled ]]
do :; done
if [[ $stopping && $code == 143 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
