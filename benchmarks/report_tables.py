# SPDX-License-Identifier: Apache-2.0
"""The tables that are made of committed results: which file each is read from, and its rows.

``benchmarks.report`` prints them as Markdown and the documentation shows them; both take them from
here, so no figure stands anywhere without the result behind it. Cells are Markdown.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
NOT_MEASURED = "Not measured yet: the committed results have nothing of it in `{file}`."
_NONE = "-"

Record = dict[str, Any]
Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Table:
    """One table of the report.

    Attributes:
        title: What it shows.
        stem: Name of the result file, without ``.json``.
        rows: Makes the heading and the lines of a file's content; the heading alone where the file
            holds nothing of this table.
    """

    title: str
    stem: str
    rows: Callable[[Record], Rows]


def read_result(stem: str, folder: Path = RESULTS) -> Record | None:
    """The content of one result file, None where there is no such file."""
    path = folder / f"{stem}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def where_measured(record: Record, stem: str) -> str:
    """Device, version, date and file of a result, in one sentence."""
    parts = [record["device"], f"torch {record['torch']}", record.get("date")]
    return f"{', '.join(part for part in parts if part)} (`{stem}.json`)."


def section(record: Record, name: str) -> list[dict[str, Any]]:
    """The rows of one section."""
    return [row for row in record["rows"] if row.get("section") == name]


def spread(samples: Iterable[float], digits: int) -> str:
    """Smallest to largest sample."""
    return f"{min(samples):.{digits}f} to {max(samples):.{digits}f}"


def ratio(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3f}"


def step_rows(record: Record) -> Rows:
    """Every variant of one denoising step."""
    rows = [
        ("case", "linears", "attention", "variant", "seconds", "range", "of ceiling", "peak GiB")
    ]
    for row in section(record, "step"):
        rows.append(
            (
                row["case"],
                row["mode"],
                row["attention"],
                row["variant"],
                f"{row['median_s']:.4f}",
                spread(row["samples_s"], 4),
                ratio(row["of_ceiling"]),
                f"{row['peak_gib']:.1f}",
            )
        )
    return rows


def layer_rows(record: Record) -> Rows:
    """Every variant of one generation layer, then the understanding layer, which has no ceiling."""
    head = ("case", "linears", "attention", "variant", "run", "ms", "range")
    rows = [(*head, "ceiling ms", "of ceiling")]
    for row in (*section(record, "layer"), *section(record, "text_layer")):
        text = row["section"] == "text_layer"
        rows.append(
            (
                f"text, {row['shape'][1]} tokens" if text else row["case"],
                row["mode"],
                row["attention"],
                "understanding" if text else row["variant"],
                "graph" if row["graphs"] else "eager",
                f"{row['median_s'] * 1e3:.3f}",
                spread([s * 1e3 for s in row["samples_s"]], 3),
                _NONE if text else f"{row['ceiling_s'] * 1e3:.3f}",
                ratio(row.get("of_ceiling")),
            )
        )
    return rows


def ceiling_rows(record: Record) -> Rows:
    """What a step can't be faster than."""
    rows = [("case", "linears", "attention", "linears s", "attention s", "other GB", "sum s")]
    for row in section(record, "ceiling"):
        rows.append(
            (
                row["case"],
                row["mode"],
                f"{row['attention']} ({row['kernel']})",
                f"{row['linears_s']:.4f}",
                f"{row['attention_s']:.4f}",
                f"{row['other_bytes'] / 1e9:.1f}",
                f"{row['median_s']:.4f}",
            )
        )
    return rows


def alone_rows(record: Record) -> Rows:
    """GEMMs and attention in short bursts."""
    rows = [("case", "kernel", "shape", "ms", "TFLOP/s")]
    for row in (*section(record, "gemm"), *section(record, "attention")):
        kernel = f"{row['name']} {row['mode']}" if "mode" in row else f"attention {row['name']}"
        shape = " x ".join(map(str, row["shape"]))
        numbers = (f"{row['median_ms']:.3f}", f"{row['tflop_s']:.0f}")
        rows.append((row["case"], kernel, shape, *numbers))
    return rows


