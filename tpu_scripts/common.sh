# shellcheck shell=bash
# What the scripts share: flags, dry runs, and commands on all workers of a TPU.

if ((BASH_VERSINFO[0] < 5)); then
  echo "error: bash 5 or newer is needed, this is $BASH_VERSION" >&2
  exit 2
fi
# Flags that several scripts take, with the environment variable that sets each.
# shellcheck disable=SC2034 # no script uses all of them
{
  here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  name=${TPU_NAME-}
  zone=${TPU_ZONE-}
  project=${TPU_PROJECT-}
  type=${TPU_TYPE-}
  version=${TPU_VERSION-}
  capacity=${TPU_CAPACITY-on-demand}
  queued=${TPU_QUEUED-}
  slices=${TPU_SLICES-1}
  bucket=${TPU_BUCKET-}
  repository=${TPU_REPOSITORY-}
  revision=${TPU_REVISION-}
  wheel=${TPU_WHEEL-}
  dry_run=${TPU_DRY_RUN-}
  env=() extra=() command=()
}

die() { # MESSAGE
  echo "error: $1" >&2
  exit 2
}

parse() { # "FLAG= SWITCH ..." ARGUMENT...: sets the variables of the flags, and command to what follows --
  local known=" $1 dry-run " flag
  shift
  while (($#)); do
    flag=${1%%=*}
    flag=${flag#--}
    case $1 in
      --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" # the comment at the head of the script
        exit
        ;;
      --)
        shift
        command=("$@")
        break
        ;;
      --env=*=* | --extra=*)
        [[ $known == *" $flag= "* ]] || die "unknown flag --$flag; see --help"
        if [[ $flag == env ]]; then env+=("${1#*=}"); else extra+=("${1#*=}"); fi
        ;;
      --*=*)
        [[ $known == *" $flag= "* && $flag != env ]] || die "unknown flag ${1@Q}; see --help"
        printf -v "$flag" %s "${1#*=}"
        ;;
      --*)
        [[ $known != *" $flag= "* ]] || die "--$flag needs a value: --$flag=..."
        [[ $known == *" $flag "* ]] || die "unknown flag --$flag; see --help"
        printf -v "${flag//-/_}" 1
        ;;
      *) die "unexpected argument ${1@Q}: flags are --flag=value, and the command to run follows --" ;;
    esac
    shift
  done
  [[ $slices =~ ^[1-9][0-9]*$ ]] || die "--slices=$slices: expected a number of at least 1"
  # shellcheck disable=SC2034 # for the scripts
  if ((slices > 1)); then queued=1; fi
  if [[ $bucket && $bucket != gs://* ]]; then die "--bucket=$bucket: expected gs://..."; fi
  bucket=${bucket%/}
}

need() { # FLAG...: ends the script if one has no value
  local flag
  for flag; do
    [[ ${!flag} ]] || die "--$flag=... is needed; see --help"
  done
}

need_command() {
  ((${#command[@]})) || die "the command to run is needed, after --; see --help"
}

quote() { # WORD...: one line that a shell reads back as these words
  local word line=
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  echo "${line:1}"
}

with_environment() { # the command as one line, with what --env sets
  if ((${#env[@]})); then quote env "${env[@]}" "${command[@]}"; else quote "${command[@]}"; fi
}

run() { # WORD...: runs a command, or prints it
  if [[ $dry_run ]]; then quote "$@"; else "$@"; fi
}

tpus() { # WORD...: gcloud compute tpus
  run gcloud compute tpus "$@" --zone="$zone" ${project:+--project="$project"} --quiet
}

on_workers() { # COMMAND [FLAG...]: runs one line on every worker of every slice
  set -- "$name" --worker=all --command="$1" "${@:2}" --ssh-flag=-oServerAliveInterval=30 # preempted VMs hang
  if ((slices > 1)); then tpus queued-resources ssh "$@" --node=all; else tpus tpu-vm ssh "$@"; fi
}
