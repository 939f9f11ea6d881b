#!/usr/bin/env bash
# All checks and all tests that need no GPU. The last line is pytest's summary; the exit code is 0 if everything passed.
set -uo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

usage() {
    cat <<'TEXT'
Usage: ./run_tests.sh                       linters, types, import directions, then every test that needs no GPU
       ./run_tests.sh --gpu [pytest options]  only the tests that need an NVIDIA GPU
       ./run_tests.sh PYTEST_OPTIONS        pytest alone, for example: ./run_tests.sh tests/suite/results -k lock
TEXT
}

case "${1:-}" in -h | --help)
    usage
    exit 0
    ;;
esac

# shellcheck source=suite/set_up.sh
source "$root/suite/set_up.sh"
set_up || exit
cd -- "$root" || exit

if [ "${1:-}" = --gpu ]; then
    shift
    encore env --require-gpu || exit
    exec "$root/tests/gpu/pytest.sh" "$encore_python" "$@"
fi
if [ $# -gt 0 ]; then
    exec "$encore_python" -m pytest "$@"
fi

# It takes a minute, on one core: linters and the first tests run meanwhile.
types="$(mktemp)"
"$encore_python" -m mypy >"$types" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null; rm -f -- "$types"' EXIT

failed=()
check() {
    echo "== $1" >&2
    "$encore_python" "${@:2}" >&2 || failed+=("$1")
}
check "ruff check" -m ruff check .
check "ruff format" -m ruff format --check .
check "lint-imports" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

# Each of the many processes that tests start would compile Encore's own modules where Python is told to write no bytecode.
# Files with tests are compiled by pytest, in its own way.
"$encore_python" -m compileall -qq -j 0 -x '/test_\w*\.py$' encore host_tuning models optimizations suite tests || true

# Two at a time: the tests start compilers and workers themselves.
# First, in their own processes, files that count what Dynamo and autocast do: other tests leave state behind that
# `reset` does not take back.
apart=(tests/models/test_constructs.py tests/optimizations/capture/step/test_programs.py
    tests/optimizations/placement/test_examples.py tests/suite/measure/test_correctness.py
    tests/suite/measure/test_mixed_inputs.py tests/suite/measure/test_stochastic.py
    tests/suite/measure/test_useless_references.py tests/suite/measure/test_graphs.py)
"$encore_python" -m pytest -m "not gpu" --numprocesses 2 --dist loadfile "${apart[@]}"
first=$?
# It compares bits of whole models. Behind hundreds of other tests in its process they differ, and why is not known.
alone=tests/suite/worker/test_captured_iteration.py
"$encore_python" -m pytest -m "not gpu" "$alone" || first=$?
echo "== mypy" >&2
wait "$mypy" || failed+=("mypy")
cat -- "$types" >&2
[ ${#failed[@]} -eq 0 ] || echo "== failed so far: ${failed[*]}" >&2
"$encore_python" -m pytest -m "not gpu" --numprocesses 2 --dist worksteal "${apart[@]/#/--ignore=}" --ignore="$alone"
status=$?
[ ${#failed[@]} -eq 0 ] || exit 1
exit $((first ? first : status))
