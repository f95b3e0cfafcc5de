# SPDX-License-Identifier: Apache-2.0
"""Generate an image or a video with Cosmos3, see README.md beside this file."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tensorrt_llm import VisualGen, VisualGenArgs, VisualGenOutput, VisualGenParams
from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen import media_writer
from tensorrt_llm.visual_gen.tiny_checkpoint import cached_tiny_checkpoint

# The modes that a prompt file may name: what is generated, and from which kind of reference.
MODES = {
    "text2image": ("image", None),
    "text2video": ("video", None),
    "image2video": ("video", "image"),
    "video2video": ("video", "video"),
}
PROMPT_FILE_OPTIONS = ("prompt", "negative_prompt", "model_mode", "vision_path", "enable_audio")
GUARDRAILS_OFF = "TRTLLM_DISABLE_COSMOS3_GUARDRAILS"


@dataclass(frozen=True)
class Job:
    """What the prompt options say together; references are paths or URIs."""

    prompt: str
    negative_prompt: str | None
    output_type: str | None
    image: str | None
    video: str | None
    enable_audio: bool


@click.command(context_settings={"show_default": True})
@click.option("--model", help="Checkpoint folder or Hub id.  [default: a tiny random checkpoint]")
@click.option("--revision", help="Branch, tag or commit of a Hub repository, such as fp8.")
@click.option("--visual_gen_args", type=click.Path(path_type=Path), help="YAML of VisualGenArgs.")
@click.option("--prompt", help="Text, or the name of a prompt file.")
@click.option("--prompt_file", type=click.Path(path_type=Path), help="Text or JSON, see README.")
@click.option("--negative_prompt", help="Text, or the name of a file; '' for an empty one.")
@click.option("--negative_prompt_file", type=click.Path(path_type=Path))
@click.option("--image_path", help="Picture to start a video from: a file, an http(s) or data URI.")
@click.option("--video_path", help="Clip to go on from: a file, an http(s) or data URI.")
@click.option("--enable_audio", is_flag=True, help="Generate sound with the video.")
@click.option("--output_path", type=click.Path(path_type=Path), help="png, jpg, webp, mp4 or wav.")
@click.option("--output_type", type=click.Choice(["image", "video"]), help="What to generate.")
@click.option("--disable_duration_template", is_flag=True, help="Don't tell length and rate.")
@click.option("--disable_resolution_template", is_flag=True, help="Don't tell the size.")
@click.option("--use_system_prompt/--no-use_system_prompt", default=None)
@click.option("--extra_params", help="JSON object for VisualGenParams.extra_params.")
@click.option("--disable_guardrails", is_flag=True, help=f"Set {GUARDRAILS_OFF}=1 for this run.")
@click.option("--seed", type=int)
@click.option("--height", type=int)
@click.option("--width", type=int)
@click.option("--num_frames", type=int)
@click.option("--frame_rate", type=float, help="Frames a second; a clip's own by default.")
@click.option("--num_inference_steps", type=int)
@click.option("--guidance_scale", type=float)
def main(
    model: str | None,
    revision: str | None,
    visual_gen_args: Path | None,
    prompt: str | None,
    prompt_file: Path | None,
    negative_prompt: str | None,
    negative_prompt_file: Path | None,
    image_path: str | None,
    video_path: str | None,
    enable_audio: bool,
    output_path: Path | None,
    output_type: str | None,
    disable_duration_template: bool,
    disable_resolution_template: bool,
    use_system_prompt: bool | None,
    extra_params: str | None,
    disable_guardrails: bool,
    **values: Any,
) -> None:
    """Generate an image or a video from a text, a picture or a clip.

    What is not given takes the pipeline's default, and the resolved values are printed.
    """
    try:
        job = read_job(
            prompt,
            prompt_file,
            negative_prompt,
            negative_prompt_file,
            output_type,
            image_path,
            video_path,
            enable_audio,
        )
        extra = parse_extra_params(extra_params)
        if job.output_type is not None:
            extra["output_type"] = job.output_type
        if job.enable_audio:
            extra["enable_audio"] = True
        if disable_duration_template:
            extra["use_duration_template"] = False
        if disable_resolution_template:
            extra["use_resolution_template"] = False
        if use_system_prompt is not None:
            extra["use_system_prompt"] = use_system_prompt
        params = VisualGenParams(
            negative_prompt=job.negative_prompt,
            image_reference=job.image,
            video_reference=job.video,
            extra_params=extra or None,
            **values,
        )
        target = check_output_path(output_path, params)
        if disable_guardrails:
            os.environ[GUARDRAILS_OFF] = "1"
        if model is None and revision is not None:
            raise ValueError(
                describe_error(
                    "A revision belongs to a model on the Hub",
                    where="--revision",
                    expected="a Hub id as --model beside it",
                    found=repr(revision),
                    remedy="name the model, or leave the revision out",
                )
            )
        overrides = {} if revision is None else {"revision": revision}
        args = (
            VisualGenArgs(**overrides)
            if visual_gen_args is None
            else VisualGenArgs.from_yaml(visual_gen_args, **overrides)
        )
        if model is None and args.model is None:
            click.echo("No --model: a tiny checkpoint with random weights, so the result is noise.")
        checkpoint = model or args.model or str(cached_tiny_checkpoint())
        with VisualGen(checkpoint, args) as visual_gen:
            output = visual_gen.generate(job.prompt, params)
        report(output)
        click.echo(f"Saved {output.save(target)}")
    except (ValueError, MemoryError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error


def read_job(
    prompt: str | None,
    prompt_file: Path | None,
    negative_prompt: str | None,
    negative_prompt_file: Path | None,
    output_type: str | None,
    image_path: str | None,
    video_path: str | None,
    enable_audio: bool,
) -> Job:
    """Bring the prompt options and the prompt file's own options together; flags win."""
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("Give --prompt or --prompt_file, one of the two.")
    if negative_prompt is not None and negative_prompt_file is not None:
        raise click.UsageError("Give --negative_prompt or --negative_prompt_file, not both.")
    if prompt is not None and is_file_name(prompt):
        prompt_file = Path(prompt)
    content = prompt if prompt_file is None else read_file(prompt_file)
    options: dict[str, Any] = {}
    if isinstance(content, dict) and "prompt" in content:
        options = check_prompt_file(content, prompt_file)
        content = options["prompt"]
    if negative_prompt is not None and is_file_name(negative_prompt):
        negative_prompt_file, negative_prompt = Path(negative_prompt), None
    if negative_prompt_file is not None:
        negative_prompt = as_text(read_file(negative_prompt_file))
    elif negative_prompt is None and "negative_prompt" in options:
        negative_prompt = as_text(options["negative_prompt"])
    if image_path is None and video_path is None:
        mode, image_path, video_path = read_mode(options, prompt_file)
        output_type = output_type or mode
    return Job(
        prompt=as_text(content),
        negative_prompt=negative_prompt,
        output_type=output_type,
        image=image_path,
        video=video_path,
        enable_audio=enable_audio or bool(options.get("enable_audio")),
    )


