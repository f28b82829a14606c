#!/usr/bin/env bash
# Everything that needs no GPU.
#
#   tests/run.sh [PYTEST ARGUMENTS]    style, types, and all tests beside vLLM 0.33.0
#   tests/run.sh --vllm 0.29.0 [...]   unit, selection and self-tests beside an older release, in an
#                                      environment that is made for it and removed afterwards
#   tests/run.sh --every-release       the first, then the second for each older release, in CI while
#                                      time is left; fails when tests/support.json says something
#                                      else of one
#
# No test at all is a failure.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
outcomes=$root/build/support
# An older release takes up to 10 minutes on two quiet cores; a busy or slow machine twice that.
readonly SECONDS_A_RELEASE=1260
# Continuous integration ends a run after 90 minutes, and its machine may be half as fast as the day
# before: a release whose turn would come too late is said not to have been run.
readonly SECONDS_TO_START=3900
# What is about the repository and not about a release, what asks no vLLM, what needs a GPU, and what
# is of the newest release only: started engines, the plan's figures, the examples' flags, what a
# server's log says, and that the self-test finds faults that are planted.
readonly NOT_BY_RELEASE=(
  --ignore tests/packaging --ignore tests/readme --ignore tests/gpu
  --ignore tests/serve --ignore tests/rehearse --ignore tests/examples
  --ignore tests/bench --ignore tests/planner --ignore tests/doctor/test_server_log.py
  --ignore tests/cli/test_cli_bench.py --ignore tests/cli/test_cli_plan.py
  --ignore tests/cli/test_cli_rehearse.py
  --deselect tests/selftest/test_selftest.py::test_a_planted_fault_is_found
)

# Two processes, whatever the machine has: each takes up to 4 GB, and tests start ranks of their own.
# Files stay whole and in order, since a file's tests share processes that are started once.
readonly IN_PARALLEL=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)
export OMP_NUM_THREADS=1

# Many tests start a process that imports vLLM, three times as quickly with bytecode. It is kept
# beside the environment, and out of the checkout, whatever this shell says about it.
keep_bytecode() { export PYTHONDONTWRITEBYTECODE='' PYTHONPYCACHEPREFIX=$1/bytecode; }

newest_release() {
  local venv
  venv=$("$root/examples/setup.sh")
  keep_bytecode "$venv"
  export PATH="$venv/bin:$PATH"
  cd "$root"
  ruff check
  ruff format --check
  mypy
  if (($#)); then # a part says nothing of a release
    python -m pytest "${IN_PARALLEL[@]}" "$@"
    return
  fi
  rm -rf "$outcomes"
  python -m pytest "${IN_PARALLEL[@]}" --support-file="$outcomes/newest.json"
  python tests/support.py "$outcomes/newest.json"
}

older_release() {
  local release=$1
  shift
  export DCP_MLA_VLLM=$release DCP_MLA_VENV=$root/.venv-$release
  trap 'rm -rf "$DCP_MLA_VENV"' EXIT
  # Where nobody uses the downloads again, they go with the environment.
  [[ -z ${CI:-} ]] || export UV_CACHE_DIR=$DCP_MLA_VENV/cache
  "$root/examples/setup.sh" >/dev/null
  keep_bytecode "$DCP_MLA_VENV"
  cd "$root"
  local python=$DCP_MLA_VENV/bin/python file=$outcomes/$release.json
  if (($#)); then
    "$python" -m pytest "${IN_PARALLEL[@]}" "${NOT_BY_RELEASE[@]}" "$@"
    return
  fi
  "$python" -m pytest "${IN_PARALLEL[@]}" "${NOT_BY_RELEASE[@]}" --support-file="$file"
  "$python" tests/support.py "$file"
}

every_release() {
  newest_release
  local older release failed=()
  older=$(python -c '
from vllm_dcp_mla.compat.releases import RELEASES
print(*(f"{release.series}.0" for release in RELEASES[:-1]))')
  for release in $older; do
    if [[ -n ${CI:-} ]] && ((SECONDS > SECONDS_TO_START)); then
      echo "vLLM $release: not run, $((SECONDS / 60)) minutes are gone; tests/run.sh --vllm $release"
      continue
    fi
    echo "vLLM $release"
    timeout --kill-after=60 "$SECONDS_A_RELEASE" "$root/tests/run.sh" --vllm "$release" ||
      failed+=("$release")
  done
  if ((${#failed[@]})); then
    echo "failed with vLLM ${failed[*]}" >&2
    return 1
  fi
}

case ${1:-} in
  --vllm) older_release "${@:2}" ;;
  --every-release) every_release ;;
  *) newest_release "$@" ;;
esac
