"""`prfaas certs`: issues certificates for clusters without an operator or a certificate manager.

OpenSSL reads the files, a Kubernetes TLS Secret may hold them, and `prfaas-worker --tls-dir` uses them. Keys are never
printed, and only their owner can read them from the first byte on. Files are overwritten only with --force.
"""

import datetime
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from prfaas.console import TextOrJson, new_app
from prfaas.errors import ConfigError, IdentityError
from prfaas.names import AUTHORITY_KEY, TLS_CERT, TLS_KEY, TLS_TRUSTED
from prfaas.rights import BUYER
from prfaas.util import replace_file

app = new_app(
    help="Make certificates that name an instance's cluster. Example: prfaas certs init --out ca", no_args_is_help=True
)

Out = Annotated[Path, typer.Option("--out", help="Directory to write to; it is made if missing.")]
Ca = Annotated[Path, typer.Option("--ca", help="Directory with ca.crt and ca.key.")]
Hours = Annotated[int, typer.Option("--hours", min=1, max=87_600, help="How long the certificate is valid.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]


class CertificateSummary(msgspec.Struct, frozen=True):
    """The output of `show`. `problem` is empty when peers accept the certificate now."""

    cluster: str
    part: str
    domain: str
    not_before: datetime.datetime
    not_after: datetime.datetime
    renew_after: datetime.datetime
    chain_ok: bool
    problem: str


@app.command()
def init(
    out: Out,
    days: Annotated[int, typer.Option(min=1, max=36500, help="How long the authority is valid.")] = 3650,
    domain: Annotated[
        str,
        typer.Option(help="The installation's trust domain; random if not given. A successor needs the former one's."),
    ] = "",
    force: Force = False,
) -> None:
    """Make a certificate authority: ca.crt, and ca.key to keep secret. Example: prfaas certs init --out ca."""
    from prfaas import identity  # cryptography takes longer to load than all other commands

    validity = identity.valid_for(_now(), days)
    name = f"prfaas {validity.not_before:%F}-{secrets.token_hex(4)}"
    pair = identity.make_authority(name, validity, domain or identity.new_domain())
    write_files(out, {AUTHORITY_KEY: pair.key, TLS_TRUSTED: pair.certificate}, force)


@app.command()
def issue(
    ca: Ca,
    cluster: Annotated[str, typer.Option("--cluster", help="The cluster's name: its MemberCluster's, or hub.")],
    out: Out,
    part: Annotated[
        Literal["gateway", "worker"] | None, typer.Option(help="The part of the cluster; both if not given.")
    ] = None,
    hours: Hours = 24,
    force: Force = False,
) -> None:
    """Issue a cluster's certificate: tls.crt, tls.key and ca.crt, as `prfaas-worker --tls-dir` reads them.

    Example: prfaas certs issue --ca ca --cluster prefill-eu --out prefill-eu.
    """
    if cluster.startswith(BUYER):
        raise ConfigError(f"{cluster!r} cannot be a cluster's name; `prfaas certs buyer` issues a buyer's certificate")
    _issue(ca, cluster, part or "", hours, out, force)


@app.command()
def buyer(
    ca: Ca,
    name: Annotated[str, typer.Option("--name", help="The buyer's name, which no other buyer has.")],
    out: Out,
    hours: Hours = 24,
    force: Force = False,
) -> None:
    """Issue the certificate of a buyer, who may have prompts prefilled here and fetch their caches, and nothing else.

    Example: prfaas certs buyer --ca ca --name acme --out acme.
    """
    _issue(ca, BUYER + name, "", hours, out, force)


def _issue(ca: Path, name: str, part: str, hours: int, out: Path, force: bool) -> None:
    from prfaas import identity

    authority = identity.KeyPair(_read(ca / TLS_TRUSTED), _read(ca / AUTHORITY_KEY))
    pair = identity.issue(authority, name, identity.valid_for(_now(), hours / 24), part)
    trusted = identity.bundle(authority.certificate)
    write_files(out, {TLS_TRUSTED: trusted, TLS_KEY: pair.key, TLS_CERT: pair.certificate}, force)


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(help="Directory with tls.crt, tls.key and ca.crt.")],
    output: TextOrJson = "text",
) -> None:
    """Show a certificate's cluster and validity; exit code 1 if peers would refuse it.

    Example: prfaas certs show prefill-eu -o json.
    """
    shown = _inspect(*(_read(directory / name) for name in (TLS_CERT, TLS_KEY, TLS_TRUSTED)))
    if output == "json":
        typer.echo(msgspec.json.encode(shown))
    else:
        typer.echo(f"cluster    {shown.cluster or '-'}{f', {shown.part}' if shown.part else ''}")
        typer.echo(f"domain     {shown.domain or '-'}")
        typer.echo(f"valid      {shown.not_before:%F %R} to {shown.not_after:%F %R} UTC")
        typer.echo(f"renew      {shown.renew_after:%F %R} UTC")
        typer.echo(f"accepted   {shown.problem or 'yes'}")
    raise typer.Exit(0 if shown.chain_ok else 1)


def _inspect(certificate: bytes, key: bytes, trusted: bytes) -> CertificateSummary:
    """Return the facts of a certificate, also of one that peers refuse."""
    from prfaas import identity

    begin, end = identity.validity_of_pem(certificate)
    cluster, part, domain, problem = "", "", "", ""
    try:
        facts = identity.check(certificate, key, trusted, _now())
        (cluster, part), domain = facts.identity, facts.domain
    except (ConfigError, IdentityError) as error:
        problem = str(error)
    renew = identity.when_to_renew(begin, end)
    return CertificateSummary(cluster, part, domain, begin, end, renew, not problem, problem)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def write_files(directory: Path, files: dict[str, bytes], force: bool) -> None:
    """Write each file whole or not at all; only the owner can read keys."""
    check_directory(directory, files, force)
    try:
        for name, content in files.items():
            replace_file(directory / name, content, 0o600 if name.endswith(".key") else None)
            typer.echo(f"wrote {directory / name}")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from error


def check_directory(directory: Path, names: Iterable[str], force: bool) -> None:
    """Make a directory for files, before what they hold is made.

    Raises ConfigError: it has one of them and must not lose it, or takes no file.
    """
    present = [name for name in names if (directory / name).exists()]
    if present and not force:
        raise ConfigError(f"{directory} has {', '.join(present)} already; give --force to replace them")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from error


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
