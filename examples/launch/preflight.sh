# shellcheck shell=bash
# Sourced by the launch scripts: looks at the installation and at the memory before a server starts.
#
#   PREFLIGHT   1, or 0 to start without looking
#   GPU         what plan and doctor know the GPU by; "local" asks the driver
#   PLAN_MODEL  a built-in name, or a folder with config.json (and the checkpoint)

preflight() {
  [[ ${MTP:-0} =~ ^(0|[1-9][0-9]*)$ ]] || refuse "MTP is '$MTP', it must be a whole number; set one"
  case ${PREFLIGHT:-1} in
    0) return 0 ;;
    1) ;;
    *) refuse "PREFLIGHT is '$PREFLIGHT', it must be 1 or 0; leave it out" ;;
  esac
  local shared=(
    --model "$PLAN_MODEL"
    --gpu "${GPU:-local}"
    --tp "$TP"
    --pcp "$PCP"
    --dcp "$DCP"
    --kv-cache-dtype "$KV_CACHE_DTYPE"
    --max-num-batched-tokens "$MAX_NUM_BATCHED_TOKENS"
  )
  if ((DCP > 1)); then
    shared+=(--comm "$DCP_COMM_BACKEND")
  fi
  local sizes=(
    --max-model-len "$MAX_MODEL_LEN"
    --max-num-seqs "$MAX_NUM_SEQS"
    --utilization "$GPU_MEMORY_UTILIZATION"
    --mtp "${MTP:-0}"
  )
  vllm-dcp-mla plan "${shared[@]}" "${sizes[@]}" ||
    refuse 'plan refuses; change what it names, or start anyway with PREFLIGHT=0'
  vllm-dcp-mla doctor "${shared[@]}" ||
    refuse 'doctor found a failure; fix what it names, or start anyway with PREFLIGHT=0'
}

refuse() {
  echo "launch: $1." >&2
  exit 1
}
