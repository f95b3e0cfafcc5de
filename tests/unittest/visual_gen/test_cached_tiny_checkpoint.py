# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint in the user's cache."""

import pytest

from tensorrt_llm.visual_gen import tiny_checkpoint


def test_it_is_made_once_and_said_so(tmp_path, monkeypatch):
    made, said = [], []

    def make(path, precision, seed):
        made.append((precision, seed))
        path.mkdir(parents=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiny_checkpoint, "make_tiny_checkpoint", make)
    path = tiny_checkpoint.cached_tiny_checkpoint(said.append)
    assert tiny_checkpoint.cached_tiny_checkpoint(said.append) == path
    assert path.is_relative_to(tmp_path) and path.name.startswith("tiny-fp8-")
    assert made == [("fp8", 0)] and len(said) == 1 and str(path) in said[0]


def test_one_that_another_process_finished_meanwhile_is_used(tmp_path, monkeypatch):
    def lose(path, precision, seed):
        path.mkdir(parents=True)
        (path / "model_index.json").write_text("{}")
        raise OSError("Directory not empty")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiny_checkpoint, "make_tiny_checkpoint", lose)
    assert tiny_checkpoint.cached_tiny_checkpoint(lambda text: None).is_dir()

    def fail(path, precision, seed):
        raise OSError("No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(tiny_checkpoint, "make_tiny_checkpoint", fail)
    with pytest.raises(OSError, match="No space"):
        tiny_checkpoint.cached_tiny_checkpoint(lambda text: None)
