"""Proves that no pool reads what opens other clusters: kubeconfigs, the authority, other clusters' certificates."""

import pytest

from prfaas.api.template import PodTemplate
from prfaas_operator.errors import ForbiddenSecretError
from prfaas_operator.plan.member import check_secrets
from prfaas_operator.render import certificates, service_account

KUBECONFIGS = {"named-by-a-member"}
RESERVED = (
    certificates.AUTHORITY_SECRET,
    certificates.SECRET,
    certificates.issued_secret("eu"),
    service_account.secret_name("eu"),
    "named-by-a-member",
)


def mounting(name: str) -> PodTemplate:
    return PodTemplate.model_validate({"volumes": [{"name": "v", "secret": {"secretName": name}}]})


def reading(name: str) -> PodTemplate:
    source = {"secretKeyRef": {"name": name, "key": "k"}}
    return PodTemplate.model_validate({"env": [{"name": "E", "valueFrom": source}]})


@pytest.mark.parametrize("name", RESERVED)
@pytest.mark.parametrize(("use", "where"), [(mounting, r"template\.volumes\[v\]"), (reading, r"template\.env\[E\]")])
def test_a_template_that_would_read_it_is_refused_with_its_name_and_place(name, use, where):
    with pytest.raises(ForbiddenSecretError, match=f"Secret {name} .* remove it from {where}"):
        check_secrets(use(name), KUBECONFIGS)


@pytest.mark.parametrize("name", ["huggingface", "prfaas", "prfaas-cache", "prfaas-ca-2", "kubeconfig", "my-issued"])
def test_other_secrets_are_their_owners_to_read(name):
    for use in (mounting, reading):
        check_secrets(use(name), KUBECONFIGS)


def test_ignores_files_and_variables_from_elsewhere():
    template = PodTemplate.model_validate(
        {
            "volumes": [{"name": "v", "configMap": {"name": "prfaas-ca"}}, {"name": "w", "emptyDir": {}}],
            "env": [
                {"name": "A", "value": "prfaas-ca"},
                {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "x-kubeconfig", "key": "k"}}},
            ],
        }
    )
    check_secrets(template, KUBECONFIGS)
