"""Character LSTM: embedding of 128, LSTM of 256, dense layer over 97 characters; it writes text.

The network that "Deep Learning GPU Essentials" describes (embedding 128, then an LSTM that its
listing lacks, then a dense layer with softmax), over characters instead of 1,000 words. The
softmax is in the loss. 432,609 parameters.

Data: `--data FILE`, any text in UTF-8; without it the Constitution of the United States of America
(in the public domain), 45 kB next to this file. A sample is a piece of a paragraph, of at most 96
characters; shorter ones are padded at the end, and the labels there are -100, which neither loss
nor scores count, so that the lengths are those of the labels. The LSTM runs forward only: what
follows a character, padding too, does not change its prediction. Of each ten paragraphs one
calibrates and one tests; a piece that tests, such as a heading that is repeated, does not train. A
character that is not printable ASCII becomes "?".

The figures in the manifest: perplexity per character on the test data, the unigram's (each
character by its frequency in the training data), and a sample of what the model writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from deploykit.core.errors import BadInput, os_reason
from deploykit.core.files import check_readable
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.core.tensors import TensorSpec

TEXT = Path(__file__).with_name("constitution.txt")
LENGTH = 96
NEWLINE, CHARACTERS = 1, 97  # 0 is padding, 1 the end of a line, 2 to 96 are ASCII 32 to 126
IGNORED = -100
WRITTEN = 200


class CharLstm(nn.Module):
    """ids_NT: int64 (N, T) in 0..96 -> logits_NTD: float32 (N, T, 97) of the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 128, padding_idx=0)
        self.lstm = nn.LSTM(128, 256, batch_first=True)
        self.dense = nn.Linear(256, CHARACTERS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden_NTD, _ = self.lstm(self.embedding(ids))
        logits: torch.Tensor = self.dense(hidden_NTD)
        return logits


def encode(text: str) -> np.ndarray:
    """Characters as ids; a blank for each end of a line within a paragraph is up to the caller."""
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    printable = (codes >= 32) & (codes < 127)
    return np.where(printable, codes - 30, np.where(codes == 10, NEWLINE, ord("?") - 30))


def decode(ids: np.ndarray) -> str:
    return "".join("\n" if each == NEWLINE else chr(each + 30) for each in ids if each > 0)


def data(path: Path | None) -> Splits:
    """Int64 ids and labels (samples, 96): the label is the next character, -100 in the padding."""
    file = check_readable(path or TEXT)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as exc:
        raise BadInput(f"{file}: cannot be read: {os_reason(exc)}") from exc
    except UnicodeDecodeError:
        raise BadInput(f"{file}: is not a text file in UTF-8") from None
    paragraphs = [" ".join(each.split()) for each in text.replace("\r", "").split("\n\n")]
    paragraphs = [each for each in paragraphs if each]
    if len(paragraphs) < 10:
        raise BadInput(
            f"{file}: has {len(paragraphs)} paragraphs, 10 or more are needed",
            hint="an empty line ends a paragraph",
        )
    parts: list[list[str]] = [[], [], []]
    for number, paragraph in enumerate(paragraphs):
        parts[{4: 1, 9: 2}.get(number % 10, 0)].append(paragraph)
    taken: set[bytes] = set()
    test, calibration, train = (_split(part, taken) for part in reversed(parts))
    return Splits(
        train, calibration, test, "text: " + ("the US Constitution" if path is None else str(path))
    )


def _split(paragraphs: list[str], taken: set[bytes]) -> Split:
    """Pieces of paragraphs that no other split has taken.

    Each is fed from the character before it: the first is fed a newline.
    """
    ids, labels = [], []
    for paragraph in paragraphs:
        codes = np.concatenate([[NEWLINE], encode(paragraph + "\n")])
        for start in range(0, len(codes) - 1, LENGTH):
            piece = codes[start : start + LENGTH + 1]
            padding = LENGTH + 1 - len(piece)
            row = np.pad(piece[:-1], (0, padding))
            if row.tobytes() not in taken:
                ids.append(row)
                labels.append(np.pad(piece[1:], (0, padding), constant_values=IGNORED))
    if not ids:
        raise BadInput("the text repeats itself: all that would train or calibrate also tests")
    taken.update(row.tobytes() for row in ids)
    return Split({"ids": np.stack(ids)}, np.stack(labels))


def loss(logits_NTD: torch.Tensor, labels_NT: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the characters that are not padding, in nats."""
    return F.cross_entropy(logits_NTD.flatten(0, 1), labels_NT.flatten(), ignore_index=IGNORED)


def next_character(outputs: dict[str, np.ndarray], labels_NT: np.ndarray) -> np.ndarray:
    """For each sample the share of its characters that got the largest logit."""
    counted = labels_NT != IGNORED
    right = (outputs["logits"].argmax(2) == labels_NT) & counted
    shares: np.ndarray = right.sum(1) / np.maximum(counted.sum(1), 1)
    return shares


def unigram_perplexity(train: Split, test: Split) -> float:
    """Of a model that knows how often each character is, and nothing of those before it."""
    counts = np.bincount(train.labels[train.labels != IGNORED], minlength=CHARACTERS) + 1.0
    log_shares = np.log(counts / counts.sum())
    return math.exp(-log_shares[test.labels[test.labels != IGNORED]].mean())


@torch.no_grad()
def perplexity(module: nn.Module, split: Split) -> float:
    total, count = 0.0, 0
    for start in range(0, len(split.labels), 64):
        ids, labels = (
            torch.from_numpy(a[start : start + 64]) for a in (split.inputs["ids"], split.labels)
        )
        characters = int((labels != IGNORED).sum())
        total, count = total + float(loss(module(ids), labels)) * characters, count + characters
    return math.exp(total / count)


@torch.no_grad()
def generate(module: nn.Module, start: str, length: int, seed: int = 0) -> str:
    """`start` and up to `length` characters after it, drawn as the model predicts them."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.from_numpy(encode("\n" + start))[None]
    for _ in range(length):
        logits = module(ids[:, -LENGTH:])[0, -1]
        logits[0] = -torch.inf  # padding is no character
        drawn = torch.multinomial(logits.softmax(0), 1, generator=random)
        ids = torch.cat([ids, drawn[None]], 1)
        if int(drawn) == NEWLINE:
            break
    return decode(ids[0, 1:].numpy())


def report(module: nn.Module, splits: Splits) -> Mapping[str, Any]:
    return {
        "perplexity": perplexity(module, splits.test),
        "unigram_perplexity": unigram_perplexity(splits.train, splits.test),
        "sample": generate(module, "The ", WRITTEN),
    }


RECIPE = Recipe(
    build=CharLstm,
    data=data,
    inputs=(TensorSpec("ids", "int64", ("N", "T")),),
    outputs=(TensorSpec("logits", "float32", ("N", "T", CHARACTERS)),),
    loss=loss,
    metric=next_character,
    metric_name="next-character accuracy",
    epochs=15,
    batch_size=16,
    learning_rate=4e-3,
    clip_norm=1.0,
    report=report,
)
