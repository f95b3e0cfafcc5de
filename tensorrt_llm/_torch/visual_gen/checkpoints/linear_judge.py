# SPDX-License-Identifier: Apache-2.0
"""Whether the tensors of a checkpoint can fill a linear exactly, in its recipe's precision."""

from collections.abc import Sequence

import torch

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.modules.linear_methods import CUDA_FP8_MULTIPLE, FP8
from tensorrt_llm._torch.modules.weight_copy import HIGH_PRECISION
from tensorrt_llm._torch.visual_gen.checkpoints.problems import (
    CALIBRATION,
    DTYPE,
    FEATURES,
    FOREIGN,
    GROUP,
    MISSING,
    MIXED_PARTS,
    NO_RECIPE,
    SCALE,
    SCALES_WITHOUT_FP8,
    SHAPE,
    UNQUANTIZED,
    Problems,
    dtype_name,
)
from tensorrt_llm._torch.visual_gen.checkpoints.tensor_table import TensorTable
from tensorrt_llm._torch.visual_gen.quantization.foreign_tensors import FOREIGN_WEIGHT_DTYPES
from tensorrt_llm.quantization.scales import (
    MODELOPT_KEYS,
    SCALE_KEYS,
    SCALE_SOURCES,
    ScaleError,
    check_scale,
    resolve_fp8_scale,
)

Scales = tuple[torch.Tensor | None, torch.Tensor | None]
"""(weight_scale, input_scale) of one shard, 0-d FP32."""


