#!/usr/bin/env bash
# The tests that need a GPU: several at a time, for they compile longer than they use it, and then one after another
# those that measure time, waits or memory. The exit code is that of the first part that failed.
#
# Usage: tests/gpu/pytest.sh PYTHON [pytest options] [files; all that have such tests]
# ENCORE_RESULTS names a folder for together.xml and alone.xml, ENCORE_TEST_PROCESSES how many (6), ENCORE_TEST_PART the
# only part that runs (together or alone), ENCORE_TEST_TOOLCHAIN a folder for what processes of several runs share.
set -uo pipefail
python="${1:?Usage: tests/gpu/pytest.sh PYTHON [pytest options]}"
shift
# Six times Inductor's default number of compiler processes would be too many for any machine.
export TORCHINDUCTOR_COMPILE_THREADS=4
if [ -z "${ENCORE_TEST_TOOLCHAIN:-}" ]; then
    ENCORE_TEST_TOOLCHAIN="$(mktemp -d)" || exit 2
    trap 'rm -rf -- "$ENCORE_TEST_TOOLCHAIN"' EXIT
fi
export ENCORE_TEST_TOOLCHAIN
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
cd -- "$root" || exit 2
# `torch.compile(backend="encore")` finds the backend by the installed package's entry point.
"$python" -c 'from importlib.metadata import distribution; distribution("encore")' 2>/dev/null || {
    echo "pytest.sh: $python has no package encore: $python -m pip install --no-deps --no-build-isolation -e $root" >&2
    exit 2
}
# Where PyTorch's Python is not compiled, each process would take 8 s of a core for it.
bytecode="$("$python" -c 'from importlib.util import find_spec; print(find_spec("torch").cached)')"
if [ ! -e "$bytecode" ]; then
    export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$ENCORE_TEST_TOOLCHAIN/bytecode}" PYTHONDONTWRITEBYTECODE=
fi
[ -e "$ENCORE_TEST_TOOLCHAIN/made" ] || "$python" -m tests.gpu.toolchain "$ENCORE_TEST_TOOLCHAIN" ||
    echo "pytest.sh: each process finds out by itself what C++ can use" >&2
some=
for argument in "$@"; do
    [ ! -e "${argument%%::*}" ] || some=1
done
if [ -z "$some" ]; then # every process would import all other test files only to find nothing in them
    mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests | sort)
    # What takes minutes begins first; pytest takes each file once.
    file=tests/gpu/test_indirection_workloads_gpu.py
    [[ " ${files[*]} " != *" $file "* ]] || files=("$file" "${files[@]}")
    set -- "$@" "${files[@]}"
fi
nothing_collected=5
interrupted=2

# part NAME MARKERS OPTIONS...
part() {
    local name="$1" markers="$2"
    shift 2
    echo "== $name: $markers"
    "$python" -m pytest -m "$markers" ${ENCORE_RESULTS:+--junitxml "$ENCORE_RESULTS/$name.xml"} "$@"
}

together() {
    part together "gpu and not alone" --numprocesses "${ENCORE_TEST_PROCESSES:-6}" --dist load --maxschedchunk 1 "$@"
}
alone() { part alone "gpu and alone" "$@"; }

case "${ENCORE_TEST_PART:-}" in
"") ;;
together | alone)
    "$ENCORE_TEST_PART" "$@"
    exit
    ;;
*) echo "ENCORE_TEST_PART is $ENCORE_TEST_PART, neither together nor alone" >&2 && exit 2 ;;
esac
together "$@"
together=$?
[ "$together" -ne "$interrupted" ] || exit "$together"
alone "$@"
alone=$?
echo "== together: exit code $together, alone: exit code $alone"
# Options such as -k may leave nothing for one of the parts.
[ "$together" -ne "$nothing_collected" ] || exit "$alone"
[ "$alone" -ne "$nothing_collected" ] || exit "$together"
exit $((together ? together : alone))
