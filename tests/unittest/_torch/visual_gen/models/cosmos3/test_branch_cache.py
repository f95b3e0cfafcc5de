# SPDX-License-Identifier: Apache-2.0
"""The text cache: what a request computes once, what outlives it, and what must not."""

import pytest
import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.branch_cache import (
    KEPT_BRANCHES,
    BranchCache,
    TextBranch,
    TextKeys,
)

LAYERS = 2


class Encoder:
    """Keys and values that say which tokens they come from; counts its calls."""

    def __init__(self):
        self.encoded = []

    def __call__(self, ids):
        self.encoded.append(tuple(ids[0].tolist()))
        base = ids[0].float().view(1, -1, 1, 1).expand(1, -1, 2, 4)
        return [base + layer for layer in range(LAYERS)], [-base - layer for layer in range(LAYERS)]


@pytest.fixture
def encoder():
    return Encoder()


def call(*rows):
    """Ids and mask [B, L] of token lists, padded at the end."""
    length = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), length, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return ids, mask


def test_branches_stand_side_by_side_with_zeros_behind_the_shorter(encoder):
    text = BranchCache(encoder).text(*call([5, 6, 7], [8]))
    assert text.lengths.host == (3, 1) and text.lengths.device.tolist() == [3, 1]
    assert text.lengths.device.dtype == torch.int32
    for layer in range(LAYERS):
        assert text.keys[layer].shape == text.values[layer].shape == (2, 3, 2, 4)
        assert text.keys[layer][:, :, 0, 0].tolist() == [
            [5 + layer, 6 + layer, 7 + layer],
            [8 + layer, 0, 0],
        ]
        assert text.values[layer][1, 1:].abs().sum() == 0


def test_one_branch_is_not_copied():
    keys = [torch.rand(1, 3, 2, 4) for _ in range(LAYERS)]
    branch = TextBranch((1, 2, 3), tuple(keys), tuple(keys))
    assert TextKeys.of([branch]).keys[0] is keys[0]


def test_the_same_tensors_are_not_read_again_and_changed_ones_are(encoder):
    cache = BranchCache(encoder)
    ids, mask = call([1, 2], [3])
    assert cache.text(ids, mask) is cache.text(ids, mask)
    ids[0, 0] = 9
    assert cache.text(ids, mask).keys[0][0, 0, 0, 0] == 9
    assert encoder.encoded == [(1, 2), (3,), (9, 2)]


def test_the_negative_prompt_of_later_requests_is_not_computed_again(encoder):
    cache = BranchCache(encoder)
    for prompt in ([1], [2], [3]):
        cache.text(*call(prompt, [7, 7]))
        cache.end_request()
    assert encoder.encoded == [(1,), (7, 7), (2,), (3,)]


def test_two_negative_prompts_that_take_turns_are_not_computed_again(encoder):
    cache = BranchCache(encoder)
    for number in range(6):
        cache.text(*call([number], [[7, 7], [8]][number % 2]))
        cache.end_request()
    assert encoder.encoded.count((7, 7)) == encoder.encoded.count((8,)) == 1


def test_a_repeated_prompt_with_another_negative_is_not_computed_again(encoder):
    cache = BranchCache(encoder)
    for negative in ([7], [8], [9]):
        cache.text(*call([1], negative))
        cache.end_request()
    assert encoder.encoded.count((1,)) == 1


def test_branches_that_outlive_a_request_are_bounded(encoder):
    cache = BranchCache(encoder)
    cache.text(*call(*([i] for i in range(6))))
    assert len(cache._branches) == 6
    cache.end_request()
    assert list(cache._branches) == [(2,), (3,), (4,), (5,)] and KEPT_BRANCHES == 4
    assert not cache._calls and not cache._tables


def test_a_kept_branch_gives_the_same_bits_as_a_new_one(encoder):
    cache = BranchCache(encoder)
    first = cache.text(*call([1, 2], [7]))
    cache.end_request()
    again = cache.text(*call([1, 2], [7]))
    fresh = BranchCache(Encoder()).text(*call([1, 2], [7]))
    for layer in range(LAYERS):
        for a in (first, again):
            assert torch.equal(a.keys[layer], fresh.keys[layer])
            assert torch.equal(a.values[layer], fresh.values[layer])


def test_prompts_with_a_long_common_start_are_different_branches(encoder):
    common, cache = list(range(1, 200)), BranchCache(encoder)
    texts = [cache.text(*call([*common, last])) for last in (300, 301)]
    assert len(encoder.encoded) == 2
    assert not torch.equal(texts[0].keys[0], texts[1].keys[0])


def test_a_branch_whose_encoding_failed_is_not_kept():
    failing = [True]

    def encode(ids):
        if failing.pop() if failing else False:
            raise RuntimeError("out of memory")
        return Encoder()(ids)

    cache = BranchCache(encode)
    with pytest.raises(RuntimeError):
        cache.text(*call([1, 2]))
    assert not cache._branches and not cache._calls
    assert cache.text(*call([1, 2])).lengths.host == (2,)


def test_clearing_forgets_every_branch(encoder):
    cache = BranchCache(encoder)
    cache.text(*call([1]))
    cache.clear()
    cache.text(*call([1]))
    assert encoder.encoded == [(1,), (1,)]


def test_tables_last_as_long_as_the_request(encoder):
    cache, made = BranchCache(encoder), []

    def build():
        made.append(1)
        return torch.zeros(1), torch.zeros(1)

    assert cache.table(("a",), build) is cache.table(("a",), build)
    cache.end_request()
    cache.table(("a",), build)
    assert len(made) == 2


@pytest.mark.parametrize(
    "ids, mask, message",
    [
        (torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 3), "same tokens"),
        (torch.ones(2, dtype=torch.int64), torch.ones(2), "same tokens"),
        (torch.ones(1, 2, dtype=torch.int64), torch.zeros(1, 2), "no token"),
    ],
)
def test_tokens_that_make_no_sense_are_refused(encoder, ids, mask, message):
    with pytest.raises(ValueError, match=message):
        BranchCache(encoder).text(ids, mask)