def read_mode(
    options: dict[str, Any], path: Path | None
) -> tuple[str | None, str | None, str | None]:
    """Output type, picture and clip of a prompt file; a relative path starts at the file."""
    mode, vision = options.get("model_mode"), options.get("vision_path")
    output_type, kind = (None, None) if mode is None else MODES[mode]
    if (kind is None) != (vision is None):
        expected = "with model_mode image2video or video2video" if kind is None else f"for {mode}"
        raise ValueError(
            describe_error(
                "model_mode and vision_path don't belong together",
                where=path,
                expected=f"vision_path {expected}, and only there",
                found=f"model_mode {mode!r}, vision_path {vision!r}",
                remedy="name a picture or clip for such a mode, and leave it out for text",
            )
        )
    if vision is not None and "://" not in vision and not vision.startswith("data:"):
        vision = str(path.parent / vision)
    return output_type, vision if kind == "image" else None, vision if kind == "video" else None


def check_prompt_file(content: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Refuse options of a prompt file that are unknown or of another type, by name."""
    unknown = sorted(set(content) - set(PROMPT_FILE_OPTIONS))
    if unknown:
        raise ValueError(
            describe_error(
                "Unknown options in a prompt file",
                where=path,
                expected=", ".join(PROMPT_FILE_OPTIONS),
                found=", ".join(unknown),
                remedy="correct their names; give other options as flags",
            )
        )
    for name in ("prompt", "negative_prompt"):
        if not isinstance(content.get(name, ""), (str, dict)):
            raise ValueError(
                describe_error(
                    f"{name} is no text and no JSON object",
                    where=path,
                    expected="a string, or an object (a structured caption)",
                    found=type(content[name]).__name__,
                    remedy="put the text in quotes",
                )
            )
    if content.get("model_mode") not in (None, *MODES):
        raise ValueError(
            describe_error(
                "Unknown model_mode in a prompt file",
                where=path,
                expected=", ".join(MODES),
                found=repr(content["model_mode"]),
                remedy="name one of these modes, or leave model_mode out",
            )
        )
    for name, kind, remedy in (
        ("vision_path", str, "write the path or URI in quotes"),
        ("enable_audio", bool, "write true or false without quotes"),
    ):
        if not isinstance(content.get(name), (kind, type(None))):
            raise ValueError(
                describe_error(
                    f"{name} is no {kind.__name__}",
                    where=path,
                    expected=f"a {kind.__name__}",
                    found=repr(content[name]),
                    remedy=remedy,
                )
            )
    return content


def is_file_name(text: str) -> bool:
    """Whether a prompt option names a file; a long text can't, and a missing one is a mistake."""
    try:
        found = Path(text).is_file()
    except (OSError, ValueError):
        return False
    if not found and re.fullmatch(r"\S+\.(json|txt)", text):
        raise click.UsageError(f"There is no file {text}, and it hardly is a prompt.")
    return found


def read_file(path: Path) -> str | dict[str, Any]:
    """A prompt file's JSON object, or its text without the newlines around it."""
    try:
        # Some editors begin a file with a byte order mark; it belongs to no prompt.
        text = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            describe_error(
                "Can't read a prompt file",
                where=path,
                expected="a text file in UTF-8",
                found=error,
                remedy="correct the path, or save the file in UTF-8",
            )
        ) from error
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            describe_error(
                "A prompt file starts like a JSON object and is none",
                where=path,
                expected="JSON, or a text that begins with another character than {",
                found=error,
                remedy="correct the JSON at the place that is named here",
            )
        ) from error


