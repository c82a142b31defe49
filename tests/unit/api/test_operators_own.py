"""Proves that what a pool's owner may not set is exactly what the operator sets itself."""

from prfaas.api import PrefillPool
from prfaas.api.template import EnvVar, PodTemplate
from prfaas.engines import ENGINES
from prfaas_operator.render import common, pool_deployment
from prfaas_operator.render.launch import StartTerms

OFFLOAD = PrefillPool.model_validate(
    {
        "metadata": {"name": "offload", "namespace": "prfaas", "uid": "1"},
        "spec": {"model": {"name": "m", "source": "builtin:m"}},
    }
)


def test_flags_refused_in_args_are_those_of_the_rendered_worker():
    deployment = pool_deployment.deployment(OFFLOAD, None, StartTerms(tls=True))
    (worker,) = deployment["spec"]["template"]["spec"]["containers"]
    flags = {argument.removeprefix("--") for argument in worker["args"] if argument.startswith("--")}
    assert set(ENGINES["prfaas"].flags) == flags


def test_variables_refused_in_env_are_those_of_the_rendered_worker():
    refused = next(rule.rule for rule in EnvVar.rules if rule.field == "name")
    assert refused == f"!(self.name in {[name for name, _ in common.POD_FIELDS]})"


def test_prefixes_refused_in_labels_cover_those_of_the_rendered_pods():
    labels = pool_deployment.deployment(OFFLOAD, None)["spec"]["template"]["metadata"]["labels"]
    refused = next(rule.rule for rule in PodTemplate.rules if rule.field == "labels")
    for label in labels:
        assert f"startsWith('{label.partition('/')[0]}/')" in refused
