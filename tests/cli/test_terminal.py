"""What a person sees on a terminal, and what a script reads from a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from deploykit.cli import output
from deploykit.cli.tables import ms
from deploykit.core.errors import BadInput
from deploykit.evaluation.formatting import Table
from tests.support.cli.command import Run
from tests.support.onnx_zoo import linear, save

DEPLOYKIT = [sys.executable, "-m", "deploykit"]


def on_terminal(words: list[object], until: str | None = None, **variables: str) -> tuple[int, str]:
    """Run a command on a terminal of 100 columns; Ctrl-C once it has printed `until`."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"} | variables
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    seen = b""
    with subprocess.Popen([*DEPLOYKIT, *map(str, words)], env=environment, **streams) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the process has ended
            while chunk := os.read(ours, 65536):
                seen += chunk
                if until is not None and until in seen.decode(errors="replace"):
                    process.send_signal(signal.SIGINT)
                    until = None
    os.close(ours)
    return process.returncode, seen.decode()


def test_tables_help_and_errors_are_coloured_on_a_terminal_where_that_is_wanted(
    model: Path,
) -> None:
    code, seen = on_terminal(["compare", model, model])
    assert (code, "\x1b[1moutput" in seen) == (0, True)
    assert "\x1b[1mMake" in on_terminal(["--help"])[1]
    assert "\x1b[31;1merror:\x1b[0m nothing.onnx" in on_terminal(["inspect", "nothing.onnx"])[1]
    assert "\x1b" not in on_terminal(["compare", model, model], NO_COLOR="1")[1]
    assert "\x1b" not in on_terminal(["inspect", "nothing.onnx"], TERM="dumb")[1]


@pytest.mark.parametrize("option", [(), ("-v",)])
def test_progress_is_one_line_that_is_erased_or_lines_with_verbose(
    model: Path, samples: Path, tmp_path: Path, option: tuple[str, ...]
) -> None:
    words = ["predict", *option, model, samples, "-o", tmp_path / "out.npz", "--batch", 1]
    code, seen = on_terminal(words, NO_COLOR="1")
    assert code == 0
    if option:
        assert ("\x1b[2K" in seen, "predict: " in seen) == (False, True)
        return
    bar, _, result = seen.rpartition("\x1b[2K")
    assert "predict ━" in bar
    assert result.lstrip().startswith("wrote ")


def test_verbose_prints_each_step_in_a_log_with_the_seconds_since_the_start(
    run: Run, model: Path, samples: Path, tmp_path: Path
) -> None:
    ran = run("predict", model, samples, "-o", tmp_path / "out.npz", "--batch", 1)
    assert not {"\r", "\x1b"} & {*ran.err}
    assert all(line.startswith("predict: ") for line in ran.err.splitlines())
    ran = run("-v", "quantize", model, "--to", "fp16")
    steps = re.findall(r"quantize --to fp16: +\d+ %  (.+), after \d+\.\d s\s", ran.err)
    assert steps == ["reading the model", "converting to fp16", "measuring accuracy"]
    assert "`" not in ran.out  # a parameter in a note is spelled as its flag
    assert "--data" in ran.out


FIGURES = Table(
    "",
    ("setup", "batch", "inferences/s", "nothing here", "p50", "p99 of all", "verdict", "why"),
    [
        ("fp32, 2 sessions", "1", "1,290,000", "-", "0.0173 ms", "12.9 ms", "pass", "word " * 12),
        ("int8", "32", "549.5 kB", "", "needs 36 calls", "needs 368 calls", "fail", "short"),
    ],
    (0, 6, 7),
)


def be_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(output, "is_terminal", lambda _stream: True)


@pytest.mark.parametrize("columns", [40, 80, 90, 300])
def test_a_table_never_loses_a_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    be_terminal(monkeypatch, columns)
    output.show_parts([FIGURES])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    for row in FIGURES.rows:
        for cell in row[1:7]:
            assert cell in shown  # whole, and on one line
    assert shown.count("word") == 12
    assert ("nothing here" in shown) == (columns == 300)
    blocks = [block for block in shown.split("\n\n") if block.strip()]
    assert all(block.lstrip().startswith("setup") for block in blocks)
    header = ("setup", "batch", "p50", "p90", "p99")
    rows = [("model-" * 13 + kind, "64", "0.210 ms", "0.263 ms", "0.399 ms") for kind in "ab"]
    output.show_parts([Table("", header, rows)])
    long = capsys.readouterr().out
    assert max(map(len, long.splitlines())) <= columns
    assert long.count("0.399 ms") == 2
    assert columns < 80 or long.count("setup") == 1  # one block


