"""Proves that the cache sizes of known models are those that others publish, and what docs/understand/capacity.md says
of them.
"""

import re
from pathlib import Path

import pytest
from tests.unit.capacity.systems import no_traces, paper_document

from prfaas.capacity import planfile
from prfaas.capacity.comparison import compare
from prfaas.capacity.models import MODEL_CACHES
from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.cli.plan import load
from prfaas.errors import ConfigError
from prfaas.wire.profile import Profile

ROOT = Path(__file__).parents[3]
LENGTHS = (1024, 8192, 32768, 131072)
# By kvcache-simulator 0.1.3 of KVCache.AI (PyPI): `calculate_cache_size` with linear attention's state, in bytes.
PUBLISHED = {
    "kimi-k3": (477_683_712, 675_864_576, 1_355_341_824, 4_073_250_816),
    "qwen3.5-397b": (223_518_720, 443_719_680, 1_198_694_400, 4_218_593_280),
    "qwen3.5-122b": (178_814_976, 354_975_744, 958_955_520, 3_374_874_624),
}
EXAMPLES = {"the paper's model": "paper", "Kimi K3": "kimi-k3", "Qwen3.5-397B": "qwen3.5-397b"}


@pytest.mark.parametrize("model", PUBLISHED)
def test_caches_are_as_large_as_their_makers_simulator_says(model):
    cache = MODEL_CACHES[model]
    assert tuple(cache.state_bytes + cache.token_bytes * length for length in LENGTHS) == PUBLISHED[model]


def test_other_sizes_are_those_of_the_public_configurations():
    k3, kimi = MODEL_CACHES["kimi-k3"], MODEL_CACHES["kimi-linear-48b"]
    assert (k3.token_bytes, round(k3.state_bytes / 1e6, 1)) == (27_648, 449.4)
    assert (kimi.token_bytes, round(kimi.state_bytes / 1e6, 1)) == (8_064, 43.4)
    assert MODEL_CACHES["qwen3-next-80b"].token_bytes == 12 * 2 * 2 * 256 * 2


def least_tokens(home: Profile, cache: Profile, link_mbps: float) -> int | None:
    """Return the shortest prompt whose cache crosses a link in the time that the hub needs to compute it."""
    lengths = range(1, 200_001)
    pays = (one for one in lengths if 8e-6 * cache_bytes(cache, one) / link_mbps <= prefill_seconds(home, one))
    return next(pays, None)


def test_the_page_says_from_which_length_on_a_cache_is_worth_its_way():
    page = (ROOT / "docs" / "understand" / "capacity.md").read_text()
    head, *rows = re.findall(r"^\| (?:the paper's model|Kimi K3|Qwen3\.5-397B|link) .*$", page, re.MULTILINE)
    rates = [1000 * int(rate) for rate in re.findall(r"(\d+) Gbit/s", head)]
    assert len(rows) == len(EXAMPLES)
    assert len(rates) >= 3
    for row in rows:
        name, state, token, *lengths = [cell.strip() for cell in row.strip("|").split("|")]
        system = load(ROOT / "examples" / f"{EXAMPLES[name]}.yaml").system
        home, cache = system.hub[0].profile, system.offload[0].profile
        assert state == f"{cache.state_bytes / 1e6:.1f} MB"
        assert token == f"{cache.token_bytes:,} bytes"
        found = [least_tokens(home, cache, rate) for rate in rates]
        assert lengths == ["never" if one is None else "all" if one == 1 else f"{one:,}" for one in found]


@pytest.mark.parametrize("name", ["kimi-k3", "qwen3.5-397b"])
def test_an_example_is_planned_and_offloading_pays_within_its_link(name):
    file = load(ROOT / "examples" / f"{name}.yaml")
    profile, cache = file.system.offload[0].profile, MODEL_CACHES[name]
    assert (profile.state_bytes, profile.token_bytes) == (cache.state_bytes, cache.token_bytes)
    result = compare(file)
    assert result.prfaas_pd.lambda_max > 1.1 * result.homogeneous.lambda_max
    assert result.prfaas_pd.egress_gbps <= file.system.links[0].capacity_mbps / 1000 + 1e-6


def test_a_file_names_a_model_in_place_of_its_cache_sizes():
    document = paper_document()
    points = [{name: one[name] for name in ("tokens", "seconds")} for one in document["profiles"]["h200"]["points"]]
    document["profiles"]["h200"] = {"model": "kimi-k3", "points": points}
    profile = planfile.read(document, no_traces).system.offload[0].profile
    assert profile.token_bytes == pytest.approx(27_648, abs=1)
    assert profile.state_bytes == pytest.approx(449_372_160, abs=1)
    for more, says in (
        ({"model": "kimi-k4"}, r"profiles\.h200\.model is 'kimi-k4'; there are: kimi-k3, "),
        ({"points": [{"tokens": 1, "seconds": 1, "cacheMib": 3}] * 2}, r"cacheMib is no field here"),
        ({"stateBytes": 3}, r"stateBytes is no field here"),
    ):
        with pytest.raises(ConfigError, match=says):
            planfile.read(document | {"profiles": {"h200": {"model": "kimi-k3", "points": points} | more}}, no_traces)
