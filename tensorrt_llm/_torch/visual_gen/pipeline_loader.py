# SPDX-License-Identifier: Apache-2.0
"""From ``VisualGenArgs`` to a pipeline that is ready to generate.

The order is: find the files, judge the configuration, plan the weights on a model without memory,
and only then allocate and copy. A checkpoint that is refused costs neither time nor memory, and
what either precision mode needs is tried once before the first request.
"""

import json
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensorrt_llm._torch.custom_ops.attention_arguments import check_cuda_head_dim
from tensorrt_llm._torch.visual_gen.attention_backend import resolve_attention_backend
from tensorrt_llm._torch.visual_gen.checkpoints.agreement import (
    check_latents,
    check_step_dtype,
    read_model_index,
)
from tensorrt_llm._torch.visual_gen.checkpoints.components import (
    check_files,
    plan_sound_tokenizer,
    plan_vae,
    read_scheduler,
)
from tensorrt_llm._torch.visual_gen.checkpoints.json_files import read_json
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.checkpoints.source import CheckpointSource, resolve_source
from tensorrt_llm._torch.visual_gen.checkpoints.text_tokenizer import check_prompts, read_tokenizer
from tensorrt_llm._torch.visual_gen.checkpoints.weight_apply import allocate, apply_plan
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import WeightPlan, plan_weights
from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.config_fields import AttentionConfig, TorchCompileConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.guardrails import Guardrails, load_guardrails
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_policy import (
    refuse_idle_fp8_attention,
    uses_static_fp8,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_probe import probe_precisions
from tensorrt_llm._torch.visual_gen.models.cosmos3.sampling import Cosmos3SamplingPolicy
from tensorrt_llm._torch.visual_gen.models.cosmos3.sound import SoundDecoder
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm._torch.visual_gen.pipeline_registry import find_pipeline
from tensorrt_llm._utils import describe_error
from tensorrt_llm.logger import logger

if TYPE_CHECKING:
    from tensorrt_llm.visual_gen.args import VisualGenArgs

_GIB = 2**30
# Variants of a compiled function that torch keeps in this process: eight or nine a checkpoint.
_VARIANTS = 64


@dataclass(frozen=True)
class Cosmos3Components:
    """Everything a pipeline is made of. Nothing here is changed by a request.

    Attributes:
        transformer: Loaded Cosmos3VFMTransformer.
        vae: diffusers AutoencoderKLWan, BF16 (FP32 beside an FP32 transformer).
        sound_tokenizer: diffusers Cosmos3AVAEAudioTokenizer in the same dtype; None for a
            checkpoint without the folder.
        tokenizer: transformers tokenizer with a chat template.
        scheduler: diffusers scheduler as configured by the checkpoint; requests copy it.
        model: The caller's name of the checkpoint.
        revision: The caller's revision.
        commit: The Hub commit of the files, None for a folder.
        default_use_system_prompt: The checkpoint's default, false where it says nothing.
        negative_prompt: Text of the checkpoint's assets/negative_prompt.json, if it has one.
        requires_guardrails: Whether requests are checked unless they say otherwise.
        guardrails: What checks them.
        device: Where generation runs.
    """

    transformer: Cosmos3VFMTransformer
    vae: nn.Module
    sound_tokenizer: nn.Module | None
    tokenizer: Any
    scheduler: Any
    model: str
    revision: str | None
    commit: str | None
    default_use_system_prompt: bool
    negative_prompt: str | None
    requires_guardrails: bool
    guardrails: Guardrails
    device: torch.device


@dataclass(frozen=True)
class LoadPlan:
    """A checkpoint that was judged and can be loaded; nothing large has been read or allocated.

    Attributes:
        source: Its files.
        index: ``model_index.json``.
        pipeline_class: What it becomes.
        transformer: The model, on the meta device.
        weights: The transformer's tensors.
        weight_plan: Which of them goes where.
        vae: The VAE, on the meta device.
        sound_tokenizer: The same, None for a checkpoint without one.
        tokenizer: As in Cosmos3Components, like the two below.
        scheduler: The checkpoint's.
        negative_prompt: The checkpoint's.
    """

    source: CheckpointSource
    index: dict[str, Any]
    pipeline_class: type
    transformer: Cosmos3VFMTransformer
    weights: SafetensorsFolder
    weight_plan: WeightPlan
    vae: nn.Module
    sound_tokenizer: nn.Module | None
    tokenizer: Any
    scheduler: Any
    negative_prompt: str | None


class PipelineLoader:
    """Builds the pipeline that ``args`` describe.

    Args:
        args: The public arguments.
        device: Where to generate; CUDA when there is a device, else CPU. CUDA without an index is
            the calling thread's current device.
    """

    def __init__(self, args: "VisualGenArgs", device: torch.device | str | None = None) -> None:
        self.args = args
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = _numbered(torch.device(device or default))

    def load(self, skip_warmup: bool = False) -> Any:
        """Load the checkpoint and return its pipeline, with ``.transformer``.

        Args:
            skip_warmup: Leave out the warm-up that ``compilation_config`` asks for. The short probe
                of both precision modes always runs.

        Raises:
            ValueError: a checkpoint or an option that contradicts itself.
            NotImplementedError: one that is valid and not built.
            MemoryError: weights that don't fit the device.
        """
        # Options that can't be served are refused before a checkpoint is downloaded for them.
        wants_compile(self.args.torch_compile_config, self.device)
        self._check_graphs()
        plan = self.plan(resolve_source(self.args.model, self.args.revision))
        check_memory(plan.transformer, self.device)
        transformer = self._load_transformer(plan)
        components = self._load_components(plan)
        probe_precisions(transformer)
        options = transformer.model_config.torch_compile
        if wants_compile(options, self.device):
            compile_generation_layers(transformer, options.enable_fullgraph)
        pipeline = plan.pipeline_class(components)
        warmup = self.args.compilation_config
        if not (skip_warmup or warmup.skip_warmup):
            pipeline.warmup(resolutions=warmup.resolutions, num_frames=warmup.num_frames)
        return pipeline

    def _check_graphs(self) -> None:
        if self.args.cuda_graph_config.enable and self.device.type != "cuda":
            raise ValueError(
                describe_error(
                    "CUDA graphs need a CUDA device",
                    where="cuda_graph_config.enable",
                    expected="False, or nothing, on this device",
                    found=f"True on {self.device.type}",
                    remedy="leave cuda_graph_config.enable off, or use a GPU",
                )
            )

    def plan(self, source: CheckpointSource) -> LoadPlan:
        """Judge a checkpoint; nothing is allocated, and no weight is read.

        ``trtllm-inspect`` makes the same call, so that its verdict is that of a load.

        Args:
            source: From ``resolve_source``.

        Raises:
            ValueError, TypeError, NotImplementedError: as ``load``.
        """
        check_files(source.path)
        index = read_model_index(source.path)
        pipeline_class = find_pipeline(index.get("_class_name")).load_class()
        config = DiffusionPipelineConfig.from_pretrained(source.path, args=self.args)
        scheduler = read_scheduler(source.path)
        Cosmos3SamplingPolicy.from_scheduler(scheduler)
        model_config = config.primary_model_config
        architecture = Cosmos3Architecture.from_pretrained_config(model_config.pretrained_config)
        if self.device.type == "cuda":
            where = "transformer/config.json, head_dim"
            check_cuda_head_dim(where, architecture.head_dim)
        backend = resolve_attention_backend(
            model_config.attention.backend,
            device=self.device,
            dtype=model_config.torch_dtype,
            head_dim=architecture.head_dim,
            static_fp8=uses_static_fp8(model_config),
        )
        model_config.attention = AttentionConfig(backend=backend)
        check_step_dtype(model_config)
        with torch.device("meta"):
            transformer = Cosmos3VFMTransformer(model_config)
        refuse_idle_fp8_attention(transformer)
        weights = SafetensorsFolder(source.path / "transformer")
        weight_plan = plan_weights(transformer, weights, self.device)
        sound_tokenizer = plan_sound_tokenizer(source.path)
        if sound_tokenizer is not None and transformer.arch.sound_gen:
            SoundDecoder(sound_tokenizer, transformer.arch)  # refuses one of another model
        vae = plan_vae(source.path)
        check_latents(vae, transformer)
        tokenizer = read_tokenizer(source.path)
        check_prompts(tokenizer, source.path, index, architecture.vocab_size)
        negative = source.path / "assets" / "negative_prompt.json"
        return LoadPlan(
            source=source,
            index=index,
            pipeline_class=pipeline_class,
            transformer=transformer,
            weights=weights,
            weight_plan=weight_plan,
            vae=vae,
            sound_tokenizer=sound_tokenizer,
            tokenizer=tokenizer,
            scheduler=scheduler,
            negative_prompt=json.dumps(read_json(negative)) if negative.is_file() else None,
        )

    def _load_transformer(self, plan: LoadPlan) -> Cosmos3VFMTransformer:
        start = time.perf_counter()
        transformer = plan.transformer
        allocate(transformer, self.device)
        apply_plan(plan.weight_plan, plan.weights, progress=True)
        transformer.post_load_weights()
        transformer.eval()
        logger.info(
            "Loaded %.2f GiB of transformer weights in %.1f s; FP8 linears: %s.",
            plan.weight_plan.num_bytes / _GIB,
            time.perf_counter() - start,
            transformer.fp8_linear_counts(),
        )
        return transformer

    def _load_components(self, plan: LoadPlan) -> Cosmos3Components:
        import diffusers

        fp32 = plan.transformer.dtype == torch.float32
        dtype = torch.float32 if fp32 else torch.bfloat16
        vae = _load_module(diffusers.AutoencoderKLWan, plan.source.path / "vae", dtype)
        sound_tokenizer = None
        if plan.sound_tokenizer is not None:
            folder = plan.source.path / "sound_tokenizer"
            sound_tokenizer = _load_module(diffusers.Cosmos3AVAEAudioTokenizer, folder, dtype)
            sound_tokenizer.to(self.device)
        required, guardrails = load_guardrails(plan.index, self.device)
        return Cosmos3Components(
            transformer=plan.transformer,
            vae=vae.to(self.device),
            sound_tokenizer=sound_tokenizer,
            tokenizer=plan.tokenizer,
            scheduler=plan.scheduler,
            model=plan.source.model,
            revision=plan.source.revision,
            commit=plan.source.commit,
            default_use_system_prompt=bool(plan.index.get("default_use_system_prompt", False)),
            negative_prompt=plan.negative_prompt,
            requires_guardrails=required,
            guardrails=guardrails,
            device=self.device,
        )


def _numbered(device: torch.device) -> torch.device:
    """The device with its index.

    Without one it would mean another GPU in another thread: the current one is each thread's own.
    """
    # Without a GPU a checkpoint can still be planned for CUDA.
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _load_module(model_class: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """A diffusers module on the CPU, ready for inference; its files were judged by the plan."""
    with warnings.catch_warnings():
        # diffusers normalises the sound decoder's weights in a way that torch calls old.
        warnings.simplefilter("ignore", FutureWarning)
        # low_cpu_mem_usage would want accelerate, which nothing else here needs.
        module = model_class.from_pretrained(
            folder, torch_dtype=dtype, low_cpu_mem_usage=False, local_files_only=True
        )
    return module.eval().requires_grad_(False)


def wants_compile(options: TorchCompileConfig, device: torch.device) -> bool:
    """Whether the generation layers are compiled: by default on CUDA, not on the CPU.

    Raises:
        ValueError: options that contradict each other.
    """
    wanted = device.type == "cuda" if options.enable is None else options.enable
    if options.enable_fullgraph and not wanted:
        raise ValueError(
            describe_error(
                "enable_fullgraph has no effect without torch.compile",
                where="torch_compile_config",
                expected="enable=True, or enable_fullgraph=False",
                found=f"enable={options.enable} on {device.type}",
                remedy="set torch_compile_config.enable, or leave enable_fullgraph out",
            )
        )
    return wanted


def compile_generation_layers(transformer: Cosmos3VFMTransformer, fullgraph: bool) -> None:
    """Compile the halves of each generation layer around attention.

    Attention alone depends on the prompt's length, so one graph a precision mode serves every
    prompt; dynamic shapes let it serve every size, and the layers share it.

    Args:
        transformer: Loaded; its layers' ``project`` and ``finish`` are replaced.
        fullgraph: Raise instead of splitting a half into several graphs.
    """
    # Two modes, one or two branches, the first layer and the others, and shapes in which a size is
    # one or equals another: a half has more than eight variants. Beyond the limit torch runs what
    # is new eagerly with one warning, or fails where a full graph is asked for.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _VARIANTS)
    for layer in transformer.gen_layers:
        layer.project = torch.compile(layer.project, fullgraph=fullgraph, dynamic=True)
        layer.finish = torch.compile(layer.finish, fullgraph=fullgraph, dynamic=True)
    count = len(transformer.gen_layers)
    logger.info("torch.compile: %d generation layers, fullgraph %s.", count, fullgraph)


def check_memory(transformer: nn.Module, device: torch.device) -> None:
    """Report need against free memory, and refuse before allocating what can't fit.

    Raises:
        MemoryError: the weights are larger than what is free on a CUDA device.
    """
    tensors = [*transformer.parameters(), *transformer.buffers()]
    need = sum(t.numel() * t.element_size() for t in tensors)
    if device.type != "cuda":
        logger.info("Transformer weights need %.2f GiB.", need / _GIB)
        return
    free, total = torch.cuda.mem_get_info(device)
    logger.info(
        "Transformer weights need %.2f GiB; %.2f of %.2f GiB are free on %s.",
        need / _GIB,
        free / _GIB,
        total / _GIB,
        device,
    )
    if need > free:
        raise MemoryError(
            describe_error(
                "The weights don't fit the device",
                where=str(device),
                expected=f"{need / _GIB:.2f} GiB free",
                found=f"{free / _GIB:.2f} of {total / _GIB:.2f} GiB",
                remedy="use the fp8 revision, a smaller model or a larger device",
            )
        )
