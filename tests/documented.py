"""Ask a server for what its OpenAPI document promises, and for much that it does not: schemathesis, from outside."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "positive_data_acceptance",
    "unsupported_method",
    "allow_header_conformance",
)


def keeps_its_word(document: dict[str, Any], url: str, folder: Path, *, without: tuple[str, ...] = ()) -> None:
    """Fail with schemathesis's own report, which has a curl for each, where answers are not what the document says."""
    path = folder / "openapi.json"
    path.write_text(json.dumps(document))
    command = [
        *(Path(sys.executable).with_name("schemathesis"), "run", path, "--url", url),
        *("--checks", ",".join(check for check in CHECKS if check not in without)),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--seed", "1", "--no-color"),
        *("--request-timeout", "30", "--warnings", "off"),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
