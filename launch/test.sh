#!/usr/bin/env bash
# Formatting, lint, types and tests, as continuous integration runs them. Arguments go to pytest:
#
#   bash launch/test.sh
#   bash launch/test.sh tests/unit -k losses
#
# Without any, four parts run beside each other, so that no core waits: whole runs, the programs of several ranks, and
# two halves of the unit tests, except for tests/unit/watch, which forks as those programs do (tests/forks.py).
set -euo pipefail
# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Several ranks share few cores in the tests; with more threads vLLM on a CPU is up to 100 times slower.
export OMP_NUM_THREADS=1

python -m ruff format --check .
python -m ruff check .
python -m mypy
if [[ $# -gt 0 ]]; then
    exec python -m pytest "$@"
fi
logs=$(mktemp -d)
others=()
trap 'kill "${others[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT
first_half=(tests/unit/[a-m]*/)
python -m pytest tests/e2e >"$logs/1" 2>&1 &
others+=($!)
python -m pytest tests/dist tests/unit/watch >"$logs/2" 2>&1 &
others+=($!)
python -m pytest "${first_half[@]}" >"$logs/3" 2>&1 &
others+=($!)
status=0
python -m pytest tests --ignore=tests/e2e --ignore=tests/dist --ignore=tests/unit/watch \
    "${first_half[@]/#/--ignore=}" || status=$?
for other in "${others[@]}"; do
    wait "$other" || status=$?
done
cat "$logs"/*
exit "$status"
