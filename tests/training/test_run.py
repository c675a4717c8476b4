"""A run: its schedule, its checkpoint, its record, and what happens when something gives out."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.artefact import Artefact  # noqa: E402
from deploykit.core.errors import BadInput, MissingExtra, OutOfMemory, Unsupported  # noqa: E402
from deploykit.core.recipe import Split  # noqa: E402
from deploykit.engines.torch.open import load_module  # noqa: E402
from deploykit.training import loop  # noqa: E402
from deploykit.training import train as verb  # noqa: E402
from deploykit.training.checks import SCHEDULES  # noqa: E402
from deploykit.training.loop import KEY, VERSION, run_training  # noqa: E402
from deploykit.training.options import TrainingOptions  # noqa: E402
from tests.support.campaign import only_in_a_campaign  # noqa: E402
from tests.support.training import LINE, SPLITS, dropping, losses  # noqa: E402

pytestmark = pytest.mark.torch
CPU = TrainingOptions(device="cpu", epochs=4)
OWN_RECIPE = Path(__file__).parents[2] / "examples" / "own_recipe.py"


class StopError(Exception):
    """Ends a run in the test."""


def stop_after(epoch: int) -> Callable[[str, float], None]:
    def progress(text: str, _share: float) -> None:
        if text.startswith(f"epoch {epoch + 1}/"):
            raise StopError

    return progress


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_goes_on_equals_an_unbroken_one_bit_for_bit(
    tmp_path: Path, schedule: str
) -> None:
    """With dropout, whose random numbers go on too; stopped before the third epoch is kept."""
    recipe = replace(LINE, build=dropping, clip_norm=1.0, schedule=schedule)
    options = replace(CPU, checkpoint=tmp_path / "run.ckpt")
    unbroken = run_training(recipe, SPLITS, replace(options, checkpoint=None))
    with pytest.raises(StopError):
        run_training(recipe, SPLITS, options, on_progress=stop_after(2))
    torch.manual_seed(77)  # another process has another state
    resumed = run_training(recipe, SPLITS, options)
    assert losses(resumed) == losses(unbroken)
    for one, other in zip(
        unbroken.module.state_dict().values(), resumed.module.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    assert "went on after epoch 2" in resumed.notes[0]


def test_a_run_that_is_killed_while_it_saves_keeps_the_state_before(tmp_path: Path) -> None:
    """SIGKILL in the middle of torch.save, half of the file written."""
    path = tmp_path / "run.ckpt"
    program = f"""
import os, signal, torch
from pathlib import Path
from dataclasses import replace
from deploykit.training.loop import KEY, VERSION, run_training
from deploykit.training.options import TrainingOptions
from tests.support.campaign import only_in_a_campaign  # noqa: E402
from tests.support.training import LINE, SPLITS
save, count = torch.save, [0]
def killed(document, file):
    save(document, file)
    count[0] += 1
    if count[0] == 3:
        os.truncate(file.name, file.tell() // 2)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed
run_training(LINE, SPLITS, TrainingOptions(device="cpu", epochs=4, checkpoint=Path({str(path)!r})))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == -signal.SIGKILL
    resumed = run_training(LINE, SPLITS, replace(CPU, checkpoint=path))
    assert "went on after epoch 2" in resumed.notes[0]
    assert losses(resumed) == losses(run_training(LINE, SPLITS, CPU))


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Let no file grow beyond so many bytes; without limit again after the test."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_run_goes_on_where_the_disk_is_full_and_keeps_the_state_before(
    tmp_path: Path, full_disk: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    path, events = tmp_path / "run.ckpt", tmp_path / "events"
    options, before = replace(CPU, checkpoint=path), b""
    events.mkdir()

    def fill(text: str, _share: float) -> None:
        nonlocal before
        if text.startswith("epoch 3/"):
            before = path.read_bytes()
            full_disk(100)

    trained = run_training(LINE, SPLITS, replace(options, tensorboard=events), on_progress=fill)
    full_disk(-1)
    for file in (path, *events.iterdir()):
        note = f"epoch 4 is not saved: {file}: cannot be written: File too large"
        assert note in trained.notes
        assert note in caplog.messages
    assert {each.name for each in tmp_path.iterdir()} == {"run.ckpt", "events"}
    assert path.read_bytes() == before
    resumed = run_training(LINE, SPLITS, options)
    assert "went on after epoch 2" in resumed.notes[0]
    assert losses(resumed) == losses(trained) == losses(run_training(LINE, SPLITS, CPU))


@pytest.mark.parametrize("spare", [True, False])
def test_a_trained_model_whose_folder_is_gone_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: bool
) -> None:
    pytest.importorskip("sklearn")
    out, temporary = tmp_path / "out" / "m.pt", tmp_path / "temporary"
    out.parent.mkdir()
    temporary.mkdir()

    def lose(text: str, _share: float) -> None:
        if text.startswith("epoch 2/2") and out.parent.exists():
            out.parent.rmdir()
            monkeypatch.setattr(tempfile, "tempdir", str(temporary if spare else out))

    with pytest.raises(BadInput, match=r"m\.pt") as caught:
        verb.train(str(OWN_RECIPE), out, epochs=2, device="cpu", on_progress=lose)
    kept = list(temporary.rglob("m.pt"))
    assert len(kept) == spare
    for path in kept:
        assert str(path) in (caught.value.hint or "")
        manifest = Artefact(path).manifest
        assert manifest is not None
        assert manifest.evidence.training is not None
        load_module(path, arch=str(OWN_RECIPE))


