# SPDX-License-Identifier: Apache-2.0
"""Ask a server for a video and wait for it, see README.md beside this file."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import click


@click.command(context_settings={"show_default": True})
@click.option("--base_url", default="http://127.0.0.1:8000/v1", help="Of the server, with /v1.")
@click.option("--api_key", envvar="TRTLLM_SERVE_API_KEY", help="The server's key, if it has one.")
@click.option("--prompt", default="A robot arm folds a towel in a bright kitchen.")
@click.option("--size", help="WIDTHxHEIGHT.")
@click.option("--num_frames", type=int)
@click.option("--fps", type=float)
@click.option("--num_inference_steps", type=int)
@click.option("--seed", type=int)
@click.option("--output_path", type=click.Path(path_type=Path), default=Path("video.mp4"))
def main(base_url: str, api_key: str | None, output_path: Path, **fields) -> None:
    """Generate a video with one request, which lasts as long as the generation."""
    body = {name: value for name, value in fields.items() if value is not None}
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(
        f"{base_url}/videos/sync", json.dumps(body).encode(), headers, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=3600) as response:
            output_path.write_bytes(response.read())
            click.echo(f"Saved {output_path} ({response.headers['Server-Timing']}).")
    except urllib.error.HTTPError as error:
        raise click.ClickException(json.load(error)["message"]) from error


if __name__ == "__main__":
    main()
