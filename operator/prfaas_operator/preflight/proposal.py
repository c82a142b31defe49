"""Writes what comes next: a file like examples/two-clusters.yaml with what was found, and what the planner expects.

The planner knows instances by built-in profiles. It plans the largest model for which both clusters have one, on the
devices that a node has and in the most frequent kind. The load is an assumption, and is said with the plan. Where no
profile fits, there is no figure. Pure.
"""

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import yaml

from prfaas.capacity import planfile
from prfaas.capacity.builtin import Builtin, all_builtins
from prfaas.capacity.comparison import Comparison, compare
from prfaas.errors import ConfigError
from prfaas.names import API_VERSION
from prfaas_operator.preflight.facts import Accelerators, PathFacts
from prfaas_operator.preflight.findings import stale_seconds

BATCHES: Final = (32, 8)
"""Requests that an instance of the hub decodes together, the first that fits."""
WORKLOAD: Final[dict[str, Any]] = {
    "lognormal": {"mu": 9.0, "sigma": 1.2, "minTokens": 128, "maxTokens": 131_072},
    "outputTokens": 600,
}
"""As examples/qwen3.5-397b.yaml has it."""
LINK: Final = "member-to-hub"
LOAD: Final = "prompts of 14,600 tokens in the mean and answers of 600, an assumption"
SMALL: Final = {"name": "kimi-linear-tiny", "source": "builtin:kimi-linear-tiny"}
VLLM: Final = {"type": "vllm", "image": "vllm/vllm-openai:v0.32.0"}
NAMESPACE: Final = "prfaas"
PROMETHEUS: Final = "http://prometheus.monitoring.svc:9090"
START_TOKENS, MIN_TOKENS, MAX_TOKENS = 1024, 512, 32_768
"""Of the threshold, as in examples/two-clusters.yaml."""


Devices = Sequence[Accelerators] | None


class Target(NamedTuple):
    """The names that a person gave, and what was measured between them."""

    hub_context: str
    member_context: str
    server: str | None
    prometheus: str | None
    path: PathFacts

    @property
    def cluster_name(self) -> str:
        """The member's name: a label's value, and not that of the hub."""
        name = re.sub(r"[^a-z0-9]+", "-", self.member_context.lower().rpartition("/")[2]).strip("-")[-50:].strip("-")
        return name if name not in {"", "hub"} else "member"


class Expectation(NamedTuple):
    """What the planner was told, and what it answered."""

    hub: Builtin
    member: Builtin
    document: dict[str, Any]
    result: Comparison

    @property
    def sentence(self) -> str:
        there, here = self.document["offloadPools"][0]["instances"], self.document["hub"][0]["instances"]
        pools = f"{here} x {self.hub.name} in the hub, {there} x {self.member.name} in the member"
        batch = f"batches of {self.document['hub'][0]['maxBatch']}"
        return f"{self.hub.model} in {self.hub.precision}, {pools}; {batch}; {LOAD}. {self.result.verdict.sentence}"


def expect(hub: Devices, member: Devices, path: PathFacts) -> Expectation | str:
    """Return the plan of the largest model that both clusters serve, or what is missing for one."""
    near, far = (found[0] if found else None for found in (hub, member))
    if near is None or far is None:
        return f"the {'member' if near else 'hub'} has no accelerators, or they are not known"
    for where, one in (("hub", near), ("member", far)):
        if one.kind is None:
            what = one.product or f"{one.resource} without a name"
            return f"the {where} has {what}, which the planner does not know; measure your model (`prfaas profile`)"
    refused = f"no model has a built-in profile on both {near.kind} and {far.kind}; measure yours (`prfaas profile`)"
    for (ours, theirs), batch in itertools.product(_pairs(near, far), BATCHES):
        here = {"name": "hub", "instances": _instances(near, ours), "profile": {"builtin": ours.name}}
        there = {"name": "offload", "instances": _instances(far, theirs), "profile": {"builtin": theirs.name}}
        document = {
            "workload": WORKLOAD,
            "links": [{"name": LINK, "capacityMbps": round(path.best_mbps, 1)}],
            "offloadPools": [{**there, "link": LINK}],
            "hub": [{**here, "maxBatch": batch}],
        }
        try:
            return Expectation(ours, theirs, document, compare(planfile.read(document, lambda _: [])))
        except ConfigError as error:
            refused = str(error)
    return refused


