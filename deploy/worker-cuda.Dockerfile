# The rollout worker for NVIDIA GPUs: vLLM generates. See docs/worker-images.md for publishing it.
#   docker build -f deploy/worker-cuda.Dockerfile -t prime-worker-cuda .
# The task's command names the engine: ["python", "-m", "prime_node.worker", "--engine", "vllm"]. Like the
# CPU image it needs no network, no capability and no writable root but /tmp.
# Not run yet on a GPU machine by its authors: files of a card that the
# calibration does not cover are judged at the widest limits (orchestrator calibrate --device cuda).
# vLLM's wheel brings CUDA 13's libraries; this base makes a driver that is too old (below 580) say so
# at the container's start.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

ARG VLLM="vllm==0.32.0"
RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/prime
RUN pip install --no-cache-dir "${VLLM}"
COPY pyproject.toml README.md ./
COPY protocol protocol
COPY node node
RUN pip install --no-cache-dir ".[rollout-base,families,python-sandbox,python-tool,search-tool]"
# The interpreter of the tool python-2, compiled: tasks have no writable folder to keep it in.
ENV PRIME_TOOL_CACHE=/opt/prime-tools
RUN python -m prime_envs.python_wasm

# The engine checks the first two at start and refuses to run without them.
ENV VLLM_USE_V2_MODEL_RUNNER=0 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 \
    HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false \
    HOME=/tmp XDG_CACHE_HOME=/tmp/cache VLLM_CACHE_ROOT=/tmp/cache/vllm
USER 65532:65532
CMD ["python", "-m", "prime_node.worker", "--engine", "vllm", "--device", "cuda", "--dtype", "bfloat16"]
