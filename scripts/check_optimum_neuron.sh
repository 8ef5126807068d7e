#!/usr/bin/env bash
# Ask pip which versions of optimum-neuron can share an environment with this package; nothing is installed.
# What docs/neuron.md says about them ("Beside optimum-neuron") was found so. Needs a package index; on Python 3.11
# most versions of either package are allowed.
#
#   bash scripts/check_optimum_neuron.sh                  the versions of that table
#   bash scripts/check_optimum_neuron.sh 0.4.6 0.5.0      others
#   PYTHON=python3.11 bash scripts/check_optimum_neuron.sh
set -uo pipefail
cd "$(dirname "$0")/.."

versions=(0.4.5 0.4.4 0.4.3 0.4.0 0.3.0 0.1.0 0.0.28 0.0.3)
if [ $# -gt 0 ]; then versions=("$@"); fi
"${PYTHON:-python}" --version
for version in "${versions[@]}"; do
    # --ignore-installed: the answer must not depend on what this environment holds.
    if told="$("${PYTHON:-python}" -m pip install --dry-run --ignore-installed --no-input --disable-pip-version-check \
        . "optimum-neuron==$version" 2>&1)"; then
        echo "optimum-neuron $version: can be installed beside this package"
    else
        echo "optimum-neuron $version: cannot be installed beside this package"
        grep -E '^ +(optimum-neuron|hf-neuron-moe) [0-9].* depends on|No matching distribution|Requires-Python' \
            <<<"$told" | grep -E 'depends on|optimum-neuron' | sort -u
    fi
done
