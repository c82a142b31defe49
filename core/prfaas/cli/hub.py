"""How commands are told where the hub is: the same three options everywhere."""

from pathlib import Path
from typing import Annotated

import typer

HubContext = Annotated[str | None, typer.Option(help="Kubeconfig context of the hub; the current one if not given.")]
HubKubeconfig = Annotated[Path | None, typer.Option(help="Kubeconfig file of the hub; the usual one if not given.")]
HubNamespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the hub where prfaas is installed.")]
