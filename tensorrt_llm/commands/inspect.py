# SPDX-License-Identifier: Apache-2.0
"""``trtllm-inspect``: what a checkpoint is, whether it loads, what it needs, what fusing costs.

Exit codes: 0 it would load, 1 it would be refused, 2 the call can't be carried out (bad options, no
such checkpoint, no access, no network).
"""

import json
import sys

import click


@click.command("trtllm-inspect")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of a Hub repository.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--fidelity",
    is_flag=True,
    help="Read the weights and measure what merging projections would cost.",
)
@click.option("--height", type=int, help="Pixels of the request whose memory is estimated.")
@click.option("--width", type=int, help="Pixels of that request.")
@click.option("--num_frames", type=int, help="Frames of that request; 1 is an image.")
@click.option("--guidance", type=float, help="Guidance scale of that request; 1 is one branch.")
def main(
    model: str,
    revision: str | None,
    as_json: bool,
    fidelity: bool,
    height: int | None,
    width: int | None,
    num_frames: int | None,
    guidance: float | None,
) -> None:
    """Say what the checkpoint MODEL is, whether it would load, and what it needs.

    MODEL is a folder in the diffusers layout or a Hub id, which is fetched into the Hub's cache as
    a load would. Without --fidelity only headers and scales are read. The exit code is 0 if it
    would load, 1 if it would be refused, 2 if MODEL can't be found or fetched or an option is bad.
    """
    # Heavy imports only now: --help must not wait for torch.
    from tensorrt_llm._torch.visual_gen.checkpoints.source import resolve_source
    from tensorrt_llm._torch.visual_gen.inspection.render import render_text
    from tensorrt_llm._torch.visual_gen.inspection.report import inspect_checkpoint
    from tensorrt_llm.visual_gen.params import VisualGenParams

    try:
        params = VisualGenParams(
            height=height, width=width, num_frames=num_frames, guidance_scale=guidance
        )
        source = resolve_source(model, revision)
        report = inspect_checkpoint(source, params, measure=fidelity, progress=True)
    except (ValueError, OSError) as error:
        raise _Unusable(str(error)) from error
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else render_text(report))
    sys.exit(0 if report.refusal is None else 1)


class _Unusable(click.ClickException):
    exit_code = 2


if __name__ == "__main__":
    main()
