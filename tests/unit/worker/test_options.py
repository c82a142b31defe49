"""The flags of prfaas-worker: a bad one ends the process with code 2 and a sentence that names it and the fix."""

import pytest

from prfaas_worker.options import Options, parse

NEEDED = ["--model-source", "builtin:kimi-linear-tiny", "--model-name", "tiny"]


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_flags_of_the_operator_are_read():
    flags = [
        "--host",
        "10.1.2.3",
        "--api-port",
        "8000",
        "--data-port",
        "8001",
        "--admin-port",
        "8003",
        "--instance",
        "pod-0",
        "--cluster",
        "eu",
    ]
    flags += ["--pool", "offload", "--role", "prefill", "--drain-seconds", "7", "--threads", "2", "--cache-mib", "64"]
    flags += ["--max-context", "4096", "--max-running", "5", "--dtype", "float32"]
    assert parse([*NEEDED, *flags]) == Options(
        model_source="builtin:kimi-linear-tiny",
        model_name="tiny",
        host="10.1.2.3",
        api_port=8000,
        data_port=8001,
        admin_port=8003,
        instance="pod-0",
        cluster="eu",
        pool="offload",
        role="prefill",
        drain_seconds=7,
        threads=2,
        max_context_tokens=4096,
        max_running=5,
        dtype="float32",
        cache_mib=64,
    )


def test_the_default_listens_only_on_loopback():
    assert parse(NEEDED).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--api-port", "0"], "'--api-port': '0' is not a whole number from 1 to 65535"),
        (["--api-port", "9000", "--data-port", "9000"], "give two different ports"),
        (["--data-port", "8002"], "--data-port and --admin-port are both 8002"),
        (["--host", "localhost"], "'--host': 'localhost' is not an IP address"),
        (["--dtype", "float16"], "'--dtype': 'float16' is not one of 'auto', 'float32', 'bfloat16'"),
        (["--role", "router"], "'--role': 'router' is not one of 'prefill', 'decode', 'mixed'"),
        (["--max-running", "0"], "'--max-running': '0' is not a whole number from 1"),
        (["--drain-seconds", "1.5"], "'--drain-seconds': '1.5' is not a whole number"),
        (["--speed", "fast"], "No such option: --speed"),
    ],
)
def test_a_bad_flag_is_named_with_its_value(capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str):
    assert sentence in refusal(capsys, *NEEDED, *flags)


def test_a_missing_model_is_named(capsys: pytest.CaptureFixture[str]):
    assert "Missing option '--model-source'" in refusal(capsys, "--model-name", "tiny")
    assert "Missing option '--model-name'" in refusal(capsys, "--model-source", "builtin:kimi-linear-tiny")


def test_help_shows_an_example_and_ends_well(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    assert "prfaas-worker --model-source builtin:kimi-linear-tiny" in capsys.readouterr().out
