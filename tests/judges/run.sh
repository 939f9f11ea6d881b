#!/usr/bin/env bash
# Runs tests that others wrote under plain torch.compile, stock's CUDA graphs and Encore.
set -uo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"

usage() {
    cat <<'TEXT'
Usage: tests/judges/run.sh NAME OUT [options]

  wheel       PyTorch's own databases of operators, modules and optimizers; the wheel has them
  kornia      tests of kornia that compile             --checkout DIR
  tensordict  tests of tensordict that compile         --checkout DIR
  diffusers   tests of diffusers' models that compile  --checkout DIR
  torchbench  models of TorchBench, by `encore run`    --checkout DIR

DIR is a checkout of the project of that name, or a cut of it: `run.sh NAME --list` says which folders it needs, and
what must be installed. Rows are written to the folder OUT; `run.sh NAME --help` has the options.

PYTHON names the interpreter (.venv/bin/python, else python3). The exit code is 0 if nothing that passes under plain
compile fails under Encore, 1 if something does, and 2 after wrong use.
TEXT
}

case "${1:-}" in
wheel | kornia | tensordict | diffusers | torchbench) ;;
-h | --help) usage && exit 0 ;;
*) usage >&2 && exit 2 ;;
esac
name="$1"
shift
python="${PYTHON:-}"
[ -n "$python" ] || { [ -x "$root/.venv/bin/python" ] && python="$root/.venv/bin/python" || python=python3; }
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ "$name" = wheel ]; then
    exec "$python" -P -m tests.judges.wheel "$@"
fi
exec "$python" -P -m tests.judges.projects "$name" "$@"
