#!/usr/bin/env bash
# Everything that a GPU can show, in one call, from a checkout and an installed torch, triton, numpy, msgspec, zstandard,
# urllib3 and pytest; nothing is installed. Kernels compile in SHARDS processes side by side.
# Trainings are not among all: they need packages of their own, and ten minutes.
#   tests/gpu/run.sh check | bench | all | trainings
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:-all}
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/agent:$PWD/server:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" FP8WATCH_REQUIRE_GPU=1
unset TRITON_INTERPRET
status=0
if [ "$what" = trainings ]; then
  "$python" tests/gpu/trainings.py --out build/gpu-trainings --budget 3600 ${ARGS:-} || status=1
  if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("transformer_engine") is None)'; then
    "$python" tests/gpu/te_trainings.py --out build/gpu-trainings/te || status=1
  fi
  exit "$status"
fi
if [ "$what" != bench ]; then
  shards=${SHARDS:-8}
  logs=$(mktemp -d)
  pids=()
  for ((i = 0; i < shards; i++)); do
    FP8WATCH_SHARD="$i/$shards" "$python" -m pytest -q -p no:cacheprovider -c tests/gpu/pytest.ini --confcutdir tests/gpu \
      tests/gpu >"$logs/$i" 2>&1 &
    pids+=($!)
  done
  for ((i = 0; i < shards; i++)); do
    code=0
    wait "${pids[$i]}" || code=$?
    # 5: a share without a test in it
    if [ "$code" != 0 ] && [ "$code" != 5 ]; then status=1; tail -60 "$logs/$i"; else tail -3 "$logs/$i"; fi
  done
  rm -r "$logs"
fi
if [ "$what" != check ]; then
  "$python" -m benchmarks.gpu ${ARGS:-} || status=1
fi
exit "$status"
