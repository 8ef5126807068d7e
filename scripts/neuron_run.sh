# Sourced by run_trn2.sh and run_trn3.sh: check the machine, then train with torchrun, one process per logical core.
#
#   neuron_run CONFIG CHIP [options of `hf-neuron-moe train` ...]
#
# Settings: NPROC (processes; default: the logical cores of one chip, 4 at LNC 2), PYTHON (default python), CACHE (of
# compiled kernels and graphs), SKIP_DOCTOR=1, and DRY_RUN=1: check what can be told on any machine (options, files,
# the precision against the chip, NPROC) and print what would run.
#
# Several nodes: the same command on each, with NNODES, RDZV_ENDPOINT=HOST:PORT (one node's address, that all reach) and
# RDZV_ID (a name for the job; default hf-neuron-moe). NPROC is per node, by default all of a trn2.48xlarge.

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
needed = ("hf_neuron_moe", "torch", "transformers", "datasets", "peft", "trl", "yaml")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: {sys.executable} has no {', '.join(missing)}. Activate the environment of docs/neuron.md (pip "
             'install -e ".[train]"), or set PYTHON to its interpreter.')
PY
    local cores=4 nodes="${NNODES:-1}"
    if [ "$NEURON_LOGICAL_NC_CONFIG" = 1 ]; then cores=8; fi
    local group=(--standalone)
    if [ "$nodes" != 1 ]; then
        neuron_nodes "$nodes" "$chip" || return 2
        group=(--nnodes "$nodes" --rdzv_backend c10d --rdzv_endpoint "$RDZV_ENDPOINT"
            --rdzv_id "${RDZV_ID:-hf-neuron-moe}")
        cores=$((cores * 16)) # of a trn2.48xlarge; only whole machines have EFA
    fi
    local processes="${NPROC:-$cores}"
    local command=("$python" -m torch.distributed.run "${group[@]}" --nproc_per_node "$processes"
        -m hf_neuron_moe train "$config" "$@")
    if [ "${DRY_RUN:-0}" = 1 ]; then
        "$python" scripts/neuron_check.py "$chip" "$processes" --dry "$config" "$@" || return 2
        env | grep -E '^(HF_NEURON_MOE_|NEURON_|NKI_|NKILIB_|TORCH_NEURONX_|TORCH_DEVICE_BACKEND_|HF_DEACTIVATE_|FI_)' | sort
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

# Check the settings of a run on several nodes, and set the variables of EFA, the network between them. Their names and
# values: AWS Neuron, "How to prepare trn1.32xlarge for multi-node execution", the only page that has them.
neuron_nodes() {
    local why=""
    if ! [[ "$1" =~ ^[1-9][0-9]{0,4}$ ]]; then why="NNODES must be a number of machines, got '$1'"; fi
    if ! [[ "${RDZV_ENDPOINT:-}" =~ ^[^[:space:]]+:[0-9]+$ ]]; then
        why="${why:-RDZV_ENDPOINT must be HOST:PORT of one of the nodes, got '${RDZV_ENDPOINT:-}'}"
    elif [ "$2" != trn2 ] && [ -z "${NPROC:-}" ]; then
        why="${why:-NPROC must be set: the logical cores of one node, since the UltraServers are of several sizes}"
    fi
    if [ -n "$why" ]; then
        echo "error: $why. See docs/neuron.md, Several nodes." >&2
        return 2
    fi
    export FI_PROVIDER="${FI_PROVIDER:-efa}" FI_EFA_USE_DEVICE_RDMA="${FI_EFA_USE_DEVICE_RDMA:-1}"
}
