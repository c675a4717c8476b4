"""Give a module of the zoo weights with the statistics of a trained one.

Random weights as the libraries leave them are no test of a precision: deep networks answer nearly
the same to every input, some answer 0, and batch norms have seen no data. The module is changed in
place and left in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

LOGIT_SPREAD = 3.0  # a trained classifier's logits differ by about this much between images


@dataclass(frozen=True)
class Labelled:
    """One split: `x` shape (samples, ...), `labels` int64 (samples,)."""

    x: np.ndarray
    labels: np.ndarray


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What `build` makes under a fixed seed, in eval mode; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


def fan_in(module: nn.Module, _: object = None) -> None:
    """Linear layers with variance 1/inputs, so that a signal keeps its size on the way."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("layer_scale"):  # ConvNeXt starts its blocks at 1e-6: as if absent
                parameter.fill_(0.3)
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(std=layer.in_features**-0.5, generator=random)


def batch_norms(module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Set every batch norm's running statistics to those of `inputs`."""
    norms = [
        layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average
        norm.train()
    with torch.no_grad():
        module(*inputs)
    module.eval()


def spread_logits(module: nn.Module, head: str, inputs: Sequence[torch.Tensor]) -> None:
    """Make the logits of the last Linear, `head`, differ between inputs: no class is ahead."""
    layer = module.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    seen: list[torch.Tensor] = []
    hook = layer.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    with torch.no_grad():
        module(*inputs)
        hook.remove()
        layer.weight.normal_(generator=torch.Generator().manual_seed(1))
        layer.weight.mul_(LOGIT_SPREAD / F.linear(seen[0], layer.weight).std(0).mean())
        layer.bias.copy_(-F.linear(seen[0], layer.weight).mean(0))


def fit(module: nn.Module, data: Labelled, *, epochs: int, rate: float, noise: float = 0.0) -> None:
    """Train a small classifier on the CPU; `noise`: the deviation of what its inputs get added."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other on layers this small
    x, labels = torch.from_numpy(data.x), torch.from_numpy(data.labels)
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    module.train()
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - epoch / epochs)
        for index in torch.split(torch.randperm(len(labels), generator=random), 50):
            batch = x[index]
            if noise:
                batch = batch + noise * torch.randn(batch.shape, generator=random)
            optimizer.zero_grad()
            F.cross_entropy(module(batch), labels[index]).backward()
            optimizer.step()
    module.eval()
    torch.set_num_threads(threads)


def massive_feature(module: nn.Module, before: str, after: str, size: float) -> None:
    """Let feature 0 of layer `before` be `size` for every input, and `after` read a bias from it.

    What the network computes in float32 stays the same but for the feature that is given up.
    """
    source, reader = module.get_submodule(before), module.get_submodule(after)
    assert isinstance(source, nn.Linear)
    assert isinstance(reader, nn.Linear)
    with torch.no_grad():
        source.weight[0] = 0
        source.bias[0] = size
        share = torch.randn(reader.out_features, generator=torch.Generator().manual_seed(2)) * 2
        reader.weight[:, 0] = share / size
        reader.bias.sub_(share)