def as_text(content: str | dict[str, Any]) -> str:
    """Text as it is; a structured caption serialised, as the model was trained to see it."""
    return content if isinstance(content, str) else json.dumps(content)


def parse_extra_params(text: str | None) -> dict[str, Any]:
    """The object of --extra_params."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        raise ValueError(
            describe_error(
                "The options are no JSON object",
                where="--extra_params",
                expected="a JSON object",
                found=value,
                remedy="quote it for the shell: --extra_params '{\"flow_shift\": 5}'",
            )
        )
    return value


def check_output_path(path: Path | None, params: VisualGenParams) -> Path:
    """The target, known to fit before any time is spent on generating."""
    extra = params.extra_params or {}
    is_image = extra.get("output_type") == "image" or params.num_frames == 1
    if path is None:
        return Path("cosmos3_output.png" if is_image else "cosmos3_output.mp4")
    if is_image:
        found, kinds = "an image", ("png", "jpg", "webp")
    elif extra.get("enable_audio"):
        found, kinds = "a video with sound", ("mp4", "wav")
    else:
        found, kinds = "a video", ("mp4",)
    if media_writer.resolve_format(path, None) not in kinds:
        wanted = " or ".join(kinds)
        other = "" if is_image else ", or ask for a picture with --output_type image"
        raise ValueError(
            describe_error(
                "The file's name doesn't fit what is generated",
                where=f"--output_path {path}",
                expected=wanted,
                found=f"a run that generates {found}",
                remedy=f"name it {wanted}{other}",
            )
        )
    media_writer.resolve_target(path)
    return path


def report(output: VisualGenOutput) -> None:
    """Print what ran: FP8 linears, every resolved value, the precision of each step, times."""
    metadata = output.metadata
    counts = metadata["fp8_linears"]
    click.echo(
        f"FP8 linears: {counts['understanding']} understanding, {counts['generation']} generation"
    )
    click.echo(f"Checkpoint: {metadata['model']}, commit {metadata['commit']}")
    click.echo(f"Request: {json.dumps(shorten(metadata['request']), indent=2)}")
    if metadata["reference"] is not None:
        click.echo(f"Reference: {json.dumps(metadata['reference'])}")
    if output.audio is not None:
        channels, samples = output.audio.shape
        seconds = samples / output.audio_sample_rate
        click.echo(f"Sound: {seconds:.3f} s, {channels} channels, {output.audio_sample_rate} Hz")
    click.echo("Precision by step (generation / attention / understanding, timestep, branches):")
    for index, step in enumerate(metadata["precision_trace"]):
        click.echo(
            f"  {index:3d}  {step['generation']} / {step['attention']} / {step['understanding']}  "
            f"t={step['timestep']}  {step['branches']}"
        )
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in output.metrics)
    click.echo(f"Metrics: {seconds}")


def shorten(values: dict[str, Any], limit: int = 160) -> dict[str, Any]:
    """Long texts cut for printing, with their length."""
    return {
        name: f"{value[:limit]}... ({len(value)} characters)"
        if isinstance(value, str) and len(value) > limit
        else value
        for name, value in values.items()
    }


if __name__ == "__main__":
    main()
