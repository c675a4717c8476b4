"""Where a run on a GPU puts its tensors: torch's fake and meta tensors stand in for the GPU's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from deploykit.core.recipe import Split  # noqa: E402
from deploykit.training import data as batches  # noqa: E402
from deploykit.training import distributed  # noqa: E402
from deploykit.training.data import (  # noqa: E402
    Augmentation,
    Batches,
)
from deploykit.training.distributed import Processes, parallel  # noqa: E402
from deploykit.training.options import choose_device  # noqa: E402

pytestmark = pytest.mark.torch
SPLIT = Split({"x": np.zeros((8, 3), np.float32)}, np.zeros(8, np.int64))
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(name="pinned")
def pinned_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The device of each tensor that was pinned. torch sees a GPU, whose memory is META."""
    found: list[Any] = []

    def pin(tensor: Any) -> Any:
        found.append(tensor.device)
        assert tensor.device == CPU, f"torch cannot pin a tensor on {tensor.device}"
        return tensor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(batches, "WaitClock", lambda _device: nullcontext())
    return found


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:1"])
def test_data_on_the_gpu_are_not_copied_again(name: str, pinned: list[Any]) -> None:
    """A run's device has no index, or one, and its tensors always do."""
    made, device = Batches(SPLIT, META, 4, 0), choose_device(name)
    with FakeTensorMode():
        assert torch.empty(1, device=device).device.type == device.type == "cuda"
    made.device = device
    (x, *_), labels, share = next(iter(made))
    assert (x.device, labels.device, share, pinned) == (META, META, 1.0, [])


def test_batches_that_the_cpu_augments_are_pinned_and_copied(pinned: list[Any]) -> None:
    augmentation = Augmentation(lambda images, _: images, 0, CPU)
    (x, *_), labels, _ = next(iter(Batches(SPLIT, META, 4, 0, None, augmentation)))
    assert (x.device, labels.device, pinned) == (META, META, [CPU, CPU])


def test_batches_for_the_cpu_are_not_pinned(pinned: list[Any]) -> None:
    (x, *_), labels, _ = next(iter(Batches(SPLIT, choose_device("cpu"), 4, 0)))
    assert (x.device, labels.device, pinned) == (CPU, CPU, [])


@pytest.mark.parametrize(
    ("name", "ids"), [("cuda:0", [0]), ("cuda:2", [2]), ("cuda", [1]), ("cpu", None)]
)
def test_a_process_is_joined_on_the_gpu_of_its_weights(
    name: str, ids: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has local rank 1, whose GPU is meant where no index is named."""
    asked: list[Any] = []
    monkeypatch.setattr(
        torch.nn.parallel,
        "DistributedDataParallel",
        lambda _module, device_ids: asked.append(device_ids),
    )
    module = torch.nn.Linear(2, 2)
    parallel(module, Processes(1, 2, local=1), torch.device(name), shard=False)
    assert asked == [ids]


def test_a_run_on_the_cpu_is_sharded_on_the_cpu_next_to_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        module = parallel(torch.nn.Linear(4, 2), Processes(0, 2), CPU, shard=True)
        assert module.weight.device_mesh.device_type == module.weight.device.type == "cpu"
    finally:
        dist.destroy_process_group()


class Layers(torch.nn.Module):
    """Blocks in a list, as transformers have them, in a module that holds most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Module()
        self.encoder.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.by_name = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8)})
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.ReLU())


@pytest.mark.parametrize("wrapped", [False, True])
def test_fsdp_gathers_the_blocks_inside_of_lists_and_wrappers(wrapped: bool) -> None:
    module = Layers()
    run = torch.nn.Sequential(module) if wrapped else module
    names = {part: name for name, part in module.named_modules()}
    found = [names[each] for each in distributed._blocks(run) if each in names]
    blocks = [f"encoder.layers.{n}" for n in range(3)] + ["by_name.a", "head.0", "head"]
    assert [each for each in found if each] == blocks  # "" is the whole


@pytest.mark.parametrize(("device", "kind"), [("cuda", "SyncBatchNorm"), ("cpu", "BatchNorm1d")])
def test_processes_on_gpus_share_the_statistics_of_batch_norm(
    device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda module, **_: module)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    found = parallel(module, Processes(0, 2), torch.device(device), shard=False)
    assert type(found[1]).__name__ == kind
