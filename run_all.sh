#!/usr/bin/env bash
# The main job: sets up .venv, measures every registered workload in every mode, renders tables, figures and report.html.
# Without an NVIDIA GPU it analyses the workloads instead, and renders the recorded runs.
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

usage() {
    cat <<'TEXT'
Usage: ./run_all.sh [--quick] [options of `encore run`]

With an NVIDIA GPU: measures all workloads in all modes, then renders the report. Started again, it goes on with the
newest run that fits, or says that it is complete. --quick is a smoke run of a few minutes.
Without one: `encore explain --all`, and the report of the recorded runs. Options are of no use then.

Examples: ./run_all.sh --quick
          ./run_all.sh XLNET-I EOS --modes compile,graph
          ./run_all.sh --budget 9m
TEXT
}

case "${1:-}" in -h | --help)
    usage
    exit 0
    ;;
esac

# shellcheck source=suite/set_up.sh
source "$root/suite/set_up.sh"
set_up

status=0
gpu="$(encore env --require-gpu 2>&1)" || status=$?
case $status in
0)
    echo "measuring on $gpu" >&2
    # --resume newest comes first, so that a --resume given here replaces it.
    encore run --resume newest --report "$@"
    ;;
2)
    echo "${gpu%%. Without*}: analysing the workloads without one${1:+ (options have no effect: $*)}" >&2
    status=0
    encore explain --all --reuse --out "$root/results/explained" || status=$?
    [ "$status" -le 1 ] || exit "$status"
    encore report --recorded --explanations "$root/results/explained" --out "$root/results/report"
    exit "$status"
    ;;
*)
    echo "$gpu" >&2
    exit "$status"
    ;;
esac
