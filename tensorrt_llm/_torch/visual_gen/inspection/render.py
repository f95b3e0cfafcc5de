# SPDX-License-Identifier: Apache-2.0
"""The inspection as text for a terminal: one block for each question."""

from collections.abc import Iterator, Sequence

from tensorrt_llm._torch.visual_gen.inspection.contents import Contents
from tensorrt_llm._torch.visual_gen.inspection.fidelity import FUSIONS, Group, relative_error
from tensorrt_llm._torch.visual_gen.inspection.report import Memory, Report, fusion_summary

_SHOWN_GROUPS = 10
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

Row = Sequence[object]


def render_text(report: Report) -> str:
    """Render a report; the JSON form has every group, this one those with the widest spread."""
    source = report.source
    title = source.model if source.commit is None else f"{source.model} at {source.commit}"
    blocks = [
        [title],
        ["VERDICT", *_verdict(report)],
        ["CONTENTS", *_contents(report.contents)],
        ["MEMORY", *_memory(report.memory)],
        ["FIDELITY", *_fidelity(report)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _verdict(report: Report) -> Iterator[str]:
    if report.refusal is None:
        yield "  loads: the loader's own plan accepts it"
        yield from (f"  but {notice}" for notice in report.notices)
        return
    lines = str(report.refusal).splitlines() or [""]
    yield f"  refused: {type(report.refusal).__name__}: {lines[0]}"
    yield from (f"  {line}" for line in lines[1:])


def _contents(contents: Contents) -> Iterator[str]:
    policy = contents.step_policy
    recipe = "none"
    if contents.quant_algo is not None:
        kind = {True: "static", False: "quantised while loading", None: "refused"}
        recipe = f"{contents.quant_algo}, {kind[contents.quant_static]}"
    rows = [
        ("family", contents.family),
        ("build", contents.build),
        ("", contents.build_evidence),
        ("pipeline", contents.pipeline_class),
        ("scheduler", contents.scheduler_class),
        ("model_index.json", _pairs(contents.index_flags)),
        ("sizes", _pairs(contents.sizes)),
        ("modalities", ", ".join(contents.modalities)),
        ("quantisation", recipe),
        ("exported by", contents.quant_producer),
        ("scales", _pairs({k: v for k, v in contents.scale_dialects.items() if v})),
        ("FP8 linears", _pairs(contents.fp8_linears)),
        ("step policy", "none" if policy is None else _pairs(policy)),
    ]
    yield from _table([row for row in rows if row[1]])
    yield ""
    yield from _table(
        [
            ("transformer tensors", "count", "size"),
            *((t.dtype, t.count, size_text(t.num_bytes)) for t in contents.tensors),
        ]
    )
    yield ""
    yield from _table(
        [
            ("component", "files", "tensors", "size"),
            *((c.name, c.files, c.tensors, size_text(c.num_bytes)) for c in contents.components),
        ]
    )


def _memory(memory: Memory | None) -> Iterator[str]:
    if memory is None:
        yield "  unknown: config.json describes no model that is built here"
        return
    request, need = memory.request, memory.need
    branches = "two branches" if request.is_guided else "one branch"
    graphs = ("CUDA graphs", size_text(need.graphs), "estimate, kept from their capture on")
    yield (
        f"  {request.width}x{request.height}, {request.num_frames} frames, {branches} of "
        f"{memory.tokens:,} tokens"
    )
    yield from _table(
        [
            ("transformer weights", size_text(need.transformer)),
            ("VAE weights", size_text(need.vae)),
            ("sound tokenizer weights", size_text(need.sound_tokenizer)),
            (
                "text keys and values",
                size_text(need.text_cache),
                "estimate, for the longest prompt",
            ),
            *([graphs] if need.graphs else []),
            ("denoising", size_text(need.denoising), "estimate, at its peak"),
            ("decoding", size_text(need.decoding), "estimate, at its peak, after denoising"),
            ("together", size_text(need.total), "estimate"),
        ]
    )
    yield f"  {_fit(memory)}"


def _fit(memory: Memory) -> str:
    if memory.device is None:
        return "no CUDA device here to compare with"
    name, free, total = memory.device
    has = f"{name} has {size_text(free)} free of {size_text(total)}"
    if memory.fits:
        return f"fits: {has}"
    if memory.largest_num_frames:
        return f"does not fit: {has}; {memory.largest_num_frames} frames of this size would"
    return f"does not fit: {has}; no number of frames of this size would"


def _fidelity(report: Report) -> Iterator[str]:
    if not report.groups and not report.left_out:
        yield "  no FP8 projections that an engine could merge: nothing would be rounded twice"
        return
    yield "  what merging projections under one scale would cost; this package merges none of them"
    for fusion in FUSIONS:
        yield from _fusion(report, fusion)
    widest = sorted(report.groups, key=lambda group: -group.spread)[:_SHOWN_GROUPS]
    if len(widest) < len(report.groups):
        yield f"  the {len(widest)} of {len(report.groups)} groups with the widest spread:"
    yield ""
    yield from _table([("group", "weight scales", "spread", "twice", "error"), *map(_row, widest)])
    for name, reason in report.left_out.items():
        yield f"  left out: {name}: {reason}"
    if not report.measured:
        yield "  --fidelity reads the weights and measures the errors"


def _fusion(report: Report, fusion: str) -> Iterator[str]:
    total = fusion_summary(report.groups, fusion)
    yield f"  {fusion}: {total['description']}"
    twice, shards = total["rounded_twice"], total["shards"]
    if twice == 0:
        yield f"    nothing lost: the scales inside each of its {total['groups']} groups are equal"
        return
    share = f"{twice} of {shards} shards ({twice / shards:.0%}) would be rounded a second time"
    yield f"    {share}"
    yield f"    widest spread {total['widest_spread']:.2f}: {total['widest_group']}"
    if total["relative_error"] is not None:
        yield f"    relative L2 error over all its shards: {total['relative_error']:.3e}"


def _row(group: Group) -> Row:
    twice = sum(shard.rounded_twice for shard in group.shards)
    error = relative_error(group.shards)
    scales = " ".join(f"{shard.scale:.3e}" for shard in group.shards)
    return (
        group.name,
        scales,
        f"{group.spread:.2f}",
        f"{twice} of {len(group.shards)}",
        "" if error is None else f"{error:.3e}",
    )


def _pairs(mapping: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in mapping.items())


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Rows as aligned columns."""
    texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
    columns = max(map(len, texts))
    texts = [[*row, *[""] * (columns - len(row))] for row in texts]
    widths = [max(len(row[i]) for row in texts) for i in range(columns)]
    for row in texts:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def size_text(num_bytes: int) -> str:
    """Spell a size in the largest unit that leaves at least 1."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} bytes"
