"""The training loop on a tiny recipe: its schedule, checkpoint and record, and what gives out."""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, OutOfMemory, Unsupported
from deploykit.core.recipe import Split
from deploykit.engines.torch.open import load_module
from deploykit.training import loop
from deploykit.training import train as verb
from deploykit.training.loop import KEY, VERSION, run_training, score_module, use_tf32
from deploykit.training.options import SCHEDULES, Trained, TrainingOptions, choose_device
from tests.support.campaign import only_in_a_campaign
from tests.support.training import LINE, SPLITS, losses

pytestmark = pytest.mark.torch
CPU = TrainingOptions(device="cpu", epochs=4)
OWN_RECIPE = Path(__file__).parents[2] / "examples" / "own_recipe.py"


def same_weights(one: Trained, other: Trained) -> bool:
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("amp", "precision"), [("off", "float32"), ("bf16", "bfloat16")])
def test_training_learns(amp: str, precision: str) -> None:
    shares: list[float] = []
    options = replace(CPU, epochs=10, amp=amp)
    trained = run_training(LINE, SPLITS, options, on_progress=lambda _, s: shares.append(s))
    before = score_module(LINE.build(), LINE, SPLITS.test).mean()
    assert trained.scores.mean() > 0.95 > before
    assert not trained.module.training
    assert (shares == sorted(shares), shares[-1]) == (True, 1.0)
    figures = trained.figures
    assert (figures["precision"], figures["train_samples"]) == (precision, 200)
    assert (figures["threads"], figures["tf32"]) == (torch.get_num_threads(), False)
    assert [each["epoch"] for each in figures["history"]] == list(range(1, 11))
    assert figures["history"][-1]["learning_rate"] < 1e-9


def test_the_same_seed_gives_the_same_weights_and_another_does_not() -> None:
    first, again, other = (run_training(LINE, SPLITS, replace(CPU, seed=s)) for s in (1, 1, 2))
    assert same_weights(first, again)
    assert not same_weights(first, other)


def test_training_starts_from_given_weights(tmp_path: Path) -> None:
    weights = {"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)}
    torch.save(weights, tmp_path / "net.pt")
    options = replace(CPU, weights=tmp_path / "net.pt")
    trained = run_training(replace(LINE, learning_rate=1e-30), SPLITS, options)
    assert torch.equal(trained.module.weight, weights["weight"])


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    broken = replace(LINE, loss=lambda y, _: (y * math.nan).sum())
    for amp, where in (("off", "epoch 1$"), ("bf16", "in mixed precision and in float32")):
        with pytest.raises(Unsupported, match=f"diverged: .* {where}"):
            run_training(broken, SPLITS, replace(CPU, amp=amp))


@pytest.mark.parametrize(("name", "error"), [("cuda", Unsupported), ("tpu", BadInput)])
def test_a_device_that_is_not_there_is_refused(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=name):
        choose_device(name)


def dropping() -> torch.nn.Module:
    layers = torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 2)
    return torch.nn.Sequential(*layers)


