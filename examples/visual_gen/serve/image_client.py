# SPDX-License-Identifier: Apache-2.0
"""Ask a server for pictures through OpenAI's client, see README.md beside this file."""

import base64
from pathlib import Path

import click
import openai


@click.command(context_settings={"show_default": True})
@click.option("--base_url", default="http://127.0.0.1:8000/v1", help="Of the server, with /v1.")
@click.option("--api_key", default="none", envvar="TRTLLM_SERVE_API_KEY", help="The server's key.")
@click.option("--prompt", default="A robot arm folds a towel in a bright kitchen.")
@click.option("--size", default="auto", help="WIDTHxHEIGHT, or auto.")
@click.option("--n", default=1, help="Number of pictures.")
@click.option("--num_inference_steps", type=int)
@click.option("--seed", type=int)
@click.option("--output_path", type=click.Path(path_type=Path), default=Path("image.png"))
def main(
    base_url: str,
    api_key: str,
    prompt: str,
    size: str,
    n: int,
    num_inference_steps: int | None,
    seed: int | None,
    output_path: Path,
) -> None:
    """Generate pictures and save them: image.png, image-1.png and so on."""
    # What OpenAI's own service doesn't know goes into extra_body.
    extra = {"num_inference_steps": num_inference_steps, "seed": seed}
    extra = {name: value for name, value in extra.items() if value is not None}
    try:
        with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=3600) as client:
            result = client.images.generate(
                prompt=prompt, size=size, n=n, response_format="b64_json", extra_body=extra
            )
    except openai.OpenAIError as error:
        raise click.ClickException(str(error)) from error
    for index, image in enumerate(result.data):
        suffix = f"-{index}" if index else ""
        path = output_path.with_stem(output_path.stem + suffix)
        path.write_bytes(base64.b64decode(image.b64_json))
        click.echo(f"Saved {path}, {result.size}.")


if __name__ == "__main__":
    main()
