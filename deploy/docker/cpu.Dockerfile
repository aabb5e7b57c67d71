# Offbeat for machines without a GPU, from the root of the repository:
#
#   docker build -f deploy/docker/cpu.Dockerfile -t offbeat:cpu .
FROM docker.io/library/python:3.11-slim-bookworm

# A C++ compiler for DeepSpeed's operators, which are compiled at their first use; wget and procps for probes and `ray stop`.
# Debian keeps the newest version of a package alone, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ procps tini wget \
    && rm -rf /var/lib/apt/lists/*

# In a folder with pyproject.toml, whose overrides keep torchvision out, uv installs what `make setup` does.
WORKDIR /opt/offbeat
COPY . .
RUN pip install --no-cache-dir uv==0.13.9 \
    && uv pip install --system --no-cache --compile-bytecode --torch-backend cpu '.[cpu,data,s3]' \
    && install -m 755 deploy/nodes/run_once.sh /usr/local/bin/offbeat-run-once \
    && useradd --create-home --uid 1000 offbeat \
    && install -d -o offbeat -g offbeat -m 700 /mesh \
    && install -d -o offbeat -g offbeat /tmp/ray

USER 1000
# Folder of runs, logs and models; every container of a mesh mounts the same one.
WORKDIR /mesh
ENV RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
ENTRYPOINT ["tini", "-g", "--"]
CMD ["offbeat", "--help"]