def _pairs(hub: Accelerators, member: Accelerators) -> list[tuple[Builtin, Builtin]]:
    """Return the profiles of the same weights for both clusters, the largest first; the hub must know its steps."""
    known = all_builtins()
    ours = [one for one in known if _instances(hub, one) and one.decode_steps]
    theirs = [one for one in known if _instances(member, one)]
    pairs = [(one, two) for one in ours for two in theirs if (one.model, one.precision) == (two.model, two.precision)]
    return sorted(pairs, key=lambda pair: -pair[0].weights_bytes)


def _instances(found: Accelerators, builtin: Builtin) -> int:
    return sum(count // builtin.devices for count in found.nodes) if found.kind == builtin.device else 0


def manifests(target: Target, planned: Expectation | None) -> str:
    """Return the file for `kubectl apply`."""
    figures = planned.result.prfaas_pd if planned else None
    n_p, n_d = (int(figures.n_p), int(figures.n_d)) if figures else (1, 1)
    there = planned.document["offloadPools"][0]["instances"] if planned else 1
    near, far = _instance(planned.hub if planned else None), _instance(planned.member if planned else None)
    prefill = [_resource("PrefillPool", "offload", {"clusterName": target.cluster_name, **far, "replicas": there})]
    if n_p:
        prefill.append(_resource("PrefillPool", "local", {**near, "replicas": n_p}))
    most = WORKLOAD["lognormal"]["maxTokens"] if planned else MAX_TOKENS
    from_tokens = (planned.result.verdict.from_tokens or most) if planned else START_TOKENS
    tokens = min(most, max(MIN_TOKENS, from_tokens))
    stale = stale_seconds(target.path.prometheus)
    policy = {
        "model": near["model"]["name"],
        "decodePool": "decode",
        "prefillPools": [one["metadata"]["name"] for one in prefill],
        "threshold": {"mode": "Auto", "tokens": tokens, "min": MIN_TOKENS, "max": most},
        "metrics": {
            "prometheusUrl": target.prometheus or PROMETHEUS,
            **({"staleAfterSeconds": stale} if stale else {}),
        },
        "onOffloadFailure": "PrefillLocally",
    }
    decode = _resource("DecodePool", "decode", {**near, "replicas": n_d})
    objects = [*prefill, decode, _resource("PrfaaSPolicy", "two-clusters", policy)]
    return _head(target, planned) + yaml.safe_dump_all(objects, sort_keys=False)


def join_command(target: Target) -> str:
    """Return the command that registers the member with what was measured."""
    millis = round(1000 * (target.path.round_trip_seconds or 0))
    server = f" --server {shlex.quote(target.server)}" if target.server else ""
    return (
        f"prfaas cluster join {target.cluster_name} --hub-context {shlex.quote(target.hub_context)} --context "
        f"{shlex.quote(target.member_context)}{server} --link-mbps {max(1, int(target.path.best_mbps))} "
        f"--round-trip-millis {millis}"
    )


def _head(target: Target, planned: Expectation | None) -> str:
    lines = [
        "Two clusters as `prfaas preflight` found them. Prompts above the threshold are prefilled in the member.",
        "Install both charts (docs/use/install.md), then register the member:",
        f"  {join_command(target)}",
    ]
    if planned:
        where = f"at {_source(planned.hub)}, by template.volumes and volumeMounts"
        lines += [f"Put the model's directory, in {planned.hub.precision}, {where}."]
    else:
        lines += ["The model is a small one for CPUs: put in yours, and its engine."]
    if target.prometheus is None:
        lines += ["Put in the address of your Prometheus."]
    return "".join(f"# {line}\n" for line in lines)


def _instance(builtin: Builtin | None) -> dict[str, Any]:
    """Return the part of a pool's spec that says what an instance is."""
    if builtin is None:
        return {"model": dict(SMALL)}
    return {
        "model": {"name": builtin.model, "source": _source(builtin)},
        "engine": dict(VLLM),
        "parallelism": {"tensor": builtin.devices},
        "profile": {"builtin": builtin.name},
        "template": {"resources": {"limits": {"nvidia.com/gpu": builtin.devices}}},
    }


def _source(builtin: Builtin) -> str:
    return f"/models/{builtin.model}"


def _resource(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": dict(spec)}