def stop(text: str, _share: float) -> None:
    if text.startswith("epoch 3/"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_goes_on_equals_an_unbroken_one_bit_for_bit(
    tmp_path: Path, schedule: str
) -> None:
    """With dropout, whose random numbers go on too; stopped before the third epoch is kept."""
    recipe = replace(LINE, build=dropping, clip_norm=1.0, schedule=schedule)
    options = replace(CPU, checkpoint=tmp_path / "run.ckpt")
    unbroken = run_training(recipe, SPLITS, CPU)
    with pytest.raises(KeyboardInterrupt):
        run_training(recipe, SPLITS, options, on_progress=stop)
    torch.manual_seed(77)  # another process has another state
    resumed = run_training(recipe, SPLITS, options)
    assert losses(resumed) == losses(unbroken)
    assert same_weights(resumed, unbroken)
    assert "went on after epoch 2" in resumed.notes[0]
    diverging = replace(recipe, loss=lambda y, _: (y * math.nan).sum())
    assert same_weights(run_training(diverging, SPLITS, options), unbroken)  # nothing is repeated


def test_a_run_that_is_killed_while_it_saves_keeps_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SIGKILL leaves on the disk when half of the third state is written."""
    folder, left, saved = tmp_path / "run", tmp_path / "left", []
    folder.mkdir()

    def half(document: Any, file: Any) -> None:
        save(document, file)
        saved.append(file)
        if len(saved) == 3:
            file.truncate(file.tell() // 2)
            shutil.copytree(folder, left)
            raise KeyboardInterrupt

    save = torch.save
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        run_training(LINE, SPLITS, replace(CPU, checkpoint=folder / "run.ckpt"))
    assert len(list(left.iterdir())) == 2
    resumed = run_training(LINE, SPLITS, replace(CPU, checkpoint=left / "run.ckpt"))
    assert "went on after epoch 2" in resumed.notes[0]


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


def test_a_run_of_a_constant_rate_is_lengthened_as_if_it_had_been_asked_at_first(
    tmp_path: Path,
) -> None:
    recipe = replace(LINE, build=dropping, schedule="constant")
    options = replace(CPU, checkpoint=tmp_path / "run.ckpt", patience=9)
    run_training(recipe, SPLITS, options)
    longer = run_training(recipe, SPLITS, replace(options, epochs=7))
    whole = run_training(recipe, SPLITS, replace(options, epochs=7, checkpoint=None))
    assert losses(longer) == losses(whole)
    assert same_weights(longer, whole)
    with pytest.raises(BadInput, match="its epochs is 7, here it is 6"):
        run_training(recipe, SPLITS, replace(options, epochs=6))
    options = replace(CPU, checkpoint=tmp_path / "cosine.ckpt")
    run_training(LINE, SPLITS, options)
    with pytest.raises(BadInput, match="its epochs is 4, here it is 5") as caught:
        run_training(LINE, SPLITS, replace(options, epochs=5))  # cosine ends with them
    assert "schedule='constant'" in (caught.value.hint or "")


OTHER_DATA = Split({"x": SPLITS.train.inputs["x"] + 1}, SPLITS.train.labels)


@pytest.mark.parametrize(
    ("options", "splits", "name", "reason"),
    [
        ({"seed": 5}, {}, "line", "seed"),
        ({}, {"train": OTHER_DATA}, "line", "data"),
        ({}, {"classes": ("left", "right")}, "line", "classes"),
        ({}, {}, "other", "recipe"),
    ],
    ids=str,
)
def test_the_checkpoint_of_another_run_is_refused(
    tmp_path: Path, options: dict[str, Any], splits: dict[str, Any], name: str, reason: str
) -> None:
    kept = replace(CPU, checkpoint=tmp_path / "run.ckpt", epochs=1)
    run_training(LINE, SPLITS, kept, name="line")
    with pytest.raises(BadInput, match=f"another run: its {reason}"):
        run_training(LINE, replace(SPLITS, **splits), replace(kept, **options), name=name)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04" + bytes(50), "is not the state"),
        ({"weight": 3}, "is not the state of a training run: it was not written by"),
        ({KEY: VERSION - 1}, "is not the state of a training run: .* of another version"),
        ({KEY: VERSION, "x": Evil()}, "is not the state"),
    ],
    ids=["empty", "cut zip", "model", "version", "code"],
)
def test_a_file_that_is_no_state_is_refused_and_kept(
    tmp_path: Path, content: Any, reason: str
) -> None:
    path = tmp_path / "run.ckpt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(BadInput, match=rf"run\.ckpt: {reason}"):
        run_training(LINE, SPLITS, replace(CPU, checkpoint=path))
    assert path.read_bytes() == before


def test_patience_ends_a_run_with_the_best_weights() -> None:
    """A loss that turns round after epoch 3 makes each later epoch worse."""
    steps = [0]

    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        steps[0] += 1
        return LINE.loss(y, labels) * (1.0 if steps[0] <= 30 else -1.0)

    turning = replace(LINE, loss=loss, schedule="constant")
    trained = run_training(turning, SPLITS, replace(CPU, epochs=50, patience=6))
    scores = [each["score"] for each in trained.history]
    assert len(scores) < 50
    assert scores[-1] < 0.5 < 0.9 < trained.scores.mean()
    assert "no better score" in trained.notes[0]
    assert f"epoch {scores.index(max(scores)) + 1}" in trained.notes[1]


def test_half_precision_that_gives_no_finite_loss_falls_back_to_float32(tmp_path: Path) -> None:
    """The loss is infinite wherever the logits come in bfloat16; weights are as without it."""

    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.cross_entropy(y.float(), labels)
        return found * (math.inf if y.dtype == torch.bfloat16 else 1.0)

    fragile = replace(LINE, loss=loss)
    options = replace(CPU, amp="bf16", checkpoint=tmp_path / "run.ckpt")
    trained, again = (run_training(fragile, SPLITS, options) for _ in range(2))
    assert not again.figures["amp"]  # which goes on from the end of the first
    plain = run_training(fragile, SPLITS, CPU)
    assert trained.notes[0].startswith("bfloat16 gave a loss of")
    assert torch.equal(trained.module.weight, plain.module.weight)
    assert (trained.figures["precision"], trained.figures["amp"]) == ("bfloat16", False)


def test_float16_overflow_skips_steps_and_is_counted() -> None:
    """The first loss scales carry the gradients out of float16; the scale falls until they fit."""
    loud = replace(LINE, loss=lambda y, z: torch.nn.functional.cross_entropy(y.float(), z) * 3e4)
    trained = run_training(loud, SPLITS, replace(CPU, amp="fp16", epochs=3))
    skipped = trained.figures["skipped_steps"]
    assert 0 < skipped < 30
    assert "fp16 is much slower on a CPU" in trained.notes[0]
    assert f"skipped {skipped} of 30 steps" in str(trained.notes)
    assert sum(each["skipped_steps"] for each in trained.history) == skipped


def fails(message: str) -> Any:
    raise RuntimeError(message)


LACKS = "[enforce fail] DefaultCPUAllocator: can't allocate memory"


class Large(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training or len(x) < 3 else fails(LACKS)


@pytest.mark.parametrize(
    ("changed", "error", "named"),
    [
        ({"loss": lambda *_: fails(LACKS)}, OutOfMemory, "on 20 samples, cpu: does not fit"),
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


def test_the_verb_passes_every_option_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = dict.fromkeys(("epochs", "batch_size", "seed", "patience"), 7)
    given |= dict.fromkeys(("compile", "fsdp", "augment"), True) | {"tf32": False}
    given |= {"amp": "bf16", "device": "cpu", "learning_rate": 0.5, "unfreeze": 0.25}
    given |= {"checkpoint": tmp_path / "c.ckpt", "tensorboard": tmp_path / "t"}
    given["weights"] = tmp_path / "w.pt"
    given["weights"].write_bytes(b"any")
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


def test_event_files_hold_the_history(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained = run_training(LINE, SPLITS, replace(CPU, tensorboard=tmp_path / "events"))
    read = EventAccumulator(str(tmp_path / "events"))
    read.Reload()
    assert [each.value for each in read.Scalars("loss")] == pytest.approx(losses(trained))
    assert [each.step for each in read.Scalars("score")] == [1, 2, 3, 4]


def test_gradients_are_clipped() -> None:
    norms = []

    def note(optimiser: Any, *_: Any) -> None:
        grads = [p.grad.norm() for g in optimiser.param_groups for p in g["params"]]
        norms.append(float(torch.stack(grads).norm()))

    handle = optimizer.register_optimizer_step_pre_hook(note)
    run_training(replace(LINE, clip_norm=1e-3), SPLITS, replace(CPU, epochs=1))
    handle.remove()
    assert (len(norms), max(norms) <= 1.001e-3) == (10, True)


@pytest.mark.parametrize("on", [False, True])
def test_torchs_newer_switch_of_tf32_comes_back(on: bool) -> None:
    """A recipe or a library may have set it: torch then refuses to read its older one."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    places: list[Any] = [matmul, cudnn.conv]
    before = [(each, "allow_tf32", each.allow_tf32) for each in (matmul, cudnn)]
    before += [(each, "fp32_precision", each.fp32_precision) for each in places]
    try:
        matmul.fp32_precision, cudnn.conv.fp32_precision = "tf32", "ieee"
        with use_tf32(on):
            assert {each.fp32_precision for each in places} == {"tf32" if on else "ieee"}
            assert matmul.allow_tf32 == cudnn.allow_tf32 == on
        assert [each.fp32_precision for each in places] == ["tf32", "ieee"]
    finally:
        for each, name, value in before:  # the older switch first, or an export cannot read it
            setattr(each, name, value)
