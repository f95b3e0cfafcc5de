# SPDX-License-Identifier: Apache-2.0
"""A clip from a picture, with sound, in every precision: FP8 stays near BF16, in both parts."""

import numpy as np
import pytest

from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen.args import CompilationConfig, VisualGenArgs
from tensorrt_llm.visual_gen.params import VisualGenParams
from tests.support.diffusers_oracle import relative_error
from tests.support.pipelines import load_pipeline

pytestmark = pytest.mark.cosmos3

STEPS = 8
PICTURE = np.random.default_rng(1).integers(0, 256, (48, 80, 3), np.uint8)


def run(pipeline):
    params = VisualGenParams(
        image_reference=PICTURE,
        height=48,
        width=80,
        num_frames=9,
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        seed=3,
        extra_params={"enable_audio": True},
    )
    done = pipeline.denoise(pipeline.prepare_request("A robot arm hums", params))
    return done, [record.generation for record in done.trace]


@pytest.fixture(scope="module")
def bf16(tiny_bf16_checkpoint):
    done, trace = run(load_pipeline(tiny_bf16_checkpoint))
    assert trace == ["bf16"] * STEPS
    return done


def check_near(done, reference):
    for found, expected in ((done.latents, reference.latents), (done.sound, reference.sound)):
        error = relative_error(found, expected)
        assert 1e-3 < error < 0.05, error


def test_static_fp8_follows_its_policy_and_stays_near_bf16(fp8_pipeline, bf16):
    done, trace = run(fp8_pipeline)
    assert trace == ["w8a16"] * 3 + ["w8a8"] * 2 + ["w8a16"] * 3
    check_near(done, bf16)


def test_dynamic_fp8_stays_near_bf16(tiny_bf16_checkpoint, bf16):
    args = VisualGenArgs(
        model=str(tiny_bf16_checkpoint),
        quant_config={"quant_algo": "FP8"},
        compilation_config=CompilationConfig(skip_warmup=True),
    )
    done, trace = run(PipelineLoader(args, device="cpu").load())
    assert trace == ["fp8_dynamic"] * STEPS
    check_near(done, bf16)
