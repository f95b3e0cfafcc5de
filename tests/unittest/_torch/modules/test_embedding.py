# SPDX-License-Identifier: Apache-2.0
import torch

from tensorrt_llm._torch.modules.embedding import Embedding


def test_ids_of_any_shape_select_rows():
    table = Embedding(7, 4, torch.bfloat16)
    table.weight.copy_(torch.arange(28).view(7, 4))
    ids = torch.tensor([[6, 0, 3]])
    assert torch.equal(table(ids), table.weight[ids])
    assert table(ids).dtype == torch.bfloat16


def test_the_table_is_frozen_and_can_be_built_on_meta():
    with torch.device("meta"):
        table = Embedding(7, 4, torch.float32)
    assert table.weight.is_meta and not table.weight.requires_grad
    assert not table.to_empty(device="cpu").weight.is_meta
