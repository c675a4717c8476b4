"""Describe a model's task: how an image or a text becomes its inputs, and what its outputs mean.

A `Task` is the `task` section of a manifest. The graph takes bytes, and normalises them itself
(`Preprocess`). Decoding, resizing and tokenising are described here and happen before the graph,
which cannot do them as the clients' libraries do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record

CLASSIFY, DETECT, SEGMENT, EMBED = "classify", "detect", "segment", "embed"
TEXT_CLASSIFY = "text-classify"
MEAN, CLS = "mean", "cls"  # pooling over all tokens, or the first token alone
STRETCH = "stretch"  # both sides get the model's size, or `resize_to`
SHORTEST_EDGE = "shortest-edge"  # the shorter side gets `resize_to`; then crop the middle
LETTERBOX = "letterbox"  # scale to fit, then pad with `padding` to the model's size
RESIZE_RULES = (STRETCH, SHORTEST_EDGE, LETTERBOX)
INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
COLOURS = ("RGB", "BGR", "L")
TOKENIZER = ".tokenizer.json"  # appended to the artefact's name
_HEADS = "deploykit.exporting.heads"
_ANSWERS = "deploykit.engines.tasks"


@dataclass(frozen=True)
class Kind:
    """One row of the table of tasks.

    `takes`: "image", "text" or both. `outputs`: the fields of `TaskOutputs` that an answer is made
    of. `head`: "module:function" that puts these outputs behind a model; `answer`: the one that
    makes JSON values of them. `options`: parameters of `export` that the task has. `resize`: how an
    image is placed where neither the user nor the model's library says it. `any_size`: the model
    may take images of any size.
    """

    name: str
    takes: tuple[str, ...]
    outputs: tuple[str, ...]
    head: str
    answer: str
    options: tuple[str, ...] = ("labels",)
    resize: str = STRETCH
    any_size: bool = False


ALL = (
    Kind(
        CLASSIFY,
        takes=("image",),
        outputs=("scores",),
        head=f"{_HEADS}.classify:add_scores",
        answer=f"{_ANSWERS}:label_rows",
        resize=SHORTEST_EDGE,
    ),
    Kind(
        DETECT,
        takes=("image",),
        outputs=("scores", "boxes", "classes"),
        head=f"{_HEADS}.detect:add_boxes",
        answer=f"{_ANSWERS}:box_rows",
        options=("labels", "threshold", "iou", "boxes"),
        resize=LETTERBOX,
    ),
    Kind(
        SEGMENT,
        takes=("image",),
        outputs=("mask",),
        head=f"{_HEADS}.segment:add_mask",
        answer=f"{_ANSWERS}:segment_rows",
        any_size=True,
    ),
    Kind(
        EMBED,
        takes=("image", "text"),
        outputs=("embedding",),
        head=f"{_HEADS}.embed:add_embedding",
        answer=f"{_ANSWERS}:embedding_rows",
        options=("tokenizer", "max_length", "pooling"),
        resize=SHORTEST_EDGE,
    ),
    Kind(
        TEXT_CLASSIFY,
        takes=("text",),
        outputs=("scores",),
        head=f"{_HEADS}.classify:add_scores",
        answer=f"{_ANSWERS}:label_rows",
        options=("labels", "tokenizer", "max_length"),
    ),
)
KINDS: Mapping[str, Kind] = {each.name: each for each in ALL}


@dataclass(frozen=True)
class ImageInput(Record):
    """How an image becomes the tensor `tensor`, uint8 [N, height, width, channels].

    `height` and `width` 0: those of the resized image, rounded up to a multiple of `multiple`.
    `resize`: one of `RESIZE_RULES`. `resize_to`: pixels of the shorter side, for "shortest-edge";
    for "stretch" too, where it is larger than the model's: the middle is cut out.
    `interpolation`: "bilinear" or "bicubic", with Pillow's antialiasing; "nearest" without.
    `colours`: "RGB", "BGR", or "L" for grey. `padding`: the byte that the rest is filled with.
    """

    tensor: str
    height: int
    width: int
    resize: str = STRETCH
    resize_to: int = 0
    interpolation: str = "bilinear"
    colours: str = "RGB"
    padding: int = 114
    multiple: int = 1


@dataclass(frozen=True)
class TextInput(Record):
    """How a text becomes token ids, int64 [N, tokens].

    `ids`, `mask`, `types`: names of the input tensors, "" for one that the model lacks.
    `tokenizer`: file name, next to the model, of the Hugging Face `tokenizers` JSON; `sha256`: its
    hash. `max_length`: tokens, the special ones included; a longer text is refused.
    """

    ids: str
    tokenizer: str
    sha256: str
    max_length: int
    mask: str = ""
    types: str = ""
    pad_id: int = 0


@dataclass(frozen=True)
class TaskOutputs(Record):
    """Names of the output tensors, "" for those that the task does not have.

    `scores`: probabilities float32 [N, labels]; for "detect" float32 [N, boxes], 0 in unused rows.
    `boxes`: float32 [N, boxes, 4], x1 y1 x2 y2 in pixels of the model's input. `classes`: int64
    [N, boxes], indices of labels. `mask`: an integer [N, height, width], the label's index of each
    pixel. `embedding`: float32 [N, size], of length 1.
    """

    scores: str = ""
    boxes: str = ""
    classes: str = ""
    mask: str = ""
    embedding: str = ""


@dataclass(frozen=True)
class Task(Record):
    """The purpose of a model. `kind`: one of `KINDS`; `image` or `text`: its input.

    `labels`: names in the order of the indices; empty where nobody named them. `threshold`: the
    least score of a box that is answered. `top_k`: how many labels are answered. `source`: where
    this was read from, for people: "torchvision's weights ResNet18_Weights.IMAGENET1K_V1".
    """

    kind: str
    outputs: TaskOutputs
    image: ImageInput | None = None
    text: TextInput | None = None
    labels: tuple[str, ...] = ()
    threshold: float = 0.25
    top_k: int = 5
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"`task` must be one of {', '.join(KINDS)}; got {self.kind!r}")
        if (self.image is None) == (self.text is None):
            raise BadInput(f"the task {self.kind} needs either an image or a text as its input")
        if not 0 <= self.threshold <= 1:
            raise BadInput(f"`threshold` must be from 0 to 1, got {self.threshold:g}")
        if self.top_k < 1:
            raise BadInput(f"`top_k` must be 1 or more, got {self.top_k}")

    @property
    def extra(self) -> str:
        """The extra that installs the task's package; the model's runtime is another."""
        return "text" if self.image is None else "images"

    def named_after(self, artefact: str) -> Task:
        """Return this task for the file `artefact`, with its tokenizer's file named after it."""
        if self.text is None:
            return self
        return replace(self, text=replace(self.text, tokenizer=f"{artefact}{TOKENIZER}"))

    def label(self, index: int) -> str:
        """Return the label's name, or its index if labels have no names."""
        return self.labels[index] if 0 <= index < len(self.labels) else str(index)


# `Preprocess` is part of the graph, so that clients send bytes, and training, ONNX Runtime, an
# engine and a server compute the same. It resizes nothing.


@dataclass(frozen=True)
class Preprocess(Record):
    """value = (byte * scale - mean) / std, per channel, in the order of the bytes.

    The input is a uint8 image (N, H, W, C); the model gets float32 (N, C, H, W).
    """

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255

    @property
    def channels(self) -> int:
        return len(self.mean)


# Source: torchvision's ImageNet weights, https://docs.pytorch.org/vision/stable/models.html
IMAGENET = Preprocess("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
