# SPDX-License-Identifier: Apache-2.0
"""The probe at load sees a NaN in every weight that generation computes with."""

import pytest
import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_probe import probe_precisions
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs

pytestmark = pytest.mark.cosmos3

# Behind the last K and V of the understanding tower, which nothing of generation reads.
UNREAD = ("to_q.", "to_out.", "norm_q.", "post_attention_layernorm.", "mlp.")


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_nan_in_any_weight_that_is_read_ends_the_load(precision, request):
    path = request.getfixturevalue(f"tiny_{precision}_checkpoint")
    args = VisualGenArgs(model=str(path))
    transformer = PipelineLoader(args, device="cpu").load(skip_warmup=True).transformer
    last = f"language_model.layers.{transformer.arch.num_hidden_layers - 1}."
    missed = []
    for name, parameter in transformer.named_parameters():
        unread = name.startswith(last) and any(part in name for part in UNREAD)
        if parameter.dim() == 0 or unread:
            continue
        kept = parameter.detach().clone()
        # Codes 0x7F are NaN in float8_e4m3fn; 0xFF bytes are NaN in every other format.
        parameter.detach().view(torch.uint8).fill_(0x7F if parameter.itemsize == 1 else 0xFF)
        try:
            probe_precisions(transformer)
            missed.append(name)
        except RuntimeError as error:
            assert "not finite" in str(error)
        parameter.detach().view(torch.uint8).copy_(kept.view(torch.uint8))
    assert not missed
    probe_precisions(transformer)
