#!/usr/bin/env bash
# Lint, types and tests, in an environment that this script makes when it is missing.
#
#   bash scripts/test.sh                  everything, and of cases that repeat others a sixteenth
#   bash scripts/test.sh --fast           without slow tests and repeated cases, property tests with the same examples
#   bash scripts/test.sh --all-cases      everything
#   bash scripts/test.sh -k swizzle -x    further arguments go to pytest
#
# Every run draws other examples of property tests and other repeated cases (tests/thinned.py). pytest prints the seed. To
# draw them again: --hypothesis-seed=SEED, with --draw-cases for the cases.
# TEST_WORKERS: number of pytest processes (default: one per core, 4 at most; 0 runs in this process, e.g. for --pdb).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh

pytest_arguments=()
[ $# -gt 0 ] || pytest_arguments=(--draw-cases)
for argument in "$@"; do
    case "$argument" in
        --fast)
            pytest_arguments+=(-m "not slow and not repeated")
            export PROPERTY_EXAMPLES=fixed
            ;;
        *) pytest_arguments+=("$argument") ;;
    esac
done

ensure_environment test,dev
bin=.venv/bin

echo "== ruff"
$bin/ruff check .
$bin/ruff format --check .
echo "== mypy"
$bin/mypy
echo "== pytest"
cores="$($bin/python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
workers="${TEST_WORKERS:-$((cores < 4 ? cores : 4))}"
# One worker per core, so each keeps to one thread; nothing in the tests may reach for the network.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE # else each worker rewrites every assertion again, and each process compiles the package
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((workers > 1 ? 1 : cores))}"
$bin/python -m pytest -n "$workers" --dist worksteal --durations=25 "${pytest_arguments[@]+"${pytest_arguments[@]}"}"