def breakdown_table(record: Record) -> Rows:
    """Where the time of a step goes."""
    head = ("case", "linears", "attention", "kernels", "count", "ms", "share", "of ceiling")
    rows = [head]
    for row in section(record, "breakdown"):
        rows.append(
            (
                row["case"],
                row["mode"],
                row["attention"],
                row["kernel_family"],
                str(row.get("count", _NONE)),
                f"{row['seconds'] * 1e3:.2f}",
                f"{row['share']:.1%}",
                ratio(row.get("of_ceiling")),
            )
        )
    return rows


def request_rows(record: Record) -> Rows:
    """Seconds by phase, and how even the steps are."""
    rows = [("what", "value")]
    for row in section(record, "warm-up"):
        rows.append(("warm-up, before the request", f"{row['seconds']:.1f} s"))
    for row in section(record, "request"):
        height, width, frames = row["size"]
        rows.append(("request", f"{width} x {height}, {frames} frames, {row['steps']} steps"))
        rows += [(f"{name}", f"{s:.2f} s") for name, s in row["phases_s"].items()]
        rows.append(("whole request", f"{row['total_s']:.2f} s"))
        slowest = ratio(row["slowest_of_median"])
        rows.append((f"slowest of {row['settled_steps']} settled steps, of its median", slowest))
        rows.append(("peak memory", f"{row['peak_gib']:.1f} GiB"))
    steps = section(record, "request_step")
    for mode in dict.fromkeys(row["mode"] for row in steps):
        settled = [row["seconds"] for row in steps if row["mode"] == mode and row["settled"]]
        if settled:
            text = f"{statistics.median(settled):.3f} s, {spread(settled, 3)}"
            rows.append((f"{len(settled)} settled {mode} steps", text))
    for row in section(record, "lifecycle"):
        ends = " and ".join(f"a {end}" for end in row["after"])
        what = f"latents after {ends} request of {row['steps']} steps"
        rows.append((what, "the same bits" if row["bit_identical"] else "DIFFERENT"))
    return rows


def peer_rows(record: Record) -> Rows:
    """Ours beside the peer."""
    rows = [("implementation", "attention", "seconds", "range", "speed", "peak GiB", "velocities")]
    for row in section(record, "peer"):
        timed = "median_s" in row
        rows.append(
            (
                row["name"],
                row["attention"],
                f"{row['median_s']:.3f}" if timed else _NONE,
                spread(row["samples_s"], 3) if timed else _NONE,
                f"{row['speedup']:.2f} x" if timed else _NONE,
                f"{row['peak_gib']:.1f}",
                f"{row['velocity_error']:.1e}",
            )
        )
    return rows


# Errors of FP8 attention: as it runs, with the mean value in the codes, with the mean key in them.
_ERRORS = ("error", "error_value_mean_kept", "error_key_mean_kept")


def error_section(record: Record, name: str) -> list[dict[str, Any]]:
    """Rows that have all three errors; "error" alone may stand for another quantisation."""
    return [row for row in section(record, name) if row.keys() >= set(_ERRORS)]


def layer_error_rows(record: Record) -> Rows:
    """Error of FP8 attention by layer; of the two branches the larger one."""
    found: dict[int, dict[float, list[dict]]] = {}
    for row in error_section(record, "layer"):
        found.setdefault(row["layer"], {}).setdefault(row["sigma"], []).append(row)
    sigmas = sorted({sigma for by_sigma in found.values() for sigma in by_sigma}, reverse=True)
    rows = [("layer", *(f"noise {sigma:g}" for sigma in sigmas))]
    for layer, by_sigma in sorted(found.items()):
        cells = []
        for sigma in sigmas:
            errors = (max(r[k] for r in by_sigma[sigma]) for k in _ERRORS)
            cells.append("{:.4f} ({:.4f}, {:.4f})".format(*errors))
        rows.append((str(layer), *cells))
    return rows


