# SPDX-License-Identifier: Apache-2.0
"""Create a video job through OpenAI's client and follow it, see README.md beside this file."""

import time
from pathlib import Path

import click
import openai


@click.command(context_settings={"show_default": True})
@click.option("--base_url", default="http://127.0.0.1:8000/v1", help="Of the server, with /v1.")
@click.option("--api_key", default="none", envvar="TRTLLM_SERVE_API_KEY", help="The server's key.")
@click.option("--prompt", default="A robot arm folds a towel in a bright kitchen.")
@click.option(
    "--input_reference",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A picture to start from, or a clip to continue.",
)
@click.option("--size", help="WIDTHxHEIGHT.")
@click.option("--seconds", help="Length.")
@click.option("--num_inference_steps", type=int)
@click.option("--seed", type=int)
@click.option("--poll_seconds", default=1.0, help="Time between two looks.")
@click.option("--delete", is_flag=True, help="Delete the job after the download.")
@click.option("--output_path", type=click.Path(path_type=Path), default=Path("video.mp4"))
def main(
    base_url: str,
    api_key: str,
    prompt: str,
    input_reference: Path | None,
    size: str | None,
    seconds: str | None,
    num_inference_steps: int | None,
    seed: int | None,
    poll_seconds: float,
    delete: bool,
    output_path: Path,
) -> None:
    """Create a video, watch its steps, download it."""
    given = {"input_reference": input_reference, "size": size, "seconds": seconds}
    extra = {"num_inference_steps": num_inference_steps, "seed": seed}
    given, extra = (
        {name: value for name, value in values.items() if value is not None}
        for values in (given, extra)
    )
    try:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            video = client.videos.create(prompt=prompt, extra_body=extra, **given)
            click.echo(f"Created {video.id}: {video.size}, {video.seconds} s, seed {video.seed}.")
            seen = None
            while video.status not in ("completed", "failed"):
                if seen != (now := (video.status, video.stage, video.step)):
                    click.echo(f"{video.status} {video.stage or ''} {video.step}/{video.num_steps}")
                    seen = now
                time.sleep(poll_seconds)
                video = client.videos.retrieve(video.id)
            if video.status == "failed":
                raise click.ClickException(f"{video.error.code}: {video.error.message}")
            client.videos.download_content(video.id).write_to_file(output_path)
            click.echo(f"Saved {output_path}.")
            if delete:
                client.videos.delete(video.id)
                click.echo(f"Deleted {video.id}.")
    except openai.OpenAIError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
