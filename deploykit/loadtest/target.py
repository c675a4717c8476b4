"""Describe a model on an Open Inference Protocol server, and prepare requests before timing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.files import check_readable
from deploykit.core.tensors import BATCH, PROTOCOL_NAMES, TensorSpec, name_axes
from deploykit.engines.data.samples import Samples, random_feeds, read_npz, read_samples
from deploykit.loadtest.server import TIMEOUT_S, Server
from deploykit.loadtest.wire import (
    DTYPES,
    AnswerCheck,
    BodyCheck,
    NotHttpError,
    Tensor,
    infer_body,
    one_line,
)
from deploykit.pipelines.file import input_files, read_answers

_OTHER_FORM = (400, 415, 422, 500, 501)  # statuses of servers that do not take a form of tensors
_SENT = "tensors are sent as {}, as the server {}"
OUTPUTS = "outputs/"  # prefix of names in golden samples
VARIANTS = 8  # different inputs, so that the server cannot answer from a cache
MOST_BYTES = 64 << 20  # of all distinct requests together; one is always made
MOST_BODIES = 256  # distinct requests without tensors
_TYPES = {
    **dict.fromkeys((".jpg", ".jpeg"), "image/jpeg"),
    ".png": "image/png",
    ".webp": "image/webp",
    ".txt": "text/plain",
    ".json": "application/json",
}
_ARRAYS = (".npz", ".npy")
_SHOWN, _NAMED = 20, 3  # characters of a sentence, names of files in the report
_NO_OPTIONS = {"name", "platform", "input", "output", "parameters"}  # reported elsewhere
_MOST_OPTIONS = 64


@dataclass(frozen=True)
class RemoteModel:
    """One model on a server."""

    server: Server
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # name: shape
    about: Mapping[str, str] = field(default_factory=dict)  # the server's description of itself
    options: Mapping[str, str] = field(default_factory=dict)  # the server's options for the model
    binary: bool = True  # the server declares that it takes tensors as bytes

    def __str__(self) -> str:
        return f"{self.server.url}: {self.name}"

    def probe(self, request: bytes) -> tuple[int, str]:
        """Return an inference's status, 0 for no answer, and error. Raises BadInput after 10 s."""
        wire = self.server.wire([request])
        try:
            return self.server.exchange(wire), wire.error or ""
        except TimeoutError as exc:
            why = f"no answer to an inference within {TIMEOUT_S:g} s"
            raise BadInput(f"{self}: {why}") from exc
        except (OSError, NotHttpError):
            return 0, ""  # the run will count it as a failure

    @property
    def pipeline(self) -> bool:
        """Return whether the model takes no tensors."""
        return self.about.get("platform") == "deploykit_pipeline"

    def infer_request(self, tensors: Sequence[Tensor], *, binary: bool = True) -> bytes:
        """Return a whole request; with `binary` its tensors are bytes, else JSON or typed."""
        if self.server.grpc:
            from deploykit.loadtest.grpc import infer_request

            return infer_request(self.name, tensors, raw=binary)
        return self.post("infer", *infer_body(tensors, binary=binary))

    def post(self, verb: str, fields: Mapping[str, str], body: bytes) -> bytes:
        """Return a whole HTTP request for `verb` ("infer" or "predict") of the model."""
        path = f"/models/{quote(self.name, safe='')}/{verb}"
        return self.server.request("POST", path, fields, body)