def peaked_rows(record: Record) -> Rows:
    """Error of FP8 attention on synthetic queries."""
    kinds = ("both means subtracted", "mean value kept", "mean key kept")
    rows = [("lean towards one key", "size of the mean value", *kinds)]
    for row in error_section(record, "peaked"):
        errors = (f"{row[name]:.4f}" for name in _ERRORS)
        rows.append((f"{row['peak']:g}", f"{row['value_mean']:g}", *errors))
    return rows


def op_rows(record: Record) -> Rows:
    """The fastest launch of every kernel."""
    best: dict[tuple, dict] = {}
    for row in record["rows"]:
        key = (row["section"], row["name"], tuple(row.get("shape", ())))
        if key not in best or row["median_ms"] < best[key]["median_ms"]:
            best[key] = row
    rows = [("kernel", "shape", "ms", "GB/s", "of copy")]
    for (_, name, shape), row in best.items():
        rows.append(
            (
                name,
                " x ".join(map(str, shape)) or _NONE,
                f"{row['median_ms']:.4f}",
                f"{row['bytes'] / row['median_ms'] / 1e6:.0f}",
                ratio(row["of_copy"]),
            )
        )
    return rows


def load_rows(record: Record) -> Rows:
    """A load against moving the same bytes."""
    summary = record["summary"]
    rows = [("what", "seconds")]
    rows.append(("the same bytes read and copied, nothing else", f"{summary['reference_s']:.3f}"))
    rows.append(("our load, in all", f"{summary['load_s']:.3f}"))
    rows += [(f"of which {name}", f"{s:.3f}") for name, s in summary["phases_s"].items()]
    rows.append(("safetensors' load_file", f"{record['load_file_s']:.3f}"))
    rows.append(("ratio of our load to the bytes alone", f"{summary['ratio']:.2f}"))
    return rows


def outcome_rows(record: Record) -> Rows:
    """Outcomes of a list of GPU tests."""
    return [("outcome", "tests")] + [(k, str(n)) for k, n in sorted(record["counts"].items())]


TABLES = {
    "ops": Table("Kernels alone", "ops_h200", op_rows),
    "ceilings_nano": Table("Ceilings of a step, Nano", "step_nano_h200", ceiling_rows),
    "layer_nano": Table("One layer, Nano", "layer_nano_h200", layer_rows),
    "layer_super": Table("One layer, Super", "layer_super_h200", layer_rows),
    "step_nano": Table("One denoising step, Nano", "step_nano_h200", step_rows),
    "breakdown_nano": Table("Where a step's time goes, Nano", "step_nano_h200", breakdown_table),
    "alone_nano": Table("GEMMs and attention alone, Nano", "step_nano_h200", alone_rows),
    "ceilings_super": Table("Ceilings of a step, Super", "step_super_h200", ceiling_rows),
    "alone_super": Table("GEMMs and attention alone, Super", "step_super_h200", alone_rows),
    "step_super": Table("One denoising step, Super", "step_super_h200", step_rows),
    "breakdown_super": Table("Where a step's time goes, Super", "step_super_h200", breakdown_table),
    "peer": Table("Beside diffusers with ModelOpt FP8", "peer_nano_h200", peer_rows),
    "request": Table("A whole request", "request_nano_h200", request_rows),
    "attention_error": Table("FP8 attention by layer", "attention_error_h200", layer_error_rows),
    "attention_peaked": Table("FP8 attention, synthetic", "attention_error_h200", peaked_rows),
    "load": Table("Loading Nano", "load_nano_h200", load_rows),
    "gpu_tests": Table("GPU tests", "gpu_tests_h200", outcome_rows),
}
