# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the generation layers: one per precision mode and shape, bounded in number.

A graph replays kernels on fixed addresses, so what a request changes is copied into inputs of the
graph's own: the media tokens every step, the text K/V and the tables once a request. Where the
attention backend reads key lengths on the device, the text has room for ``TEXT_CAPACITY`` tokens
and one graph serves every prompt; elsewhere the lengths belong to the key.

Nothing of a request selects what a graph does but its inputs: a request that fails or is cancelled
leaves the graphs as they were.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tensorrt_llm._torch.custom_ops.w8a16_ops import release_scratch, scratch_buffers
from tensorrt_llm._torch.visual_gen.attention_backend import KeyLengths
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.branch_cache import TextKeys
from tensorrt_llm.logger import logger

MAX_GRAPHS = 8
"""Graphs kept; the one used longest ago is dropped. Two modes at four shapes, or two by two with
and without guidance at two."""

TEXT_CAPACITY = 4096
"""Text tokens a branch that a graph has room for, and the step by which it grows: the default
``max_sequence_length``."""

MAX_SHORT_ROWS = 16_384
"""Rows up to which a step counts as short, for CUDA graphs by default. At 2,048 rows (1024x1024,
two branches) a step takes 30 ms with graphs, and 33 to 48 without, by how busy the host is; at
37,440 (480p x 189) 1.1 s (benchmarks/results/step_nano_h200.json)."""

RunLayers = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TextKeys], torch.Tensor]


class Captured(NamedTuple):
    """A captured run.

    Attributes:
        first: Its first result.
        output: What each replay fills.
        replay: Repeats the run on the current inputs.
        uses: Tensors that the graph writes to and that somebody else might let go.
    """

    first: torch.Tensor
    output: torch.Tensor
    replay: Callable[[], None]
    uses: tuple[torch.Tensor, ...] = ()


class ShapeKey(NamedTuple):
    """What the inputs of a graph look like.

    Attributes:
        media: Shape of the media tokens (B, N, H).
        capacity: Text rows.
        lengths: The branches' text lengths where the backend needs them on the host, else None.
    """

    media: tuple[int, ...]
    capacity: int
    lengths: tuple[int, ...] | None

    @classmethod
    def of(cls, media: tuple[int, ...], lengths: tuple[int, ...], any_length: bool) -> "ShapeKey":
        """The shape of a step.

        Args:
            media: Shape of the media tokens (B, N, H).
            lengths: Text tokens of the B branches.
            any_length: Whether the backend reads them on the device.
        """
        if any_length:
            return cls(media, math.ceil(max(lengths) / TEXT_CAPACITY) * TEXT_CAPACITY, None)
        return cls(media, max(lengths), lengths)

    def input_bytes(self, arch: Cosmos3Architecture, dtype: torch.dtype) -> int:
        """Bytes that the graphs of this shape read: media tokens, tables, and the text's room.

        Args:
            arch: Sizes of the model.
            dtype: Of its activations.
        """
        branches, tokens, hidden = self.media
        media = tokens * (hidden + 2 * arch.head_dim)
        keys = self.capacity * arch.num_key_value_heads * arch.head_dim
        text = 2 * arch.num_hidden_layers * keys
        return branches * ((media + text) * dtype.itemsize + torch.int32.itemsize)


def wants_graph(enable: bool | None, any_length: bool, rows: int) -> bool:
    """Whether a step runs as a graph on a CUDA device.

    Args:
        enable: ``cuda_graph_config.enable``.
        any_length: Whether the backend reads the text's lengths on the device, so that one graph
            serves every prompt.
        rows: Media tokens of all branches.
    """
    return any_length and rows <= MAX_SHORT_ROWS if enable is None else enable


@dataclass(eq=False)
class _Inputs:
    """The addresses that the graphs of one shape read, and whose values they hold."""

    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    text: TextKeys
    loaded_tables: torch.Tensor | None = None
    loaded_text: TextKeys | None = None

    @property
    def num_bytes(self) -> int:
        text = (*self.text.keys, *self.text.values, self.text.lengths.device)
        return sum(tensor.nbytes for tensor in (self.hidden, self.cos, self.sin, *text))


