# SPDX-License-Identifier: Apache-2.0
"""A tiny random Cosmos3 checkpoint in the published diffusers layout, BF16 or static FP8.

It is structurally complete (both towers, sound and action weights, VAE, sound tokenizer, scheduler,
text tokenizer) and small enough to generate on two CPU cores, so the demo and the tests need no
download. The weights are random: what it generates is noise.

Run ``python -m tensorrt_llm.visual_gen.tiny_checkpoint OUT --precision fp8 --seed 0``.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from tensorrt_llm._utils import describe_error

PRECISIONS = ("fp8", "bf16")


def make_tiny_checkpoint(
    out_dir: str | os.PathLike[str], precision: str = "fp8", seed: int = 0
) -> Path:
    """Write a tiny checkpoint, all of it or nothing.

    The same seed and the same library versions give the same bytes, and the FP8 checkpoint of a
    seed is the quantised BF16 checkpoint of that seed. The FP8 one has what the published ones
    have: e4m3 weights, FP32 ``weight_scale`` and ``input_scale``, ModelOpt's own BF16 buffers
    beside them, a calibration by a real guided run, and the step-precision policy in its config.

    Args:
        out_dir: The folder to make. It may exist if it is empty; missing parents are made.
        precision: ``"fp8"`` (static W8A8) or ``"bf16"``.
        seed: Seed of the random weights, 0 or more.

    Returns:
        The absolute path of the finished checkpoint.

    Raises:
        ValueError: an unknown precision, a negative seed, or an ``out_dir`` that is a file or a
            folder with something in it. Nothing is written then.
    """
    out = Path(os.path.abspath(out_dir))
    _check_request(out, precision, seed)
    # Heavy imports only now: a refusal and ``--help`` must not wait for torch and diffusers.
    from tensorrt_llm.visual_gen.tiny_components import write_bf16_checkpoint

    out.parent.mkdir(parents=True, exist_ok=True)
    # A sibling, so that the final rename stays inside one file system and is atomic.
    building = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        write_bf16_checkpoint(building, seed)
        if precision == "fp8":
            from tensorrt_llm.visual_gen.tiny_fp8 import quantize_checkpoint

            quantize_checkpoint(building)
        building.chmod(0o777 & ~_current_umask())  # mkdtemp makes it private
        os.replace(building, out)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return out


def cached_tiny_checkpoint(report: Callable[[str], None] = click.echo) -> Path:
    """The tiny static FP8 checkpoint of seed 0, made once for every version of its maker.

    Args:
        report: Told when it has to be made, which takes some seconds.

    Returns:
        Its folder in the user's cache.
    """
    maker = Path(__file__).parent
    sources = [*sorted(maker.glob("tiny_*.py")), maker / "data" / "tokenizer_corpus.txt"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "tensorrt-llm-cosmos3" / f"tiny-fp8-{digest[:16]}"
    if not path.exists():
        report(f"Making the tiny checkpoint {path} (once).")
        try:
            make_tiny_checkpoint(path, precision="fp8", seed=0)
        except OSError:
            # Another process may have finished the same folder meanwhile.
            if not (path / "model_index.json").is_file():
                raise
    return path


def _check_request(out: Path, precision: str, seed: int) -> None:
    if precision not in PRECISIONS:
        raise ValueError(
            describe_error(
                "Unknown precision for a tiny checkpoint",
                where="precision",
                expected=f"one of {', '.join(PRECISIONS)}",
                found=repr(precision),
                remedy="pass --precision fp8 or --precision bf16",
            )
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(
            describe_error(
                "Bad seed for a tiny checkpoint",
                where="seed",
                expected="an integer, 0 or more",
                found=repr(seed),
                remedy="pass a seed of 0 or more",
            )
        )
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(
            describe_error(
                "The output folder of a tiny checkpoint is not free",
                where=out,
                expected="no such path yet, or an empty folder",
                found="a link or a file"
                if out.is_symlink() or out.is_file()
                else "a folder in use",
                remedy="name another folder, or remove this one first",
            )
        )


def _current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--precision", type=click.Choice(PRECISIONS), default="fp8", show_default=True, help="Weights."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def main(out: Path, precision: str, seed: int) -> None:
    """Write a tiny random Cosmos3 checkpoint to the folder OUT."""
    started = time.perf_counter()
    try:
        make_tiny_checkpoint(out, precision, seed)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    click.echo(
        f"{out}: tiny Cosmos3 checkpoint, {precision}, seed {seed}, {size / 1e6:.1f} MB, "
        f"made in {time.perf_counter() - started:.1f} s (random weights: it generates noise)"
    )


if __name__ == "__main__":
    main()
