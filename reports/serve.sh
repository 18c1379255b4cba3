#!/bin/sh
# Made by the report stage from reports/decision.json: change that, not this.
# Serve without speculation: nothing was shown to be faster at some load and slower at none;
# nothing that is pending may be adopted before its output is lossless.
# SmolLM2-135M-Instruct.Q4_1-dequantised-fp32 (fingerprint db778d49ad1b), no speculation; measured
# on AMD EPYC, 2 cores; vllm 0.32.0, torch 2.13.0+cpu.
# Run: sh reports/serve.sh [more flags of vLLM, which win]. It listens on 127.0.0.1:8000 only;
# with VLLM_API_KEY set clients need that key, and without one no other --host is taken.
set -eu
CDPATH= cd -- "$(dirname -- "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
prefix=$(python -c 'from specmill import compat; print(compat.environment_prefix())')
model=$(python -c 'from specmill import paths, verifier
print(verifier.model_path(paths.VERIFIER))')
case " $* " in
  *" --host"*) : "${VLLM_API_KEY:?set a key before other machines can ask: --host}" ;;
esac
export VLLM_NO_USAGE_STATS=1
export DO_NOT_TRACK=1
export TOKENIZERS_PARALLELISM=false
export VLLM_WORKER_MULTIPROC_METHOD=spawn
export ARCTIC_INFERENCE_ENABLED=0
export LD_PRELOAD="$prefix/lib/libiomp5.so${LD_PRELOAD:+ $LD_PRELOAD}"
export VLLM_CPU_NUM_OF_RESERVED_CPU=0
export VLLM_CPU_KVCACHE_SPACE=2
export VLLM_USE_AOT_COMPILE=0
exec "$prefix/bin/python" -m vllm.entrypoints.openai.api_server \
  --model "$model" \
  --served-model-name verifier \
  --host 127.0.0.1 \
  --port 8000 \
  --generation-config vllm \
  --max-model-len 2048 \
  --dtype float32 \
  "$@"
