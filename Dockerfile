# Any image with Python >= 3.11; for GPUs take one with a CUDA 13 runtime, or let pip bring the CUDA libraries (the default does).
ARG BASE=python:3.12-slim
FROM ${BASE}

WORKDIR /opt/vitpt
COPY pyproject.toml README.md LICENSE ./
COPY vitpt vitpt
COPY recipes recipes
COPY shards shards
RUN pip install --no-cache-dir .

WORKDIR /work
# exec form: SIGTERM reaches the trainer, which then saves and leaves with status 75
ENTRYPOINT ["vitpt"]
CMD ["--help"]
