# SPDX-License-Identifier: Apache-2.0
"""Step precision: which Linear a controller governs, what it binds, and installing again."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from tensorrt_llm._torch.modules.linear import (
    FP8QDQLinearMethod,
    Linear,
    W8A16FP8LinearMethod,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import (
    StepPrecisionController,
    install_step_precision,
    uninstall_step_precision,
)
from tensorrt_llm.models.modeling_utils import QuantConfig


def fp8_linear(**kwargs):
    return Linear(16, 16, quant_config=QuantConfig(quant_algo="FP8"), **kwargs)


def tower(size=3):
    return nn.ModuleList(nn.Sequential(fp8_linear(), fp8_linear()) for _ in range(size))


def linears(*roots):
    return [m for root in roots for m in root.modules() if isinstance(m, Linear)]


def is_w8a16(root):
    """The mode that every Linear under the root has; a mixture fails."""
    modes = {isinstance(linear.quant_method, W8A16FP8LinearMethod) for linear in linears(root)}
    assert len(modes) == 1, "some linears run W8A16 and some do not"
    return modes.pop()


# --- binding ------------------------------------------------------------------------------------


def test_reset_gives_back_the_same_fp8_objects():
    gen = tower()
    originals = [linear.quant_method for linear in linears(gen)]
    controller = StepPrecisionController(3, 3)
    install_step_precision(gen, controller)
    for _ in range(2):
        controller.set_step(0, num_steps=50)
        assert controller.high_precision is True and is_w8a16(gen)
        controller.reset()
        assert controller.high_precision is False
        found = [linear.quant_method for linear in linears(gen)]
        assert all(a is b for a, b in zip(found, originals, strict=True))


def test_all_16_bit_linears_share_one_method_object():
    gen, und = tower(), tower()
    controller = StepPrecisionController(3, 3)
    install_step_precision(gen, controller)
    install_step_precision(und, controller, always_high=True)
    controller.set_step(0, num_steps=50)
    assert len({id(linear.quant_method) for linear in linears(gen, und)}) == 1


def test_modules_are_touched_only_when_the_mode_changes():
    rebinds = []

    class Recorder(nn.Module):
        def __setattr__(self, name, value):
            if name == "quant_method":
                rebinds.append(value)
            super().__setattr__(name, value)

    controller = StepPrecisionController(3, 3)
    native = FP8QDQLinearMethod()
    for _ in range(4):
        controller.govern(Recorder(), native)
    rebinds.clear()
    for i in range(50):
        for _branch in range(2):
            controller.set_step(i, num_steps=50)
    controller.reset()
    controller.reset()
    assert len(rebinds) == 4 * 4  # 4 modules; into 16 bit, out, in, and out at the reset


def test_pinned_linears_stay_at_16_bit():
    und = tower()
    controller = StepPrecisionController(3, 3)
    assert install_step_precision(und, controller, always_high=True) == len(linears(und))
    assert is_w8a16(und)
    for i in range(7):
        controller.set_step(i, num_steps=7)
        assert is_w8a16(und)
    controller.reset()
    assert is_w8a16(und) and controller.high_precision is False


def test_has_fp8_qdq_stays_true_on_a_16_bit_step():
    linear = fp8_linear()
    controller = StepPrecisionController(1, 0)
    install_step_precision(linear, controller)
    controller.set_step(0, num_steps=2)
    assert linear.has_fp8_qdq and linear.requires_unquantized_activation
    controller.reset()
    assert linear.has_fp8_qdq and not linear.requires_unquantized_activation


def test_only_static_fp8_linears_are_governed_and_counted():
    model = nn.ModuleList(
        [
            fp8_linear(),
            Linear(16, 16),
            fp8_linear(force_dynamic_quantization=True),
            nn.Linear(16, 16),
        ]
    )
    before = [getattr(module, "quant_method", None) for module in model]
    controller = StepPrecisionController(9, 9)
    assert install_step_precision(model, controller) == 1
    controller.set_step(0, num_steps=9)
    after = [getattr(module, "quant_method", None) for module in model]
    assert isinstance(after[0], W8A16FP8LinearMethod)
    assert all(a is b for a, b in zip(before[1:], after[1:], strict=True))


def test_a_linear_under_several_roots_counts_once():
    gen = tower(2)
    controller = StepPrecisionController(3, 3)
    assert install_step_precision([gen, gen[0], gen], controller) == 4
    assert install_step_precision((root for root in gen), controller) == 4


def test_a_linear_whose_fp8_method_is_unknown_is_refused_and_nothing_changes():
    gen = tower(1)
    first, second = linears(gen)
    second.quant_method = W8A16FP8LinearMethod()
    controller = StepPrecisionController(3, 3)
    for always_high in (False, True):
        with pytest.raises(ValueError, match="FP8 method of a linear is unknown"):
            install_step_precision(gen, controller, always_high=always_high)
    controller.set_step(0, num_steps=9)
    assert isinstance(first.quant_method, FP8QDQLinearMethod)


def test_a_linear_without_weights_is_refused():
    with pytest.raises(ValueError, match="create and load the weights before"):
        install_step_precision(
            fp8_linear(skip_create_weights_in_init=True), StepPrecisionController(3, 3)
        )


# --- installing again ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_high_precision", [False, True])
@pytest.mark.parametrize("same_controller", [False, True])
@pytest.mark.parametrize("always_high", [(a, b) for a in (False, True) for b in (False, True)])
def test_a_second_install_leaves_exactly_the_live_controller(
    in_high_precision, same_controller, always_high
):
    gen = tower()
    originals = [linear.quant_method for linear in linears(gen)]
    first = StepPrecisionController(3, 3)
    install_step_precision(gen, first, always_high=always_high[0])
    if in_high_precision:
        first.set_step(0, num_steps=50)

    live = first if same_controller else StepPrecisionController(2, 2)
    assert install_step_precision(gen, live, always_high=always_high[1]) == len(linears(gen))
    # The linears are in the mode of the live controller at once.
    assert is_w8a16(gen) is (always_high[1] or live.high_precision)
    if not same_controller:  # the earlier controller moves nothing any more
        for index in (0, 10):
            first.set_step(index, num_steps=50)
            assert is_w8a16(gen) is always_high[1]
    for index, high in ((0, True), (10, False), (49, True)):
        live.set_step(index, num_steps=50)
        assert is_w8a16(gen) is (high or always_high[1])
    live.reset()
    assert is_w8a16(gen) is always_high[1]
    assert uninstall_step_precision(gen) == len(linears(gen))
    found = [linear.quant_method for linear in linears(gen)]
    assert all(a is b for a, b in zip(found, originals, strict=True))


def test_uninstalling_ends_all_government():
    gen, und = tower(), tower()
    controller = StepPrecisionController(3, 3)
    install_step_precision(gen, controller)
    install_step_precision(und, controller, always_high=True)
    controller.set_step(0, num_steps=50)
    assert uninstall_step_precision([gen, und]) == len(linears(gen, und))
    assert uninstall_step_precision([gen, und]) == 0
    controller.reset()
    controller.set_step(0, num_steps=50)
    assert not is_w8a16(gen) and not is_w8a16(und)


def test_an_install_elsewhere_leaves_other_linears_alone():
    gen, und = tower(), tower()
    first, second = StepPrecisionController(3, 3), StepPrecisionController(3, 3)
    install_step_precision([gen, und], first)
    install_step_precision(und, second)
    first.set_step(0, num_steps=50)
    assert is_w8a16(gen) and not is_w8a16(und)


def test_nothing_outlives_the_modules_and_a_replaced_controller_is_freed():
    gen = tower(1)
    first, second = StepPrecisionController(3, 3), StepPrecisionController(3, 3)
    install_step_precision(gen, first)
    install_step_precision(gen, second)
    dead = [weakref.ref(first), weakref.ref(second), weakref.ref(gen[0][0])]
    del first
    assert dead[0]() is None
    del gen, second
    gc.collect()
    assert [ref() for ref in dead] == [None, None, None]


def test_a_copied_model_is_governed_by_its_own_copy_of_the_controller():
    model = nn.Module()
    model.gen, model.controller = tower(1), StepPrecisionController(3, 3)
    install_step_precision(model.gen, model.controller)
    twin = copy.deepcopy(model)
    twin.controller.set_step(0, num_steps=50)
    assert is_w8a16(twin.gen) and not is_w8a16(model.gen)
    twin.controller.reset()
    assert not is_w8a16(twin.gen)
    assert uninstall_step_precision(twin.gen) == 2


def test_govern_unpins_and_pin_ungoverns():
    linear = fp8_linear()
    native = linear.quant_method
    controller = StepPrecisionController(1, 0)
    controller.pin_unquantized(linear)
    controller.pin_unquantized(linear)
    assert is_w8a16(linear)
    controller.govern(linear, native)
    assert linear.quant_method is native
    controller.set_step(0, num_steps=2)
    assert is_w8a16(linear)
    controller.pin_unquantized(linear)
    controller.reset()
    assert is_w8a16(linear)


def test_govern_refuses_the_16_bit_method_as_native():
    with pytest.raises(ValueError, match="FP8 method of a linear is unknown"):
        StepPrecisionController(1, 0).govern(fp8_linear(), W8A16FP8LinearMethod())


def test_the_weights_are_untouched_by_a_switch():
    linear = fp8_linear()
    with torch.no_grad():
        linear.weight.copy_(torch.arange(256).reshape(16, 16) % 7)
    before = linear.weight.view(torch.uint8).clone()
    pointer = linear.weight.data_ptr()
    controller = StepPrecisionController(1, 0)
    install_step_precision(linear, controller)
    controller.set_step(0, num_steps=2)
    controller.reset()
    assert torch.equal(linear.weight.view(torch.uint8), before)
    assert linear.weight.data_ptr() == pointer