def find_model(server: Server, model: str | None) -> RemoteModel:
    """Return `model`, or the only ready one, of a server. Raises BadInput, NotFound."""
    url, about = server.url, _mapping(server.ask("about")[1])
    status, index, error = server.ask("index")
    if status != 200 and not server.grpc:  # the index is an extension; KServe lists them here
        known = _mapping(server.ask("models")[1]).get("models")
        if isinstance(known, list):
            status, index = 200, [{"name": name} for name in known]
    names = None
    if status == 200 and isinstance(index, list) and all(isinstance(one, dict) for one in index):
        ready = [one for one in index if one.get("state", "READY") in ("READY", "")]
        names = list(dict.fromkeys(str(one.get("name")) for one in ready))
    elif not about.get("name"):
        raise server.not_oip(f"index: {error or 'not a list of models'}")
    listed = ", ".join(names or ())
    if model is None:
        if names is None or len(names) != 1:
            have = f"serves {len(names)} models: {listed}" if names else "does not list its models"
            raise BadInput(f"{url}: {have}", hint="choose one with `model`")
        model = names[0]
    status, metadata, error = server.ask("metadata", model)
    if status == 404 or (status != 200 and names and model not in names):
        hint = f"the models are: {listed}" if listed else None
        raise NotFound(f"{url}: no model '{model}': {error}", hint=hint)
    if status != 200:
        raise server.refused(status, f"metadata: {error}")
    metadata = _mapping(metadata)
    if not isinstance(metadata.get("inputs"), list):
        raise server.not_oip(f"metadata: {error or 'no inputs'}")
    config: Mapping[str, Any] = {}
    with suppress(BadInput):
        config = _mapping(server.ask("config", model)[1])
    extensions = about.get("extensions")
    return RemoteModel(
        server,
        model,
        inputs=tuple(_spec(server, model, item) for item in metadata["inputs"]),
        outputs={
            each["name"]: shape if isinstance(shape := each.get("shape"), list) else ()
            for each in map(_mapping, metadata.get("outputs") or ())
            if isinstance(each.get("name"), str)
        },
        about=_about(metadata, config, about),
        options=model_options(config),
        binary=server.grpc
        or (isinstance(extensions, (list, dict)) and "binary_tensor_data" in extensions),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _about(
    metadata: Mapping[str, Any], config: Mapping[str, Any], server: Mapping[str, Any]
) -> dict[str, str]:
    """Return the server's name and version, and the model's platform, device and file."""
    parameters = _mapping(config.get("parameters"))
    values = {
        "server": server.get("name"),
        "version": server.get("version"),
        "platform": metadata.get("platform"),
        **{k: v.get("string_value") for k, v in parameters.items() if isinstance(v, dict)},
        **_mapping(metadata.get("parameters")),
    }
    return {
        name: one_line(value)
        for name, value in values.items()
        if isinstance(name, str) and isinstance(value, str) and value
    }


def model_options(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a ModelConfig as text: {"dynamic_batching": '{"max_queue_...": 0}'}."""
    options = [pair for pair in config.items() if pair[0] not in _NO_OPTIONS and pair[1]]
    return {
        one_line(name): one_line(value if isinstance(value, str) else json.dumps(value))
        for name, value in options[:_MOST_OPTIONS]
    }


def _spec(server: Server, model: str, item: object) -> TensorSpec:
    """Parse a tensor of the metadata: -1 on axis 0 is the batch, elsewhere "NAME_1"."""
    try:
        name, datatype = str(item["name"]), str(item["datatype"])  # type: ignore[index]
        sizes = [int(size) for size in item["shape"]]  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        raise server.not_oip("an input of its metadata has no name, type or shape") from None
    if datatype not in DTYPES:
        raise BadInput(f"{server.url}: {model}: no random values exist for {name}, {datatype}")
    axes = name_axes(name, [size if size >= 0 else None for size in sizes])
    return TensorSpec(name, DTYPES[datatype], axes)


# a request without tensors: its file's name or the sentence's beginning, its type, its content
Body = tuple[str, str, bytes]


@dataclass(frozen=True)
class Requests:
    """The requests to send in turn, and the check of their answers.

    `shapes`: shapes of a request's inputs; `sends`: a description of requests without tensors.
    `note`: on the form of the tensors, `calls`: the tensors of each request.
    """

    messages: Sequence[bytes]
    check: AnswerCheck
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sends: str = ""
    note: str = ""
    calls: Sequence[Sequence[Tensor]] = ()
    batch: int = 1


def make_requests(
    remote: RemoteModel,
    source: Path | Sequence[str] | None = None,
    *,
    batch: int = 1,
    seed: int = 0,
    max_error: float | None = None,
    axes: Mapping[str, int] | None = None,
) -> Requests:
    """Return whole requests as the arguments of `load_test` ask. Raises BadInput for wrong ones.

    `source`: a file or a folder, sentences, or None for random values from `seed`. `max_error`: the
    file also holds the right answers, and how far others may be off.
    """
    path = source if isinstance(source, Path) else None
    text = source is not None and path is None
    files = path is not None and path.suffix not in _ARRAYS
    if (text or files) and "takes" in remote.about:
        if batch > 1 or axes:
            raise BadInput(f"`{'axes' if axes else 'batch'}` is for tensors")
        bodies, answers = _read_bodies(source or (), expect=max_error is not None)
        is_json, grpc = remote.about.get("gives") != "bytes", remote.server.grpc
        body_check = BodyCheck(is_json, answers, max_error or 0.0, grpc=grpc)
        messages = [_body_request(remote, body) for body in bodies]
        return Requests(messages, body_check, sends=_describe(bodies))
    if remote.pipeline:
        why = "is a pipeline: its requests are not made up"
        raise BadInput(f"{remote} {why}", hint="`data` FILE or DIR, or `text`")
    if text or (files and max_error is not None):
        raise BadInput(f"{remote} has no task, so it takes only tensors")
    if not remote.inputs:
        hint = "its settings do, as MLServer's model-settings.json: inputs"
        raise BadInput(f"{remote}: the server names no inputs of the model", hint=hint)
    samples, expected = None, list[Mapping[str, np.ndarray]]()
    if path is not None:
        if axes:
            raise BadInput("`axes` and `data` exclude each other", hint="the data have sizes")
        some = any(spec.batched for spec in remote.inputs)  # then the data tell where it is
        samples = read_samples(path, remote.inputs if some else name_batch(remote.inputs, {}))
    rows, feeds = make_feeds(remote, batch, seed, samples, axes)
    if path is not None and samples is not None and max_error is not None:
        expected = read_outputs(path, remote, len(samples), rows)
    calls = [
        [(spec.name, PROTOCOL_NAMES[spec.dtype], each[spec.name]) for spec in remote.inputs]
        for each in feeds
    ]
    messages = [remote.infer_request(tensors, binary=remote.binary) for tensors in calls]
    note = "" if remote.binary else _SENT.format("JSON", "declares no binary_tensor_data")
    shapes = {name: array.shape for name, array in feeds[0].items()}
    check = AnswerCheck(remote.outputs, expected, max_error or 0.0)
    return Requests(messages, check, shapes, note=note, calls=calls, batch=rows)


def probe(remote: RemoteModel, requests: Requests) -> Requests:
    """Return the requests as bytes or JSON, as the server takes them. Raises BadInput."""
    status, error = remote.probe(requests.messages[0])
    if status in _OTHER_FORM and requests.calls:
        binary = not remote.binary
        with suppress(BadInput):  # NaN in JSON, float16 in typed contents
            messages = [remote.infer_request(each, binary=binary) for each in requests.calls]
            if remote.probe(messages[0])[0] not in (0, *_OTHER_FORM):
                forms = ("bytes", "typed contents" if remote.server.grpc else "JSON")
                mine, other = forms if remote.binary else forms[::-1]
                note = _SENT.format(other, f"does not take {mine} ({error})")
                return replace(requests, messages=messages, note=note)
    if 300 <= status < 500 and status != 429:  # which does not mean that the request is wrong
        raise remote.server.refused(status, f"{remote.name}: answered {error}")
    return requests


def _read_bodies(source: Path | Sequence[str], *, expect: bool) -> tuple[list[Body], list[Any]]:
    """Return the requests in a file, a folder or sentences, and with `expect` their answers."""
    if not isinstance(source, Path):
        return [(one_line(each[:_SHOWN]), "text/plain", each.encode()) for each in source], []
    if expect:
        lines = read_answers(source)[:MOST_BODIES]
        return [_read_body(file) for file, _ in lines], [answer for _, answer in lines]
    bodies, size = list[Body](), 0
    for file in input_files([source]):
        size += file.stat().st_size
        if bodies and (size > MOST_BYTES or len(bodies) >= MOST_BODIES):
            break
        bodies.append(_read_body(file))
    return bodies, []


def _read_body(file: Path) -> Body:
    if check_readable(file).stat().st_size > MOST_BYTES:
        raise BadInput(f"{file}: is above the {MOST_BYTES:,} bytes that can be sent")
    kind = _TYPES.get(file.suffix.lower(), "application/octet-stream")
    return file.name, kind, file.read_bytes()


def _describe(bodies: Sequence[Body]) -> str:
    names, types, contents = zip(*bodies, strict=True)
    least, most = min(map(len, contents)), max(map(len, contents))
    span = f"{least:,} to {most:,}" if most > least else f"{least:,}"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(types).items())
    return f"{kinds}, {span} bytes: {', '.join(names[:_NAMED])}{more}"


def _body_request(remote: RemoteModel, body: Body) -> bytes:
    _, kind, content = body
    if not remote.server.grpc:
        return remote.post("predict", {"Content-Type": kind}, content)
    name = remote.inputs[0].name if remote.pipeline else remote.about["takes"]
    return remote.infer_request([(name, "BYTES", np.array([content], object))])


def name_batch(specs: Sequence[TensorSpec], axes: Mapping[str, int]) -> tuple[TensorSpec, ...]:
    """Return the inputs with the batch named where it is not axis 0: a state h[2,N,8], or x[2,N,8].

    The metadata name no axes. It is the only dynamic axis of an input of three axes or more whose
    axis 0 is fixed, to more than 1 if no other input has a batch; unless `axes` gives it a size.
    """
    batched, named = any(spec.batched for spec in specs), []
    for spec in specs:
        free = [axis for axis in spec.shape if isinstance(axis, str)]
        alone = len(free) == 1 and len(spec.shape) > 2 and not spec.batched
        if alone and (batched or spec.shape[0] != 1) and free[0] not in axes:
            spec = replace(spec, shape=tuple(BATCH if a == free[0] else a for a in spec.shape))
        named.append(spec)
    return tuple(named)


def free_axis_sizes(
    remote: RemoteModel, specs: Sequence[TensorSpec], axes: Mapping[str, int]
) -> dict[str, int]:
    """Return the size of each dynamic axis but the batch. Raises BadInput if `axes` lacks one.

    "ids_1" is an axis of one input, "axis1" that of all which have none of their own; where there
    is no other, any name will do.
    """
    free = {
        axis: f"axis{place}"
        for spec in specs
        for place, axis in enumerate(spec.shape)
        if isinstance(axis, str) and axis != BATCH
    }
    places = set(free.values())
    if len(places) == len(axes) == 1 and not axes.keys() & free.keys():
        axes = dict.fromkeys(places, *axes.values())
    sizes = {axis: axes.get(axis, axes.get(place, 0)) for axis, place in free.items()}
    least = min((*axes.values(), *sizes.values()), default=1)
    if least < 1 or not axes.keys() <= places | free.keys():
        named = ", ".join(f"{axis} ({place})" for axis, place in free.items())
        raise BadInput(
            f"{remote}: `axes`: the axes of any length besides the batch are: {named or 'none'}; "
            "each needs a size of 1 or more",
            hint="such as `axis` axis1=128 for all inputs, or inputs that the model takes with "
            "`data`, such as its FILE.golden.npz",
        )
    return sizes


def make_feeds(
    remote: RemoteModel,
    batch: int,
    seed: int,
    samples: Samples | None = None,
    axes: Mapping[str, int] | None = None,
) -> tuple[int, list[Mapping[str, np.ndarray]]]:
    """Return the rows of a request and the inputs of up to VARIANTS: random, or of `samples`."""
    specs = name_batch(remote.inputs, axes or {})
    if samples is None:
        sizes = {BATCH: batch, **free_axis_sizes(remote, specs, axes or {})}
        dynamic = {axis for spec in specs for axis in spec.shape if isinstance(axis, str)}
        first = {spec.shape[0] if len(spec.shape) > 1 else 1 for spec in specs}
        fixed = int(first.pop()) if len(first) == 1 and not dynamic else 1
        rows = batch if BATCH in dynamic else fixed
    else:
        rows, _ = samples.batching(batch, specs)
        rows = rows if {*samples.axes.values()} - {None} else 1
    if batch > 1 and rows != batch:
        hint = "`axis` sets the size of another axis of any length"
        raise BadInput(f"{remote} has no batch axis: batch {batch} is not {rows}", hint=hint)

    def make(number: int) -> Mapping[str, np.ndarray]:
        if samples is None:
            return random_feeds(specs, sizes, seed + number)
        return samples.rows(_rows(number, rows) % len(samples))

    feeds = [make(0)]
    each_bytes = sum(array.nbytes for array in feeds[0].values())
    while len(feeds) < VARIANTS and each_bytes * (len(feeds) + 1) <= MOST_BYTES:
        feeds.append(make(len(feeds)))
    return rows, feeds


def _rows(number: int, batch: int) -> np.ndarray:
    return np.arange(number * batch, (number + 1) * batch)


def read_outputs(
    path: Path, remote: RemoteModel, count: int, batch: int
) -> list[Mapping[str, np.ndarray]]:
    """Return the outputs of golden samples for each request; `count`: how many samples there are.

    Samples lie along the first axis that is as long as they are many and dynamic in the metadata.
    """
    arrays = read_npz(path)
    outputs = {n.removeprefix(OUTPUTS): a for n, a in arrays.items() if n.startswith(OUTPUTS)}
    axes: dict[str, int] = {}
    for name, array in outputs.items():
        sizes = remote.outputs.get(name, ())
        declared = sizes if len(sizes) == array.ndim else (None,) * array.ndim
        places = [place for place, size in enumerate(array.shape) if size == count]
        if places:
            axes[name] = min(places, key=lambda place: (declared[place] == count, place))
    if not outputs or len(axes) < len(outputs):
        hint = "golden samples do: arrays outputs/NAME in the FILE.golden.npz next to a model"
        raise BadInput(f"{path}: has no outputs to expect, one for each sample", hint=hint)
    return [
        {n: a.take(_rows(number, batch), axes[n], mode="wrap") for n, a in outputs.items()}
        for number in range(VARIANTS)
    ]
