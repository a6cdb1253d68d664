#!/usr/bin/env bash
# Formatting, lint, types and tests, as continuous integration runs them. Arguments go to pytest:
#
#   bash launch/test.sh
#   bash launch/test.sh tests/unit -k losses
#
# Without any, three parts of about equal length run beside each other, so that no core waits: whole runs, programs of
# several ranks with some unit tests, and the other unit tests.
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
runs=(tests/e2e)
ranks=(tests/dist tests/unit/watch tests/unit/[a-d]*/ tests/unit/report tests/unit/features/agents)
python -m pytest "${runs[@]}" >"$logs/1" 2>&1 &
others+=($!)
python -m pytest "${ranks[@]}" >"$logs/2" 2>&1 &
others+=($!)
rest=("${runs[@]/#/--ignore=}" "${ranks[@]/#/--ignore=}")
status=0
python -m pytest tests "${rest[@]}" || status=$?
for other in "${others[@]}"; do
    wait "$other" || status=$?
done
cat "$logs"/*
exit "$status"
