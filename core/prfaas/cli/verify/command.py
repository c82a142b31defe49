"""`prfaas verify`: whether two engines hand requests over without changing an answer, found out over HTTP."""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
import typer

from prfaas.cli.contract.calls import CheckedEngine
from prfaas.cli.contract.checks import EnginePair
from prfaas.cli.measured_server import KEY_VARIABLE
from prfaas.cli.verify.kit import Kit
from prfaas.cli.verify.prompts import Prompts
from prfaas.cli.verify.record import EngineSaid, Record, VerifiedStep, page_of, verdict_of
from prfaas.cli.verify.run import fit, measure_pace, run_steps
from prfaas.cli.verify.ways import GatewayWay, MoverWay, Way, answers_alone, find_way
from prfaas.console import TextOrJson, echo_json
from prfaas.credentials import utc_now
from prfaas.errors import ConfigError, PeerError
from prfaas.names import WORKER_DATA_PORT

_BLOCK_TOKENS: Final = 64
"""Our worker's, and that of an engine which does not say it."""
_FIRST_TOKENS: Final = 200
_MARKS: Final = {"holds": "ok  ", "fails": "FAIL", "proves little": "?   ", "left out": "-   "}
_ADDRESS: Final = re.compile(r"https?://[^\s;,()]+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")


