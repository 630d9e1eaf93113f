# natten_jax in an image, for a machine with NVIDIA's driver and container toolkit:
#   docker build --tag natten_jax . && docker run --rm --gpus all natten_jax
# CUDA=0 and EXTRAS=flax leave the kernels for GPUs out. CUDA=12 needs another image to build in, with a toolkit.
FROM python:3.12-slim-bookworm AS build
ARG CUDA=13
ARG ARCHITECTURES=80;90a
# Debian keeps no older versions of a package: naming one would break the image with its next update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /sources
COPY . .
RUN NATTEN_JAX_CUDA="$CUDA" NATTEN_JAX_CUDA_ARCHS="$ARCHITECTURES" \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
ARG EXTRAS=cuda13,flax
COPY --from=build /wheels /wheels
# The wheel says which versions it takes.
# hadolint ignore=DL3013
RUN wheel=$(echo /wheels/*.whl) \
    && pip install --no-cache-dir "${wheel}[${EXTRAS}]" \
    && useradd --create-home --uid 1000 natten
USER 1000
WORKDIR /home/natten
CMD ["python", "-m", "natten_jax.doctor"]
