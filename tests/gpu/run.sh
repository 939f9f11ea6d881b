#!/usr/bin/env bash
# Everything that a short stay on a GPU machine should bring home, in one go.
set -uo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"

usage() {
    cat <<'TEXT'
Usage: tests/gpu/run.sh OUT [--minutes N] [--stages tests,micro,suite] [--run ARCHIVE] [options of `encore run`]

Runs the tests that need a GPU, the microbenchmarks, and as many workloads as the rest of the time allows. Writes to the
folder OUT, at most eight files:

  summary.txt       what ran, with exit codes and seconds
  environment.json  GPU, driver, versions, commit
  tests.log, tests.tar.gz (results as XML, and real captures to test with elsewhere)
  micro.log, micro.tar.gz
  run.log, run.tar.gz (the run and its report)
  fuzz.log                                   only if --stages names fuzz
  programs.log (a table), programs.jsonl     only if --stages names programs
  nanogpt.log, nanogpt.tar.gz (a run)        only if --stages names nanogpt

  --minutes N     time for all of it (9)
  --stages LIST   only these (tests,micro,suite); fuzz: three minutes of random programs (tests/fuzz/on_gpu.py);
                  programs: tests/gpu/programs.py; nanogpt: encore run --set nanogpt
  --run ARCHIVE   a run.tar.gz from an earlier stay, to go on with

PYTHON names the interpreter (.venv/bin/python, else python3). The exit code is 0 if every stage's was.
TEXT
}

minutes=9
stages=tests,micro,suite
declare -A options=([--minutes]=minutes [--stages]=stages [--run]=archive)
# shellcheck source=tests/gpu/stages.sh
source "$root/tests/gpu/stages.sh"
start

: >"$out/summary.txt"
if [[ ",$stages," == *,tests,* ]]; then
    export ENCORE_RESULTS="$work/tests" ENCORE_CAPTURES="$work/tests/captures"
    mkdir -p "$ENCORE_CAPTURES"
    stage tests $(($(left) * 40 / 100)) "$root/tests/gpu/pytest.sh" "$python" -p no:cacheprovider
    tar -C "$work" -czf "$out/tests.tar.gz" tests
fi
if [[ ",$stages," == *,micro,* ]]; then
    stage micro $(($(left) * 10 / 100)) "$python" -P -m suite micro indirection --out "$work/micro"
    [ ! -d "$work/micro" ] || tar -C "$work" -czf "$out/micro.tar.gz" micro
fi
if [[ ",$stages," == *,fuzz,* ]]; then
    limit=$(($(left) < 210 ? $(left) : 210))
    stage fuzz "$limit" "$python" -m tests.fuzz.on_gpu --seconds $((limit - 30))
fi
if [[ ",$stages," == *,programs,* ]]; then
    # The last processes are timed after the budget has ended, and their rows written.
    limit=$(($(left) - 20))
    stage programs "$limit" "$python" "$root/tests/gpu/programs.py" --seconds $((limit - 30)) --out "$out/programs.jsonl"
fi
if [[ ",$stages," == *,nanogpt,* ]]; then
    nanogpt=eager,compile,graph,indirection,encore,by-hand
    stage nanogpt "$(left)" "$python" -P -m suite run --set nanogpt --modes "$nanogpt" --out "$work/nanogpt"
    [ ! -d "$work/nanogpt" ] || tar -C "$work" -czf "$out/nanogpt.tar.gz" nanogpt
fi
if [[ ",$stages," == *,suite,* ]]; then
    run="$work/run"
    where=(--out "$run")
    if [ -n "$archive" ]; then
        tar -C "$work" -xzf "$archive" || exit 2
        where=(--resume "$run")
    fi
    # A minute is kept for the report and the archive.
    limit=$(($(left) - 60))
    [ "$limit" -lt 20 ] || stage run "$limit" "$python" -P -m suite run "${where[@]}" --budget "${limit}s" "$@"
    report
fi
cat -- "$out/summary.txt"
exit "$failed"
