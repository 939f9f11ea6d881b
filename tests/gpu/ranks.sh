#!/usr/bin/env bash
# Everything that a short stay on a machine with several GPUs should bring home, in one go.
set -uo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"

usage() {
    cat <<'TEXT'
Usage: tests/gpu/ranks.sh OUT [--minutes N] [--stages tests,suite] [--run ARCHIVE] [WORKLOAD...]

Runs the tests that need several GPUs, then `encore run --tp` over 1, 2 and 4 GPUs, as far as there are so many, in the
modes compile, graph and encore, as many workloads as the rest of the time allows. Writes to the folder OUT:

  summary.txt       what ran, with exit codes and seconds
  environment.json  GPUs, driver, versions, commit
  topology.txt      how the GPUs are linked
  tests.log, tests.tar.gz (results as XML, and what the programs found as JSON)
  run.log, run.tar.gz (the run and its report)

  --minutes N     time for all of it (8)
  --stages LIST   only these (tests,suite)
  --run ARCHIVE   a run.tar.gz from an earlier stay, to go on with
  WORKLOAD...     DECODER XLNET-I ST VM DALLE2, in this order, unless some are named

PYTHON names the interpreter (.venv/bin/python, else python3). The exit code is 0 if every stage's was.
TEXT
}

minutes=8
stages=tests,suite
declare -A options=([--minutes]=minutes [--stages]=stages [--run]=archive)
# shellcheck source=tests/gpu/stages.sh
source "$root/tests/gpu/stages.sh"
[[ "${1:-}" != -* ]] || { echo "unknown option $1 (see --help)" >&2 && exit 2; }
workloads=("$@")
[ ${#workloads[@]} -gt 0 ] || workloads=(DECODER XLNET-I ST VM DALLE2)

# Multicast over NVLink can take the GPUs of a shared host out of service.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
export NVSHMEM_DISABLE_NVLS="${NVSHMEM_DISABLE_NVLS:-1}"
start
nvidia-smi topo -m >"$out/topology.txt" 2>&1
gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')" || exit 2
degrees=1
for degree in 2 4; do
    [ "$degree" -gt "$gpus" ] || degrees="$degrees,$degree"
done

echo "$gpus GPUs, degrees $degrees" | tee "$out/summary.txt"
if [[ ",$stages," == *,tests,* ]]; then
    export ENCORE_RESULTS="$work/tests"
    mkdir -p "$ENCORE_RESULTS"
    # One test at a time: each takes all the GPUs it can get.
    share=100
    [[ ",$stages," != *,suite,* ]] || share=60
    stage tests $(($(left) * share / 100)) "$python" -m pytest -m gpu -q -p no:cacheprovider \
        --junitxml "$ENCORE_RESULTS/ranks.xml" "$root/tests/gpu/test_ranks_gpu.py"
    tar -C "$work" -czf "$out/tests.tar.gz" tests
fi
if [[ ",$stages," == *,suite,* ]]; then
    run="$work/run"
    # A minute is kept for the report and the archive.
    limit=$(($(left) - 60))
    # What is through when the time is over is kept; no budget, for estimates are for all modes.
    if [ -n "$archive" ]; then
        tar -C "$work" -xzf "$archive" || exit 2
        stage run "$limit" "$python" -P -m suite run --resume "$run" --timeout 4m
    else
        stage run "$limit" "$python" -P -m suite run "${workloads[@]}" --tp "$degrees" --out "$run" \
            --modes compile,graph,encore --processes 1 --measure-s 3 --timeout 4m
    fi
    report
fi
cat -- "$out/summary.txt"
exit "$failed"
