"""Fixtures for every test: one engine per runtime, all of the same model, y = 2x + 1.

A runtime that this machine lacks is left out; one test of the conformance suite is skipped with the
reason, which `pytest -ra` (our default) prints.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.engines.engine import Engine
from tests.support.exports import share_the_constants
from tests.support.runtimes.cases import AFFINE, OPENERS, PRESENT, onnx_model

# A shell starts background jobs with SIGINT ignored, and children inherit that; here it must work.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share the cores: OpenMP threads that wait for one another would spin, and take minutes.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# What else runs on this machine is not to decide what a benchmark's report says.
os.environ["HOST_PROC"] = os.environ["HOST_SYS"] = "/nonexistent"

gc.disable()  # until all is collected: little of that is garbage

DIED = pytest.StashKey[bool]()

EXPORTS = (  # and what else imports the slow parts of torch, torchvision and scikit-learn
    "tests/cli/test_first_error.py",
    "tests/engines/test_torch",
    "tests/evaluation/test_compare.py",
    "tests/exporting/",
    "tests/test_examples.py",
    "tests/test_find_shapes.py",
    "tests/training/",
    "tests/zoo/test_recipes.py",
    "tests/zoo/test_small.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Called where a worker of pytest-xdist ends; `error`: why, if it died."""
    if error:
        node.config.stash[DIED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker that died may leave tests unrun: then the exit code is not "some failed"."""
    if session.config.stash.get(DIED, False):
        session.exitstatus = pytest.ExitCode.INTERRUPTED


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Keep signals as they were: later children inherit what is done to them."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _same_numbers(request: pytest.FixtureRequest) -> None:
    """Draw the same numbers in a test, whichever ran before it."""
    if generator := getattr(request.module, "RNG", None):
        generator.bit_generator.state = np.random.default_rng(1).bit_generator.state


@pytest.fixture
def affine_onnx(tmp_path: Path) -> Path:
    """The file of y = 2x + 1 on float32[N,4]."""
    path = tmp_path / "affine.onnx"
    path.write_bytes(onnx_model(AFFINE).SerializeToString())
    return path


@pytest.fixture
def onnxruntime_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` has the columns that a test asks for, in one session; other tests search."""
    from deploykit.reporting.report import CpuSettings

    monkeypatch.setattr("deploykit.benchmarking.columns.choices", lambda *_: [CpuSettings(1, 1)])
    monkeypatch.setattr("deploykit.benchmarking.columns.installed", lambda _: False)


@pytest.fixture(params=PRESENT)
def runtime(request: pytest.FixtureRequest) -> str:
    """The name of each runtime that is here, for tests that open their own models with it."""
    return str(request.param)


@pytest.fixture
def engine(runtime: str, tmp_path: Path) -> Iterator[Engine]:
    """The model y = 2x + 1 on x float32[N,4], in each runtime."""
    with OPENERS[runtime](tmp_path, AFFINE) as opened:
        yield opened


def pytest_runtest_setup() -> None:
    share_the_constants()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in captured text: a worker of pytest-xdist cannot send them."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what one worker has for minutes, then the files that hold a slow test.

    So no worker is left alone with one of them at the end.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (not item.nodeid.startswith(EXPORTS), item.path not in slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` one worker has all exports: the first in a process takes 6 s more."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "exports" if nodeid.startswith(EXPORTS) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """What collection made stays until the end: no garbage collection goes through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # Python's 700 take a tenth of the time of an export
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "conformance: what every runtime promises")
    config.addinivalue_line("markers", "xdist_group(name): tests that share a worker")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files anew, for review"
    )


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """A command that runs in the process of the tests sets them."""
    loggers = [logging.getLogger(), logging.getLogger("deploykit")]
    before = [each.level for each in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