class LayerGraphs:
    """Runs the generation layers through graphs, capturing each the first time it is needed.

    Args:
        run: (hidden [B, N, H], cos, sin [B, N, D], text) to [B, N, H], the thing to capture.
        any_length: Whether ``run`` serves a text whose lengths the host does not know.
        capture: How a run is captured; ``CudaCapture()`` by default.
    """

    def __init__(
        self,
        run: RunLayers,
        any_length: bool,
        capture: Callable[[Callable[[], torch.Tensor]], Captured] | None = None,
    ) -> None:
        self._run = run
        self._any_length = any_length
        self._capture = CudaCapture() if capture is None else capture
        self._inputs: dict[ShapeKey, _Inputs] = {}
        # In the order of their last use.
        self._graphs: dict[tuple[str, ShapeKey], Captured] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def shapes(self) -> set[ShapeKey]:
        """The shapes that have a graph."""
        return set(self._inputs)

    @property
    def input_bytes(self) -> int:
        """Bytes of all inputs; the pool of the graphs comes on top."""
        return sum(inputs.num_bytes for inputs in self._inputs.values())

    def shape_key(self, media: tuple[int, ...], lengths: tuple[int, ...]) -> ShapeKey:
        """The shape of a step with media tokens (B, N, H) and B branches of so many text tokens."""
        return ShapeKey.of(media, lengths, self._any_length)

    def clear(self) -> None:
        """Drop every graph and its inputs, and give the memory of their pool back."""
        held = bool(self._graphs)
        self._graphs.clear()
        self._inputs.clear()
        if held:
            # Until then the allocator keeps the blocks of a pool whose graphs are gone.
            torch.cuda.empty_cache()

    def end_request(self) -> None:
        """Let go of the request's own text and tables; what was copied of them stays."""
        for inputs in self._inputs.values():
            inputs.loaded_tables = inputs.loaded_text = None

    def __call__(
        self,
        mode: str,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        text: TextKeys,
    ) -> torch.Tensor:
        """Run the layers in the precision that is bound now.

        Args:
            mode: Names that precision.
            hidden: [B, N, H].
            cos: [B, N, D], like sin.
            sin: Rotary table.
            text: Of the B branches.

        Returns:
            [B, N, H]; valid until the next call.
        """
        shape = self.shape_key(tuple(hidden.shape), text.lengths.host)
        inputs = self._inputs.get(shape)
        if inputs is None:
            inputs = _new_inputs(shape, hidden, cos, sin, text)
        _load(inputs, hidden, cos, sin, text)
        graph = self._graphs.pop((mode, shape), None)
        if graph is not None:
            self._graphs[mode, shape] = graph
            graph.replay()
            return graph.output
        self._make_room()
        logger.info("Capturing a CUDA graph: %s, %s tokens.", mode, "x".join(map(str, shape.media)))
        # The stream and the pool of a capture are the current device's, which is the calling
        # thread's and need not be the model's.
        with torch.cuda.device_of(hidden):
            graph = self._capture(
                lambda: self._run(inputs.hidden, inputs.cos, inputs.sin, inputs.text)
            )
        # Kept only now: a capture that fails leaves nothing behind.
        self._inputs[shape] = inputs
        self._graphs[mode, shape] = graph._replace(first=graph.output)
        return graph.first

    def _make_room(self) -> None:
        while len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        in_use = {shape for _, shape in self._graphs}
        for shape in self._inputs.keys() - in_use:
            del self._inputs[shape]


@torch.inference_mode(False)  # or a later request without inference mode could not fill them
def _new_inputs(
    shape: ShapeKey, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, text: TextKeys
) -> _Inputs:
    def room(rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros((rows.shape[0], shape.capacity, *rows.shape[2:]))

    lengths = KeyLengths(text.lengths.device.clone(), shape.lengths)
    keys, values = (tuple(map(room, rows)) for rows in (text.keys, text.values))
    tensors = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (hidden, cos, sin)
    )
    return _Inputs(*tensors, TextKeys(keys, values, lengths))


def _load(
    inputs: _Inputs, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, text: TextKeys
) -> None:
    inputs.hidden.copy_(hidden)
    # Forgotten before they are overwritten: a copy that fails half-way must be made again.
    if inputs.loaded_tables is not cos:
        inputs.loaded_tables = None
        inputs.cos.copy_(cos)
        inputs.sin.copy_(sin)
        inputs.loaded_tables = cos
    if inputs.loaded_text is not text:
        inputs.loaded_text = None
        longest = text.keys[0].shape[1]
        for rooms, rows in ((inputs.text.keys, text.keys), (inputs.text.values, text.values)):
            for room, row in zip(rooms, rows, strict=True):
                room[:, :longest].copy_(row)
        inputs.text.lengths.device.copy_(text.lengths.device)
        inputs.loaded_text = text


class CudaCapture:
    """Captures on a stream of its own, of the current device; all graphs share one memory pool.

    Sharing is sound because a graph's output is read before another graph runs. With the last graph
    the scratch buffer of the stream is let go: nobody else's layers would use it.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: tuple | None = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Captured:
        """Run once as a warm-up, which compiles and reserves what is missing, then capture."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if not self._graphs:
            # A pool ends with its last graph: the allocator refuses to take it up again.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        weakref.finalize(graph, _after_graph, self._graphs, self._stream)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            first = run()
        current.wait_stream(self._stream)
        first.record_stream(current)
        # Another model on this stream may replace or drop the scratch buffer, even before the
        # capture is over; this graph goes on using it.
        held = scratch_buffers(self._stream)
        # thread_local: in torch's default mode a cudaMalloc of any other thread, as of a second
        # engine, fails and ends this capture with it.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = run()
        self._graphs.add(graph)
        return Captured(first, output, graph.replay, held)


def _after_graph(others: weakref.WeakSet[torch.cuda.CUDAGraph], stream: torch.cuda.Stream) -> None:
    """Runs when a graph is gone, whoever dropped it, or when its warm-up or capture failed."""
    if not any(True for _ in others):  # len() may still count the graph that has just gone
        release_scratch(stream)
