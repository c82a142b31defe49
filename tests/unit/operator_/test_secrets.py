"""Proves that no pool reads what opens other clusters or gateways, and that prfaas uses no Secret not made for it."""

import pytest

from prfaas import names
from prfaas.api import MemberCluster
from prfaas.api.template import PodTemplate
from prfaas_operator.errors import ForbiddenSecretError, SecretNotFoundError
from prfaas_operator.plan.member import check_given, check_secrets
from prfaas_operator.reconcile.members import access_from
from prfaas_operator.render import certificates, service_account

RESERVED = (
    certificates.AUTHORITY_SECRET,
    certificates.SECRET,
    certificates.GATEWAY_SECRET,
    certificates.issued_secret("eu"),
    certificates.issued_secret("hub/gateway"),
    service_account.secret_name("eu"),
    "chat-api-keys",
)


def mounting(name: str) -> PodTemplate:
    return PodTemplate.model_validate({"volumes": [{"name": "v", "secret": {"secretName": name}}]})


def reading(name: str) -> PodTemplate:
    source = {"secretKeyRef": {"name": name, "key": "k"}}
    return PodTemplate.model_validate({"env": [{"name": "E", "valueFrom": source}]})


def pulling(name: str) -> PodTemplate:
    return PodTemplate.model_validate({"imagePullSecrets": [{"name": name}]})


def labelled(name: str, use: str = "", **data: str) -> dict:
    return {"metadata": {"name": name, "labels": {names.LABEL_SECRET: use} if use else {}}, "data": data}


@pytest.mark.parametrize("name", RESERVED)
@pytest.mark.parametrize(
    ("use", "where"),
    [(mounting, r"template\.volumes\[v\]"), (reading, r"template\.env\[E\]"), (pulling, r"template\.imagePullSecrets")],
)
def test_a_template_that_would_read_it_is_refused_with_its_name_and_place(name, use, where):
    with pytest.raises(ForbiddenSecretError, match=f"Secret {name} .* remove it from {where}"):
        check_secrets(use(name))


@pytest.mark.parametrize("name", ["huggingface", "prfaas", "prfaas-cache", "prfaas-ca-2", "kubeconfig", "my-issued"])
def test_other_secrets_are_their_owners_to_read(name):
    for use in (mounting, reading, pulling):
        check_secrets(use(name))


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
    check_secrets(template)


def test_a_secret_is_used_for_what_its_label_says_and_for_nothing_else():
    check_given(labelled("chat-api-keys", names.API_KEYS_SECRET), names.API_KEYS_SECRET)
    for other in ("", names.KUBECONFIG_SECRET):
        with pytest.raises(ForbiddenSecretError, match=r"label secret chat-api-keys prfaas\.io/secret=api-keys"):
            check_given(labelled("chat-api-keys", other), names.API_KEYS_SECRET)


def test_join_labels_the_secret_that_it_writes():
    check_given(service_account.secret("eu", "{}"), names.KUBECONFIG_SECRET)


@pytest.mark.parametrize("use", ["", names.KUBECONFIG_SECRET])
def test_no_message_about_a_secret_names_its_keys(make, use):
    member: MemberCluster = make.member()
    with pytest.raises((ForbiddenSecretError, SecretNotFoundError)) as refused:
        access_from(member, labelled("eu-kubeconfig", use, token="x", users="y"))
    assert "token" not in str(refused.value)
    assert "users" not in str(refused.value)
