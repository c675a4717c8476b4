"""The zoo's architectures: functions for `--arch tests/support/zoo/models.py:NAME`.

Each returns a float32 `nn.Module`; the weights of the zoo are made in `members.py` and come as a
state dict.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 1000  # the vocabulary of the models that read ids
WIDTH = 64  # features per step of the encoders' input


def register_torchvision() -> None:
    """Make torchvision importable beside a torch that its native library was not built for."""
    import deploykit.engines.torch.files  # noqa: F401 - declares torchvision's operators

    if importlib.util.find_spec("torchvision"):
        importlib.import_module("torchvision")


def bert_tiny() -> nn.Module:
    """Ids and mask int64 (N, T) -> an object with last_hidden_state and pooler_output."""
    register_torchvision()  # transformers imports it where it is installed
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
    )
    module: nn.Module = BertModel(config)
    return module


class Lstm(nn.Module):
    """ids int64 (N, T) -> logits float32 (N, 10), from a two-layer bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.lstm = nn.LSTM(64, 64, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(ids))
        logits: torch.Tensor = self.head(states.mean(1))
        return logits


class Encoder(nn.Module):
    """x float32 (N, T, 64) -> logits float32 (N, 10), from two transformer layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(x).mean(1))
        return logits


class MaskedEncoder(Encoder):
    """x float32 (N, T, 64), keep bool (N, T), also of the first step -> logits float32 (N, 10).

    One layer: each test session exports it.
    """

    def __init__(self) -> None:
        super().__init__(layers=1)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        keep = keep | (torch.arange(x.shape[1]) == 0)
        states = self.layers(x, src_key_padding_mask=~keep)
        weight = keep.to(x.dtype)[:, :, None]
        logits: torch.Tensor = self.head((states * weight).sum(1) / weight.sum(1))
        return logits


class Detector(nn.Module):
    """image float32 (N, 3, 64, 64) -> {"boxes": (N, 64, 4) in 0..1, "scores": (N, 64, 5)}."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential()
        for into, out in ((3, 16), (16, 32), (32, 64)):
            self.backbone.append(nn.Conv2d(into, out, 3, stride=2, padding=1, bias=False))
            self.backbone.extend([nn.BatchNorm2d(out), nn.ReLU()])
        self.boxes = nn.Conv2d(64, 4, 1)
        self.scores = nn.Conv2d(64, 5, 1)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        cells = self.backbone(image)
        boxes = torch.sigmoid(self.boxes(cells).flatten(2).transpose(1, 2))
        scores = torch.sigmoid(self.scores(cells).flatten(2).transpose(1, 2))
        return {"boxes": boxes, "scores": scores}


class Overflow(nn.Module):
    """pixels float32 (N, 64) in 0..255 -> logits float32 (N, 10).

    Features are divided by their length, whose square is far above float16's largest number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.hidden(pixels))
        length = torch.sqrt((features * features).sum(1, keepdim=True) + 1.0)
        logits: torch.Tensor = self.head(features / length)
        return logits


class BadInt8(nn.Module):
    """image float32 (N, 1, 8, 8) in 0..1 -> logits float32 (N, 10).

    `members.py` makes one of the 64 features some thousand times the others, as in large language
    models: one INT8 scale for the whole tensor then leaves nothing of the other 63.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.dense1 = nn.Linear(32 * 4 * 4, 64)
        self.dense2 = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(image))
        x = F.relu(self.conv2(x)).flatten(1)
        x = F.relu(self.dense1(x))
        logits: torch.Tensor = self.head(F.relu(self.dense2(x)))
        return logits


class LinearStack(nn.Module):
    """x float32 (N, 8192) -> y float32 (N, 8192): ten layers, 2.7 GB of weights in float32."""

    def __init__(self, width: int = 8192, depth: int = 10) -> None:
        super().__init__()
        # Left as they lie in memory: the file's weights follow, and 0.7 G random numbers take long.
        layers = [nn.utils.skip_init(nn.Linear, width, width, bias=False) for _ in range(depth)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x