def verify(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    prefill: Annotated[str, typer.Option(help="The engine that prefills.")],
    decode: Annotated[str, typer.Option(help="The engine that decodes.")],
    gateway: Annotated[
        str | None, typer.Option(help="A gateway before them, which hands over every prompt.", show_default=False)
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="An engine that answers alone; the one that decodes if not given.", show_default=False),
    ] = None,
    data_port: Annotated[int, typer.Option(min=1, max=65_535, help="The source's port for caches.")] = WORKER_DATA_PORT,
    data_host: Annotated[str, typer.Option(help="The source's host for caches; that of its URL if not given.")] = "",
    ca: Annotated[Path | None, typer.Option(help="Authority of the certificates.", show_default=False)] = None,
    tls_dir: Annotated[
        Path | None, typer.Option(help="Directory with a cluster's certificate.", show_default=False)
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.5, help="What is not done by then is left out.")] = 20.0,
    most_tokens: Annotated[int, typer.Option(min=512, help="The longest prompt.")] = 16_384,
    device: Annotated[str, typer.Option(help="What the engines run on, for the record.")] = "",
    link: Annotated[str, typer.Option(help="What is between them, for the record.")] = "",
    record: Annotated[Path | None, typer.Option(help="Write the record as JSON.", show_default=False)] = None,
    html: Annotated[Path | None, typer.Option(help="Write the record as a page.", show_default=False)] = None,
    output: TextOrJson = "text",
) -> None:
    """Prove that two engines hand requests over without changing an answer.

    Example: prfaas verify --prefill http://10.0.0.5:8000 --decode http://10.0.0.6:8000 --html verify.html

    Both serve the same model: our worker, vLLM with our connector, NixlConnector or MooncakeConnector, or SGLang. Use
    idle engines. The exit code is 0 if all is proven, 1 if not. A key stands in PRFAAS_API_KEY.
    """
    began = time.monotonic()
    for path in filter(None, (record, html)):
        _write(path, "")  # before the run: one that cannot be written is worth none
    if record is not None and record == html:
        raise ConfigError("give --record and --html different files")
    say = partial(typer.echo, err=output == "json")
    urls = {"prefill": prefill, "decode": decode, "reference": reference, "gateway": gateway}
    urls = {role: url for role, url in urls.items() if url is not None}
    if len({url.rstrip("/") for url in urls.values()}) < len(urls):
        raise ConfigError(f"give {' and '.join(f'--{role}' for role in urls)} different URLs")
    if tls_dir is not None and not all(url.startswith("https://") for url in urls.values()):
        raise ConfigError("--tls-dir is for engines whose URLs begin with https://")
    key = os.environ.get(KEY_VARIABLE) or None
    opened = partial(CheckedEngine, ca=ca, key=key, tls_dir=tls_dir)
    engines = {role: opened(url, flag=f"--{role}") for role, url in urls.items()}
    say("looking for the way by which they hand over")
    kit = make_kit(engines, EnginePair(engines["prefill"], engines["decode"], data_port, data_host=data_host))
    kit.tls_dir = tls_dir if prefill.startswith("https") else None
    kit.most_tokens = min(most_tokens, kit.reference.context_tokens // 2, kit.way.decode.context_tokens // 2)
    said = [EngineSaid(role, one.label(), one.model) for role, one in engines.items()]  # type: ignore[arg-type]
    say(f"{' and '.join(f'{one.role}: {one.label}' for one in said)}; by {kit.way.name}")
    pace = measure_pace(kit)
    steps = fit(kit, pace, minutes * 60)
    say(f"{len(steps)} steps, prompts of up to {kit.most_tokens:,} tokens, in about {_clock(pace.of(steps))}")

    def tell(result: VerifiedStep, left_seconds: float) -> None:
        say(f"{_MARKS[result.outcome]}  {result.claim}: {result.seen}  [{_clock(left_seconds)} left]")

    results: list[VerifiedStep] = []
    try:
        run_steps(kit, steps, pace, began + minutes * 60, tell, results)
    finally:  # what is interrupted is recorded, too
        rest = [VerifiedStep(one.claim, "left out", "interrupted", 0.0, is_due=True) for one in steps[len(results) :]]
        results = [*results, *rest]
        found = Record(
            prfaas=version("prfaas"),
            day=f"{utc_now():%Y-%m-%d}",
            way=kit.way.name,
            engines=said,
            device=device,
            link=link,
            verdict=verdict_of(results),
            seconds=round(time.monotonic() - began, 1),
            figures=kit.figures,
            steps=[msgspec.structs.replace(one, seen=_without_addresses(one.seen, engines, key)) for one in results],
        )
        say(f"{found.verdict}, after {_clock(found.seconds)}")
        try:
            _write(record, msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
        finally:  # one may be on a full disk, and the other not
            _write(html, page_of(found))
    if output == "json":
        echo_json(found)
    raise typer.Exit(0 if found.verdict == "proven" else 1)


def make_kit(engines: Mapping[str, CheckedEngine], pair: EnginePair) -> Kit:
    """Return the kit for these engines. Raises PeerError if no cache crosses between them, ConfigError if nothing
    answers alone."""
    models = {one.model for role, one in engines.items() if role != "gateway"}
    if len(models) > 1:
        raise ConfigError(f"the engines serve different models: {', '.join(sorted(models))}")
    reference = engines.get("reference") or engines["decode"]
    if not answers_alone(pair.source) and "reference" not in engines:
        raise ConfigError("SGLang's decode instance computes no prompts: give --reference with one that answers alone")
    prompts = Prompts(reference)
    gateway = engines.get("gateway")
    way: Way
    direct: Way | None = None
    if gateway is None:
        way = direct = find_way(pair, prompts.draw(_FIRST_TOKENS))
    else:
        way = GatewayWay(gateway, pair.source, pair.destination)
        with suppress(PeerError):
            direct = find_way(pair, prompts.draw(_FIRST_TOKENS))
    return Kit(
        way=way,
        reference=reference,
        prompts=prompts,
        block_tokens=min(pair.destination.block_tokens() or _BLOCK_TOKENS, reference.context_tokens // 16),
        most_tokens=reference.context_tokens // 2,
        direct=direct if isinstance(direct, MoverWay) else None,
        prefill_answers=answers_alone(pair.source),
        labels={one.url: one.label() for one in engines.values()},
    )


def _without_addresses(text: str, engines: Mapping[str, CheckedEngine], key: str | None) -> str:
    for role, engine in engines.items():
        text = text.replace(engine.url, role).replace(urlsplit(engine.url).netloc, role)
    return _ADDRESS.sub("an address", text.replace(key, "the key") if key else text)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _write(path: Path | None, content: str) -> None:
    if path is None:
        return
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
