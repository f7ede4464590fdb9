# One file for every image of this project; `make image` builds it with docker or buildah.
#
#   base   system, torch, libraries: layers in the order in which they change, the rarest first
#   train  the project on top; it starts without a network, and finds its rank and its lead by itself
#   serve  the same with the libraries of a server
#
# amd64 and arm64 alike. A build for GPUs differs in TORCH_BUILD only: its wheels bring CUDA, the host brings the driver.
ARG BASE=docker.io/library/debian:12-slim@sha256:7c7b2c966bc9ee8cedfeef67e0e279108992c77681fa595db4a9d65c06ccc587

FROM ${BASE} AS system
# torch.compile builds kernels with g++ and Python's headers, in training and in serving. Debian has one version of a
# package in a release, and the digest of BASE names the release.
# hadolint ignore=DL3008
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean \
    && apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv tini \
    && useradd --uid 10001 --no-log-init --create-home headway \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

FROM system AS torch
ARG TORCH=2.13.0
# cpu, or a build for GPUs: cu126, cu130.
ARG TORCH_BUILD=cpu
# Empty: pip's own configuration says where torch is.
ARG TORCH_INDEX=https://download.pytorch.org/whl
# pip's configuration and the certificates it trusts are secrets of the build, which no layer holds.
RUN --mount=type=cache,target=/root/.cache/pip,sharing=locked \
    --mount=type=secret,id=pip,target=/run/secrets/pip \
    --mount=type=secret,id=ca,target=/run/secrets/ca \
    PIP_CONFIG_FILE=/run/secrets/pip \
    pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}/${TORCH_BUILD}"} "torch==${TORCH}"

# What to install is worked out in a stage of its own: a change of pyproject.toml that adds no library rebuilds none.
FROM system AS wanted
WORKDIR /build
COPY docker/requirements.py pyproject.toml uv.loc[k] ./
ARG EXTRAS="parquet s3 zstd"
ARG SERVE="parquet s3 zstd serve"
# hadolint ignore=SC2086
RUN mkdir -p /wanted/base /wanted/serve \
    && python3 requirements.py ${EXTRAS} && mv requirements.txt constraints.txt /wanted/base \
    && python3 requirements.py ${SERVE} && mv requirements.txt constraints.txt /wanted/serve

FROM torch AS base
COPY --from=wanted /wanted/base /opt/headway/libraries
RUN --mount=type=cache,target=/root/.cache/pip,sharing=locked \
    --mount=type=secret,id=pip,target=/run/secrets/pip \
    --mount=type=secret,id=ca,target=/run/secrets/ca \
    PIP_CONFIG_FILE=/run/secrets/pip \
    pip install --requirement /opt/headway/libraries/requirements.txt \
    --constraint /opt/headway/libraries/constraints.txt

FROM system AS wheel
RUN --mount=type=cache,target=/root/.cache/pip,sharing=locked \
    --mount=type=secret,id=pip,target=/run/secrets/pip \
    --mount=type=secret,id=ca,target=/run/secrets/ca \
    PIP_CONFIG_FILE=/run/secrets/pip \
    pip install "hatchling>=1.24,<2"
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY src src
# Equal sources give an equal wheel, and an equal wheel rebuilds nothing.
RUN SOURCE_DATE_EPOCH=315532800 pip wheel --no-cache-dir --no-deps --no-build-isolation --no-index --wheel-dir /wheels .

FROM base AS train
COPY docker/health.py /opt/headway/health.py
COPY configs /app/configs
RUN mkdir -p /app/runs /app/data && chown -R 10001:10001 /app
COPY --from=wheel /wheels /opt/headway/wheels
RUN pip install --no-cache-dir --no-deps --no-index /opt/headway/wheels/*.whl
WORKDIR /app
USER 10001:10001
# A training asks no hub for anything; HF_HUB_OFFLINE=0 lets it fetch models.
ENV HF_HUB_OFFLINE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all
# Start period: a first step may have to prepare text and to compile.
HEALTHCHECK --interval=2m --timeout=30s --start-period=30m --retries=3 CMD ["python", "/opt/headway/health.py", "train"]
ENTRYPOINT ["tini", "--", "headway"]
CMD ["train", "configs/smoke.yaml"]
ARG REVISION=unknown
ARG VERSION=unknown
ARG TORCH_BUILD=cpu
LABEL org.opencontainers.image.title="headway-train" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    dev.headway.target="train" \
    dev.headway.torch-build="${TORCH_BUILD}"

FROM base AS serve
COPY --from=wanted /wanted/serve /opt/headway/libraries
RUN --mount=type=cache,target=/root/.cache/pip,sharing=locked \
    --mount=type=secret,id=pip,target=/run/secrets/pip \
    --mount=type=secret,id=ca,target=/run/secrets/ca \
    PIP_CONFIG_FILE=/run/secrets/pip \
    pip install --requirement /opt/headway/libraries/requirements.txt \
    --constraint /opt/headway/libraries/constraints.txt
COPY docker/health.py /opt/headway/health.py
COPY --from=wheel /wheels /opt/headway/wheels
RUN pip install --no-cache-dir --no-deps --no-index /opt/headway/wheels/*.whl
WORKDIR /app
USER 10001:10001
ENV HF_HUB_OFFLINE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=25s --start-period=2m --retries=3 CMD ["python", "/opt/headway/health.py", "serve"]
ENTRYPOINT ["tini", "--", "headway"]
# The exported model is mounted at /model.
CMD ["serve", "/model"]
ARG REVISION=unknown
ARG VERSION=unknown
ARG TORCH_BUILD=cpu
LABEL org.opencontainers.image.title="headway-serve" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    dev.headway.target="serve" \
    dev.headway.torch-build="${TORCH_BUILD}"
