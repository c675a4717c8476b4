"""Where `serve` takes its options from, and how it reports that it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.command import Run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `serve` or `boot` passes on; nothing is served."""
    seen: dict[str, Any] = {}

    def until_stopped(*words: Any, **more: Any) -> int:
        seen.update(vars(words[-1]), **more)
        return 0

    monkeypatch.setattr("deploykit.serving.serve.serve_until_stopped", until_stopped)
    monkeypatch.setattr("deploykit.deploying.boot.boot_until_stopped", until_stopped)
    return seen


def config(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text)
    return path


def test_a_flag_comes_before_a_variable_and_that_before_the_file(
    run: Run, served: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, 'http_port = 1\nmax-batch = 1\nqueue = 1\ngrpc_port = "none"\n')
    monkeypatch.setenv("DEPLOYKIT_HTTP_PORT", "2")
    monkeypatch.setenv("DEPLOYKIT_MAX_BATCH", "2")
    monkeypatch.setenv("DEPLOYKIT_TRUST", "1")
    assert run("serve", "m.onnx", "--config", path, "--http-port", 3).code == 0
    names = ("http_port", "max_batch", "queue", "timeout_ms", "grpc_port", "trust")
    assert [served[name] for name in names] == [3, 2, 1, 30_000, None, True]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("MAXBATCH", "did you mean DEPLOYKIT_MAX_BATCH?"), ("COLOUR", "see --help")],
)
@pytest.mark.parametrize("command", [("serve", "m.onnx"), ("boot", "b", "--cache", "c")])
@pytest.mark.usefixtures("served")
def test_an_unknown_variable_gets_one_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, hint: str, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv(f"DEPLOYKIT_{name}", "9")
    ran = run(*command)
    assert ran.code == 0
    (line,) = [line for line in ran.err.splitlines() if f"DEPLOYKIT_{name} " in line]
    assert line.startswith("warning: the variable")
    assert hint in line


def test_models_of_a_file_or_a_variable_give_way_to_arguments_and_options(
    run: Run, served: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, 'engine = ["a=a.onnx", "b.onnx"]\nbuckets = "T=1,2"\n')
    run("serve", "--config", path)
    assert served["models"] == ["a=a.onnx", "b.onnx"]
    assert served["buckets"] == {"T": (1, 2)}
    monkeypatch.setenv("DEPLOYKIT_ENGINE", "c.onnx d=d.onnx")
    run("serve", "--config", path)
    assert served["models"] == ["c.onnx", "d=d.onnx"]
    run("serve", "--config", path, "e.onnx", "--engine", "f=f.onnx")
    assert served["models"] == ["f=f.onnx", "e.onnx"]


SERVE = ("serve", "m.onnx", "--config")
BOOT = ("boot", "bundle", "--cache", "cache", "--serve-config")  # which serves its bundle's model
WRONG = {
    "http_prot = 1": (SERVE, "unknown key 'http_prot'\nhint: did you mean http_port?"),
    'config = "other.toml"': (SERVE, "unknown key 'config'"),
    'http_port = "x"': (SERVE, "valid int"),
    "reload = 2": (SERVE, "valid bool"),
    'log = "xml"': (SERVE, "'--log': 'xml' is not one of 'text', 'json'"),
    "http_port =": (SERVE, "is not valid TOML"),
    "": (SERVE, "the file is empty"),
    'engine = "m.onnx"': (BOOT, "--engine: `boot` serves the model of the bundle alone"),
    "trust = true": (BOOT, "--trust: `boot` serves the model of the bundle alone"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_exit_2_and_names_file_and_key(
    run: Run, served: dict[str, Any], tmp_path: Path, text: str
) -> None:
    command, says = WRONG[text]
    ran = run(*command, config(tmp_path, text))
    assert ran.code == 2
    assert ("serve.toml: " in ran.error()) is (command == SERVE)
    assert says in ran.err
    assert not served


def test_a_missing_file_and_a_wrong_variable_are_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("serve", "m.onnx", "--config", tmp_path / "missing.toml")
    assert (ran.code, "missing.toml" in ran.error()) == (2, True)
    monkeypatch.setenv("DEPLOYKIT_HTTP_PORT", "many")
    ran = run("serve", "m.onnx")
    assert (ran.code, "DEPLOYKIT_HTTP_PORT" in ran.error()) == (2, True)


@pytest.mark.parametrize("command", [("serve", "m.onnx"), ("health",)])
def test_the_address_of_a_kubernetes_service_is_not_taken_for_a_port(
    run: Run, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Kubernetes sets it in each pod next to a Service `deploykit-http`."""
    monkeypatch.setenv("DEPLOYKIT_HTTP_PORT", "tcp://10.96.0.7:8000")
    for name in ("HTTP_PORT_8000_TCP_ADDR", "HTTP_SERVICE_HOST", "SERVICE_HOST"):
        monkeypatch.setenv(f"DEPLOYKIT_{name}", "10.96.0.7")
    monkeypatch.setenv("DEPLOYKIT_PORT", "tcp://10.0.0.1:80")
    ran = run(*command)
    if command[0] == "health":
        assert "http://127.0.0.1:8000: no server answers" in ran.error()
        return
    assert (ran.code, served["http_port"]) == (0, 8000)
    assert ran.err.count("\n") == 1
    assert "DEPLOYKIT_HTTP_PORT=tcp://10.96.0.7:8000 is ignored: Kubernetes sets it" in ran.err


def test_boot_takes_the_options_of_serve_from_a_file_and_from_variables(
    run: Run, served: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, 'max_batch = 1\nqueue = 1\nhost = "::1"\nlog = "json"\n')
    monkeypatch.setenv("DEPLOYKIT_MAX_BATCH", "2")
    command = ("boot", "bundle", "--cache", "cache", "--serve-config", path)
    monkeypatch.setenv("DEPLOYKIT_HTTP_PORT", "3")
    assert run(*command).code == 0
    names = ("max_batch", "queue", "host", "http_port", "grpc_port", "log_format")
    assert [served[name] for name in names] == [2, 1, "::1", 3, 8001, "json"]
