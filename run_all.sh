#!/usr/bin/env bash
# Sets up .venv. On an NVIDIA GPU it measures the workloads of the set grace in every mode and renders report.html.
# Without one it renders the recorded runs and analyses four workloads: five minutes on two cores.
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

usage() {
    cat <<'TEXT'
Usage: ./run_all.sh [--all] [--with-torchbench PATH] [--quick] [options of `encore run`]

With an NVIDIA GPU: measures the workloads of the set grace (--all: every one there is) in all modes, then renders the
report. Started again, it goes on with the newest run that fits, or says that it is complete. --quick is a smoke run
of a few minutes.
Without one: the report of the recorded runs, then `encore explain` of four workloads, about five minutes on two cores.
With --all, which comes first: of the whole set grace, about an hour. Other options are of no use then.

--with-torchbench PATH, before all others: a checkout of https://github.com/pytorch/benchmark, whose models are measured
afterwards in their own run, with the same options. What they need must be installed in .venv; a model that cannot run
is recorded with its reason. Not with --out, --resume, --tp, --variant and --budget, which fit one run. Where workloads
are named, only these are measured, torchbench:NAME among them, with any options.

Examples: ./run_all.sh --quick
          ./run_all.sh --all
          ./run_all.sh XLNET-I EOS --modes compile,graph
          ./run_all.sh --budget 9m
          ./run_all.sh --with-torchbench ~/benchmark --modes compile,graph,indirection
TEXT
}

for word in "$@"; do
    case "$word" in -h | --help)
        usage
        exit 0
        ;;
    esac
done

# What of the options of `encore run` takes no value: the word behind any other is no workload.
flags=" --cold-compile-times --with-optimizer --warm-cache --quick --retry-failed --dry-run --report --help "

# Sets `workloads` to the words among the arguments that are neither options nor their values.
find_workloads() {
    workloads=()
    while [ $# -gt 0 ]; do
        case "$1" in
        --)
            workloads+=("${@:2}")
            return
            ;;
        -*=*) ;;
        -*) [[ "$flags" == *" $1 "* ]] || [ $# -eq 1 ] || shift ;;
        *) workloads+=("$1") ;;
        esac
        shift
    done
}

everything=
if [ "${1:-}" = --all ]; then
    everything=yes
    shift
fi
torchbench=
two_runs=
if [ "${1:-}" = --with-torchbench ]; then
    torchbench="${2:-}"
    if [ ! -f "$torchbench/torchbenchmark/__init__.py" ]; then
        echo "--with-torchbench '$torchbench': no checkout of https://github.com/pytorch/benchmark is there" >&2
        exit 2
    fi
    shift 2
fi
for word in "$@"; do
    case "$word" in --with-torchbench | --with-torchbench=*)
        echo "--with-torchbench PATH is given once, before all options and workloads, as two words:" \
            "./run_all.sh --with-torchbench PATH --quick" >&2
        exit 2
        ;;
    esac
done

find_workloads "$@"

if [ -n "$torchbench" ]; then
    # Named workloads are all that is measured.
    [ ${#workloads[@]} -gt 0 ] || two_runs=yes
    # Nothing comes behind a last --, where the second run gets options.
    [ -z "$two_runs" ] || [ "${*: -1}" != -- ] || set -- "${@:1:$#-1}"
    for word in "$@"; do
        case "$two_runs${word%%=*}" in yes--out | yes--resume | yes--tp | yes--variant | yes--budget)
            echo "--with-torchbench makes two runs, and ${word%%=*} fits one only;" \
                "leave it out, or name workloads" >&2
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
echo "looking for a GPU" >&2
gpu="$(encore env --require-gpu 2>&1)" || status=$?
case $status in
0)
    echo "measuring on $gpu" >&2
    [ -z "$everything" ] || set -- --set all "$@"
    # --resume newest comes first, so that a --resume given here replaces it.
    encore run --resume newest --report "$@" || status=$?
    if [ -n "$two_runs" ] && [ "$status" -le 1 ]; then
        second=0
        # --set comes last, so that a --set given here is that of the first run.
        encore run --resume newest "$@" --set torchbench || second=$?
        [ "$status" -ne 0 ] || status=$second
        [ "$second" -le 1 ] || status=$second
    fi
    exit "$status"
    ;;
2)
    set -- ${torchbench:+--with-torchbench} "$@"
    echo "${gpu%%. Without*}: showing the recorded runs, analysing workloads${1:+ (options have no effect: $*)}" >&2
    encore report --recorded --out "$root/results/report"
    # Three in which placement removes something, and one that stock captures as it is.
    status=0
    encore explain EOS MMC XLNET-I ST || status=$?
    if [ -n "$everything" ] && [ "$status" -le 1 ]; then
        encore explain --set grace --out "$root/results/explained" || status=$?
    fi
    exit "$status"
    ;;
*)
    echo "$gpu" >&2
    exit "$status"
    ;;
esac
