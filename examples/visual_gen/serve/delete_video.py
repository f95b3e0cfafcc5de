# SPDX-License-Identifier: Apache-2.0
"""Cancel and delete video jobs through OpenAI's client, see README.md beside this file."""

import click
import openai


@click.command(context_settings={"show_default": True})
@click.argument("video_ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every job of the server.")
@click.option("--base_url", default="http://127.0.0.1:8000/v1", help="Of the server, with /v1.")
@click.option("--api_key", default="none", envvar="TRTLLM_SERVE_API_KEY", help="The server's key.")
def main(video_ids: tuple[str, ...], everything: bool, base_url: str, api_key: str) -> None:
    """Delete VIDEO_IDS: a job that waits or runs is cancelled, its file is removed."""
    if bool(video_ids) == everything:
        raise click.UsageError("Give ids, or --all.")
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        ids = [video.id for video in client.videos.list(limit=100)] if everything else video_ids
        for video_id in ids:
            try:
                client.videos.delete(video_id)
                click.echo(f"Deleted {video_id}.")
            except openai.NotFoundError as error:
                raise click.ClickException(error.body["message"]) from error


if __name__ == "__main__":
    main()
