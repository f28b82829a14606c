#!/usr/bin/env bash
# GLM-5.2-NVFP4 on four B200: prefill and decode context parallel 4.
# Every value may be set in the environment; further flags are passed on.
set -euo pipefail

MODEL=${MODEL:-nvidia/GLM-5.2-NVFP4}
PLAN_MODEL=${PLAN_MODEL:-glm-5.2-nvfp4}
HOST=${HOST:-127.0.0.1}
PORT=${PORT:-8000}
SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-glm-5.2-nvfp4}
TP=${TP:-1}
PCP=${PCP:-4}
DCP=${DCP:-4}
DCP_COMM_BACKEND=${DCP_COMM_BACKEND:-ag_rs}
KV_CACHE_DTYPE=${KV_CACHE_DTYPE:-fp8_e4m3}
MAX_NUM_BATCHED_TOKENS=${MAX_NUM_BATCHED_TOKENS:-4096}
MAX_MODEL_LEN=${MAX_MODEL_LEN:-1048576}
MAX_NUM_SEQS=${MAX_NUM_SEQS:-256}
GPU_MEMORY_UTILIZATION=${GPU_MEMORY_UTILIZATION:-0.96}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=examples/launch/preflight.sh
. "$here/../../launch/preflight.sh"
preflight

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
  "$@"
