#!/usr/bin/env bash
# What the scripts for a stay on a GPU machine share; they source it. It takes `root`, `out` and `minutes`, and gives
# `python`, `encore`, `work` (a folder that goes at the end), `left`, `stage` and `failed`.
# shellcheck disable=SC2154  # they are the caller's

python="${PYTHON:-$root/.venv/bin/python}"
[ -x "$python" ] || python="$(command -v python3)"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT
cd -- "$root" || exit 2

# `torch.compile(backend="encore")` finds the backend by the installed package's entry point.
if ! "$python" -c 'from importlib.metadata import distribution; distribution("encore")' 2>/dev/null; then
    "$python" -m pip install --quiet --no-deps --no-build-isolation --editable "$root" || exit 2
fi
encore() { "$python" -P -m suite "$@"; }
encore env --require-gpu || exit
encore env --json >"$out/environment.json"

started=$SECONDS
failed=0
left() { echo $((minutes * 60 - (SECONDS - started))); }

# stage NAME SECONDS COMMAND...: no longer than SECONDS, output to OUT/NAME.log
stage() {
    local name="$1" limit="$2" begun=$SECONDS status
    shift 2
    if [ "$limit" -lt 20 ]; then
        echo "$name: not started, $limit s are left" | tee -a "$out/summary.txt"
        failed=1
        return
    fi
    timeout --signal=INT --kill-after=20 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    echo "$name: exit code $status after $((SECONDS - begun)) s" | tee -a "$out/summary.txt"
    tail -n 3 -- "$out/$name.log"
    [ "$status" -eq 0 ] || failed=1
}
