"""A member gives a cache that it could have forged: it serves the request that it was made for, and then only requests
that allow that member.

The control is a request without places, as a gateway sends none that knows no such rule: the bytes serve it.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from prfaas.names import WORKER_DATA_PORT
from prfaas.wire import headers
from prfaas.wire.prefill import new_transfer
from prfaas_transfer.credentials import PeerCredentials

from .conftest import CALLERS, STEER, Answer, Installation, Targets, call

pytestmark = pytest.mark.system

GATEWAY = CALLERS["a gateway of the hub"]
# 512 tokens behind the first, so that the state that crosses is at a block's end.
PROMPT = {"model": "tiny", "prompt": ("You name your sources. " * 99)[:512], "max_tokens": 1}


def hand_off(targets: Targets, shown: PeerCredentials | None) -> Answer:
    """Have the member prefill the prompt for the hub."""
    transfer = new_transfer()
    place = {"host": targets.eu.worker.host, "port": WORKER_DATA_PORT, "cluster": "eu"}
    source = {STEER: {"prfaas": {"role": "source", **transfer}}}
    destination = {STEER: {"prfaas": {"role": "destination", **transfer, **place}}}
    with ThreadPoolExecutor(1) as pool:
        giving = pool.submit(call, targets.eu, shown, "POST", "/v1/completions", PROMPT | source)
        answer = call(targets.hub, shown, "POST", "/v1/completions", PROMPT | destination)
        assert giving.result().status == 200
    return answer


def test_a_members_bytes_serve_only_requests_that_allow_it(targets: Targets, installation: Installation):
    shown = installation.credentials(GATEWAY)
    assert int(hand_off(targets, shown).headers[headers.KV_BYTES]) > 0

    def cached(places: str | None) -> int:
        sent = {} if places is None else {headers.PLACES: places}
        found = call(targets.hub, shown, "POST", "/v1/completions", PROMPT, headers=sent)
        return int(found.headers[headers.CACHED_TOKENS])

    assert [cached(None), cached("us eu"), cached("us")] == [512, 512, 0]
    assert cached("") == 512, "the request before computed it here, which serves all"
