"""Proves that the operator loads no second client of API servers, and that others may load it later."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.system


def test_the_operator_does_not_load_the_synchronous_client():
    absent = {"kubernetes", "requests", "oauthlib", "urllib3"}
    lean = f"import sys, prfaas_operator.serve; assert not {absent} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", f"{lean}; import kubernetes.client; kubernetes.client.V1Pod"], check=True)


def test_kopf_loads_it_by_itself():
    """A control: without it the test above could pass because kopf no longer looks for the client."""
    subprocess.run([sys.executable, "-c", "import sys, kopf; assert 'requests' in sys.modules"], check=True)
