# Offbeat for NVIDIA GPUs, from the root of the repository:
#
#   docker build -f deploy/docker/gpu.Dockerfile -t offbeat:gpu .
#
# The base has CUDA, torch and vLLM of the version in pyproject.toml, and what DeepSpeed needs to compile its operators.
FROM docker.io/vllm/vllm-openai:v0.32.0

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ procps tini wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/offbeat
COPY . .
RUN pip install --no-cache-dir uv==0.13.9 \
    && uv pip install --system --no-cache --compile-bytecode '.[gpu,data,s3]' \
    && install -m 755 deploy/nodes/run_once.sh /usr/local/bin/offbeat-run-once \
    && useradd --create-home --uid 1000 --non-unique offbeat \
    && install -d -o 1000 -m 700 /mesh \
    && install -d -o 1000 /tmp/ray

USER 1000
WORKDIR /mesh
ENV RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
ENTRYPOINT ["tini", "-g", "--"]
CMD ["offbeat", "--help"]
