# Sourced by the other scripts: an environment in .venv with this package installed in editable mode.
#
#   ensure_environment EXTRAS     e.g. ensure_environment test,dev
#
# Installs only when something changed: the stamp file holds a hash of pyproject.toml, the Python version and the extras
# that are already there. Settings: PYTHON (interpreter that makes .venv), TORCH_SPEC (default torch==2.13.0) and
# TORCH_PIP_ARGS (e.g. an --index-url with smaller CPU-only wheels).

TORCH_SPEC="${TORCH_SPEC:-torch==2.13.0}"

_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python 3.11 or later found; set PYTHON to one" >&2
    return 1
}

_has_torch() {
    .venv/bin/python - >/dev/null 2>&1 <<'PY'
import sys, torch
sys.exit(tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11))
PY
}

_fingerprint() {
    .venv/bin/python -c '
import hashlib, sys
digest = hashlib.sha256(open("pyproject.toml", "rb").read())
digest.update(sys.version.encode())
print(digest.hexdigest())'
}

ensure_environment() {
    local extras="$1" stamp have want
    if [ ! -x .venv/bin/python ]; then
        local python
        python="$(_find_python)"
        echo "== creating .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    stamp=".venv/installed-${extras//,/-}"
    want="$(_fingerprint)"
    have="$(cat "$stamp" 2>/dev/null || true)"
    if [ "$have" = "$want" ]; then
        return
    fi
    # Modules that are never imported are not worth compiling; the others are when they are imported.
    unset PYTHONDONTWRITEBYTECODE
    # torch first and by itself: a resolver that meets it as somebody's dependency may pick another build.
    if ! _has_torch; then
        echo "== installing $TORCH_SPEC"
        # shellcheck disable=SC2086
        .venv/bin/python -m pip install --no-compile --progress-bar off $TORCH_SPEC ${TORCH_PIP_ARGS:-}
    fi
    echo "== installing hf-neuron-moe[$extras]"
    .venv/bin/python -m pip install --no-compile --progress-bar off -e ".[$extras]"
    echo "$want" >"$stamp"
}
