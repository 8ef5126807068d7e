# Sourced by run_trn2.sh and run_trn3.sh: check the machine, then train with torchrun, one process per logical core.
#
#   neuron_run CONFIG CHIP [options of finetune.py ...]
#
# Settings: NPROC (processes; default 4, the logical cores of one chip at LNC 2), PYTHON (default python), CACHE (of
# compiled kernels and graphs), SKIP_DOCTOR=1, and DRY_RUN=1: check the options and print what would run, on any machine.

neuron_run() {
    local config="$1" chip="$2"
    shift 2
    local python="${PYTHON:-python}" processes="${NPROC:-4}" cache="${CACHE:-$HOME/.cache/hf-neuron-moe}"
    # Two physical cores per logical one: the default, and what the experts' backward needs.
    export NEURON_LOGICAL_NC_CONFIG="${NEURON_LOGICAL_NC_CONFIG:-2}"
    export TORCH_NEURONX_NEFF_CACHE_DIR="${TORCH_NEURONX_NEFF_CACHE_DIR:-$cache/neff}"
    export NKI_COMPILE_CACHE_URL="${NKI_COMPILE_CACHE_URL:-$cache/nki}"
    # The documented setting for transformers' loader beside this device.
    export HF_DEACTIVATE_ASYNC_LOAD="${HF_DEACTIVATE_ASYNC_LOAD:-1}"
    export TOKENIZERS_PARALLELISM=false
    local command=("$python" -m torch.distributed.run --standalone --nproc_per_node "$processes"
        scripts/finetune.py "$config" "$@")
    if [ "${DRY_RUN:-0}" = 1 ]; then
        "$python" - "$config" "$@" <<'PY'
import sys

sys.path.insert(0, "scripts")
from finetune_options import parse

from hf_neuron_moe.errors import NeuronMoEError

try:
    training = parse([*sys.argv[1:], "--use_cpu", "true"]).training
except NeuronMoEError as error:
    sys.exit(f"error: {error}")
print(f"options: {training.neuron_precision} blocks, backend {training.neuron_backend}, to {training.output_dir}")
PY
        env | grep -E '^(NEURON_LOGICAL_NC_CONFIG|TORCH_NEURONX_NEFF_CACHE_DIR|NKI_COMPILE_CACHE_URL|HF_DEACTIVATE)' | sort
        printf 'would run:'
        printf ' %q' "${command[@]}"
        printf '\n'
        return
    fi
    if [ "${SKIP_DOCTOR:-0}" != 1 ]; then
        local found
        found="$("$python" -m hf_neuron_moe.cli.main doctor --json --strict)" || {
            "$python" -m hf_neuron_moe.cli.main doctor >&2
            echo "no Neuron kernel can run here; DRY_RUN=1 checks the options only" >&2
            return 1
        }
        "$python" -c 'import json, sys; target = json.loads(sys.argv[1])["target"]["value"]
sys.exit(target != sys.argv[2] and f"this is {target}, and the run is for {sys.argv[2]}")' "$found" "$chip"
    fi
    mkdir -p "$cache/neff" "$cache/nki"
    exec "${command[@]}"
}
