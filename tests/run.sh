#!/usr/bin/env bash
# Makes the environments, one per engine, and runs everything that is not marked slow: format, types, import order, tests.
# `tests/run.sh --slow` runs what is marked slow instead. Ends with a table of the parts, and fails if one of them did.
set -uo pipefail
cd "$(dirname "$0")/.."

case "$*" in
  "") speed="not slow" minutes=30 ;;
  --slow) speed="slow" minutes=300 ;;
  *) echo "usage: bash tests/run.sh [--slow]" >&2; exit 2 ;;
esac

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYRIGHT_PYTHON_IGNORE_WARNINGS=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import torch, and compiling it each time would double that
logs=.cache/test-logs
rm -rf "$logs" && mkdir -p "$logs"
table="" failures=0
declare -A running

begin() { # begin NAME COMMAND...: runs a command beside what comes after, with its output in its log
  local name=$1 began=$SECONDS status=0
  shift
  { "$@" >"$logs/$name.log" 2>&1 || status=$?; echo "$status $((SECONDS - began))" >"$logs/$name.ended"; } &
  running[$name]=$!
}

finish() { # finish NAME...: waits for what was begun, shows its output, and adds lines to the table
  local name status seconds
  for name in "$@"; do
    printf '\n==== %s\n' "$name"
    wait "${running[$name]}"
    cat "$logs/$name.log"
    read -r status seconds <"$logs/$name.ended"
    line "$name" "$status" "$seconds"
  done
}

part() { # part NAME COMMAND...: runs a command with its output on the screen, and adds a line to the table
  local name=$1 began=$SECONDS status=0
  shift
  printf '\n==== %s\n' "$name"
  "$@" 2>&1 | tee "$logs/$name.log" || status=1
  line "$name" "$status" $((SECONDS - began))
}

line() { # line NAME STATUS SECONDS
  local verdict=ok last
  [ "$2" = 0 ] || { verdict=FAILED; failures=$((failures + 1)); }
  last=$(grep -v '^[[:space:]]*$' "$logs/$1.log" | tail -n 1)
  table+=$(printf '%-22s %-7s %4d s  %s' "$1" "$verdict" "$3" "${last:0:110}")$'\n'
}

python=$(command -v python3.11 || command -v python3)
make() { # make ENVIRONMENT...
  local each
  for each in "$@"; do "$python" tests/environments/make.py "$each" || return; done
}
named() { # named ENGINE: the test files that need it, by their name or by a mark
  { find tests -path "*$1*" -name 'test_*.py'; grep -rl "mark\.$1" --include='test_*.py' tests; } | sort -u
}

part environment make transformers
own=.venv-transformers/bin/python with_vllm=.venv-vllm/bin/python with_sglang=.venv-sglang/bin/python with_deepspeed=.venv-deepspeed/bin/python
limit=(timeout "${minutes}m") pytest=(-m pytest --durations=10 -m)

# What takes one core goes side by side. The tests that start ranks come after it, and have the cores to themselves.
begin environments make vllm sglang deepspeed
legality=(tests/test_state.py tests/test_ledger.py tests/test_steps.py)
alone=(tests/data tests/engines tests/environments tests/memory tests/ops tests/rewards tests/static tests/telemetry tests/testing)
mapfile -t rest < <(printf '%s\n' tests/test_*.py | grep -vxF "$(printf '%s\n' "${legality[@]}")")
if [ "$speed" = "not slow" ]; then
  begin types "$own" -m pyright --pythonpath "$own"
  # All branches of what decides about legality, by its own tests.
  begin legality-covered "$own" -m pytest "${legality[@]}" --cov --cov-config=tests/legality.coveragerc
  part lint "$own" -m ruff check .
  part format "$own" -m ruff format --check .
  part import-order .venv-transformers/bin/lint-imports --no-cache
fi
part tests-alone "${limit[@]}" "$own" "${pytest[@]}" "$speed and not vllm and not sglang and not deepspeed" "${alone[@]}" "${rest[@]}"
[ "$speed" = "slow" ] || finish types legality-covered
finish environments
part tests-ranks "${limit[@]}" "$own" "${pytest[@]}" "$speed and not vllm and not sglang and not deepspeed" "${alone[@]/#/--ignore=}" "${rest[@]/#/--ignore=}" \
  "${legality[@]/#/--ignore=}" tests
mapfile -t files < <(named vllm)
part tests-vllm "${limit[@]}" "$with_vllm" "${pytest[@]}" "$speed and vllm" "${files[@]}"
mapfile -t files < <(named sglang)
part tests-sglang "${limit[@]}" "$with_sglang" "${pytest[@]}" "$speed and sglang" "${files[@]}"
mapfile -t files < <(named deepspeed)
part tests-deepspeed env DS_ACCELERATOR=cpu "${limit[@]}" "$with_deepspeed" "${pytest[@]}" "$speed and deepspeed" "${files[@]}"

printf '\n==== summary\n%s' "$table"
[ "$failures" = 0 ] && echo "all good" || echo "$failures of the parts failed; their output is above and in $logs/"
exit "$((failures > 0))"
