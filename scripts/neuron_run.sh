# Sourced by run_trn2.sh and run_trn3.sh: check the machine, then train with torchrun, one process per logical core.
#
#   neuron_run CONFIG CHIP [options of finetune.py ...]
#
# Settings: NPROC (processes; default: the logical cores of one chip, 4 at LNC 2), PYTHON (default python), CACHE (of
# compiled kernels and graphs), SKIP_DOCTOR=1, and DRY_RUN=1: check what can be told on any machine (options, files,
# the precision against the chip, NPROC) and print what would run.

neuron_run() {
    local config="$1" chip="$2"
    shift 2
    local python="${PYTHON:-python}" cache="${CACHE:-$HOME/.cache/hf-neuron-moe}"
    # Two physical cores per logical one: the default, and what the experts' backward needs.
    # This package's own variable, where it is set, counts for the runtime too.
    export NEURON_LOGICAL_NC_CONFIG="${NEURON_LOGICAL_NC_CONFIG:-${HF_NEURON_MOE_LNC:-2}}"
    export TORCH_NEURONX_NEFF_CACHE_DIR="${TORCH_NEURONX_NEFF_CACHE_DIR:-$cache/neff}"
    export NKI_COMPILE_CACHE_URL="${NKI_COMPILE_CACHE_URL:-$cache/nki}"
    # The documented setting for transformers' loader beside this device.
    export HF_DEACTIVATE_ASYNC_LOAD="${HF_DEACTIVATE_ASYNC_LOAD:-1}"
    export TOKENIZERS_PARALLELISM=false
    "$python" - <<'PY' || return 2
import importlib.util
import sys

sys.path[:] = filter(None, sys.path)  # without this folder: what counts is what is installed
needed = ("hf_neuron_moe", "torch", "transformers", "datasets", "peft", "yaml")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: {sys.executable} has no {', '.join(missing)}. Activate the environment of docs/neuron.md (pip "
             'install -e ".[train]"), or set PYTHON to its interpreter.')
PY
    local cores=4
    if [ "$NEURON_LOGICAL_NC_CONFIG" = 1 ]; then cores=8; fi
    local processes="${NPROC:-$cores}"
    local command=("$python" -m torch.distributed.run --standalone --nproc_per_node "$processes"
        scripts/finetune.py "$config" "$@")
    if [ "${DRY_RUN:-0}" = 1 ]; then
        "$python" scripts/neuron_check.py "$chip" "$processes" --dry "$config" "$@" || return 2
        env | grep -E '^(HF_NEURON_MOE_|NEURON_|NKI_|NKILIB_|TORCH_NEURONX_|TORCH_DEVICE_BACKEND_|HF_DEACTIVATE_)' | sort
        printf 'would run:'
        printf ' %q' "${command[@]}"
        printf '\n'
        return
    fi
    if [ "${SKIP_DOCTOR:-0}" != 1 ]; then
        local found
        found="$("$python" -m hf_neuron_moe.cli.main doctor --strict)" || {
            printf '%s\n' "$found" >&2
            echo "no Neuron kernel can run here; DRY_RUN=1 checks what can be told without" >&2
            return 1
        }
        "$python" scripts/neuron_check.py "$chip" "$processes" --here "$config" "$@" || return 2
    fi
    mkdir -p "$cache/neff" "$cache/nki"
    exec "${command[@]}"
}
