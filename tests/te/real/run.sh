#!/usr/bin/env bash
# The checks of this room on real versions of Transformer Engine: their Python packages (1.2 MB each, from the package
# registry) over a stand-in for the C++ extension. Nothing is installed in the environment of PYTHON: what these packages
# import lies in a cache outside the tree, and is used again.
#   tests/te/real/run.sh [VERSION...]
#   tests/te/real/run.sh --part    those of tests/support/real_packages.py: oldest, newest, and others in turn
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=${PYTHON:-python3}
versions=("$@")
if [ $# = 0 ]; then versions=(2.9.0 2.11.0 2.12.0 2.16.1 2.17.1 2.20.2); fi
if [ "${1:-}" = --part ]; then
  part=$("$python" tests/support/real_packages.py te)
  readarray -t versions <<<"$part"
fi
name=$("$python" -c 'import sys, torch; print(f"py{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}")')
cache=${FP8WATCH_TE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fp8watch/transformer-engine}/$name
mkdir -p "$cache"

"$python" tests/support/overlay_env.py "$cache/env"  # torch, pytest and the rest are those of PYTHON
"$cache/env/bin/python" -m pip install -q --disable-pip-version-check ${PIP_ARGS:-} -c constraints.txt \
  onnxscript pydantic einops packaging importlib-metadata nvdlfw-inspect triton  # asks nobody where they are there
for version in "${versions[@]}"; do
  if [ ! -d "$cache/$version/transformer_engine" ]; then
    rm -rf "$cache/$version" "$cache/$version.part"
    "$cache/env/bin/python" -m pip install -q --disable-pip-version-check ${PIP_ARGS:-} --no-deps --no-compile \
      --target "$cache/$version.part" "transformer-engine==$version"
    mv "$cache/$version.part" "$cache/$version"
  fi
done

check() {  # one version, one process: its output whole, one after the other
  local out status=0
  out=$(PYTHONPATH="$cache/$1" OMP_NUM_THREADS=1 "$cache/env/bin/python" -m pytest -p no:cacheprovider \
    -c tests/te/real/pytest.ini --confcutdir tests/te/real tests/te/real 2>&1) || status=$?
  printf '== Transformer Engine %s\n%s\n' "$1" "$(tail -n 80 <<<"$out")"
  return "$status"
}
export -f check
export cache
printf '%s\n' "${versions[@]}" | xargs -P "${WORKERS:-2}" -I{} bash -c 'check "$1"' _ {}
