#!/usr/bin/env bash
# Fine-tune Llama-3-8B on a Trn3 chip: checks the machine, then trains on its logical cores with torchrun.
# Needs the Neuron SDK (docs/neuron.md) and this package with its extra `train`. Nothing of this has run on Trainium.
#
#   bash scripts/run_trn3.sh                           the configuration trn3-llama-3-8b
#   CONFIG=mine.yaml bash scripts/run_trn3.sh          another file of options
#   bash scripts/run_trn3.sh --model MODEL_DIR         another model than the file's, from a folder
#   bash scripts/run_trn3.sh --max_steps 10            options of `hf-neuron-moe train` on top
#   DRY_RUN=1 bash scripts/run_trn3.sh                 check the options and print the command, on any machine
#   NPROC=1 bash scripts/run_trn3.sh                   one logical core only
#   NNODES=2 RDZV_ENDPOINT=HOST:29500 NPROC=64 bash scripts/run_trn3.sh         on each of two machines with EFA
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/neuron_run.sh

neuron_run "${CONFIG:-trn3-llama-3-8b}" trn3 "$@"
