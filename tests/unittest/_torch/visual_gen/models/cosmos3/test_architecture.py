# SPDX-License-Identifier: Apache-2.0
"""The transformer's numbers: what is filled in, and what is refused by name."""

import math
from types import SimpleNamespace

import pytest

from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture


def read(**values) -> Cosmos3Architecture:
    return Cosmos3Architecture.from_pretrained_config(SimpleNamespace(**values))


def test_fields_that_are_absent_or_null_take_the_values_of_nano():
    nano = Cosmos3Architecture()
    assert read() == nano
    assert read(hidden_size=None, rope_axes_dim=None, sound_dim=None, backbone_type=None) == nano
    assert read(rope_scaling={"rope_type": "default"}) == nano
    assert read(base_fps=24, rope_scaling={"mrope_section": [24, 20, 20]}) == nano


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("hidden_size", value) for value in ("64", 0, -64, 64.0, True, math.nan, [64])),
        *((name, 0) for name in ("num_hidden_layers", "num_attention_heads", "head_dim")),
        *((name, "8") for name in ("num_key_value_heads", "vocab_size", "latent_channel")),
        *((name, -1) for name in ("intermediate_size", "latent_patch_size", "patch_latent_dim")),
        *(("rms_norm_eps", value) for value in (0, -1e-6, math.nan, math.inf, "1e-6")),
        *(("rope_theta", value) for value in (0, math.inf, "5e6")),
        *((name, math.nan) for name in ("timestep_scale", "base_fps", "sound_latent_fps")),
        *((name, "false") for name in ("attention_bias", "sound_gen", "enable_fps_modulation")),
        ("unified_3d_mrope_reset_spatial_ids", 1),
        *(("unified_3d_mrope_temporal_modality_margin", value) for value in (-1, 0.5, "15000")),
        *(("rope_axes_dim", value) for value in ([24, 20], [24, 20, 0], "24", [24.0, 20.0, 20.0])),
        ("sound_dim", 0),
    ],
)
def test_a_value_of_another_type_or_without_sense_is_refused_by_field(name, value):
    with pytest.raises(ValueError) as refusal:
        read(**{name: value})
    message = str(refusal.value)
    assert f"(where: transformer/config.json, {name})" in message
    assert f"found {name}: " in message and "Remedy: " in message


@pytest.mark.parametrize("scaling", [[24, 20, 20], {"mrope_section": [24, "20", 20]}])
def test_rope_scaling_is_judged_too(scaling):
    with pytest.raises(ValueError, match="transformer/config.json, rope_scaling"):
        read(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_axes_dim": [24, 20, 21]}, "rope_axes_dim"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"patch_latent_dim": 191}, "patch_latent_dim"),
        ({"sound_gen": True}, "sound_dim"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(values, named):
    with pytest.raises(ValueError, match=f"Inconsistent Cosmos3 configuration: {named}"):
        read(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backbone_type", "cosmos3_edge_nemotron_dense"),
        ("hidden_act", "relu2"),
        ("qk_norm_for_text", False),
        ("use_und_k_norm_for_gen", True),
        ("position_embedding_type", "3d_rope"),
    ],
)
def test_what_belongs_to_another_family_is_not_built(name, value):
    # Such a file may also have values that this family has no sense for.
    with pytest.raises(NotImplementedError, match=f"transformer/config.json, {name}.*{value}"):
        read(**{name: value}, sound_dim=0)