def test_a_finished_run_is_lengthened_as_if_it_had_been_asked_at_first(tmp_path: Path) -> None:
    recipe = replace(LINE, build=dropping, schedule="constant")
    options = replace(CPU, checkpoint=tmp_path / "run.ckpt", patience=9)
    run_training(recipe, SPLITS, options)
    longer = run_training(recipe, SPLITS, replace(options, epochs=7))
    whole = run_training(recipe, SPLITS, replace(options, epochs=7, checkpoint=None))
    assert losses(longer) == losses(whole)
    for one, other in zip(longer.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(BadInput, match="its epochs is 7, here it is 6"):
        run_training(recipe, SPLITS, replace(options, epochs=6))


@pytest.mark.parametrize("schedule", sorted({*SCHEDULES} - {"constant"}))
def test_a_schedule_over_all_epochs_is_why_a_run_cannot_be_lengthened(
    tmp_path: Path, schedule: str
) -> None:
    recipe = replace(LINE, schedule=schedule)
    options = replace(CPU, checkpoint=tmp_path / "run.ckpt", epochs=1)
    run_training(recipe, SPLITS, options)
    with pytest.raises(BadInput, match="its epochs is 1, here it is 2") as refused:
        run_training(recipe, SPLITS, replace(options, epochs=2))
    assert f"the {schedule} schedule ends with epoch 1" in str(refused.value.hint)


def test_a_state_of_another_version_is_named(tmp_path: Path) -> None:
    options = replace(CPU, checkpoint=tmp_path / "run.ckpt", epochs=1)
    run_training(LINE, SPLITS, options)
    state = torch.load(options.checkpoint, weights_only=True)
    torch.save(state | {KEY: VERSION - 1}, options.checkpoint)
    with pytest.raises(BadInput, match=f"of version {VERSION - 1}, this deploykit reads"):
        run_training(LINE, SPLITS, options)


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    options = replace(CPU, checkpoint=tmp_path / "run.ckpt")
    first = run_training(LINE, SPLITS, options)
    changed = replace(LINE, loss=lambda y, _: (y * math.nan).sum())  # a step would end the run
    again = run_training(changed, SPLITS, options)
    assert torch.equal(first.module.weight, again.module.weight)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"options": {"seed": 5}}, "seed"),
        ({"options": {"batch_size": 7}}, "batch_size"),
        ({"name": "other"}, "recipe"),
        ({"options": {"learning_rate": 0.1}}, "learning_rate"),
        ({"splits": {"source": "elsewhere"}}, "data"),
        (
            {"splits": {"train": Split({"x": SPLITS.train.inputs["x"] + 1}, SPLITS.train.labels)}},
            "data",
        ),
        ({"splits": {"classes": ("left", "right")}}, "classes"),
    ],
    ids=str,
)
def test_the_checkpoint_of_another_run_is_refused(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    options = replace(CPU, checkpoint=tmp_path / "run.ckpt", epochs=1)
    run_training(LINE, SPLITS, options, name="line")
    data = replace(SPLITS, **changed.get("splits", {}))
    with pytest.raises(BadInput, match=f"another run: its {named}"):
        run_training(
            LINE,
            data,
            replace(options, **changed.get("options", {})),
            name=changed.get("name", "line"),
        )


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"PK\x03\x04" + bytes(50),
        {"weight": 3},
        {KEY: VERSION, "x": Evil()},
    ],
    ids=["empty", "text", "cut zip", "model", "code"],
)
def test_a_file_that_is_no_state_is_refused_and_kept(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "run.ckpt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(BadInput, match=r"run\.ckpt: (is not the state|the file is empty)"):
        run_training(LINE, SPLITS, replace(CPU, checkpoint=path))
    assert path.read_bytes() == before


def test_a_checkpoint_cut_at_any_place_is_refused(tmp_path: Path) -> None:
    options = replace(CPU, epochs=1, checkpoint=tmp_path / "run.ckpt")
    run_training(LINE, SPLITS, options)
    whole = (tmp_path / "run.ckpt").read_bytes()
    for size in range(1, len(whole), len(whole) // 12):
        (tmp_path / "run.ckpt").write_bytes(whole[:size])
        with pytest.raises(BadInput, match="not the state"):
            run_training(LINE, SPLITS, options)


def test_patience_ends_a_run_with_the_best_weights() -> None:
    """Above a rate of 0 the score moves; at 0 it never gets better than after the first epoch."""
    still = replace(LINE, learning_rate=1e-30)
    trained = run_training(still, SPLITS, replace(CPU, epochs=50, patience=3))
    assert len(trained.history) == 4
    assert "no better score" in trained.notes[0]
    assert "epoch 1" in trained.notes[1]


def test_the_weights_of_the_best_epoch_are_kept() -> None:
    """A schedule of a loss that turns round after epoch 3 makes each later epoch worse."""
    steps = [0]

    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        steps[0] += 1
        sign = 1.0 if steps[0] <= 30 else -1.0
        return sign * torch.nn.functional.cross_entropy(y, labels)

    trained = run_training(
        replace(LINE, loss=loss, schedule="constant"), SPLITS, replace(CPU, epochs=9, patience=5)
    )
    scores = [each["score"] for each in trained.history]
    assert scores[-1] < max(scores)
    assert trained.scores.mean() > 0.9


def test_gradients_are_clipped() -> None:
    norms = []

    def seen(optimiser: Any, *_: Any) -> None:
        grads = [p.grad.norm() for g in optimiser.param_groups for p in g["params"]]
        norms.append(float(torch.stack(grads).norm()))

    from torch.optim import optimizer

    handle = optimizer.register_optimizer_step_pre_hook(seen)
    try:
        run_training(replace(LINE, clip_norm=1e-3), SPLITS, replace(CPU, epochs=1))
    finally:
        handle.remove()
    assert len(norms) == 10
    assert max(norms) <= 1.001e-3


def test_half_precision_that_gives_no_finite_loss_falls_back_to_float32() -> None:
    """The loss is infinite wherever the logits come in bfloat16; weights are as without it."""

    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.cross_entropy(y.float(), labels)
        return found * (math.inf if y.dtype == torch.bfloat16 else 1.0)

    fragile = replace(LINE, loss=loss)
    trained = run_training(fragile, SPLITS, replace(CPU, amp="bf16"))
    plain = run_training(fragile, SPLITS, CPU)
    assert trained.notes[0].startswith("bfloat16 gave a loss of")
    assert torch.equal(trained.module.weight, plain.module.weight)
    assert (trained.figures["precision"], trained.figures["amp"]) == ("bfloat16", False)


def test_float16_overflow_skips_steps_and_is_counted() -> None:
    """The first loss scales carry the gradients out of float16; the scale falls until they fit."""
    loud = replace(LINE, loss=lambda y, z: torch.nn.functional.cross_entropy(y.float(), z) * 3e4)
    options = replace(CPU, amp="fp16", epochs=3)
    trained = run_training(loud, SPLITS, options)
    skipped = trained.figures["skipped_steps"]
    assert 0 < skipped < 30
    assert f"skipped {skipped} of 30 steps" in str(trained.notes)
    assert sum(each["skipped_steps"] for each in trained.history) == skipped


def with_batch_norm() -> torch.nn.Module:
    layers = torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    return torch.nn.Sequential(*layers)


def test_parts_of_a_batch_with_batch_norm_are_not_called_the_whole() -> None:
    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return fails(LACKS) if len(y) > 10 else torch.nn.functional.cross_entropy(y, labels)

    trained = run_training(replace(LINE, build=with_batch_norm, loss=loss), SPLITS, CPU)
    assert "in 2 parts, and BatchNorm normalises each alone" in trained.notes[0]


def test_a_note_says_that_this_cpu_has_no_half_precision() -> None:
    assert (
        "fp16 is much slower on a CPU"
        in run_training(LINE, SPLITS, replace(CPU, amp="fp16")).notes[0]
    )


@pytest.mark.parametrize(("fits", "parts"), [(5, 4), (3, 8)])
def test_a_batch_that_does_not_fit_is_computed_in_parts(fits: int, parts: int) -> None:
    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(y) > fits:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you ...")
        return torch.nn.functional.cross_entropy(y, labels)

    trained = run_training(replace(LINE, loss=loss), SPLITS, CPU)
    whole = run_training(LINE, SPLITS, CPU)
    assert f"in {parts} parts" in trained.notes[0]
    assert trained.module.weight.detach().numpy() == pytest.approx(
        whole.module.weight.detach().numpy(), abs=1e-5
    )


def fails(message: str) -> Any:
    raise RuntimeError(message)


LACKS = "DefaultCPUAllocator: can't allocate memory"


class Large(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training or len(x) < 3 else fails(LACKS)


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"loss": lambda *_: fails(LACKS)}, OutOfMemory, "single sample"),
        ({"build": lambda: Large(2, 2)}, OutOfMemory, "scoring 256 samples at once"),
        ({"loss": lambda *_: fails("shapes")}, BadInput, "shapes"),
    ],
    ids=["step", "score", "no lack"],
)
def test_too_little_memory_differs_from_other_errors(
    changed: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        run_training(replace(LINE, **changed), SPLITS, CPU)


@pytest.mark.parametrize("split", ["train", "calibration", "test"])
@pytest.mark.parametrize("label", [-1, 2])
def test_labels_that_are_no_class_are_refused(split: str, label: int) -> None:
    part = getattr(SPLITS, split)
    labels = np.where(np.arange(len(part.labels)) == 3, label, part.labels)
    with pytest.raises(BadInput, match=f"its {split} data have labels from"):
        run_training(LINE, replace(SPLITS, **{split: replace(part, labels=labels)}), CPU)


def test_no_training_data_is_refused() -> None:
    nothing = replace(SPLITS.train, inputs={"x": np.zeros((0, 2), np.float32)}, labels=np.zeros(0))
    with pytest.raises(BadInput, match="no training data"):
        run_training(LINE, replace(SPLITS, train=nothing), CPU)


@pytest.mark.parametrize(
    ("recipe", "options", "named"),
    [
        ({"clip_norm": 0.0}, {}, "clip_norm"),
        ({"clip_norm": math.nan}, {}, "clip_norm"),
        ({"schedule": "cosin"}, {}, "schedule"),
        ({}, {"epochs": 0}, "epochs"),
        ({}, {"batch_size": -1}, "batch_size"),
        ({}, {"patience": 0}, "patience"),
        ({}, {"amp": "fp8"}, "amp"),
        ({}, {"seed": 2**64}, "seed"),
        ({}, {"unfreeze": 0.5}, "unfreeze`: this recipe has no frozen backbone"),
        *(
            ({"backbone": ("a", "b")}, {"unfreeze": x}, "unfreeze")
            for x in (0.0, -1.0, 2.0, math.nan)
        ),
    ],
    ids=str,
)
def test_wrong_options_are_named(
    recipe: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadInput, match=f"`{named}"):
        run_training(replace(LINE, **recipe), SPLITS, replace(CPU, **options))


def test_the_verb_passes_every_option_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a value that is not its default."""
    given: dict[str, Any] = dict.fromkeys(("epochs", "batch_size", "seed", "patience"), 7)
    given |= dict.fromkeys(("compile", "fsdp", "augment"), True) | {"tf32": False}
    given |= {"amp": "bf16", "device": "cpu", "learning_rate": 0.5, "unfreeze": 0.25}
    given |= {"checkpoint": tmp_path / "c.ckpt", "tensorboard": tmp_path / "t"}
    assert {each.name for each in fields(TrainingOptions)} == set(given)
    seen = []
    monkeypatch.setattr(loop, "run_training", lambda *found, **_: seen.append(found[2]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        verb.train(str(OWN_RECIPE), tmp_path / "m.pt", **given)
    assert seen == [TrainingOptions(**given)]


@only_in_a_campaign
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own
def test_compile_gives_the_same_answers() -> None:
    options = replace(CPU, epochs=1)
    plain = run_training(LINE, SPLITS, options)
    compiled = run_training(LINE, SPLITS, replace(options, compile=True))
    assert compiled.figures["compile"]
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    assert list(compiled.module.state_dict()) == ["weight", "bias"]


def test_the_figures_name_what_the_run_used() -> None:
    figures = run_training(LINE, SPLITS, CPU).figures
    assert figures["threads"] == torch.get_num_threads()
    assert not figures["tf32"]  # of a GPU
    assert [each["epoch"] for each in figures["history"]] == [1, 2, 3, 4]
    assert figures["history"][-1]["learning_rate"] < 1e-9


def test_event_files_hold_the_history(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained = run_training(LINE, SPLITS, replace(CPU, tensorboard=tmp_path / "events"))
    read = EventAccumulator(str(tmp_path / "events"))
    read.Reload()
    assert [each.value for each in read.Scalars("loss")] == pytest.approx(losses(trained))
    assert [each.step for each in read.Scalars("score")] == [1, 2, 3, 4]


def test_a_missing_tensorboard_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises((MissingExtra, Unsupported)) as caught:
        run_training(LINE, SPLITS, replace(CPU, tensorboard=tmp_path))
    assert "[tensorboard]" in str(caught.value.hint)
