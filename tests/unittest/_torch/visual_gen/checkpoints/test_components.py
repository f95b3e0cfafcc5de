# SPDX-License-Identifier: Apache-2.0
"""The parts beside the transformer: refused by name before anything large is read."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tensorrt_llm._torch.visual_gen.checkpoints.components import (
    check_files,
    plan_sound_tokenizer,
    plan_vae,
    read_scheduler,
)
from tensorrt_llm._torch.visual_gen.checkpoints.text_tokenizer import read_tokenizer

VAE_WEIGHTS = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def checkpoint(tiny_bf16_checkpoint, tmp_path):
    return shutil.copytree(tiny_bf16_checkpoint, tmp_path / "checkpoint")


def test_intact_parts_are_read(tiny_bf16_checkpoint):
    check_files(tiny_bf16_checkpoint)
    vae = plan_vae(tiny_bf16_checkpoint)
    sound = plan_sound_tokenizer(tiny_bf16_checkpoint)
    assert {p.device.type for p in (*vae.parameters(), *sound.parameters())} == {"meta"}
    assert type(read_scheduler(tiny_bf16_checkpoint)).__name__ == "UniPCMultistepScheduler"
    assert read_tokenizer(tiny_bf16_checkpoint)("A cup.").input_ids


def test_every_missing_small_file_is_named(checkpoint):
    for name in ("vae/config.json", "text_tokenizer/tokenizer_config.json"):
        (checkpoint / name).unlink()
    with pytest.raises(ValueError, match="(?s)2 problems.*tokenizer_config.json.*vae/config.json"):
        check_files(checkpoint)


def test_every_missing_and_misshapen_tensor_of_the_vae_is_named_and_more_do_no_harm(checkpoint):
    tensors = load_file(checkpoint / VAE_WEIGHTS)
    tensors["another.weight"] = torch.ones(1)
    save_file(tensors, checkpoint / VAE_WEIGHTS)
    plan_vae(checkpoint)
    del tensors["decoder.conv_out.bias"], tensors["post_quant_conv.bias"]
    tensors["quant_conv.bias"] = torch.ones(3)
    save_file(tensors, checkpoint / VAE_WEIGHTS)
    with pytest.raises(ValueError, match="3 problems") as caught:
        plan_vae(checkpoint)
    for name in ("decoder.conv_out.bias", "post_quant_conv.bias", "quant_conv.bias: (96,)"):
        assert name in str(caught.value)


def test_the_sound_tokenizer_may_lack_all_of_its_encoder_and_be_absent(checkpoint):
    path = checkpoint / "sound_tokenizer/diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    decoder = {n: t for n, t in tensors.items() if not n.startswith("encoder.")}
    assert len(decoder) < len(tensors)
    save_file(decoder, path)
    assert plan_sound_tokenizer(checkpoint) is not None
    decoder["encoder.another"] = torch.ones(1)
    del decoder["decoder.conv2.weight_g"]
    save_file(decoder, path)
    with pytest.raises(ValueError, match="(?s)missing tensors: .*encoder"):
        plan_sound_tokenizer(checkpoint)
    shutil.rmtree(checkpoint / "sound_tokenizer")
    assert plan_sound_tokenizer(checkpoint) is None


def test_a_scheduler_without_a_class_is_unipc_and_one_of_another_family_is_refused(checkpoint):
    path = checkpoint / "scheduler/scheduler_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k != "_class_name"}))
    assert type(read_scheduler(checkpoint)).__name__ == "UniPCMultistepScheduler"
    path.write_text(json.dumps(config | {"_class_name": "DDIMScheduler"}))
    with pytest.raises(ValueError, match="DDIMScheduler"):
        read_scheduler(checkpoint)


def test_the_fields_of_a_4_step_build_are_kept_without_a_warning_and_others_are_warned_of(
    checkpoint, caplog
):
    fields = {
        "fixed_step_sampler_config": {"t_list": [1.0, 0.5], "sample_type": "sde"},
        "fixed_step_requires_explicit_sigmas": True,
    }
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "stochastic_sampling": True}
    path = checkpoint / "scheduler/scheduler_config.json"
    path.write_text(json.dumps(config | fields))
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        scheduler = read_scheduler(checkpoint)
        assert fields.items() <= dict(scheduler.config).items()
        assert scheduler.config.stochastic_sampling is True
        assert caplog.text == ""
        path.write_text(json.dumps(config | fields | {"fixed_stepper": 1}))
        read_scheduler(checkpoint)
        assert "'fixed_stepper': 1}" in caplog.text and "fixed_step_" not in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("file", "content", "read"),
    [
        ("scheduler/scheduler_config.json", "{", read_scheduler),
        ("scheduler/scheduler_config.json", '{"solver_type": "none"}', read_scheduler),
        ("text_tokenizer/tokenizer.json", "{", read_tokenizer),
        ("vae/config.json", '{"dropout": "much"}', plan_vae),
    ],
)
def test_what_a_library_can_not_read_is_a_value_error_with_its_path_and_cause(
    checkpoint, file, content, read
):
    (checkpoint / file).write_text(content)
    with pytest.raises(ValueError, match=file.partition("/")[0]) as caught:
        read(checkpoint)
    assert "can't be read" in str(caught.value)
    assert caught.value.__cause__ is not None
