#!/usr/bin/env bash
# Makes the environments, one per engine, and runs everything that is not marked slow: format, types, import order, tests.
# `tests/run.sh --slow` runs what is marked slow instead. Ends with a table of the parts, and fails if one of them did.
set -uo pipefail
cd "$(dirname "$0")/.."

case "$*" in
  "") speed="not slow" ;;
  --slow) speed="slow" ;;
  *) echo "usage: bash tests/run.sh [--slow]" >&2; exit 2 ;;
esac

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYRIGHT_PYTHON_IGNORE_WARNINGS=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import torch, and compiling it each time would double that
logs=.cache/test-logs
rm -rf "$logs" && mkdir -p "$logs"
table="" failures=0

part() { # part NAME COMMAND...: runs a command with its output on the screen, and adds a line to the table
  local name=$1 began=$SECONDS verdict=ok last
  shift
  printf '\n==== %s\n' "$name"
  "$@" 2>&1 | tee "$logs/$name.log" || { verdict=FAILED; failures=$((failures + 1)); }
  last=$(grep -v '^[[:space:]]*$' "$logs/$name.log" | tail -n 1)
  table+=$(printf '%-18s %-7s %4d s  %s' "$name" "$verdict" $((SECONDS - began)) "${last:0:110}")$'\n'
}

both() { # both COMMAND A B: COMMAND A beside COMMAND B, on two cores; fails if one of them does
  "$1" "$2" & local beside=$! status=0
  "$1" "$3" || status=1
  wait "$beside" && return "$status"
}

python=$(command -v python3.11 || command -v python3)
make() { "$python" tests/environments/make.py "$1"; }
part environments both make transformers vllm
part environment-deepspeed make deepspeed
own=.venv-transformers/bin/python with_vllm=.venv-vllm/bin/python with_deepspeed=.venv-deepspeed/bin/python

if [ "$speed" = "not slow" ]; then
  part lint "$own" -m ruff check .
  part format "$own" -m ruff format --check .
  part types "$own" -m pyright --pythonpath "$own"
  part import-order .venv-transformers/bin/lint-imports --no-cache
  # All branches of what decides about legality, by its own tests alone.
  legality=(tests/test_state.py tests/test_ledger.py tests/test_steps.py)
  part legality-covered "$own" -m pytest "${legality[@]}" --cov --cov-config=tests/legality.coveragerc
fi
part tests timeout 1500 "$own" -m pytest -m "$speed and not vllm and not deepspeed"
part tests-vllm timeout 900 "$with_vllm" -m pytest -m "$speed and vllm"
part tests-deepspeed env DS_ACCELERATOR=cpu timeout 600 "$with_deepspeed" -m pytest -m "$speed and deepspeed"

printf '\n==== summary\n%s' "$table"
[ "$failures" = 0 ] && echo "all good" || echo "$failures of the parts failed; their output is above and in $logs/"
exit "$((failures > 0))"
