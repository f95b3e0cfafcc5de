# SPDX-License-Identifier: Apache-2.0
"""Unknown options are refused with what there is instead, at every level."""

import pytest

from tensorrt_llm.visual_gen import VisualGenArgs, VisualGenParams


@pytest.mark.parametrize(
    "make, owner, unknown, known",
    [
        (lambda: VisualGenArgs(model="m", foo=1), "VisualGenArgs", "foo", "quant_config"),
        (lambda: VisualGenParams(foo=1, bar=2), "VisualGenParams", "'bar', 'foo'", "num_frames"),
        (
            lambda: VisualGenArgs(model="m", torch_compile_config={"enabl": True}),
            "TorchCompileConfig",
            "enabl",
            "enable_fullgraph",
        ),
        (
            lambda: VisualGenArgs(model="m", compilation_config={"sizes": []}),
            "CompilationConfig",
            "sizes",
            "resolutions",
        ),
    ],
)
def test_an_unknown_field_is_refused_with_the_fields_that_there_are(make, owner, unknown, known):
    with pytest.raises(ValueError) as caught:
        make()
    message = str(caught.value)
    for part in (f"(where: {owner})", unknown, known, "expected", "found", "Remedy:"):
        assert part in message, part


@pytest.mark.parametrize("recipe", [[1], "FP8", 8])
def test_a_recipe_of_another_kind_is_refused_with_a_remedy(recipe):
    with pytest.raises(ValueError, match=r"quant_config\).*expected.*found.*Remedy") as caught:
        VisualGenArgs(model="m", quant_config=recipe)
    assert type(recipe).__name__ in str(caught.value)


def test_known_fields_and_objects_pass():
    args = VisualGenArgs(model="m", quant_config={"quant_algo": "FP8"}, cuda_graph_config={})
    assert VisualGenArgs(**args.model_dump()) == args
