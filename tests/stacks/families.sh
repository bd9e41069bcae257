#!/usr/bin/env bash
# Trains tiny models of the families in tests/stacks/family_models.py with real classes of transformers and diffusers, which are
# installed beside PYTHON's packages in a cache outside the tree, and writes the first table of docs/integrations.md.
#   tests/stacks/families.sh [--print] [NAME...]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
name=$("$python" -c 'import sys, torch; print(f"py{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}")')
cache=${FP8WATCH_STACKS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fp8watch/families}/$name

mkdir -p "$cache"
"$python" tests/support/overlay_env.py "$cache/env"  # torch and the rest are those of PYTHON
pip=("$cache/env/bin/python" -m pip install -q --disable-pip-version-check ${PIP_ARGS:-})
"${pip[@]}" -c constraints.txt transformers==5.23.0 importlib_metadata Pillow requests  # asks nobody where they are there
"${pip[@]}" --no-deps diffusers==0.42.1
OMP_NUM_THREADS=1 "$cache/env/bin/python" tests/stacks/families.py "$@"
