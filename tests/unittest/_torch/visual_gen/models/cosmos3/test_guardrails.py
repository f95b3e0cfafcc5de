# SPDX-License-Identifier: Apache-2.0
"""Guardrails: loaded or not, what passes through them, and what of a blocked request leaves."""

import asyncio
import json
import shutil
import sys

import pytest
import torch

from tensorrt_llm import VisualGen, VisualGenArgs, VisualGenParams
from tensorrt_llm._torch.visual_gen.models.cosmos3 import guardrails as guardrails_module
from tensorrt_llm._torch.visual_gen.models.cosmos3.guardrails import (
    GUARDRAILS_OFF,
    CosmosGuardrails,
    MissingGuardrails,
    guard_pixels,
    guard_texts,
    load_guardrails,
    require_guardrails,
)
from tensorrt_llm.visual_gen import RequestBlockedError
from tests.support.cosmos3_requests import NEGATIVE, resolve
from tests.support.fake_cosmos_guardrail import UNSAFE, CosmosSafetyChecker, package

CPU = torch.device("cpu")
ASKS = {"enable_safety_checker": True}
GUARDED = resolve(extra_params={"use_guardrails": True})
UNGUARDED = resolve(extra_params={"use_guardrails": False})


class Double:
    """Guardrails that note what they see and block what they are told to."""

    def __init__(self, text=None, frames=None, result=None):
        self.bad_text, self.bad_frames, self.result = text, frames, result
        self.texts, self.seen = [], []

    def check_text(self, text):
        self.texts.append(text)
        if text == self.bad_text:
            raise RequestBlockedError("unsafe text")

    def check_frames(self, frames):
        self.seen.append(frames)
        if len(self.seen) - 1 == self.bad_frames:
            raise RequestBlockedError("unsafe frames")
        return frames // 2 if self.result is None else self.result


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.delenv(GUARDRAILS_OFF, raising=False)
    monkeypatch.setitem(sys.modules, "cosmos_guardrail", package())


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.delenv(GUARDRAILS_OFF, raising=False)
    monkeypatch.setitem(sys.modules, "cosmos_guardrail", None)


@pytest.mark.parametrize("index", [ASKS, {}])
def test_a_checkpoint_that_asks_or_says_nothing_gets_guardrails(installed, index):
    required, guardrails = load_guardrails(index, CPU)
    assert required and isinstance(guardrails, CosmosGuardrails)


def test_guardrails_that_cannot_be_loaded_are_still_required_and_the_log_says_why(
    not_installed, caplog
):
    required, guardrails = load_guardrails(ASKS, CPU)
    assert required and isinstance(guardrails, MissingGuardrails)
    assert "Guardrails can't be loaded" in caplog.text and GUARDRAILS_OFF in caplog.text


def test_weights_that_cannot_be_had_count_as_missing_guardrails(installed, monkeypatch):
    def gated(self):
        raise OSError("401: accept the license of the gated repository")

    monkeypatch.setattr(CosmosSafetyChecker, "__init__", gated)
    required, guardrails = load_guardrails(ASKS, CPU)
    assert required
    with pytest.raises(ValueError, match="401: accept the license"):
        require_guardrails(GUARDED, guardrails)


@pytest.mark.parametrize("switch", [True, False])
def test_guardrails_that_nobody_wants_are_not_loaded(installed, monkeypatch, switch):
    monkeypatch.setattr(CosmosSafetyChecker, "__init__", lambda self: pytest.fail("loaded"))
    if switch:
        monkeypatch.setenv(GUARDRAILS_OFF, "1")
    required, guardrails = load_guardrails({"enable_safety_checker": switch}, CPU)
    assert not required
    require_guardrails(UNGUARDED, guardrails)
    with pytest.raises(ValueError, match="unset" if switch else "enable_safety_checker true"):
        require_guardrails(GUARDED, guardrails)


def test_another_value_of_the_switch_than_1_switches_nothing_off(installed, monkeypatch):
    monkeypatch.setenv(GUARDRAILS_OFF, "0")
    assert load_guardrails(ASKS, CPU)[0]


def test_missing_guardrails_let_nothing_through(not_installed):
    _, guardrails = load_guardrails(ASKS, CPU)
    for check in (guardrails.check_text, guardrails.check_frames):
        with pytest.raises(ValueError, match=f"pip install.*{GUARDRAILS_OFF}=1.*use_guardrails"):
            check(None)


def test_the_checker_is_on_the_device_for_a_check_alone():
    checker = CosmosSafetyChecker()
    guardrails = CosmosGuardrails(checker, torch.device("cuda:3"))
    guardrails.check_text("a towel")
    with pytest.raises(RequestBlockedError):
        guardrails.check_text(UNSAFE)
    guardrails.check_frames(torch.zeros((1, 16, 16, 3), dtype=torch.uint8))
    assert checker.used_on == ["cuda:3"] * 3
    assert checker.devices == ["cuda:3", "cpu"] * 3


def test_the_prompt_and_the_callers_negative_prompt_are_checked():
    double = Double()
    guard_texts(resolve("a", extra_params={"use_guardrails": True}), double, NEGATIVE)
    assert double.texts == ["a"]
    own = resolve("a", negative_prompt="b", extra_params={"use_guardrails": True})
    guard_texts(own, double, NEGATIVE)
    assert double.texts == ["a", "a", "b"]


