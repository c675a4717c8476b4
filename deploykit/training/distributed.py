"""Several processes that train one model: torchrun starts them, each has its part of every batch.

`torchrun --nproc-per-node 2 -m deploykit train …` gives each process its rank in variables; gloo
joins them on CPUs, nccl on GPUs. The gradients are averaged, so that a run gives the losses of a
single process with the same batch size where the loss is a mean over samples. BatchNorm is joined
on GPUs (SyncBatchNorm); on CPUs each process normalises its part by itself.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deploykit.core.errors import BadInput, Unsupported, first_line

_LIMIT = datetime.timedelta(minutes=30)  # the longest wait for another process


@dataclass(frozen=True)
class Processes:
    """The processes of a run: this one is number `rank` of `size`, `local` on its machine."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def share(self, value: Any) -> Any:
        found = [value]
        if self.size > 1:
            dist.broadcast_object_list(found, src=0)
        return found[0]


@contextlib.contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """Join the processes that torchrun started; without it this one alone. Raises BadInput."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Processes()
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    try:
        local = int(os.environ["LOCAL_RANK"])  # 0 for all would put them on one GPU
        if on_gpu and torch.cuda.is_available():
            if local >= (count := torch.cuda.device_count()):
                raise Unsupported(
                    f"process {local} of this machine has no GPU: it has {count}",
                    hint="start one process for each GPU",
                )
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_LIMIT)
    except (KeyError, ValueError) as exc:
        raise BadInput(
            f"WORLD_SIZE is set, but not all that torchrun sets: {first_line(exc)}",
            hint="torchrun --nproc-per-node N -m deploykit train …, or unset WORLD_SIZE",
        ) from exc
    except RuntimeError as exc:
        raise Unsupported(f"the processes cannot be joined: {first_line(exc)}") from exc
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), local)
        dist.barrier()  # gloo aborts a process whose peer has gone
    finally:
        gc.collect()  # the run's cycles hold the group: its threads would outlive the interpreter
        dist.destroy_process_group()


def parallel(run: torch.nn.Module, group: Processes, device: torch.device, *, shard: bool) -> Any:
    """Average gradients over the processes; `shard`: spread weights and the optimiser (FSDP2)."""
    if group.size == 1:
        if shard:
            raise BadInput("`fsdp` needs several processes", hint="start them with torchrun")
        return run
    if device.type == "cuda":  # on a CPU torch has no BatchNorm over processes
        joined: Any = torch.nn.SyncBatchNorm
        run = joined.convert_sync_batchnorm(run)
    if shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (group.size,))  # torch takes a GPU without it
        for block in dict.fromkeys(_blocks(run)):  # one may have two names
            fully_shard(block, mesh=mesh)
        return fully_shard(run, mesh=mesh)
    from torch.nn.parallel import DistributedDataParallel

    number = group.local if device.index is None else device.index
    return DistributedDataParallel(run, device_ids=[number] if device.type == "cuda" else None)


_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


def _blocks(run: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the parts of `run` and of lists, inner ones first: FSDP gathers one at a time.

    A module with a list inside would need the memory of all its weights if it was gathered whole.
    A ModuleList has no `forward` to gather it for.
    """
    for holder in reversed([*run.modules()]):
        if holder is run or isinstance(holder, _CONTAINERS):
            for part in holder.children():
                trains = any(each.requires_grad for each in part.parameters())
                if trains and type(part).forward is not torch.nn.Module.forward:
                    yield part


def whole_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the weights of a sharded module, whole, on the CPU; all processes call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(module, options=options))


def measure_scaling(
    run: Any, gradients: Callable[[], object], group: Processes, device: torch.device
) -> dict[str, float]:
    """Return what waiting for the others costs a step; `gradients` leaves the weights.

    `scaling_efficiency`: the time of a step of one process alone, over that with all.
    `communication_share`: the share of a step that goes away when gradients are not exchanged; both
    for the slowest process.
    """

    def median() -> float:
        times = []
        for _ in range(6):
            started = time.perf_counter()
            gradients()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])  # the first warms up

    with run.no_sync():
        gradients()  # by all: the first pass without the others' gradients shares buffers
        alone = median() if group.first else 0.0
        alone = group.share(alone)  # the others wait for it
        apart = max(group.gather(median()))
    together = max(group.gather(median()))
    return {
        "processes": group.size,
        "scaling_efficiency": round(min(1.0, alone / together), 4),
        "communication_share": round(max(0.0, 1.0 - apart / together), 4),
        "step_alone_ms": round(alone * 1e3, 3),
        "step_ms": round(together * 1e3, 3),
    }
