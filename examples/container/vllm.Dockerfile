# vLLM's image with pretuned and bundles of your own. The build fails if a bundle cannot be used.
# Build it in a folder that holds bundles/ (aot build --out bundles) and pretuned's wheel
# (pip wheel --no-deps -w FOLDER . in a clone):
#   docker build -f vllm.Dockerfile -t vllm-pretuned . && docker run --rm --gpus all vllm-pretuned --model Qwen/Qwen3-30B-A3B
ARG BASE=vllm/vllm-openai
FROM ${BASE}

COPY *.whl /tmp/
RUN python3 -m pip install --no-cache-dir /tmp/*.whl && rm /tmp/*.whl

# Owned by root, and nobody else can write it: the runtime loads code from no other place.
COPY --chown=0:0 --chmod=0755 bundles /opt/pretuned/bundles

# The check needs no GPU. `python3 -m pretuned.runtime --vllm`, on a machine with the GPU, says which models are covered.
ENV PRETUNED_BUNDLES=/opt/pretuned/bundles
RUN python3 -m pretuned.runtime
