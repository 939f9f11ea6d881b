#!/usr/bin/env bash
# Runs the tests that depend on PyTorch's internals with another version of PyTorch than the lock's, without a GPU.
# The last line is a summary; the exit code is 0 if everything passed.
set -uo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
    cat <<'TEXT'
Usage: tests/versions.sh VERSION            such as 2.14.1, or `newest`: what pip resolves
       tests/versions.sh --python PYTHON    an environment that has PyTorch, Encore's dependencies and pytest

An environment is made in .venv-torch/VERSION, and used again by the next run.
TEXT
}

# What depends on the version. Choose by what stock classes, generated code or guards a file stands on, and keep the
# whole within four minutes on two cores.
files=(optimizations/torch_internals/test_stock_trees test_layers
    optimizations/torch_internals/test_identity_guard optimizations/test_imports
    optimizations/in_place/test_generated optimizations/test_options
    optimizations/trees/test_hook optimizations/trees/test_backend
    optimizations/calls/test_binding optimizations/trees/test_function
    optimizations/trees/test_node optimizations/trees/test_referenced_results optimizations/trees/test_fast_path
    optimizations/trees/test_fast_path_live_results optimizations/trees/test_managers
    optimizations/trees/test_not_launched
    optimizations/trees/test_written_inputs optimizations/placement/test_examples
    optimizations/placement/test_plan optimizations/placement/test_rewrite optimizations/placement/test_feeds)

case "${1:-}" in -h | --help | "")
    usage
    exit 0
    ;;
esac

# shellcheck source=suite/set_up.sh
source "$root/suite/set_up.sh"
cd -- "$root" || exit

resolved() {
    "$1" -m pip install --disable-pip-version-check --quiet --dry-run --ignore-installed --no-deps --report - torch |
        "$1" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"].split("+")[0])'
}

start=$SECONDS
if [ "$1" = --python ]; then
    python="$2"
    shift 2
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
else
    base="$(find_python)" || exit
    version="$1"
    shift
    if [ "$version" = newest ]; then
        version="$(resolved "$base")" || exit
    fi
    environment="$root/.venv-torch/$version"
    python="$environment/bin/python"
    if ! { [ -f "$environment/made-from" ] && cmp -s "$root/pyproject.toml" "$environment/made-from"; }; then
        echo "versions: making an environment with PyTorch $version" >&2
        rm -f -- "$environment/made-from"
        [ -x "$python" ] || "$base" -m venv "$environment" || exit
        "$python" -m pip install --disable-pip-version-check --no-compile --quiet "torch==$version" \
            --editable "$root[suite]" pytest pytest-timeout pytest-xdist hypothesis >&2 || exit
        cp -- "$root/pyproject.toml" "$environment/made-from"
    fi
fi
"$python" -c 'import sys, torch; torch.version.cuda or sys.exit(
    f"versions: PyTorch {torch.__version__} was built without CUDA, whose names the tests use: install a wheel with CUDA")' ||
    exit
echo "versions: the environment is there after $((SECONDS - start)) s" >&2

failed=()
run() { # what is run, for the summary; its command
    echo "== $1" >&2
    "${@:2}" >&2 || failed+=("$1")
}
paths=("${files[@]/#/tests/}")
paths=("${paths[@]/%/.py}")
log="$(mktemp)"
trap 'rm -f -- "$log"' EXIT
export OMP_NUM_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=0
"$python" -m pytest -m "not gpu" --numprocesses 2 --dist loadfile "${paths[@]}" \
    --deselect tests/test_layers.py::test_backend_has_no_circle_of_imports "$@" >"$log" 2>&1
status=$?
cat -- "$log" >&2
[ $status -eq 0 ] || failed+=("tests")
run "explain" "$python" -P encore/own_packages.py suite explain --size tiny EOS DLRM
tests="$(grep -E '^=*( ?[0-9]+ (passed|failed|error).*) in ' "$log" | tail -n 1 | tr -d '=' | sed 's/^ //')"
torch="$("$python" -c 'import platform, torch; print(f"PyTorch {torch.__version__}, Python {platform.python_version()}")')"
echo "versions: $torch: ${tests:-no tests ran} ${failed[*]:+(failed: ${failed[*]})} in all $((SECONDS - start)) s" | tr -s ' '
[ ${#failed[@]} -eq 0 ]
