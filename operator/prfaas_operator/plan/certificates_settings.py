"""Where certificates come from and how long things last, as the command line says it."""

from datetime import timedelta
from enum import StrEnum
from typing import Final, NamedTuple

from prfaas.errors import ConfigError
from prfaas_operator.plan.certificates import Terms

LIVES: Final = 3
"""Lives of a certificate that its authority's has at least: the time to replace it before certificates run out."""
DEFAULT_CERTIFICATE_HOURS: Final = 90 * 24.0
DEFAULT_AUTHORITY_HOURS: Final = 365 * 24.0
DEFAULT_SETTLE_SECONDS: Final = 180.0
"""A kubelet looks at a Secret about once a minute, and may look at a copy that is a minute old."""


class Mode(StrEnum):
    """Where certificates come from."""

    OPERATOR = "Operator"
    ISSUER = "Issuer"
    DISABLED = "Disabled"


class Issuer(NamedTuple):
    """An issuer of cert-manager, by reference."""

    name: str
    kind: str
    group: str


class Settings(NamedTuple):
    """What the operator was started with; `issuer` in mode Issuer alone."""

    mode: Mode
    terms: Terms
    issuer: Issuer | None = None


DISABLED: Final = Settings(Mode.DISABLED, Terms(timedelta(), timedelta(), timedelta()))


def settings_of(
    mode: Mode, issuer: str, certificate_hours: float, authority_hours: float, settle_seconds: float
) -> Settings:
    """Return settings from the command line; `issuer` is KIND.GROUP/NAME.

    Raises:
        ConfigError: they do not fit together.

    """
    if (mode is Mode.ISSUER) != bool(issuer):
        raise ConfigError("--certificate-issuer names the issuer of --certificates Issuer, and goes with that alone")
    if mode is Mode.OPERATOR and authority_hours < LIVES * certificate_hours:
        raise ConfigError(
            f"--authority-hours {authority_hours:g} is less than {LIVES} times --certificate-hours "
            f"{certificate_hours:g}: an authority could not be replaced before certificates of it run out"
        )
    life, authority_life = timedelta(hours=certificate_hours), timedelta(hours=authority_hours)
    terms = Terms(life, authority_life, timedelta(seconds=settle_seconds), by_issuer=bool(issuer))
    return Settings(mode, terms, _reference(issuer) if issuer else None)


def _reference(issuer: str) -> Issuer:
    resource, _, name = issuer.rpartition("/")
    kind, _, group = resource.partition(".")
    if not (name and kind and group):
        raise ConfigError(f"--certificate-issuer is {issuer!r}; want KIND.GROUP/NAME, as Issuer.cert-manager.io/prfaas")
    return Issuer(name, kind, group)
