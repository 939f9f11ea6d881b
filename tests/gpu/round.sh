#!/usr/bin/env bash
# All that is to be shown on GPUs before a version is trusted, on a host with several of them.
set -uo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"

usage() {
    cat <<'TEXT'
Usage: tests/gpu/round.sh OUT [--minutes N] [--gpus N] [--timed N] [--stages LIST] [WORKLOAD... and options of
`encore run`]

One stage after another:

  tests  three times all tests that need one GPU. They compile most of the time, so all three go at once, on the GPUs in
         turn; then those that must be alone on a GPU, and random programs (tests/fuzz) on a GPU that is left or becomes
         free
  times  on one GPU the programs of `tests/gpu/programs.py`
  suite  `tests/gpu/shards.sh` with the workloads, with nothing else on the host

All of it goes on in the background: where a call may not last long enough, call again with the same OUT. Writes to OUT:

  summary.txt       what ran, with exit codes and seconds, and which tests failed; the last line says whether it goes on
  environment.json  GPU, driver, versions, commit
  tests.tar.gz      the log of each run of the tests, and its results as XML; what was found by random programs
  times.tar.gz      the rows of the programs
  suite.tar.gz      what shards.sh wrote

What is new is packed every half minute, too: a call that is ended from outside leaves what there was until then.

  --minutes N    how long this call waits (9)
  --gpus N       use so many (all)
  --timed N      the suite on so many of them at once (2): with more, neighbours disturb
  --stages LIST  only these, separated by commas (tests,suite)

ENCORE_ROUND names the folder of the background's files (encore-round among the temporary ones); remove it to begin
again. PYTHON names the interpreter (.venv/bin/python, else python3). The exit code is 1 if something failed so far.
TEXT
}

state="${ENCORE_ROUND:-${TMPDIR:-/tmp}/encore-round}"
minutes=9
gpus=
timed=2
runs=3
stages=tests,suite
programs_s=560
declare -A options=([--minutes]=minutes [--gpus]=gpus [--timed]=timed [--stages]=stages)
# shellcheck source=tests/gpu/stages.sh
source "$root/tests/gpu/stages.sh"
[[ "$timed" =~ ^[1-9][0-9]*$ ]] || { echo "$timed is not a whole number above 0 (see --help)" >&2 && exit 2; }
[[ "$stages" =~ ^(tests|times|suite)(,(tests|times|suite))*$ ]] ||
    { echo "--stages $stages: of tests, times and suite, separated by commas (see --help)" >&2 && exit 2; }
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

testing() {
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
    grep -h "^FAILED" "$state"/tests-?.log | sort | uniq -c >>"$state/summary.txt"
}

programs() { # GPU FIRST CORES
    said programs programs bound "$state/tmp-$1" "$@" "$python" "$root/tests/gpu/programs.py" --seconds "$programs_s" \
        --settle 14 --jobs $(($3 > 2 ? $3 - 2 : 1)) --out "$state/times/programs.jsonl"
}

timing() {
    mkdir -p "$state/times"
    programs 0 0 "$(share 1)"
}

everything() {
    [[ ",$stages," != *,tests,* ]] || testing
    [[ ",$stages," != *,times,* ]] || timing
    [[ ",$stages," != *,suite,* ]] ||
        said suite suite "$root/tests/gpu/shards.sh" "$state/suite" --gpus "$timed" --minutes 60 "$@"
    touch "$state/done"
}

# packed NAME FILES...: those of the files in the state's folder that are there, unless the archive has them as they are:
# packing takes a core, and what is measured meanwhile needs it
packed() {
    local name="$1" file found=() archive="$out/$1.tar.gz"
    for file in "${@:2}"; do
        [ ! -e "$state/$file" ] || found+=("$file")
    done
    [ ${#found[@]} -gt 0 ] || return 0
    [ -e "$archive" ] && [ -z "$(find "${found[@]/#/$state/}" -newer "$archive" -print -quit)" ] ||
        save "$name" "$state" "${found[@]}"
}

brought() {
    cp -- "$state/summary.txt" "$out/"
    packed tests results tests-1.log tests-2.log tests-3.log fuzz.log
    packed times times programs.log host.log step.log
    packed suite suite suite.log
}

if [ ! -e "$state/summary.txt" ]; then
    start
    mkdir -p "$state" || exit 2
    : >"$state/summary.txt" || exit 2
    export -f everything testing tests fuzz timing programs said bound share
    export root state gpus timed runs stages programs_s python PYTHON="$python"
    setsid nohup bash -c 'everything "$@"' round "$@" >"$state/round.log" 2>&1 &
else
    started=$SECONDS
fi
while [ ! -e "$state/done" ] && [ "$(left)" -gt 0 ]; do
    sleep 1
    every_half_minute brought
done
brought
if [ -e "$state/done" ]; then
    echo "all is done" >>"$out/summary.txt"
else
    echo "it goes on: call again with the same OUT" >>"$out/summary.txt"
fi
cat -- "$out/summary.txt"
[ ! -e "$state/failed" ]
