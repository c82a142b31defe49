"""`prfaas profile measure`: the profile of a running server, or of recorded results, for plans and pools.

It reads what the server says, sends prompts for some minutes (`prfaas.measure` decides which), and prints the profile
as a table and as the YAML that a plan's file and a pool's spec take. Where the times cannot be believed it prints none.
"""

import os
import random
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from prfaas.cli.measured_server import KEY_VARIABLE, HttpServer
from prfaas.console import TableOrJson
from prfaas.errors import ConfigError, PeerError
from prfaas.measure.answers import (
    CacheBytes,
    cache_bytes_by_name,
    cache_bytes_given,
    read_cache_bytes,
    unknown_cache_bytes,
)
from prfaas.measure.bench_file import BenchFile, measured, read_bench_file
from prfaas.measure.fit import Measurement
from prfaas.measure.session import Session, reach_of
from prfaas.measure.snippets import as_yaml
from prfaas.util import MIB, replace_file


def measure(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    url: Annotated[str | None, typer.Option(help="The server: vLLM, SGLang or our worker.", show_default=False)] = None,
    from_bench: Annotated[
        list[Path] | None,
        typer.Option(help="A result of `vllm bench serve` with details, in place of a server; repeat it for several."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Take the size of a known model's caches: qwen3.5-397b.", show_default=False)
    ] = None,
    cache_metrics: Annotated[
        str | None, typer.Option(help="Take it from the metrics of our connector here.", show_default=False)
    ] = None,
    token_bytes: Annotated[
        int | None, typer.Option(min=0, max=1 << 26, help="Or give it: bytes for each token.", show_default=False)
    ] = None,
    state_bytes: Annotated[
        int | None, typer.Option(min=0, max=1 << 40, help="With it: bytes of the states.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; the model's context if not given.", show_default=False)
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="Authority of the server's certificate.", show_default=False)] = None,
    tls_dir: Annotated[
        Path | None, typer.Option(help="Directory with a certificate that the server asks for.", show_default=False)
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Also write YAML or JSON here.", show_default=False)] = None,
    output: TableOrJson = "table",
) -> None:
    """Measure an idle server, or read recorded results. Example: prfaas profile measure --url http://10.0.0.5:8000.

    The profile is printed as YAML for a plan's file and for a pool's spec. A key stands in PRFAAS_API_KEY.
    """
    if (url is None) == (not from_bench):
        raise ConfigError("give either --url with a server, or --from-bench with a result of `vllm bench serve`")
    if save is not None and (save.is_dir() or not save.parent.is_dir()):
        raise ConfigError(f"--save {save}: name a file in a folder that exists")
    cache = cache_bytes_given(model, state_bytes, token_bytes)
    if cache is not None and cache_metrics is not None:
        raise ConfigError("--cache-metrics gives the size of the caches: leave --model and --token-bytes out")
    if cache_metrics is not None:
        cache = _published(cache_metrics, ca)
    found = _measure(url, ca, tls_dir, cache, max_tokens) if url is not None else _read(from_bench or [], cache)
    document = (
        msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if output == "json" else as_yaml(found)
    )
    if output == "table":
        console = Console(width=120, highlight=False, markup=False, emoji=False)
        console.print(_lengths(found))
        console.print(_steps(found))
    typer.echo(document, nl=False)
    if save is not None:
        _write(save, document)


def _write(path: Path, document: str) -> None:
    try:
        replace_file(path, document.encode())
    except OSError as error:
        raise ConfigError(f"--save {path} cannot be written: {error.strerror}") from error


def _measure(
    url: str, ca: Path | None, tls_dir: Path | None, cache: CacheBytes | None, max_tokens: int | None
) -> Measurement:
    with HttpServer(url, ca, os.environ.get(KEY_VARIABLE) or None, tls_dir=tls_dir) as server:
        card = server.card()
        cache = cache or _own_cache(server) or cache_bytes_by_name(card.id, card.root)
        if cache is None:
            raise unknown_cache_bytes(card.id)
        reach = reach_of(card, max_tokens)
        source = f"{server.url} ({server.label(card) or 'a server without a name'}), {time.strftime('%Y-%m-%d')}"
        _say(f"{card.id} at {source}: prompts of up to {reach.max_tokens:,} tokens; cache sizes from {cache.source}")
        session = Session(server, reach, random.Random(), _say)  # noqa: S311  # prompts are no secrets
        return session.measure(card, source, cache)


def _own_cache(server: HttpServer) -> CacheBytes | None:
    try:
        return read_cache_bytes(server.get("/metrics").decode(errors="replace"), server.url)
    except (PeerError, ConfigError):
        return None


def _published(url: str, ca: Path | None) -> CacheBytes:
    metrics = HttpServer(url.removesuffix("/metrics"), ca, flag="--cache-metrics").get("/metrics")
    cache = read_cache_bytes(metrics.decode(errors="replace"), url)
    if cache is None:
        raise ConfigError(f"--cache-metrics {url} shows no prfaas_profile_cache_bytes; give our connector's metrics")
    return cache


def _read(paths: list[Path], cache: CacheBytes | None) -> Measurement:
    files: list[BenchFile] = []
    for path in paths:
        try:
            files.append(read_bench_file(path.read_bytes(), str(path)))
        except OSError as error:
            raise ConfigError(f"--from-bench {path} cannot be read: {error.strerror}") from error
    cache = cache or cache_bytes_by_name(files[0].model_id)
    if cache is None:
        raise unknown_cache_bytes(files[0].model_id)
    return measured(files, ", ".join(path.name for path in paths), cache)


def _say(words: str) -> None:
    typer.echo(words, err=True)


def _lengths(found: Measurement) -> Table:
    table = _table(
        "Time to the first token of lone prompts", "tokens", "repeats", "median, s", "quickest, s", "slowest, s"
    )
    for title in ("curve, s", "off by", "cache, MiB"):
        table.add_column(title, justify="right")
    for one in found.lengths:
        size = (found.profile.state_bytes + found.profile.token_bytes * one.tokens) / MIB
        times = (
            f"{value:.4g}" for value in (one.seconds, one.quickest_seconds, one.slowest_seconds, one.fitted_seconds)
        )
        off = f"{one.fitted_seconds / one.seconds - 1:+.1%}"
        table.add_row(f"{one.tokens:,}", str(one.repeats), *times, off, f"{size:,.1f}")
    return table


def _steps(found: Measurement) -> Table:
    table = _table(f"Decode steps at {found.decode_context_tokens:,} tokens", "streams", "step, ms", "tokens/s")
    for one in found.decode_steps:
        table.add_row(str(one.batch), f"{1000 * one.seconds:.4g}", f"{one.batch / one.seconds:,.0f}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table
