#!/usr/bin/env bash
# A run of the suite on all GPUs of a host at once: each measures a part of the workloads, on cores of its own.
set -uo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"

usage() {
    cat <<'TEXT'
Usage: tests/gpu/shards.sh OUT [--minutes N] [--gpus N] [--runs ARCHIVE] [WORKLOAD... and options of `encore run`]

Starts `encore run --shard I/N` once for each of the N GPUs, all at the same time. The workloads are divided so that
all GPUs have about equally long to do. Writes to the folder OUT:

  summary.txt       what ran, with exit codes and seconds
  environment.json  GPU, driver, versions, commit
  shard-1.log ...   the log of each
  shards.tar.gz     the runs, one folder each; written every half minute, too. `encore merge` joins them

  --minutes N     time for all of it (9); what is being measured then is lost, and measured first the next time
  --gpus N        use so many (all)
  --runs ARCHIVE  a shards.tar.gz from an earlier stay of as many GPUs, to go on with; give the same workloads

PYTHON names the interpreter (.venv/bin/python, else python3). The exit code is 0 if every shard has all of its rows and
none failed.
TEXT
}

minutes=9
gpus=
declare -A options=([--minutes]=minutes [--gpus]=gpus [--runs]=archive)
# shellcheck source=tests/gpu/stages.sh
source "$root/tests/gpu/stages.sh"
count_gpus
start
runs="$work/shards"
mkdir -p "$runs"
[ -z "$archive" ] || tar -C "$work" -xzf "$archive" || exit 2
cores="$(share "$gpus")"

# shard NUMBER ARGUMENTS...
shard() {
    local number="$1" run="$runs/shard-$1" begun=$SECONDS where status
    shift
    where=(--out "$run" --shard "$number/$gpus")
    # A resumed run knows its workloads and options.
    [ ! -e "$run/environment.json" ] || { where=(--resume "$run") && set --; }
    bound "$work/tmp-$number" $((number - 1)) $(((number - 1) * cores)) "$cores" \
        timeout --signal=INT --kill-after=20 $(($(left) - 20)) \
        "$python" -P -m suite run "${where[@]}" "$@" >"$out/shard-$number.log" 2>&1
    status=$?
    echo "shard $number: exit code $status after $((SECONDS - begun)) s" >>"$out/summary.txt"
    return "$status"
}

: >"$out/summary.txt"
started_shards=()
for ((number = 1; number <= gpus; number++)); do
    shard "$number" "$@" &
    started_shards+=($!)
done
while sleep 1 && [ -n "$(jobs -pr)" ]; do
    every_half_minute save shards "$work" shards
done
for one in "${started_shards[@]}"; do
    wait "$one" || failed=1
done
save shards "$work" shards || failed=1
cat -- "$out/summary.txt"
exit "$failed"
