#!/usr/bin/env bash
# GLM-5.2-FP8 on eight B200: tensor parallel 8, the KV cache sharded over all eight.
# Every value may be set in the environment; further flags are passed on.
set -euo pipefail

MODEL=${MODEL:-zai-org/GLM-5.2-FP8}
PLAN_MODEL=${PLAN_MODEL:-glm-5.2-fp8}
HOST=${HOST:-127.0.0.1}
PORT=${PORT:-8000}
SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-glm-5.2-fp8}
TP=${TP:-8}
PCP=${PCP:-1}
DCP=${DCP:-8}
DCP_COMM_BACKEND=${DCP_COMM_BACKEND:-a2a}
KV_CACHE_DTYPE=${KV_CACHE_DTYPE:-fp8_e4m3}
MAX_NUM_BATCHED_TOKENS=${MAX_NUM_BATCHED_TOKENS:-16384}
MAX_MODEL_LEN=${MAX_MODEL_LEN:-1048576}
MAX_NUM_SEQS=${MAX_NUM_SEQS:-256}
GPU_MEMORY_UTILIZATION=${GPU_MEMORY_UTILIZATION:-0.92}
MTP=${MTP:-0}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=examples/launch/preflight.sh
. "$here/../../launch/preflight.sh"
preflight

drafter=()
if ((MTP > 0)); then
  drafter=(
    --speculative-config.method mtp
    --speculative-config.num_speculative_tokens "$MTP"
  )
fi

exec vllm serve "$MODEL" \
  --host "$HOST" \
  --port "$PORT" \
  --served-model-name "$SERVED_MODEL_NAME" \
  --tensor-parallel-size "$TP" \
  --prefill-context-parallel-size "$PCP" \
  --decode-context-parallel-size "$DCP" \
  --dcp-comm-backend "$DCP_COMM_BACKEND" \
  --enable-expert-parallel \
  --kv-cache-dtype "$KV_CACHE_DTYPE" \
  --max-num-batched-tokens "$MAX_NUM_BATCHED_TOKENS" \
  --max-model-len "$MAX_MODEL_LEN" \
  --max-num-seqs "$MAX_NUM_SEQS" \
  --gpu-memory-utilization "$GPU_MEMORY_UTILIZATION" \
  --tool-call-parser glm47 \
  --reasoning-parser glm45 \
  --enable-auto-tool-choice \
  ${drafter[@]+"${drafter[@]}"} \
  "$@"
