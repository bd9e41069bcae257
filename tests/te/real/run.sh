#!/usr/bin/env bash
# The checks of this room on real versions of Transformer Engine: their Python packages (1.2 MB each, from the package
# registry) over a stand-in for the C++ extension. Nothing is installed in the environment of PYTHON: what these packages
# import lies in a cache outside the tree, and is used again.
#   tests/te/real/run.sh [VERSION...]
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=${PYTHON:-python3}
versions=("$@")
if [ $# = 0 ]; then versions=(2.9.0 2.11.0 2.12.0 2.16.1 2.17.1 2.20.2); fi
name=$("$python" -c 'import sys, torch; print(f"py{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}")')
cache=${FP8WATCH_TE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fp8watch/transformer-engine}/$name
mkdir -p "$cache"

if [ ! -e "$cache/ready" ]; then
  rm -rf "$cache/env"
  "$python" -m venv "$cache/env"
  # torch, pytest and the rest are those of PYTHON
  "$python" -c 'import sys, sysconfig
std = tuple(sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib"))
print("\n".join(p for p in sys.path if p and ("site-packages" in p or not p.startswith((*std, sys.base_prefix)))))' \
    >"$("$cache/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  "$cache/env/bin/python" -m pip install -q --disable-pip-version-check ${PIP_ARGS:-} -c constraints.txt \
    onnxscript pydantic einops packaging importlib-metadata nvdlfw-inspect triton
  touch "$cache/ready"
fi
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
