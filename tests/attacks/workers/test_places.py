"""A member gives a cache that it could have forged: it serves the request that it was made for, and then only requests
that allow that member. One that says nothing, as from a gateway that knows no such rule, allows none.

A request that allows the member shows that the bytes are there. The control is a worker that looks at no places: there
they serve every request.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prfaas.names import WORKER_DATA_PORT
from prfaas.wire import headers
from prfaas.wire.prefill import new_transfer
from prfaas_transfer.credentials import PeerCredentials

from .conftest import CALLERS, STEER, Installation, Target, Targets, call

pytestmark = pytest.mark.system

GATEWAY = CALLERS["a gateway of the hub"]


def prompt_about(what: str) -> dict[str, Any]:
    """Return a prompt of 512 tokens behind the first, so that the state that crosses is at a block's end."""
    return {"model": "tiny", "prompt": (f"{what}: you name your sources. " * 99)[:512], "max_tokens": 1}


def hand_off(giver: Target, taker: Target, shown: PeerCredentials | None, prompt: dict[str, Any]) -> None:
    """Have one worker prefill the prompt for another one."""
    transfer = new_transfer()
    place = {"host": giver.worker.host, "port": WORKER_DATA_PORT, "cluster": giver.cluster}
    source = {STEER: {"prfaas": {"role": "source", **transfer}}}
    destination = {STEER: {"prfaas": {"role": "destination", **transfer, **place}}}
    with ThreadPoolExecutor(1) as pool:
        giving = pool.submit(call, giver, shown, "POST", "/v1/completions", prompt | source)
        answer = call(taker, shown, "POST", "/v1/completions", prompt | destination)
        assert giving.result().status == 200
    assert int(answer.headers[headers.KV_BYTES]) > 0


def cached(target: Target, shown: PeerCredentials | None, prompt: dict[str, Any], places: str | None) -> int:
    """Return how many tokens of a prompt are taken from the cache, if a request allows these places."""
    sent = {} if places is None else {headers.PLACES: places}
    found = call(target, shown, "POST", "/v1/completions", prompt, headers=sent)
    return int(found.headers[headers.CACHED_TOKENS])


@pytest.mark.parametrize(("places", "served"), [("us eu", 512), ("us", 0), ("", 0), ("* us", 0), (None, 0)])
def test_a_members_bytes_serve_only_requests_that_allow_it(
    targets: Targets, installation: Installation, places: str | None, served: int
):
    shown, prompt = installation.credentials(GATEWAY), prompt_about(str(places))
    hand_off(targets.eu, targets.hub, shown, prompt)
    assert cached(targets.hub, shown, prompt, places) == served
    assert served or cached(targets.hub, shown, prompt, "") == 512, "the request before computed it here, for all"


def test_control_where_nobody_looks_at_places_they_serve_a_request_that_forbids_it(
    targets: Targets, installation: Installation
):
    shown, prompt = installation.credentials(GATEWAY), prompt_about("the control")
    hand_off(targets.undefended, targets.credulous, shown, prompt)
    assert cached(targets.credulous, shown, prompt, "us") == 512
