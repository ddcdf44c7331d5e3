# One image for every command of Surefoot:
#   docker build -t surefoot .                                          a CPU
#   docker build -t surefoot:cuda --build-arg DEVICE=cuda .             NVIDIA GPUs
# Mirrors: --build-arg PIP_INDEX_URL=... TORCH_INDEX=...; an empty argument is as none.
# `python docker/rehearse.py FOLDER` runs the RUN steps without a container engine.
ARG DEVICE=cpu

FROM python:3.12-slim-bookworm AS wheel
ARG PIP_INDEX_URL
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY examples examples
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm AS cpu
ARG TORCH_INDEX
ENV TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

# PyTorch's wheels bring their own CUDA libraries; the base has the driver's side, and the compiler for torch.compile
FROM nvidia/cuda:12.8.1-base-ubuntu24.04 AS cuda
ARG TORCH_INDEX
ENV TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cu128}
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM ${DEVICE} AS surefoot
RUN python3 -m venv /opt/surefoot
ENV PATH=/opt/surefoot/bin:$PATH
COPY constraints.txt /wheels/constraints.txt
COPY --from=wheel /wheels /wheels
ARG PIP_INDEX_URL
ARG EXTRAS=board,serve,gguf,metrics,modelscope,tensorboard
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c /wheels/constraints.txt \
      "$(find /wheels -name '*.whl')${EXTRAS:+[$EXTRAS]}"
RUN useradd --create-home --uid 1000 surefoot \
 && install --directory --owner surefoot /cache /work /work/data /work/runs
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface MODELSCOPE_CACHE=/cache/modelscope
USER 1000
WORKDIR /work
VOLUME ["/cache", "/work/data", "/work/runs"]
EXPOSE 7860 8000
ENTRYPOINT ["surefoot"]
CMD ["--help"]
