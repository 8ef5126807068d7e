#!/usr/bin/env bash
# Fine-tune OLMoE-1B-7B on a Trn2 chip: checks the machine, then trains on its logical cores with torchrun.
# Needs the Neuron SDK (docs/neuron.md) and this package with its extra `train`. Nothing of this has run on Trainium.
#
#   bash scripts/run_trn2.sh                           the configuration trn2-olmoe
#   CONFIG=mine.yaml bash scripts/run_trn2.sh          another file of options
#   bash scripts/run_trn2.sh --model MODEL_DIR         another model than the file's, from a folder
#   bash scripts/run_trn2.sh --max_steps 10            options of `hf-neuron-moe train` on top
#   DRY_RUN=1 bash scripts/run_trn2.sh                 check the options and print the command, on any machine
#   NPROC=1 bash scripts/run_trn2.sh                   one logical core only
#   NNODES=2 RDZV_ENDPOINT=HOST:29500 bash scripts/run_trn2.sh         on each of two machines with EFA
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/neuron_run.sh

neuron_run "${CONFIG:-trn2-olmoe}" trn2 "$@"
