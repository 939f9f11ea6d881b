#!/usr/bin/env bash
# All that is to be shown on GPUs before a version is trusted, on a host with several of them.
set -uo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"

usage() {
    cat <<'TEXT'
Usage: tests/gpu/round.sh OUT [--minutes N] [--gpus N] [--timed N] [WORKLOAD... and options of `encore run`]

Three times all tests that need one GPU. They compile most of the time, so all three go at once, on the GPUs in turn;
then those that must be alone on a GPU, and random programs (tests/fuzz) on a GPU that is left or becomes free. If
workloads are named, `tests/gpu/shards.sh` follows, with nothing else on the host. All of it goes on in the background:
where a call may not last long enough, call again with the same OUT. Writes to OUT:

  summary.txt       what ran, with exit codes and seconds; the last line says whether it goes on
  tests-1.log ...   the log of each run of the tests; tests.tar.gz has their results as XML
  fuzz.log
  suite.tar.gz      what shards.sh wrote

  --minutes N   how long this call waits (9)
  --gpus N      use so many (all)
  --timed N     time on so many of them at once (2): with more, neighbours disturb

ENCORE_ROUND names the folder of the background's files (encore-round among the temporary ones); remove it to begin
again. PYTHON names the interpreter (.venv/bin/python, else python3). The exit code is 1 if something failed so far.
TEXT
}

state="${ENCORE_ROUND:-${TMPDIR:-/tmp}/encore-round}"
minutes=9
gpus=
timed=2
runs=3
declare -A options=([--minutes]=minutes [--gpus]=gpus [--timed]=timed)
# shellcheck source=tests/gpu/stages.sh
source "$root/tests/gpu/stages.sh"
[[ "$timed" =~ ^[1-9][0-9]*$ ]] || { echo "$timed is not a whole number above 0 (see --help)" >&2 && exit 2; }
count_gpus
[ "$timed" -le "$gpus" ] || timed="$gpus"

# said NAME LOG COMMAND...: with its output behind what is in LOG.log, and its end in the summary
said() {
    local name="$1" begun=$SECONDS status
    "${@:3}" >>"$state/$2.log" 2>&1
    status=$?
    echo "$name: exit code $status after $((SECONDS - begun)) s" >>"$state/summary.txt"
    [ "$status" -eq 0 ] || touch "$state/failed"
}

tests() { # NUMBER PART GPU FIRST CORES
    mkdir -p "$state/results/tests-$1"
    ENCORE_RESULTS="$state/results/tests-$1" ENCORE_TEST_PART="$2" ENCORE_TEST_PROCESSES=$(($5 > 2 ? $5 - 2 : 1)) \
        said "tests-$1 $2" "tests-$1" bound "$state/tmp-$3" "${@:3}" \
        "$root/tests/gpu/pytest.sh" "$python" -p no:cacheprovider -q
}

fuzz() { # SECONDS GPU FIRST CORES
    said fuzz fuzz bound "$state/tmp-$2" "${@:2}" \
        "$python" -m tests.fuzz.on_gpu --seconds "$1" --jobs $(($4 > 2 ? $4 - 2 : 1))
}

everything() {
    local number gpu lanes=$((gpus > runs ? runs + 1 : runs)) cores
    export ENCORE_TEST_TOOLCHAIN="$state/toolchain"
    said toolchain toolchain "$python" -m tests.gpu.toolchain "$ENCORE_TEST_TOOLCHAIN"
    cores="$(share "$lanes")"
    for ((number = 1; number <= runs; number++)); do
        tests "$number" together $(((number - 1) % gpus)) $(((number - 1) * cores)) "$cores" &
    done
    [ "$gpus" -le "$runs" ] || fuzz 400 "$runs" $((runs * cores)) "$cores" &
    wait
    cores="$(share "$gpus")"
    for ((gpu = 0; gpu < gpus; gpu++)); do
        {
            for ((number = gpu + 1; number <= runs; number += gpus)); do
                tests "$number" alone "$gpu" $((gpu * cores)) "$cores"
            done
            [ "$gpu" -ne $((gpus - 1)) ] || [ "$gpus" -gt "$runs" ] || fuzz 150 "$gpu" $((gpu * cores)) "$cores"
        } &
    done
    wait
    [ $# -eq 0 ] || said suite suite "$root/tests/gpu/shards.sh" "$state/suite" --gpus "$timed" --minutes 60 "$@"
    touch "$state/done"
}

brought() {
    cp -- "$state/summary.txt" "$out/"
    cp -- "$state"/tests-?.log "$state/fuzz.log" "$out/" 2>/dev/null
    [ ! -d "$state/results" ] || tar -C "$state" -czf "$out/tests.tar.gz" results
    [ ! -d "$state/suite" ] || tar -C "$state" -czf "$out/suite.tar.gz" suite suite.log
}

if [ ! -e "$state/summary.txt" ]; then
    start
    mkdir -p "$state" || exit 2
    : >"$state/summary.txt" || exit 2
    export -f everything tests fuzz said bound share
    export root state gpus timed runs python PYTHON="$python"
    setsid nohup bash -c 'everything "$@"' round "$@" >"$state/round.log" 2>&1 &
else
    started=$SECONDS
fi
while [ ! -e "$state/done" ] && [ "$(left)" -gt 0 ]; do
    sleep 1
done
brought
if [ -e "$state/done" ]; then
    echo "all is done" >>"$out/summary.txt"
else
    echo "it goes on: call again with the same OUT" >>"$out/summary.txt"
fi
cat -- "$out/summary.txt"
[ ! -e "$state/failed" ]
