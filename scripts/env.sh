# Sourced by scripts/serve and scripts/test: goes to the repository's root and makes .venv fit.
# Usage: extras=<extras of setup.cfg>; . scripts/env.sh
# A stamp with the checksum of everything that decides what is installed makes a second run quick.

set -eu
PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}
export PATH
cd "$(dirname "$0")/.."
venv=$PWD/.venv
stamp=$venv/mindstream-installed
log=$venv/install.log

say() { printf '==> %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    for candidate in ${MINDSTREAM_PYTHON:-python3.11 python3.12 python3.10 python3 python}; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    [ -z "${MINDSTREAM_PYTHON:-}" ] ||
        fail "MINDSTREAM_PYTHON=$MINDSTREAM_PYTHON is not a Python 3.10, 3.11 or 3.12."
    found=$(python3 --version 2>/dev/null || echo "no python3 at all")
    fail "mindstream needs Python 3.11 (3.10 and 3.12 work too: MindSpore has wheels for these);" \
        "found $found. Install one, or name it: MINDSTREAM_PYTHON=/path/to/python3.11 $0"
}

# Runs a command with its output in the log and a sign of life; shows the log if it fails.
long_step() {
    title=$1
    shift
    say "$title"
    "$@" >>"$log" 2>&1 &
    job=$!
    trap 'kill $job 2>/dev/null; exit 130' INT TERM
    seconds=0
    while kill -0 "$job" 2>/dev/null; do
        sleep 1
        seconds=$((seconds + 1))
        if [ $((seconds % 10)) -eq 0 ]; then
            now=$(grep -E '^ *(Collecting|Downloading|Installing|Building|Preparing)' "$log" |
                tail -n 1 | cut -c 1-70 || true)
            printf '    %s s  %s\n' "$seconds" "$now" >&2
        fi
    done
    trap - INT TERM
    if ! wait "$job"; then
        tail -n 20 "$log" >&2
        fail "$title: failed; the whole output is in $log"
    fi
}

wanted_stamp() {
    cat setup.cfg setup.py pyproject.toml requirements/constraints.txt scripts/env.sh \
        backends/mindspore/cpu/csrc/* | cksum
    pwd
}

# `exec`: the job that an interruption ends is pip itself and not a shell around it.
install() {
    exec "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
        --progress-bar off --constraint requirements/constraints.txt --editable ".[$extras]"
}

# pip comes last into a virtual environment: without it, its making was interrupted.
if [ ! -e "$venv/bin/pip" ] || ! supported "$venv/bin/python"; then
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" ||
        fail "$python cannot make a virtual environment; on Debian and Ubuntu install python3-venv."
fi

wanted=$(wanted_stamp)
if [ ! -f "$stamp.$extras" ] || [ "$(cat "$stamp.$extras")" != "$wanted" ]; then
    : >"$log"
    long_step "installing mindstream[$extras] and what it needs (the first time takes minutes)" install
    rm -f "$stamp".*
    printf '%s\n' "$wanted" >"$stamp.$extras"
    [ -e backends/mindspore/cpu/_kernels.so ] ||
        say "the C++ kernels were not built: serving on CPU will be several times slower." \
            "Install g++ 10 or newer, remove .venv and run $0 again."
fi
