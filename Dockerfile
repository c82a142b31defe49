# One image a deployable, all non-root and fit for a read-only root:
#     docker build --target operator -t prfaas/operator .
#     docker build --target gateway  -t prfaas/gateway  .     (gateway and scheduler)
#     docker build --target worker   -t prfaas/worker   .     (with torch's CUDA build: large; no compiler, so without the extra `cuda`)
#     docker build --target vllm-connector -t prfaas/vllm-connector .    (a folder that pools of vLLM copy into vLLM's own image)
# BASE is any Debian with python3, its venv module and CA certificates. TORCH=debian takes the distribution's torch, for
# CPUs alone and a quarter of the size, where BASE's python3 is Debian's too (trixie). Needs BuildKit, which builds only
# what a target is made of. Dependencies come before sources, which change more often.
ARG BASE=python:3.13-slim
ARG TORCH=pypi

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements-uv.lock.txt ./
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install -q --require-hashes --no-deps -r requirements-uv.lock.txt
RUN python3 -m venv --without-pip /opt/venv
ENV PATH=/opt/uv/bin:$PATH VIRTUAL_ENV=/opt/venv UV_NO_CACHE=1 UV_SYSTEM_CERTS=1
# A container's root is read-only: what is not compiled here is compiled at every start.
ENV UV_COMPILE_BYTECODE=1
COPY requirements.lock.txt pyproject.toml ./

FROM build AS wheel
COPY README.md LICENSE requirements-build.lock.txt ./
COPY core core
COPY operator operator
COPY gateway gateway
COPY scheduler scheduler
COPY transfer transfer
COPY worker worker
COPY connectors connectors
RUN uv build -q --wheel --build-constraints requirements-build.lock.txt --require-hashes --out-dir /dist

# The lock's versions and hashes bind whatever of it an extra needs.
FROM build AS build-operator
# Of the package kubernetes we use two modules (prfaas.kube.package); its API classes take 100 MB.
RUN uv pip install -q --constraints requirements.lock.txt -r pyproject.toml --extra operator --extra otel \
 && find /opt/venv -path '*/kubernetes/*' -type d \( -name api -o -name models \) -prune -exec rm -r {} +
RUN --mount=from=wheel,source=/dist,target=/dist uv pip install -q --no-deps /dist/*.whl

FROM build AS build-gateway
RUN uv pip install -q --constraints requirements.lock.txt -r pyproject.toml --extra gateway --extra scheduler --extra otel \
 && find /opt/venv -path '*/kubernetes/*' -type d \( -name api -o -name models \) -prune -exec rm -r {} +
RUN --mount=from=wheel,source=/dist,target=/dist uv pip install -q --no-deps /dist/*.whl

FROM build AS dependencies-worker-pypi
RUN uv pip install -q --constraints requirements.lock.txt -r pyproject.toml --extra worker --extra otel

FROM build AS dependencies-worker-debian
RUN echo "torch; sys_platform == 'none'" >/tmp/without && sed -i 's/^\(include-system-site-packages =\).*/\1 true/' /opt/venv/pyvenv.cfg \
 && uv pip install -q --constraints requirements.lock.txt --overrides /tmp/without -r pyproject.toml --extra worker --extra otel

FROM dependencies-worker-${TORCH} AS build-worker
RUN --mount=from=wheel,source=/dist,target=/dist uv pip install -q --no-deps /dist/*.whl

# Wheels for one processor, every Python that vLLM's images may have, and their C library or a later one. Compiled files
# have their Python's tag in their names and all else is equal, so that one folder serves all.
FROM build AS build-vllm-connector
RUN for python in 3.11 3.12 3.13; do \
      uv pip install -q --constraints requirements.lock.txt --only-binary :all: --python-version $python \
        --python-platform $(uname -m)-manylinux_2_28 --target /tmp/$python \
        msgspec xxhash zstandard cryptography \
   && mkdir -p /prfaas-vllm && cp -r /tmp/$python/. /prfaas-vllm || exit 1; done
RUN --mount=from=wheel,source=/dist,target=/dist uv pip install -q --target /prfaas-vllm --no-deps /dist/*.whl

FROM ${BASE} AS run
# No account has this number, or any other that a cluster may choose, and some libraries ask for a name.
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 USER=prfaas
USER 65532:65532
LABEL org.opencontainers.image.licenses=Apache-2.0

FROM run AS operator
LABEL org.opencontainers.image.title="prfaas operator"
COPY --from=build-operator /opt/venv /opt/venv
CMD ["prfaas-operator", "--help"]

FROM run AS gateway
LABEL org.opencontainers.image.title="prfaas gateway and scheduler"
COPY --from=build-gateway /opt/venv /opt/venv
CMD ["prfaas-gateway", "--help"]

FROM run AS vllm-connector
LABEL org.opencontainers.image.title="prfaas connector for vLLM"
COPY --from=build-vllm-connector /prfaas-vllm /prfaas-vllm
CMD ["ls", "/prfaas-vllm"]

FROM run AS run-worker-pypi

FROM run AS run-worker-debian
USER 0:0
# Without OpenBLAS, matrix products run on the reference BLAS, 50 times slower.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-torch libopenblas0-openmp >/dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
USER 65532:65532

FROM run-worker-${TORCH} AS worker
LABEL org.opencontainers.image.title="prfaas worker"
COPY --from=build-worker /opt/venv /opt/venv
CMD ["prfaas-worker", "--help"]