def check_exact(
    table: TensorTable,
    problems: Problems,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Check that a tensor can fill a parameter of this shape and dtype without rounding."""
    spec = table.spec(name)
    if spec.shape != shape:
        problems.add(SHAPE, f"{name}: {shape} expected, {spec.shape} found")
    widened = dtype == torch.float32 and spec.dtype in HIGH_PRECISION
    if spec.dtype != dtype and not widened:
        problems.add(DTYPE, f"{name}: {dtype_name(dtype)} expected, {dtype_name(spec.dtype)} found")


class LinearJudge:
    """Judges linears one after another, then what only all of them together show.

    Args:
        table: The checkpoint's tensors.
        problems: Takes what is wrong.
        quantize_here: The recipe quantises high-precision weights while they load.
        keeps_calibration: Whether such a recipe is the checkpoint's own, so that it may not drop
            the calibration of weights that are stored in FP8.
        device: Where the linears will stand; None leaves out what depends on it.
    """

    def __init__(
        self,
        table: TensorTable,
        problems: Problems,
        quantize_here: bool,
        keeps_calibration: bool,
        device: torch.device | None,
    ) -> None:
        self._table = table
        self._problems = problems
        self._quantize_here = quantize_here
        self._keeps_calibration = keeps_calibration
        self._device = device
        # Scale -> prefix -> the keys that tell it, best first; and the prefixes that need it.
        self._told: dict[str, dict[str, list[str]]] = {scale: {} for scale in SCALE_KEYS}
        self._needed: dict[str, set[str]] = {scale: set() for scale in SCALE_KEYS}
        self._resolved: dict[str, Scales] = {}

    def claim(
        self, linear: Linear, prefixes: Sequence[str], rows: Sequence[int]
    ) -> tuple[dict[str, str], ...]:
        """Claim and judge the tensors of one linear.

        Args:
            linear: The destination.
            prefixes: Checkpoint names of its shards.
            rows: Output features of each shard.

        Returns:
            Per shard: key inside the module -> name as stored.
        """
        shards = tuple(self._shard(linear, *shard) for shard in zip(prefixes, rows, strict=True))
        stored = {self._dtype(prefix) for prefix in prefixes} - {None}
        if linear.has_fp8_qdq and FP8 in stored and len(stored) > 1 and self._quantize_here:
            dtypes = ", ".join(sorted(map(dtype_name, stored)))
            self._problems.add(MIXED_PARTS, f"{' + '.join(prefixes)}: {dtypes}")
        sizes = (linear.in_features, linear.out_features)
        on_cuda = self._device is not None and self._device.type == "cuda"
        if on_cuda and linear.has_fp8_qdq and any(size % CUDA_FP8_MULTIPLE for size in sizes):
            found = f"multiples of {CUDA_FP8_MULTIPLE} expected, {sizes} found"
            self._problems.add(FEATURES, f"{' + '.join(prefixes)}: {found}")
        return shards

    def check_sources(self) -> None:
        """Let one kind of source tell a scale for all linears: the best that any of them has.

        Where a linear lacks it, ModelOpt's rounded buffer could stand in, but it would not give the
        value that the checkpoint was made with.
        """
        for scale, told in self._told.items():
            sources = SCALE_SOURCES[scale]
            best = min(
                (keys[0] for keys in told.values() if keys), key=sources.index, default=scale
            )
            for prefix in sorted(self._needed[scale]):
                if best not in told[prefix]:
                    self._problems.add(MISSING, f"{prefix}.{best}")

    def check_group(self, prefixes: Sequence[str]) -> None:
        """Check that projections which share one activation were calibrated with one scale.

        Args:
            prefixes: Checkpoint names of the projections.
        """
        scales = {
            prefix: scale.item()
            for prefix in prefixes
            if prefix in self._resolved and (scale := self._resolved[prefix][1]) is not None
        }
        if len(set(scales.values())) > 1:
            keys = {prefix: self._told["input_scale"][prefix][0] for prefix in scales}
            values = [f"{scale:.9g} by {name}.{keys[name]}" for name, scale in scales.items()]
            self._problems.add(GROUP, ", ".join(values))

    @property
    def scales(self) -> dict[str, Scales]:
        """The scales that were read, by their linear's checkpoint name."""
        return self._resolved

    def _shard(self, linear: Linear, prefix: str, rows: int) -> dict[str, str]:
        keys = ["weight"] if linear.bias is None else ["weight", "bias"]
        scale_keys = [
            key for key in (*SCALE_KEYS, *MODELOPT_KEYS) if self._table.has(f"{prefix}.{key}")
        ]
        claimed = {
            key: stored
            for key in (*keys, *scale_keys)
            if (stored := self._table.take(f"{prefix}.{key}")) is not None
        }
        if "bias" in claimed:
            check_exact(self._table, self._problems, f"{prefix}.bias", (rows,), linear.dtype)
        if "weight" in claimed:
            self._judge_weight(linear, prefix, (rows, linear.in_features), scale_keys)
        elif linear.has_fp8_qdq:
            self._read_scales(prefix, scale_keys, required=())
        return claimed

    def _judge_weight(
        self, linear: Linear, prefix: str, shape: tuple[int, int], scale_keys: list[str]
    ) -> None:
        name, spec = f"{prefix}.weight", self._table.spec(f"{prefix}.weight")
        if spec.dtype in FOREIGN_WEIGHT_DTYPES:
            scheme = FOREIGN_WEIGHT_DTYPES[spec.dtype]
            self._problems.add(FOREIGN, f"{name}: {dtype_name(spec.dtype)}, {scheme}")
            return
        static_input = ("input_scale",) if not linear.force_dynamic_quantization else ()
        found = f"{dtype_name(FP8)} expected, {dtype_name(spec.dtype)} found"
        if linear.has_fp8_qdq and spec.dtype in (FP8, *HIGH_PRECISION):
            if spec.shape != shape:
                self._problems.add(SHAPE, f"{name}: {shape} expected, {spec.shape} found")
            if spec.dtype == FP8:
                if self._quantize_here and self._keeps_calibration:
                    self._problems.add(CALIBRATION, name)
                self._read_scales(prefix, scale_keys, required=("weight_scale", *static_input))
            elif self._quantize_here:
                self._refuse_scales(prefix, set(scale_keys) & set(SCALE_SOURCES["weight_scale"]))
                self._read_scales(
                    prefix,
                    [key for key in scale_keys if key in SCALE_SOURCES["input_scale"]],
                    required=static_input,
                )
            else:
                self._problems.add(UNQUANTIZED, f"{name}: {found}, appears to be unquantized")
        elif linear.has_fp8_qdq:
            self._problems.add(DTYPE, f"{name}: {found}")
        elif spec.dtype == FP8:
            found = f"{dtype_name(linear.dtype)} expected, {dtype_name(FP8)} found"
            self._problems.add(NO_RECIPE, f"{name}: {found}")
        else:
            check_exact(self._table, self._problems, name, shape, linear.dtype)
            self._refuse_scales(prefix, set(scale_keys))

    def _refuse_scales(self, prefix: str, keys: set[str]) -> None:
        for key in sorted(keys):
            self._problems.add(SCALES_WITHOUT_FP8, f"{prefix}.{key}")

    def _read_scales(self, prefix: str, keys: list[str], required: Sequence[str]) -> None:
        """Read and keep the scales that the file has; miss the required ones that nothing tells."""
        values = []
        for scale in SCALE_KEYS:
            sources = [key for key in SCALE_SOURCES[scale] if key in keys]
            self._told[scale][prefix] = sources
            if scale in required:
                self._needed[scale].add(prefix)
            values.append(self._read_scale(prefix, scale, sources))
        self._resolved[prefix] = (values[0], values[1])

    def _read_scale(self, prefix: str, scale: str, keys: list[str]) -> torch.Tensor | None:
        tensors = {key: self._table.read(f"{prefix}.{key}").cpu() for key in keys}
        for key in keys:  # each for itself, so that one bad source doesn't hide another
            try:
                check_scale(tensors[key], f"{prefix}.{key}")
            except ScaleError as error:
                self._problems.add(SCALE, f"{error.name}: {error.fault}")
                del tensors[key]
        try:
            return resolve_fp8_scale(tensors, prefix, scale)
        except ScaleError as error:
            self._problems.add(SCALE, f"{error.name}: {error.fault}")
            return None

    def _dtype(self, prefix: str) -> torch.dtype | None:
        name = f"{prefix}.weight"
        return self._table.spec(name).dtype if self._table.has(name) else None
