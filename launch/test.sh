#!/usr/bin/env bash
# Formatting, lint and tests, as continuous integration runs them. Arguments go to pytest:
#
#   bash launch/test.sh
#   bash launch/test.sh tests/unit -k losses
set -euo pipefail
# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Several ranks share few cores in the tests; with more threads vLLM on a CPU is up to 100 times slower.
export OMP_NUM_THREADS=1

python -m ruff format --check .
python -m ruff check .
python -m pytest "$@"
