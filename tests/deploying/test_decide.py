"""How a device starts, by what its cache holds."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from deploykit.deploying.slots import MAX_TRIES, CacheState, EngineKey, decide

KEY = EngineKey("m", "0" * 64, "cpu", "1,8,32", "tensorrt 10.3.0", "aarch64", sm_count=8)
OTHER = replace(KEY, driver="540.5.0")
A, B = f"a-{KEY.digest}", f"b-{OTHER.digest}"
GIVEN_UP = CacheState("m", A, OTHER.digest, MAX_TRIES, "no memory")


def test_an_empty_cache_builds() -> None:
    step = decide(CacheState(), KEY, {})
    assert (step.do, step.slot) == ("build", A)


def test_an_engine_of_the_same_key_starts() -> None:
    assert decide(CacheState("m", A), KEY, {A: KEY}).do == "start"


def test_the_other_slot_starts_without_a_build_when_its_key_is_back() -> None:
    step = decide(CacheState("m", A), OTHER, {A: KEY, B: OTHER})
    assert (step.do, step.slot) == ("start", B)


@pytest.mark.parametrize("field", [each.name for each in fields(EngineKey)])
def test_any_difference_builds_into_the_slot_that_does_not_serve(field: str) -> None:
    value: object = 4 if field == "sm_count" else "other"
    wanted = replace(KEY, **{field: value})
    step = decide(CacheState("m", A), wanted, {A: KEY})
    assert step.do == "build"
    assert step.slot == f"b-{wanted.digest}" if wanted.may_replace(KEY) else step.slot
    assert field in step.why


def test_what_failed_is_not_built_again_while_another_engine_can_serve() -> None:
    step = decide(GIVEN_UP, OTHER, {A: KEY})
    assert (step.do, step.slot, step.why) == ("fall back", A, "no memory")
    assert decide(GIVEN_UP, OTHER, {}).do == "build"


@pytest.mark.parametrize("field", ["name", "runtime", "architecture", "gpu", "sm_count"])
def test_an_engine_of_another_model_or_device_never_replaces_one(field: str) -> None:
    value: object = 4 if field == "sm_count" else "other"
    foreign = replace(KEY, **{field: value})
    assert decide(GIVEN_UP, OTHER, {A: foreign}).do == "build"


def test_interrupted_builds_are_tried_a_few_times() -> None:
    state = CacheState("m", A)
    for _ in range(MAX_TRIES):
        assert decide(state, OTHER, {A: KEY}).do == "build"
        state = state.begin("m", OTHER.digest)
    step = decide(state, OTHER, {A: KEY})
    assert (step.do, step.slot) == ("fall back", A)
    assert "begun 3 times" in step.why


def test_an_engine_that_never_became_ready_gives_way_to_the_one_before() -> None:
    state = replace(GIVEN_UP, active=B)
    step = decide(state, OTHER, {A: KEY, B: OTHER})
    assert (step.do, step.slot) == ("fall back", A)
    assert decide(state.confirm(), OTHER, {A: KEY, B: OTHER}).do == "start"


def test_another_key_has_tries_of_its_own() -> None:
    newer = replace(KEY, deploykit="9")
    assert decide(GIVEN_UP, newer, {A: KEY}).do == "build"
    assert GIVEN_UP.begin("m", newer.digest).tries == 1


def test_a_build_never_goes_into_the_slot_that_may_serve_instead() -> None:
    newer = replace(KEY, deploykit="9")
    for active, kept in ((A, "a"), (B, "b")):
        step = decide(CacheState("m", active), newer, {A: KEY, B: OTHER})
        assert step.do == "build"
        assert step.slot[0] != kept
