"""Every engine has an adapter, which queries only its own pools and only what it publishes."""

import re
from pathlib import Path

import pytest

from prfaas.engines import ENGINES
from prfaas.wire.routes import Cluster, Instance
from prfaas_scheduler import engines
from prfaas_scheduler.engines import queries_of
from prfaas_scheduler.queries import long_query, sample_time_query, short_query

QUERIES = [
    ('sum(rate(node_bytes_total{device="wan0"}[10s]))', ['node_bytes_total{device="wan0"}']),
    ("sum(rate(bytes_total[5s])) * 8 / 1e6", ["bytes_total"]),
    ('max(a{x="}"}) + sum(b{y=~"{[}"})', ['a{x="}"}', 'b{y=~"{[}"}']),
    ("sum(rate(a{x='1'}[5s])) or sum(rate(a{x='1'}[9s]))", ["a{x='1'}"]),
]


def of_engine(table, engine):
    instances = tuple(
        Instance(name=f"{pool}-0", pool=pool, cluster=cluster, role=role, url="http://192.0.2.1:8000", engine=engine)
        for pool, cluster, role in (("offload", "eu", "prefill"), ("decode", "hub", "decode"))
    )
    return table(instances=instances)


def test_every_engine_has_an_adapter():
    assert {one.metrics for one in ENGINES.values()} == engines.QUERIES.keys()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_answers_facts_that_have_a_name(engine):
    known = set((engines.__doc__ or "").replace(",", " ").split())
    queries = queries_of(engine)
    assert queries.short.keys() | queries.long.keys() | queries.lacks.keys() <= known
    assert "instances_sampled_at_seconds" in queries.short, "otherwise a dead link looks like a quiet one"


@pytest.mark.parametrize("engine", ENGINES)
def test_queries_have_no_placeholder_left(table, engine):
    for query in (short_query(of_engine(table, engine), 5), long_query(of_engine(table, engine), 300)):
        assert "$" not in query
        assert query.count("(") == query.count(")")


def test_queries_each_engine_for_its_own_pools(table):
    mixed = (*of_engine(table, "vllm-nixl").instances[:1], *of_engine(table, "prfaas").instances[1:])
    query = short_query(table(instances=mixed), 5)
    assert 'vllm:num_requests_running{cluster=~"hub|eu", pool=~"offload"}' in query
    assert 'prfaas_prefills_waiting{cluster=~"hub|eu", pool=~"decode"}' in query


def test_queries_decoding_of_each_engines_decode_pools_and_of_no_instance_that_prefills(table):
    """Instances that two pools share carry one pool's name."""
    mixed = (*of_engine(table, "vllm-nixl").instances[:1], *of_engine(table, "prfaas").instances[1:])
    query = long_query(table(instances=mixed), 300)
    assert 'prfaas_decode_steps_total{cluster=~"hub", pool=~"decode", role!="prefill"}[300s]' in query
    assert 'vllm:generation_tokens_total{cluster=~"hub", pool=~"", role!="prefill"}[300s]' in query


def test_the_namespace_is_matched_where_all_are_known(table):
    cluster = Cluster(name="eu", capacity_mbps=1, utilisation_query="vector(1)", namespace="team-a")
    assert "namespace" not in short_query(table(), 5), "a table of an older operator does not say the member's"
    assert 'namespace=~"prfaas|team\\\\-a|", cluster=~"hub|eu"' in short_query(table(clusters=(cluster,)), 5)
    assert 'namespace=~"prfaas|team\\\\-a|"' in long_query(table(clusters=(cluster,)), 5)


def test_a_table_without_instances_queries_only_links(table):
    assert long_query(table(instances=()), 300) == ""
    assert "pool" not in short_query(table(instances=()), 5)


@pytest.mark.parametrize(("query", "selectors"), QUERIES)
def test_the_time_of_a_users_query_is_that_of_the_samples_that_it_reads(query, selectors):
    assert sample_time_query(query) == f"max({' or '.join(f'timestamp({one})' for one in selectors)})"


def test_a_query_that_names_no_sample_has_no_time():
    assert sample_time_query("vector(1)") == ""


def test_every_name_in_the_queries_of_vllm_is_in_the_metrics_of_a_running_server():
    text = (Path(__file__).parent / "vllm-0.32.0.metrics.txt").read_text()
    queries = [*engines.VLLM.short.values(), *engines.VLLM.long.values()]
    names = {name for query in queries for name in re.findall(r"vllm:\w+", query)}
    assert len(names) > 10
    assert {name for name in names if not re.search(rf'^{name}{{engine="0"', text, re.MULTILINE)} == set()
