"""How a device starts, by what its cache holds."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from deploykit.deploying.slots import MAX_TRIES, CacheState, EngineKey, decide

KEY = EngineKey("m", "0" * 64, "cpu", "1,8,32", "tensorrt 10.3.0", "aarch64", sm_count=8)
OTHER = replace(KEY, driver="540.5.0")
NEWER = replace(KEY, deploykit="9")
A, B = f"a-{KEY.digest}", f"b-{OTHER.digest}"
FAILED = CacheState("m", A, OTHER.digest, MAX_TRIES, "no memory")  # the build of OTHER

STEPS = {
    "an empty cache": (CacheState(), KEY, {}, "build", "a"),
    "the same key": (CacheState("m", A), KEY, {A: KEY}, "start", "a"),
    "the key of the other slot": (CacheState("m", A), OTHER, {A: KEY, B: OTHER}, "start", "b"),
    "what failed, and another can serve": (FAILED, OTHER, {A: KEY}, "fall back", "a"),
    "what failed, and none can serve": (FAILED, OTHER, {}, "build", ""),
    "another key has tries of its own": (FAILED, NEWER, {A: KEY}, "build", "b"),
    "it never became ready": (
        replace(FAILED, active=B),
        OTHER,
        {A: KEY, B: OTHER},
        "fall back",
        "a",
    ),
    "it became ready": (
        replace(FAILED, active=B).confirm(),
        OTHER,
        {A: KEY, B: OTHER},
        "start",
        "b",
    ),
    "not into the slot that serves, a": (
        CacheState("m", A),
        NEWER,
        {A: KEY, B: OTHER},
        "build",
        "b",
    ),
    "not into the slot that serves, b": (
        CacheState("m", B),
        NEWER,
        {A: KEY, B: OTHER},
        "build",
        "a",
    ),
}


@pytest.mark.parametrize(("state", "key", "slots", "do", "slot"), STEPS.values(), ids=STEPS)
def test_a_start_builds_or_uses_a_slot(
    state: CacheState, key: EngineKey, slots: dict[str, EngineKey], do: str, slot: str
) -> None:
    step = decide(state, key, slots)
    assert (step.do, step.slot.startswith(slot)) == (do, True)
    assert do != "fall back" or step.why == "no memory"


@pytest.mark.parametrize("field", [each.name for each in fields(EngineKey)])
def test_any_difference_builds_and_an_engine_of_another_device_never_replaces_one(
    field: str,
) -> None:
    value: object = 4 if field == "sm_count" else "other"
    wanted = replace(KEY, **{field: value})
    step = decide(CacheState("m", A), wanted, {A: KEY})
    assert (step.do, field in step.why) == ("build", True)
    alike = ("name", "runtime", "architecture", "gpu", "sm_count", "compute_capability")
    foreign = field in alike
    assert wanted.may_replace(KEY) is not foreign
    assert foreign or step.slot == f"b-{wanted.digest}"
    fallback = decide(FAILED, OTHER, {A: wanted}).do
    assert fallback == "build" if foreign else fallback == "fall back"


def test_interrupted_builds_are_tried_a_few_times() -> None:
    state = CacheState("m", A)
    for _ in range(MAX_TRIES):
        assert decide(state, OTHER, {A: KEY}).do == "build"
        state = state.begin("m", OTHER.digest)
    step = decide(state, OTHER, {A: KEY})
    assert (step.do, step.slot) == ("fall back", A)
    assert "begun 3 times" in step.why
    assert state.begin("m", NEWER.digest).tries == 1
