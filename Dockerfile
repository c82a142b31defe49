# One image a deployable, all non-root and fit for a read-only root:
#     docker build --target operator -t prfaas/operator .
#     docker build --target gateway  -t prfaas/gateway  .     (router and scheduler)
#     docker build --target worker   -t prfaas/worker   .     (with torch's CUDA build: large)
# BASE is any Debian with python3, its venv module and CA certificates. Needs BuildKit, which builds only what a target
# is made of.
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements-uv.lock.txt ./
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install -q --require-hashes --no-deps -r requirements-uv.lock.txt
RUN python3 -m venv --without-pip /opt/venv
ENV PATH=/opt/uv/bin:$PATH VIRTUAL_ENV=/opt/venv UV_NO_CACHE=1 UV_SYSTEM_CERTS=1
# The lock's versions and hashes bind whatever of it an extra needs.
COPY requirements.lock.txt pyproject.toml README.md LICENSE ./
COPY core core
COPY operator operator
COPY gateway gateway
COPY scheduler scheduler
COPY worker worker
COPY sandbox sandbox

FROM build AS build-operator
RUN uv pip install -q --constraints requirements.lock.txt '.[operator]'

FROM build AS build-gateway
RUN uv pip install -q --constraints requirements.lock.txt '.[gateway,scheduler]'

FROM build AS build-worker
RUN uv pip install -q --constraints requirements.lock.txt '.[worker]'

FROM ${BASE} AS run
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532

FROM run AS operator
COPY --from=build-operator /opt/venv /opt/venv
CMD ["prfaas-operator", "--help"]

FROM run AS gateway
COPY --from=build-gateway /opt/venv /opt/venv
CMD ["prfaas-gateway", "--help"]

FROM run AS worker
COPY --from=build-worker /opt/venv /opt/venv
CMD ["prfaas-worker", "--help"]
