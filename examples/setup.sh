#!/usr/bin/env bash
# Makes a virtual environment with stock vLLM, this package (editable) and its development tools.
# Prints the environment's folder; everything else goes to standard error. Running it again is quick.
#
#   PYTHON        the Python to use (3.11 to 3.13); left out: the first one found
#   DCP_MLA_VENV  folder of the environment; left out: .venv in the repository
#   DCP_MLA_VLLM  release of vLLM; left out: 0.33.0
set -euo pipefail

# Older releases of cuda-python ship files that belong to cuda-bindings since 12.8; beside a newer
# cuda-bindings, which resolvers like to pick, the one that is installed last breaks FlashInfer.
readonly PACKAGES=("vllm==${DCP_MLA_VLLM:-0.33.0}" 'cuda-python>=12.8')
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DCP_MLA_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
exec 3>&1 1>&2

say() { echo "setup: $*" >&2; }

# Runs the candidate: a shim may be there without the Python it stands for.
is_usable() {
  "$1" -c '
import ensurepip, sys, venv
raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
  if [[ -n ${PYTHON:-} ]]; then
    if is_usable "$PYTHON"; then
      echo "$PYTHON"
      return
    fi
    say "PYTHON is $PYTHON, which is no Python 3.11 to 3.13 with venv; looking for another."
  fi
  local candidate
  for candidate in python3 python3.12 python3.13 python3.11; do
    if is_usable "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  say 'no Python 3.11, 3.12 or 3.13 with venv found; install one or name it with PYTHON.'
  return 1
}

make_venv() {
  if [[ -e $venv && ! -f $venv/pyvenv.cfg ]]; then
    say "$venv exists and is no virtual environment; remove it or set DCP_MLA_VENV."
    return 1
  fi
  local python
  python=$(find_python)
  say "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
}

install() {
  local wanted=("${PACKAGES[@]}" --editable . --group dev)
  say "installing ${PACKAGES[0]} and this package; the first time takes minutes and about 10 GB"
  if "$venv/bin/python" -m pip install --quiet uv &&
    "$venv/bin/python" -m uv pip install --python "$venv/bin/python" "${wanted[@]}"; then
    return
  fi
  say 'uv could not do it; using pip.'
  "$venv/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
  "$venv/bin/python" -m pip install "${wanted[@]}"
}

# What an installation depends on; one that was interrupted leaves none.
fingerprint() { printf '%s\n' "$root" "${PACKAGES[@]}" && cat pyproject.toml; }

cd "$root"
is_usable "$venv/bin/python" || make_venv
if ! "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null &&
  ! command -v cc >/dev/null && ! command -v gcc >/dev/null; then
  say 'this machine has no CUDA driver and no C compiler to make a stand-in for it; install gcc.'
  exit 1
fi
if ! fingerprint | cmp -s - "$venv/installed"; then
  install
  fingerprint >"$venv/installed"
fi
echo "$venv" >&3
