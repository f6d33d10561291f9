# The rollout worker: what runs inside a task's container (python -m prime_node.worker).
#   docker build -f deploy/worker.Dockerfile -t prime-worker .
# The run definition names the image by digest (or, without a registry, by image id). It needs no
# network, no capability, no writable root: the agent starts it without them.
# On machines that reach no registry: python deploy/build_image.py worker

# The full image has the C compiler that one package needs (pycosat); the final one does without.
FROM python:3.11 AS build

# TORCH may name a CPU-only or a CUDA build, as pip understands it.
ARG TORCH="torch>=2.13,<2.14"
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/prime
RUN pip install --no-cache-dir "${TORCH}"
COPY pyproject.toml constraints.txt README.md ./
COPY protocol protocol
COPY node node
RUN pip install --no-cache-dir --constraint constraints.txt ".[rollout-base,families,python-sandbox,python-tool,search-tool,torch]"
# The interpreter of the tool python-2, compiled: tasks have no writable folder to keep it in.
ENV PRIME_TOOL_CACHE=/opt/prime-tools
RUN python -m prime_envs.python_wasm

FROM python:3.11-slim
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/prime-tools /opt/prime-tools
ENV PATH=/opt/venv/bin:$PATH PRIME_TOOL_CACHE=/opt/prime-tools \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
USER 65532:65532
CMD ["python", "-m", "prime_node.worker"]
