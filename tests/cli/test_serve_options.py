"""Where `serve` takes its options from, and how it reports that it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploykit.serving.options import ServeOptions
from tests.support.cli.command import Run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command passes on; nothing is served."""
    seen: dict[str, Any] = {}

    def serve_until_stopped(options: ServeOptions, **_more: Any) -> int:
        seen.update(vars(options))
        return 0

    monkeypatch.setattr("deploykit.serving.serve.serve_until_stopped", serve_until_stopped)
    return seen


def config(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text)
    return path


def test_models_are_arguments_or_options(run: Run, served: dict[str, Any]) -> None:
    run("serve", "a.onnx", "b=b.onnx")
    assert served["models"] == ["a.onnx", "b=b.onnx"]
    run("serve", "--engine", "a.onnx", "c=c.onnx", "--engine", "b=b.onnx")
    assert served["models"] == ["a.onnx", "b=b.onnx", "c=c.onnx"]


def test_a_flag_comes_before_a_variable_and_that_before_the_file(
    run: Run, served: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, 'http_port = 1\nmax-batch = 1\nqueue = 1\ngrpc_port = "none"\n')
    monkeypatch.setenv("DEPLOYKIT_HTTP_PORT", "2")
    monkeypatch.setenv("DEPLOYKIT_MAX_BATCH", "2")
    assert run("serve", "m.onnx", "--config", path, "--http-port", 3).code == 0
    options = [served[name] for name in ("http_port", "max_batch", "queue", "timeout_ms")]
    assert options == [3, 2, 1, 30_000]
    assert served["grpc_port"] is None


def test_a_flag_may_be_turned_off_by_a_variable(
    run: Run, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEPLOYKIT_GRPC_PORT", "none")
    monkeypatch.setenv("DEPLOYKIT_TRUST", "1")
    assert run("serve", "m.onnx").code == 0
    assert (served["grpc_port"], served["trust"]) == (None, True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("MAXBATCH", "did you mean DEPLOYKIT_MAX_BATCH?"), ("HTPP_PORT", "DEPLOYKIT_HTTP_PORT"),
     ("PORT", "did you mean"), ("COLOUR", "see --help"), ("MAX_BACTH", "DEPLOYKIT_MAX_BATCH")],
)  # fmt: skip
@pytest.mark.parametrize("command", [("serve", "m.onnx"), ("boot", "b", "--cache", "c")])
@pytest.mark.usefixtures("served", "booted")
def test_an_unknown_variable_gets_one_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, hint: str, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv(f"DEPLOYKIT_{name}", "9")
    ran = run(*command)
    assert ran.code == 0
    (line,) = [line for line in ran.err.splitlines() if f"DEPLOYKIT_{name} " in line]
    assert line.startswith("warning: the variable")
    assert hint in line


@pytest.mark.usefixtures("served")
def test_the_variables_of_a_kubernetes_service_are_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PORT": "tcp://10.0.0.1:80", "SERVICE_HOST": "10.0.0.1", "PORT_80_TCP_PROTO": "tcp",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"DEPLOYKIT_{name}", value)
    assert "warning" not in run("serve", "m.onnx").err


def test_models_of_a_file_or_a_variable_give_way_to_arguments(
    run: Run, served: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, 'engine = ["a=a.onnx", "b.onnx"]\nbuckets = "T=1,2"\n')
    run("serve", "--config", path)
    assert served["models"] == ["a=a.onnx", "b.onnx"]
    assert served["buckets"] == {"T": (1, 2)}
    monkeypatch.setenv("DEPLOYKIT_ENGINE", "c.onnx d=d.onnx")
    run("serve", "--config", path)
    assert served["models"] == ["c.onnx", "d=d.onnx"]
    run("serve", "--config", path, "e.onnx")
    assert served["models"] == ["e.onnx"]


