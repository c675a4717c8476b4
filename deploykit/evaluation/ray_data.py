"""Offline inference spread over a Ray cluster: one engine in each actor, batches by Ray Data.

Batches are those of a run on one machine and stay in order, so that the outputs are the same.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deploykit.core.artefact import Artefact
from deploykit.core.errors import DeploykitError, Unsupported, quote
from deploykit.core.extras import require
from deploykit.core.files import manifest_path
from deploykit.engines.engine import Arrays, Engine
from deploykit.evaluation.verify import open_proven

ray = require("ray")
ray_data = require("ray.data")
pyarrow = require("pyarrow")

_ANSWERS_S = 5.0


def predict_batches(
    artefact: Artefact, kind: str, trust: bool, batches: Iterable[Arrays]
) -> Iterator[Arrays]:
    """Yield the outputs of each batch, in order, while the cluster runs the later ones.

    `kind`: "cuda" for one GPU in each actor, or "cpu" for one core. Ray starts as many actors as
    there are, and repeats the work of a node that it lost; nodes need to share no file system.
    Raises Unsupported where no cluster answers, and what the engines raise.
    """
    path, names = artefact.path, [artefact.path.name]
    if artefact.manifest is not None:
        evidence = artefact.manifest.evidence
        names.append(manifest_path(path).name)
        names += [each.file for each in (evidence.weights, evidence.golden) if each]
    files, gpu = {name: path.with_name(name).read_bytes() for name in names}, kind == "cuda"
    _connect()
    context = ray_data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    blocks = [ray.put(_table([dict(batch)])) for batch in batches]
    most = max(1, int(ray.cluster_resources().get("GPU" if gpu else "CPU", 1)))
    mapped = ray_data.from_arrow_refs(blocks).map_batches(
        _Actor,
        fn_constructor_args=([ray.put(files)], kind, trust),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray_data.ActorPoolStrategy(min_size=1, max_size=min(most, len(blocks))),
        num_gpus=1 if gpu else None,
        num_cpus=None if gpu else 1,
    )
    for row in mapped.iter_rows():
        answer = pickle.loads(row["pickled"])  # noqa: S301 - by our own actors
        if isinstance(answer, DeploykitError):
            raise answer
        yield answer


def _connect() -> None:
    """Join the cluster of $RAY_ADDRESS, else start one on this machine."""
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    lost = Unsupported(
        f"no Ray cluster answers at {quote(address)}",
        hint="set RAY_ADDRESS to its address, or unset it to start one on this machine",
    )
    if port.isdecimal() and "://" not in address:  # Ray itself would try for minutes
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWERS_S).close()
        except (OSError, OverflowError) as exc:
            raise lost from exc
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as exc:
        raise lost from exc


class _Actor:
    """One engine. Its errors are answers, as Ray would wrap them in its own and try again."""

    def __init__(self, shipped: list[Any], kind: str, trust: bool) -> None:
        files: Mapping[str, bytes] = ray.get(shipped[0])  # a list: Ray would not start it again
        self._folder = tempfile.TemporaryDirectory(prefix="deploykit-")
        for name, content in files.items():
            Path(self._folder.name, name).write_bytes(content)
        path = Path(self._folder.name, next(iter(files)))
        threads = 1 if kind == "cpu" else None
        self._engine: Engine | DeploykitError
        try:
            (self._engine,) = open_proven(path, kind, threads=threads, trust=trust)
        except DeploykitError as exc:
            self._engine = exc

    def __call__(self, block: Any) -> Any:
        rows = block.column("pickled").to_pylist()
        return _table([self._answer(pickle.loads(row)) for row in rows])  # noqa: S301 - as above

    def _answer(self, arrays: Arrays) -> object:
        if isinstance(self._engine, DeploykitError):
            return self._engine
        try:
            return self._engine(arrays)
        except DeploykitError as exc:
            exc.message = exc.message.replace(f"{self._folder.name}/", "")
            exc.args = (exc.message,)
            return exc


def _table(values: list[Any]) -> Any:
    """Return the values pickled, as Arrow has neither strings in arrays of any shape nor errors."""
    pickled = [pickle.dumps(value, protocol=5) for value in values]
    return pyarrow.table({"pickled": pyarrow.array(pickled, pyarrow.large_binary())})
