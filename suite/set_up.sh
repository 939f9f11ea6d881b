# Sourced by run_all.sh and run_tests.sh. Makes .venv with what requirements.lock says, and defines `encore_python`.
# Needs `root`, the repository's folder, to be set. Nothing here depends on the working directory.

venv="$root/.venv"
encore_python="$venv/bin/python"

# What .venv was made from. The folder is part of it, because an installed package knows where its sources are.
set_up_stamp() {
    cat "$root/requirements.lock" "$root/pyproject.toml" && echo "$root"
}

is_usable_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3.11 python3.13 python3 python; do
        if [ -n "$candidate" ] && is_usable_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "set-up: found no Python of version 3.11 or newer with the modules venv and ensurepip." >&2
    echo "set-up: install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it: PYTHON=/path/to/python $0" >&2
    return 2
}

# Bytecode, without which each process would compile what it imports where Python is told to write none. On all cores:
# pip would use one. What nobody imports is left out: packages' own tests, sources of what is there as machine code, and
# large parts of packages. What is written for another Python fails without a word.
compile_packages() {
    local unused='.*/tests?/|(mypyc?|pip|fontTools|pygments/lexers|sympy/physics)/|transformers/models/.*/(modular|tokenization)_'
    "$encore_python" -m compileall -qq -j 0 -x "/site-packages/($unused)" "$venv/lib" || true
}

set_up() {
    local stamp="$venv/made-from" python
    if [ -f "$stamp" ] && is_usable_python "$encore_python" && set_up_stamp | cmp -s - "$stamp"; then
        echo "set-up: .venv is as requirements.lock says; reusing it" >&2
        return
    fi
    if ! is_usable_python "$encore_python"; then
        python="$(find_python)" || return
        echo "set-up: making .venv with $("$python" --version)" >&2
        "$python" -m venv --clear "$venv" || return
    fi
    echo "set-up: installing what requirements.lock says (several GB at first; minutes)" >&2
    rm -f "$stamp"
    "$encore_python" -m pip install --disable-pip-version-check --no-compile --requirement "$root/requirements.lock" \
        >&2 || return
    echo "set-up: compiling packages to bytecode" >&2
    compile_packages
    "$encore_python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable "$root" >&2 ||
        return
    set_up_stamp >"$stamp"
}

encore() {
    "$encore_python" -P "$root/encore/own_packages.py" suite "$@"
}
