# The image below prfaas's own and below vLLM's on kind, where images can be pulled; base-image.sh makes the same from Debian
# packages. SUITE is the release of Debian.
ARG SUITE
FROM debian:${SUITE}-slim
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends ca-certificates python3 python3-venv >/dev/null \
 && rm -rf /var/lib/apt/lists/* \
 && ln -s /usr/bin/python3 /usr/local/bin/python
CMD ["python3"]
