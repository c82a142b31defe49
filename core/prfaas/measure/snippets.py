"""Writes a measurement as the sections that `prfaas plan` and a pool's spec read."""

import re
from typing import Any

import yaml

from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.measure.fit import Measurement, shown
from prfaas.util import MIB


def as_yaml(found: Measurement) -> str:
    """Return two documents: sections of a plan's file, and the part of a pool's spec. Their points are the curve's."""
    steps = ", ".join(f"{one.batch}: {1000 * one.seconds:.4g}" for one in found.decode_steps)
    lines = [f"# {found.model} at {found.source}.", f"# Size of the caches: {found.cache_source}."]
    if steps:
        lines.append(f"# stepMillis by batch, at {found.decode_context_tokens:,} tokens: {steps}.")
    lines += [f"# Note: {note}." for note in found.notes]
    lines.append("# A plan checks memory if you add gpu, gpus and weightsGb to the profile.")
    lines += ["# Sections of a file for `prfaas plan`.", _yaml(plan_sections(found)) + "---"]
    return "\n".join(
        [*lines, "# For the spec of a PrefillPool or DecodePool.", _yaml({"profile": pool_profile(found)})]
    )


def plan_sections(found: Measurement) -> dict[str, Any]:
    """Return `profiles` for a plan's file, and a pool of its `hub` if the steps of larger batches are known."""
    name = profile_name(found.model)
    points = [
        {
            "tokens": tokens,
            "seconds": float(f"{prefill_seconds(found.profile, tokens):.6g}"),
            "cacheMib": round(cache_bytes(found.profile, tokens) / MIB, 9),
        }
        for tokens in shown(found.lengths)
    ]
    sections: dict[str, Any] = {"profiles": {name: {"points": points}}}
    if found.decode_steps and found.decode_steps[-1].batch > 1:
        last = found.decode_steps[-1]
        pool = {"name": name, "profile": name, "instances": 2, "maxBatch": last.batch}
        sections["hub"] = [pool | {"stepMillis": float(f"{1000 * last.seconds:.4g}")}]
    return sections


def pool_profile(found: Measurement) -> dict[str, Any]:
    """Return `spec.profile` of a pool."""
    points = [
        {"tokens": tokens, "prefillMillis": max(1, round(1000 * prefill_seconds(found.profile, tokens)))}
        for tokens in shown(found.lengths)
    ]
    return {"points": points, "tokenBytes": found.profile.token_bytes, "stateBytes": found.profile.state_bytes}


def profile_name(model: str) -> str:
    """Return a name for the profile of a model, as Kubernetes allows it."""
    return re.sub(r"[^a-z0-9.]+", "-", model.rpartition("/")[2].lower()).strip("-.") or "measured"


def _yaml(document: object) -> str:
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120)