def test_a_blocked_text_is_named_and_not_repeated():
    own = resolve("aa", negative_prompt="bbbb", extra_params={"use_guardrails": True})
    for field, text in (("prompt", "aa"), ("negative_prompt", "bbbb")):
        with pytest.raises(RequestBlockedError, match=f"where: {field}") as error:
            guard_texts(own, Double(text=text), NEGATIVE)
        assert isinstance(error.value, ValueError) and text not in str(error.value)


def test_what_the_guardrails_give_back_is_what_leaves():
    pixels = torch.randint(0, 255, (2, 3, 4, 5, 3), dtype=torch.uint8)
    double = Double()
    assert torch.equal(guard_pixels(GUARDED, double, pixels), pixels // 2)
    assert [tuple(frames.shape) for frames in double.seen] == [(3, 4, 5, 3)] * 2


def test_one_blocked_result_blocks_all():
    pixels = torch.zeros((3, 1, 4, 5, 3), dtype=torch.uint8)
    with pytest.raises(RequestBlockedError, match="where: result 1"):
        guard_pixels(GUARDED, Double(frames=1), pixels)


@pytest.mark.parametrize(
    "result", [torch.zeros((2, 4, 5, 3), dtype=torch.uint8), torch.zeros((1, 4, 5, 3))]
)
def test_frames_of_another_shape_or_type_do_not_leave(result):
    pixels = torch.zeros((1, 1, 4, 5, 3), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="changed the shape"):
        guard_pixels(GUARDED, Double(result=result), pixels)


def test_an_unguarded_request_passes_by():
    double, pixels = Double(), torch.zeros((1, 1, 4, 5, 3), dtype=torch.uint8)
    guard_texts(UNGUARDED, double, NEGATIVE)
    assert guard_pixels(UNGUARDED, double, pixels) is pixels
    assert not double.texts and not double.seen


def test_importing_loads_nothing_of_the_package():
    assert "cosmos_guardrail" not in vars(guardrails_module)


def small(**values) -> VisualGenParams:
    size = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 2, "seed": 0}
    return VisualGenParams(**size | values)


@pytest.fixture(scope="module")
def asking_checkpoint(tiny_fp8_checkpoint, tmp_path_factory):
    """The tiny checkpoint as a published one: it asks for guardrails."""
    path = shutil.copytree(tiny_fp8_checkpoint, tmp_path_factory.mktemp("guarded") / "checkpoint")
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | ASKS))
    return path


def load(path) -> VisualGen:
    return VisualGen(str(path), VisualGenArgs(compilation_config={"skip_warmup": True}))


@pytest.mark.cosmos3
def test_without_guardrails_the_checkpoint_loads_and_the_request_stops(
    asking_checkpoint, not_installed
):
    with load(asking_checkpoint) as visual_gen:
        message = f"cosmos_guardrail.*pip install.*{GUARDRAILS_OFF}=1.*use_guardrails False"
        with pytest.raises(ValueError, match=message):
            visual_gen.generate_async("a towel", small())  # refused before it is queued
        off = small(extra_params={"use_guardrails": False})
        assert visual_gen.generate("a towel", off).image.shape == (32, 32, 3)


@pytest.mark.cosmos3
def test_without_guardrails_a_checkpoint_that_asks_for_them_is_warmed_up(
    asking_checkpoint, not_installed
):
    options = {"resolutions": [(32, 32)], "num_frames": [1, 5]}
    VisualGen(str(asking_checkpoint), VisualGenArgs(compilation_config=options)).shutdown()


@pytest.mark.cosmos3
def test_the_switch_takes_the_checks_upon_the_operator(asking_checkpoint, monkeypatch):
    monkeypatch.setenv(GUARDRAILS_OFF, "1")
    with load(asking_checkpoint) as visual_gen:
        output = visual_gen.generate("a towel", small())
    assert output.metadata["request"]["extra_params"]["use_guardrails"] is False


@pytest.mark.cosmos3
def test_a_guarded_run(asking_checkpoint, installed, monkeypatch):
    with load(asking_checkpoint) as visual_gen:
        checker = visual_gen._pipeline.components.guardrails._checker
        output = visual_gen.generate("a towel", small())
        assert output.metadata["request"]["extra_params"]["use_guardrails"] is True
        assert checker.texts == ["a towel"] and checker.frames[0].shape == (1, 32, 32, 3)
        assert checker.frames[0][0, :8, :8].any()
        assert not output.image[:8, :8].any() and output.image[8:].any()

        denoised = []
        monkeypatch.setattr(visual_gen._pipeline, "denoise", lambda *a, **k: denoised.append(a))
        with pytest.raises(RequestBlockedError, match="where: prompt"):
            visual_gen.generate(f"a {UNSAFE} thing", small())
        assert not denoised
        monkeypatch.undo()

        checker.blocks_frames = True
        with pytest.raises(RequestBlockedError, match="where: result 0"):
            visual_gen.generate("a towel", small())
        with pytest.raises(RequestBlockedError):
            asyncio.run(visual_gen.generate_async("a towel", small()).aresult())
        (item,) = visual_gen.generate(["a towel"], small())
        assert item.error.startswith("The guardrails blocked the request")
        assert item.image is None and item.video is None and not item.metadata
