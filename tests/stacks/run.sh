#!/usr/bin/env bash
# The checks of this room on the real packages of requirements.txt, from the package registry, in an environment of their own
# that sees torch and pytest of PYTHON. A file of checks is one process: engines keep process groups.
#   tests/stacks/run.sh [CHECK...]            (transformers lightning ...)
#   tests/stacks/run.sh --part                those of tests/support/real_packages.py: a part in turn, and only what it needs
#   tests/stacks/run.sh --table [NAME...]     writes the table of trainers in docs/integrations.md
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
env=${FP8WATCH_STACKS_ENV:-build/stacks/.venv}
wanted=tests/stacks/requirements.txt

if [ "${1:-}" = --part ]; then
  part=$("$python" tests/support/real_packages.py stacks)
  readarray -t checks <<<"$part"
  set -- "${checks[@]}"
fi
pattern=.
if [ $# != 0 ] && [ "$1" != --table ]; then pattern="#.* ($(tr ' ' '|' <<<"$*"))( |\$)"; fi
lines=$(grep '==' "$wanted" | grep -E "$pattern") || { echo "run.sh: no package for $*: see $wanted" >&2; exit 2; }

if grep -qsvxFf "$wanted" "$env/ready"; then rm -rf "$env"; fi  # of other versions than are wanted now
"$python" tests/support/overlay_env.py "$env"
touch "$env/ready"
if missing=$(grep -vxFf "$env/ready" <<<"$lines"); then
  DS_BUILD_OPS=0 "$env/bin/python" -m pip install -q --disable-pip-version-check ${PIP_ARGS:-} -c constraints.txt \
    -r <(printf '%s\n' "$missing")
  printf '%s\n' "$missing" >>"$env/ready"
fi
if [ "${1:-}" = --table ]; then
  OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 exec "$env/bin/python" -W ignore tests/stacks/trainers.py "${@:2}"
fi
if [ $# = 0 ]; then
  set -- $(basename -s .py -a tests/stacks/check_*.py | sed 's/^check_//')
fi

check() {  # one file, its output whole
  local out status=0
  out=$(OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$env/bin/python" -m pytest -p no:cacheprovider -q -W ignore \
    -c tests/stacks/pytest.ini --confcutdir tests/stacks "tests/stacks/check_$1.py" 2>&1) || status=$?
  printf '== %s\n%s\n' "$1" "$(tail -n 80 <<<"$out")"
  return "$status"
}
export -f check
export env
printf '%s\n' "$@" | xargs -P "${WORKERS:-2}" -I{} bash -c 'check "$1"' _ {}
