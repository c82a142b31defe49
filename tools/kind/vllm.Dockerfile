# What a stock image of vLLM is to a pod, but for vLLM itself, which pods mount at /opt/vllm: it has 6 GB. BASE has the Python
# that vLLM was installed for. The model is the small one that ships with prfaas.
ARG BASE
FROM ${BASE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends libnuma1 >/dev/null \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
RUN echo "import site, sys; site.addsitedir('/opt/vllm/lib/python3.%d/site-packages' % sys.version_info[1])" \
      >/usr/lib/python3/dist-packages/vllm.pth \
 && printf '#!/usr/bin/python3\nfrom vllm.entrypoints.cli.main import main\nif __name__ == "__main__":\n    main()\n' >/usr/local/bin/vllm \
 && chmod 755 /usr/local/bin/vllm
COPY worker/prfaas_worker/assets/qwen3-next-tiny /models/qwen3-next-tiny
# vLLM noted there what it learned of the model's class when it ran on this machine: else it imports itself once more to learn it.
# Without a compiler, what vLLM would compile (log probabilities of tokens) has to run as it is.
ENV VLLM_TARGET_DEVICE=cpu VLLM_CACHE_ROOT=/opt/vllm/cache TORCHDYNAMO_DISABLE=1
CMD ["vllm", "--help"]
