#!/usr/bin/env bash
# Everything that needs no GPU: style, types, and all tests beside stock vLLM, with coverage.
# Arguments go to pytest. No test at all is a failure.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$("$root/examples/setup.sh")
export PATH="$venv/bin:$PATH"
cd "$root"
ruff check
ruff format --check
mypy
exec python -m pytest --cov --cov-report=term:skip-covered "$@"
