# SPDX-License-Identifier: Apache-2.0
"""``trtllm-serve``: serve images and videos over HTTP."""

import sys
from pathlib import Path
from typing import Any

import click

from tensorrt_llm._utils import describe_error

_MIB = 2**20


@click.command(context_settings={"show_default": True})
@click.argument("model", required=False)
@click.option("--revision", help="Branch, tag or commit of a Hub repository, such as fp8.")
@click.option("--visual_gen_args", type=click.Path(path_type=Path), help="YAML of VisualGenArgs.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 is every one.")
@click.option("--port", type=int, default=8000, help="0 takes a free one.")
@click.option(
    "--media_path",
    type=click.Path(path_type=Path),
    help="Folder of jobs and media.  [default: TRTLLM_MEDIA_STORAGE_PATH, else user data]",
)
@click.option("--media_limit_mib", type=int, default=51200, help="Most MiB of media kept.")
@click.option("--expire_after", type=float, default=86400.0, help="Seconds that a job is kept.")
@click.option("--max_queue_size", type=int, default=16, help="Most requests that wait.")
@click.option(
    "--job_timeout", type=float, default=3600.0, help="Seconds of a job, its wait included."
)
@click.option("--drain_timeout", type=float, default=30.0, help="Seconds of a shutdown for jobs.")
@click.option("--max_body_mib", type=int, default=128, help="Most MiB of an upload.")
@click.option(
    "--api_key",
    envvar="TRTLLM_SERVE_API_KEY",
    show_envvar=True,
    help="Token that clients must send. The variable hides it from other users' ps.",
)
@click.option("--allow_local_media", is_flag=True, help="Let requests name files of this machine.")
@click.option(
    "--allow_private_addresses",
    is_flag=True,
    help="Let reference URLs lead to private addresses.",
)
def main(
    model: str | None,
    revision: str | None,
    visual_gen_args: Path | None,
    max_body_mib: int,
    media_limit_mib: int,
    media_path: Path | None,
    **options: Any,
) -> None:
    """Serve MODEL, a checkpoint folder or a Hub id, to OpenAI's clients.

    Without MODEL a tiny checkpoint with random weights is served: it generates noise.
    """
    try:
        from tensorrt_llm.serve.server import bind, serve, url_of
        from tensorrt_llm.serve.settings import ServeSettings
        from tensorrt_llm.serve.visual_gen_spec import visual_gen_spec
    except ModuleNotFoundError as error:
        raise click.ClickException(
            describe_error(
                "A package of the server is missing",
                where="trtllm-serve",
                expected="the packages of the extra serve",
                found=f"no {error.name}",
                remedy="run pip install 'tensorrt-llm-cosmos3[serve]'",
            )
        ) from error
    from tensorrt_llm.visual_gen.args import VisualGenArgs
    from tensorrt_llm.visual_gen.tiny_checkpoint import cached_tiny_checkpoint

    try:
        if media_path is not None:
            options["media_path"] = media_path
        settings = ServeSettings(
            max_body_bytes=max_body_mib * _MIB, media_limit_bytes=media_limit_mib * _MIB, **options
        )
        overrides = {} if revision is None else {"revision": revision}
        if visual_gen_args is None:
            args = VisualGenArgs(**overrides)
        else:
            args = VisualGenArgs.from_yaml(visual_gen_args, **overrides)
        model = model or args.model
        if model is None:
            if args.revision is not None:
                raise ValueError(
                    describe_error(
                        "A revision belongs to a model on the Hub",
                        where="--revision, or revision in --visual_gen_args",
                        expected="a Hub id as MODEL beside it",
                        found=f"{args.revision!r} and no MODEL",
                        remedy="name the model, or leave the revision out",
                    )
                )
            click.echo("No MODEL: a tiny checkpoint with random weights, so the results are noise.")
            try:
                model = str(cached_tiny_checkpoint(click.echo))
            except OSError as error:
                raise ValueError(
                    describe_error(
                        "The tiny checkpoint can't be made",
                        where=error.filename or "the user's cache",
                        expected="a folder that this user can make and write to, with room in it",
                        found=error.strerror or error,
                        remedy="set XDG_CACHE_HOME to such a folder, or name a MODEL",
                    )
                ) from error
        spec = visual_gen_spec(model, args)
        listener = bind(settings)

        def announce() -> None:
            url = url_of(listener)
            click.echo(f"Serving {spec.model} on {url} (media in {settings.media_path}).")
            if not settings.is_loopback and settings.api_key is None:
                click.echo(
                    "Whoever reaches this address can use the server: there is no --api_key."
                )

        code = serve(settings, spec, listener, announce)
    except (ValueError, NotImplementedError, OSError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)


if __name__ == "__main__":
    main()