@pytest.mark.parametrize("log", ["text", "json"])
def test_ready_is_an_address_or_json_and_ctrl_c_stops_the_server(model: Path, log: str) -> None:
    words = ["serve", f"m={model}", "--http-port", 0, "--grpc-port=none", "--log", log]
    until = "Ctrl-C" if log == "text" else '"ready"'
    code, seen = on_terminal(words, until=until, NO_COLOR="1")
    assert (code, "interrupted" in seen) == (130, True)
    if log == "text":
        assert "Serving m" in seen
        assert "dashboard  http://127.0.0.1:" in seen
        assert '"event"' not in seen
    else:
        (line,) = [line for line in seen.splitlines() if '"ready"' in line]
        assert json.loads(line)["models"] == ["m"]


def ran_by_shell(
    command: str, words: list[object], **variables: str
) -> subprocess.CompletedProcess[str]:
    """`command` with {} in place of `deploykit WORDS`."""
    line = command.format(" ".join(map(str, [*DEPLOYKIT, *words])))
    environment = os.environ | {"PYTHONUNBUFFERED": ""} | variables  # as users have it
    return subprocess.run(
        line, shell=True, check=False, capture_output=True, text=True, env=environment
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("words", "how", "code", "error"),
    [
        ("profiles --json", "{} | true; exit ${{PIPESTATUS[0]}}", 0, ""),  # a closed pipe
        ("profiles", "{} > /dev/full", 3, "error: no space left"),
        ("export -h", "{} > /dev/full", 3, "error: no space left"),
        ("--debug inspect nothing.onnx", "{} 2> /dev/full", 2, ""),
        ("", "{} 2> /dev/full", 2, ""),
    ],
)
def test_a_stream_that_takes_nothing_is_one_error_line_or_changes_no_exit_code(
    words: str, how: str, code: int, error: str
) -> None:
    ran = ran_by_shell(f"bash -c '{how}'", [words])
    assert ran.returncode == code
    assert ran.stderr.startswith(error)
    assert ran.stderr.count("\n") == bool(error)


def test_closed_streams_and_paths_where_only_ascii_may_be_printed_are_no_error(model: Path) -> None:
    path = model.rename(model.parent / "mü→.onnx")
    out = model.parent / "half.onnx"
    ran = ran_by_shell("{} >&- 2>&- <&-", ["quantize", path, "--to", "fp16", "-o", out])
    assert ran.returncode == 0
    assert out.read_bytes()[:1] == b"\x08"  # not the text that went to a stream's number
    table = ran_by_shell("{}", ["inspect", path], PYTHONIOENCODING="ascii")
    assert (table.returncode, table.stderr) == (0, "")
    assert r"m\xfc\u2192.onnx" in table.stdout


def test_a_parameter_in_an_error_is_spelled_as_its_flag(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        message = "`max_drop` and `other_nodes` of `model`: `other`, the recipe's `inputs`"
        raise BadInput(message, hint="lower `max_drop`")

    monkeypatch.setattr("deploykit.quantization.quantize.quantize", refuse)
    ran = run("quantize", model, "--to", "fp16")
    spelled = "--max-drop and --other-nodes of MODEL: `other`, the recipe's `inputs`"
    assert ran.error() == f"error: {spelled}"
    assert "hint: lower --max-drop" in ran.err


@pytest.mark.parametrize("words", [("inspect",), ("quantize", "--to", "fp16"), ("compare",)])
def test_a_tensors_name_does_not_write_on_the_terminal(
    run: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    model = onnx.load_model_from_string(linear().SerializeToString())
    model.graph.input[0].name = model.graph.node[0].input[0] = "x\x1b]0;owned\x07\x9b31m"
    model.graph.output[0].name = model.graph.node[0].output[0] = "y\x1b[2J"
    path = save(model, tmp_path / "m.onnx")
    more = (path,) if words == ("compare",) else ()
    ran = run(words[0], path, *more, *words[1:])
    assert not [c for c in ran.out + ran.err if not c.isprintable() and c != "\n"], ran


def test_a_percentile_of_too_few_calls_says_how_many_it_needs() -> None:
    assert (ms(None, 1234), ms(None)) == ("needs 1,234 calls", "too few")
