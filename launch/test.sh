#!/usr/bin/env bash
# Formatting, lint, types and tests, as continuous integration runs them. Arguments go to pytest:
#
#   bash launch/test.sh
#   bash launch/test.sh tests/unit -k losses
#
# Without any, the programs of several ranks run beside the unit tests, because ranks often wait for each other.
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
runs_log=$(mktemp)
python -m pytest tests/e2e tests/dist >"$runs_log" 2>&1 &
runs=$!
trap 'kill "$runs" 2>/dev/null || true; rm -f "$runs_log"' EXIT
status=0
python -m pytest tests --ignore=tests/e2e --ignore=tests/dist || status=$?
wait "$runs" || status=$?
cat "$runs_log"
exit "$status"
