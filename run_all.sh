#!/usr/bin/env bash
# The main job: sets up .venv, measures the workloads of the set grace in every mode, renders tables, figures and report.html.
# Without an NVIDIA GPU it analyses the workloads instead, and renders the recorded runs.
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

usage() {
    cat <<'TEXT'
Usage: ./run_all.sh [--with-torchbench PATH] [--quick] [options of `encore run`]

With an NVIDIA GPU: measures the workloads of the set grace (--set all: every one there is) in all modes, then renders
the report. Started again, it goes on with the newest run that fits, or says that it is complete. --quick is a smoke run of a few minutes.
Without one: `encore explain --set grace`, and the report of the recorded runs. Options are of no use then.

--with-torchbench PATH, before all others: a checkout of https://github.com/pytorch/benchmark, whose models are measured
afterwards in their own run, with the same options; a --budget is that of both. What they need must be installed in
.venv; a model that cannot run is recorded with its reason. Not with --out, --resume, --tp and --variant, which fit one
run. If the options begin with workloads, only these are measured, torchbench:NAME among them, with any options.

Examples: ./run_all.sh --quick
          ./run_all.sh XLNET-I EOS --modes compile,graph
          ./run_all.sh --budget 9m
          ./run_all.sh --with-torchbench ~/benchmark --modes compile,graph,indirection
TEXT
}

case "${1:-}" in -h | --help)
    usage
    exit 0
    ;;
esac

torchbench=
two_runs=
if [ "${1:-}" = --with-torchbench ]; then
    torchbench="${2:-}"
    if [ ! -f "$torchbench/torchbenchmark/__init__.py" ]; then
        echo "--with-torchbench '$torchbench': no checkout of https://github.com/pytorch/benchmark is there" >&2
        exit 2
    fi
    shift 2
    # Named workloads are all that is measured.
    [[ "${1:--}" != -* ]] || two_runs=yes
    for word in "$@"; do
        case "$two_runs${word%%=*}" in yes--out | yes--resume | yes--tp | yes--variant)
            echo "--with-torchbench makes two runs, and ${word%%=*} fits one only;" \
                "leave it out, or name workloads first" >&2
            exit 2
            ;;
        esac
    done
    torchbench="$(realpath -- "$torchbench")"
    export PYTHONPATH="$torchbench${PYTHONPATH:+:$PYTHONPATH}"
fi

# shellcheck source=suite/set_up.sh
source "$root/suite/set_up.sh"
set_up

status=0
gpu="$(encore env --require-gpu 2>&1)" || status=$?
case $status in
0)
    echo "measuring on $gpu" >&2
    SECONDS=0
    # --resume newest comes first, so that a --resume given here replaces it.
    encore run --resume newest --report "$@" || status=$?
    if [ -n "$two_runs" ] && [ "$status" -le 1 ]; then
        second=0
        used=()
        # What a budget is given for is both runs together. SECONDS are whole ones, rounded down.
        [[ " $*" != *" --budget"* ]] || used=(--budget-used "$((SECONDS + 1))s")
        # --set comes last, so that a --set given here is that of the first run.
        encore run --resume newest "$@" ${used[@]+"${used[@]}"} --set torchbench || second=$?
        [ "$status" -ne 0 ] || status=$second
        [ "$second" -le 1 ] || status=$second
    fi
    exit "$status"
    ;;
2)
    set -- ${torchbench:+--with-torchbench} "$@"
    echo "${gpu%%. Without*}: analysing the workloads without one${1:+ (options have no effect: $*)}" >&2
    status=0
    encore explain --set grace --reuse --out "$root/results/explained" || status=$?
    [ "$status" -le 1 ] || exit "$status"
    encore report --recorded --explanations "$root/results/explained" --out "$root/results/report"
    exit "$status"
    ;;
*)
    echo "$gpu" >&2
    exit "$status"
    ;;
esac
