"""`prfaas serve` beside a vLLM of the user's: long prompts are prefilled by another vLLM, short ones where they are
decoded, and all are answered alike.
"""

import json
import re
import sys
from pathlib import Path

from prfaas.ports import free_ports
from prfaas.processes import ChildProcess, tail

from ..waiting import eventually
from .connected import CONNECTOR, prompt_of
from .gateways import offloaded
from .servers import StartServer, transferred_tokens


def test_long_prompts_are_bought_from_another_vllm(start_server: StartServer, tmp_path: Path):
    ports = free_ports(2)
    servers = [start_server("--kv-transfer-config", json.dumps(CONNECTOR | {"kv_port": port})) for port in ports]
    service, ours = (server.wait_ready() for server in servers)
    flags = ["--decode-url", ours.url, "--prefill-service", service.url, "--service-data-port", str(ports[0])]
    flags += ["--model-name", "tiny", "--threshold-tokens", "50", "--port", "0"]
    child = ChildProcess("the command", [sys.executable, "-m", "prfaas.cli.main", "serve", *flags], tmp_path / "log")
    try:

        def address() -> str:
            child.check_running()
            log = child.log.read_text()
            found = re.search(r"serving tiny at (http://\S+)/v1", log)
            return found[1] if found is not None and "is used for long prompts" in log else ""

        url = eventually(address, lambda: f"it serves; its log: {tail(child.log)}", poll=0.1)
        body = {"prompt": prompt_of(300), "max_tokens": 8, "temperature": 0}
        alone = service.post("/v1/completions", **body)
        assert offloaded(url, body)["choices"][0]["text"] == alone["choices"][0]["text"]
        assert transferred_tokens(ours) > 0, "its cache came"
    finally:
        child.stop(grace_seconds=5)