WRONG = {
    "http_prot = 1": "unknown key 'http_prot'",
    'config = "other.toml"': "unknown key 'config'",
    'http_port = "x"': "valid int",
    "http_port = true": "valid int",
    "reload = 2": "valid bool",
    'log = "xml"': "'--log': 'xml' is not one of 'text', 'json'",
    "http_port =": "is not valid TOML",
    "a = " + "[" * 5000: "is not valid TOML",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30])
def test_a_wrong_file_is_exit_2_and_names_file_and_key(
    run: Run, served: dict[str, Any], tmp_path: Path, text: str
) -> None:
    ran = run("serve", "m.onnx", "--config", config(tmp_path, text))
    assert ran.code == 2
    assert "serve.toml: " in ran.error()
    assert WRONG[text] in ran.error()
    assert not served


def test_a_misspelt_key_gets_the_right_one_as_a_hint(run: Run, tmp_path: Path) -> None:
    ran = run("serve", "m.onnx", "--config", config(tmp_path, "http_prot = 1"))
    assert "did you mean http_port?" in ran.err


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_exit_2(run: Run, tmp_path: Path, name: str) -> None:
    ran = run("serve", "m.onnx", "--config", tmp_path / name)
    assert ran.code == 2
    assert str(tmp_path) in ran.error()


def test_a_wrong_variable_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOYKIT_HTTP_PORT", "many")
    ran = run("serve", "m.onnx")
    assert ran.code == 2
    assert "DEPLOYKIT_HTTP_PORT" in ran.error()


@pytest.mark.parametrize("command", [("serve", "m.onnx"), ("health",)])
def test_the_address_of_a_kubernetes_service_is_not_taken_for_a_port(
    run: Run, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Kubernetes sets it in each pod next to a Service `deploykit-http`."""
    monkeypatch.setenv("DEPLOYKIT_HTTP_PORT", "tcp://10.96.0.7:8000")
    monkeypatch.setenv("DEPLOYKIT_HTTP_PORT_8000_TCP_ADDR", "10.96.0.7")
    monkeypatch.setenv("DEPLOYKIT_HTTP_SERVICE_HOST", "10.96.0.7")
    ran = run(*command)
    if command[0] == "health":
        assert "http://127.0.0.1:8000: no server answers" in ran.error()
        return
    assert (ran.code, served["http_port"]) == (0, 8000)
    assert ran.err.count("\n") == 1
    assert "DEPLOYKIT_HTTP_PORT=tcp://10.96.0.7:8000 is ignored: Kubernetes sets it" in ran.err


@pytest.fixture
def booted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `boot` passes on; nothing is served."""
    seen: dict[str, Any] = {}

    def boot_until_stopped(_bundle: Path, _cache: Path, options: ServeOptions, **more: Any) -> int:
        seen.update(vars(options), **more)
        return 0

    monkeypatch.setattr("deploykit.deploying.boot.boot_until_stopped", boot_until_stopped)
    return seen


def test_boot_takes_the_options_of_serve_from_a_file_and_from_variables(
    run: Run, booted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, 'max_batch = 1\nqueue = 1\nhost = "::1"\nlog = "json"\n')
    monkeypatch.setenv("DEPLOYKIT_MAX_BATCH", "2")
    command = ("boot", "bundle", "--cache", "cache", "--serve-config", path)
    assert run(*command, "--http-port", 3).code == 0
    names = ("max_batch", "queue", "host", "http_port", "grpc_port", "log_format")
    assert [booted[name] for name in names] == [2, 1, "::1", 3, 8001, "json"]


@pytest.mark.parametrize(
    "text", ['engine = "m.onnx"', 'shadow = "m.onnx"', "trust = true", "x = 1"]
)
def test_boot_refuses_other_models_than_the_bundles(
    run: Run, booted: dict[str, Any], tmp_path: Path, text: str
) -> None:
    path = config(tmp_path, text)
    ran = run("boot", "bundle", "--cache", "cache", "--serve-config", path)
    assert ran.code == 2
    assert text.partition(" ")[0] in ran.error()
    assert not booted
