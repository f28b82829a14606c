#!/usr/bin/env bash
# The main job, on a machine without a GPU: stock vLLM picks this package's backend, the backend's
# workspace is bounded, and a step over four ranks gives what float64 attention gives.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$("$root/examples/setup.sh")
export PATH="$venv/bin:$PATH"
failed=()

part() {
  local title=$1
  shift
  printf '\n== %s\n' "$title"
  "$@" || failed+=("$title")
}

selection() {
  echo 'Each line is a fresh process of stock vLLM that loads plugins and selects.'
  local status=0
  picks glm-5.2 fp8_e4m3 || status=1
  picks glm-5.2 bfloat16 || status=1
  picks deepseek-v3.2 auto || status=1
  return $status
}

picks() {
  { vllm-dcp-mla doctor --model "$1" --gpu b200 --tp 8 --dcp 8 --kv-cache-dtype "$2" --json ||
    true; } | python -c '
import json, sys
report = json.load(sys.stdin)
picked, name = report["selection"]["picked"], report["selection"]["class"]
print(f"{sys.argv[1]:14}{sys.argv[2]:10}{picked}")
print(f"{str():24}{name}")
for check in report["checks"]:
    if check["status"] == "fail":
        print(check["name"], "FAILED:", check["found"], "fix:", check["fix"])
if not report["ok"] or not str(name).startswith("vllm_dcp_mla."):
    sys.exit("stock vLLM did not pick a class of vllm_dcp_mla")' "$1" "$2"
}

workspace() {
  echo 'Bytes of the attention workspace of a rank, by --max-num-batched-tokens.'
  printf '%-14s%-10s%8s%16s%16s%10s\n' model cache tokens 'stock vLLM' vllm-dcp-mla launches
  local status=0 tokens
  for tokens in 8192 32768; do
    sizes glm-5.2-fp8 fp8_e4m3 $tokens || status=1
    sizes glm-5.2-fp8 bfloat16 $tokens || status=1
    sizes deepseek-v3.2 auto $tokens || status=1
  done
  return $status
}

sizes() {
  vllm-dcp-mla plan --model "$1" --gpu b200 --tp 8 --dcp 8 --kv-cache-dtype "$2" \
    --max-num-batched-tokens "$3" --json | python -c '
import json, sys
model, cache, tokens = sys.argv[1:]
sizes = json.load(sys.stdin)["workspace"]
launches = -(-int(tokens) // sizes["tokens_per_launch"])
stock, ours = (f"{sizes[key]:,}" for key in ("stock_total_bytes", "total_bytes"))
print(f"{model:14}{cache:10}{int(tokens):8,}{stock:>16}{ours:>16}{launches:10}")' "$1" "$2" "$3"
}

attention() {
  echo 'Query gather, forward_mqa and merge are stock vLLM; the backend is ours, its kernel is the'
  echo 'plain-torch reference. Four processes share a sharded cache; the error is relative.'
  vllm-dcp-mla selftest --ranks 4 --interleave 1
}

part 'Stock vLLM on a simulated B200, TP8 DCP8, picks' selection
part 'The workspace on TP8 DCP8' workspace
part 'One attention step on TP4 DCP4, against float64' attention

echo
for title in ${failed[@]+"${failed[@]}"}; do
  echo "FAILED: $title"
done
echo "demo: $((3 - ${#failed[@]})) of 3 parts passed in $SECONDS s"
((${#failed[@]} == 0))
