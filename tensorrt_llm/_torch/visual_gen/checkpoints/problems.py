# SPDX-License-Identifier: Apache-2.0
"""Every kind of problem that a checkpoint can have, and the one error that lists all of them.

Whoever judges a checkpoint adds what it finds and goes on; `Problems.raise_if_any` then says
everything at once: kind by kind the first few and the count, and what to do about each kind.
"""

from dataclasses import dataclass

from tensorrt_llm._utils import describe_error

_SHOWN_PER_KIND = 5


@dataclass(frozen=True)
class ProblemKind:
    """One kind of problem.

    Attributes:
        heading: What the listed items are; stands before them in the message.
        cause: When it is found, for the documentation.
        remedy: What the caller can do about it.
    """

    heading: str
    cause: str
    remedy: str


_DOWNLOAD = "download the files again"
_BELONG = "use weights and a config.json that belong together"
_EXPORT = "export the checkpoint again with ModelOpt's per-tensor FP8"

UNREADABLE_FILE = ProblemKind(
    "files that can't be read",
    "a file is cut short, empty or a Git LFS pointer, or its header is malformed or has a tensor "
    "twice",
    _DOWNLOAD,
)
MISSING_FILE = ProblemKind(
    "missing files",
    "the index names a shard that isn't there, or a component lacks a file",
    _DOWNLOAD,
)
INDEX = ProblemKind(
    "shards that disagree with their index",
    "the index promises tensors that a shard lacks, or a shard holds tensors of which the index "
    "knows nothing",
    _DOWNLOAD,
)
STORED_TWICE = ProblemKind(
    "tensors stored twice",
    "two files, or the names with and without `model.`, claim one tensor",
    _EXPORT,
)
MISSING = ProblemKind(
    "missing tensors",
    "a module has no source; or an FP8 linear lacks a scale, or the kind of scale that the other "
    "linears of the checkpoint have",
    f"{_DOWNLOAD}, or {_BELONG}",
)
SURPLUS = ProblemKind(
    "tensors that nothing consumes",
    "a tensor that no module reads and that is not on the list of unused ones",
    _BELONG,
)
SHAPE = ProblemKind(
    "wrong shapes", "a tensor has another shape than config.json gives its module", _BELONG
)
DTYPE = ProblemKind(
    "wrong dtypes",
    "a dtype that the module can't hold exactly: it would have to be rounded or reinterpreted "
    "(16 bit into FP32 is exact and loads)",
    "store the tensor in the expected dtype, or correct dtype in transformer/config.json",
)
UNQUANTIZED = ProblemKind(
    "weights that a static FP8 recipe needs in FP8",
    "a 16 or 32 bit weight where quantization_config says static FP8",
    "load the checkpoint's fp8 revision, or quantise while loading with "
    'quant_config={"quant_algo": "FP8"}',
)
NO_RECIPE = ProblemKind(
    "FP8 weights for a module that its configuration leaves in high precision",
    "quantization_config was removed, replaced by a quant_config without an algorithm, or excludes "
    "the module",
    "keep the quantization_config of the published transformer/config.json, and pass no "
    "quant_config that replaces it",
)
SCALES_WITHOUT_FP8 = ProblemKind(
    "scales without an FP8 weight",
    "a scale belongs to a weight that is not stored in FP8",
    f"{_BELONG} (BF16 weights have no scales)",
)
SCALE = ProblemKind(
    "unusable scales",
    "a scale has several elements (per-channel or block scales), another dtype, a value that is "
    "NaN, infinite, zero or negative, or contradicts the other dialect's",
    _EXPORT,
)
GROUP = ProblemKind(
    "projections that share one activation without the same calibrated input_scale",
    "q, k, v or gate, up of one tower differ in input_scale",
    "export the checkpoint with the input quantizers of each group tied",
)
FOREIGN = ProblemKind(
    "tensors of a quantisation that is not supported",
    "SmoothQuant's or AWQ's pre_quant_scale, NVFP4 or other 4-bit codes, INT8, block scales, "
    "quantised attention or outputs",
    "use a ModelOpt FP8 checkpoint with per-tensor scales, or the 16-bit one",
)
CALIBRATION = ProblemKind(
    "calibrated FP8 weights under a recipe that quantises while loading",
    "the checkpoint's own quantization_config has no static config_groups, so its scales would be "
    "dropped",
    "restore config_groups in quantization_config; or pass the recipe as quant_config, if dropping "
    "the calibration is what you want",
)
MIXED_PARTS = ProblemKind(
    "fused projections with parts of different precision",
    "a load-time recipe fuses projections of which some are stored in FP8 and some are not",
    _BELONG,
)
FEATURES = ProblemKind(
    "FP8 linears whose features the CUDA GEMM does not take",
    "in or out features that are no multiples of 16, on a CUDA device",
    "exclude the module from quantisation, or load on the CPU",
)
POLICY = ProblemKind(
    "diffusion_step_policy can't be served by the loaded weights",
    "quantization_config.runtime has a policy, and no linear of the generation tower is static FP8",
    "use the checkpoint's fp8 revision as published, or pass a quant_config of your own, which "
    "drops the policy",
)

KINDS: tuple[ProblemKind, ...] = (
    *(UNREADABLE_FILE, MISSING_FILE, INDEX, STORED_TWICE, MISSING, SURPLUS, SHAPE, DTYPE),
    *(UNQUANTIZED, NO_RECIPE, SCALES_WITHOUT_FP8, SCALE, GROUP, FOREIGN, CALIBRATION),
    *(MIXED_PARTS, FEATURES, POLICY),
)
"""All kinds, in the order in which the documentation and the messages list them."""


class Problems:
    """Collects what is wrong with a checkpoint."""

    def __init__(self) -> None:
        self._found: dict[ProblemKind, list[str]] = {}

    def add(self, kind: ProblemKind, text: str) -> None:
        """Note one problem; ``text`` names the tensor or file, what is expected and what found."""
        self._found.setdefault(kind, []).append(text)

    def raise_if_any(self, what: str, where: object, expected: str) -> None:
        """Raise the one error that lists all problems, if there are any.

        Args:
            what: The failure in one clause.
            where: The folder or object that was judged.
            expected: What would have been right.

        Raises:
            ValueError: the list.
        """
        if not self._found:
            return
        kinds = [kind for kind in KINDS if kind in self._found]
        total = sum(map(len, self._found.values()))
        lines = [f"{total} problem{'s' if total > 1 else ''}", *map(self._line, kinds)]
        remedies = dict.fromkeys(kind.remedy for kind in kinds)
        raise ValueError(
            describe_error(
                what,
                where=where,
                expected=expected,
                found="\n- ".join(lines),
                remedy=f"nothing was loaded; {'; '.join(remedies)}",
            )
        )

    def _line(self, kind: ProblemKind) -> str:
        found = self._found[kind]
        more = f" ... ({len(found)} in all)" if len(found) > _SHOWN_PER_KIND else ""
        return f"{kind.heading}: {'; '.join(found[:_SHOWN_PER_KIND])}{more}"


def dtype_name(dtype: object) -> str:
    """Spell a dtype without its module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
