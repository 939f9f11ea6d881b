#!/usr/bin/env bash
# What the scripts for a stay on a GPU machine share; they source it, without arguments, so that it reads theirs.
#
# It takes `root`, the function `usage`, and `options`: which variable each option sets, `minutes` and `archive` among
# them. It gives `out`, leaves the arguments behind the options to the script, and defines `start`, which gives
# `python`, `encore`, `work` (a folder that goes at the end) and `failed`; `left` and `stage` can be used behind it.
# `count_gpus` and `share` are for scripts that use several GPUs at once, and `bound` is for what each of them does.
# `save` and `every_half_minute` are for those whose call may be ended before they are done.
# shellcheck disable=SC2154  # they are the caller's

case "${1:-}" in "" | -h | --help)
    usage
    [ $# -gt 0 ]
    exit $((2 * $?))
    ;;
esac

mkdir -p "$1" && out="$(cd -- "$1" && pwd)" || exit 2
shift
archive=
while [[ "${1:-}" == --* && -n "${options[$1]:-}" ]]; do
    [ -n "${2:-}" ] || { echo "$1 needs a value (see --help)" >&2 && exit 2; }
    printf -v "${options[$1]}" %s "$2"
    shift 2
done
for number in "$minutes" ${gpus:+"$gpus"}; do
    [[ "$number" =~ ^[1-9][0-9]*$ ]] || { echo "$number is not a whole number above 0 (see --help)" >&2 && exit 2; }
done
if [ -n "$archive" ]; then
    [ -r "$archive" ] || { echo "$archive cannot be read" >&2 && exit 2; }
    archive="$(realpath -- "$archive")"
fi

start() {
    python="${PYTHON:-$root/.venv/bin/python}"
    [ -x "$python" ] || python="$(command -v python3)"
    work="$(mktemp -d)"
    trap 'rm -rf -- "$work"' EXIT
    cd -- "$root" || exit 2

    # `torch.compile(backend="encore")` finds the backend by the installed package's entry point.
    if ! "$python" -c 'from importlib.metadata import distribution; distribution("encore")' 2>/dev/null; then
        "$python" -m pip install --quiet --no-deps --no-build-isolation --editable "$root" || exit 2
    fi
    encore env --require-gpu || exit
    encore env --json >"$out/environment.json"

    started=$SECONDS
    failed=0
}

encore() { "$python" -P -m suite "$@"; }
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

# count_gpus: into `gpus`, where no option set it
count_gpus() {
    [ -n "$gpus" ] || gpus="$(nvidia-smi --list-gpus | wc -l)"
    [ "$gpus" -gt 0 ] || { echo "there is no GPU, or nvidia-smi does not list it" >&2 && exit 2; }
}

# share COUNT: how many of the host's cores each of so many gets
share() {
    local cores=$(($(nproc) / $1))
    echo $((cores > 0 ? cores : 1))
}

# bound TMP GPU FIRST CORES COMMAND...: with a folder of its own for temporary files, TMP; on this GPU, from 0, and on so
# many cores from the first
bound() {
    mkdir -p "$1"
    CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES="$2" TMPDIR="$1" \
        taskset --cpu-list "$3-$(($3 + $4 - 1))" "${@:5}"
}

# save NAME FOLDER FILES...: those files of the folder, packed into OUT/NAME.tar.gz. A call that is ended meanwhile leaves
# the archive from before. What is written meanwhile (tar says 1 then) is whole in the next one.
save() {
    local part="$out/$1.tar.gz.part" begun=$EPOCHSECONDS
    tar -C "$2" --warning=no-file-changed --exclude='*.part' -czf "$part" -- "${@:3}" || [ $? -eq 1 ] || return
    # Not newer than anything that it lacks, so that `find -newer` tells what to pack again.
    touch -d "@$((begun - 1))" -- "$part"
    mv -- "$part" "$out/$1.tar.gz"
}

# every_half_minute COMMAND...: for loops that wait, which call it again and again
saved_at=0
every_half_minute() {
    [ $((SECONDS - saved_at)) -ge 30 ] || return 0
    saved_at=$SECONDS
    "$@"
}

# report: of the run in `work`, which is packed with it
report() {
    [ -f "$work/run/cells.jsonl" ] || return 0
    encore report "$work/run" --out "$work/run/report" >>"$out/run.log" 2>&1 || failed=1
    tar -C "$work" -czf "$out/run.tar.gz" run
}
