# SPDX-License-Identifier: Apache-2.0
"""The example script: what its options and prompt files mean, and two runs of it."""

import importlib.util
import json
import os
import re
import shlex
import wave
from pathlib import Path

import av
import pytest
from click.testing import CliRunner
from PIL import Image

from tensorrt_llm import VisualGenArgs

EXAMPLES = next(
    parent / "examples" / "visual_gen"
    for parent in Path(__file__).resolve().parents
    if (parent / "pyproject.toml").is_file()
)
NAME = "visual_gen/models/cosmos3/cosmos3.py"
SCRIPT = EXAMPLES.parent / NAME


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("cosmos3_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(example, tmp_path, monkeypatch):
    """Invoke the script in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments):
        return CliRunner().invoke(example.main, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def fast(example, tiny_fp8_checkpoint, monkeypatch, tmp_path):
    """The tiny checkpoint of the other tests, and no warm-up."""
    monkeypatch.setattr(example, "cached_tiny_checkpoint", lambda: tiny_fp8_checkpoint)
    config = tmp_path / "args.yaml"
    config.write_text("compilation_config: {skip_warmup: true}\n")
    return ["--visual_gen_args", config, "--num_inference_steps", 2, "--seed", 3]


CAPTION = {"subjects": [{"description": "a robot"}], "style": "x"}


def job_of(example, tmp_path, content, **options):
    path = tmp_path / "prompt.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    return read_job(example, prompt_file=path, **options)


def read_job(example, **options):
    names = ("prompt", "prompt_file", "negative_prompt", "negative_prompt_file", "output_type")
    names += ("image_path", "video_path")
    return example.read_job(**dict.fromkeys(names) | {"enable_audio": False} | options)


@pytest.mark.parametrize(
    ("content", "prompt", "negative", "output_type"),
    [
        ("A robot arm.\n", "A robot arm.", None, None),
        (CAPTION, json.dumps(CAPTION), None, None),
        ({"prompt": "A robot."}, "A robot.", None, None),
        ({"prompt": CAPTION, "negative_prompt": ""}, json.dumps(CAPTION), "", None),
        ({"prompt": "A.", "model_mode": "text2image"}, "A.", None, "image"),
        ({"prompt": "A.", "model_mode": "text2video", "enable_audio": False}, "A.", None, "video"),
        (
            {"prompt": "A.", "negative_prompt": CAPTION, "vision_path": None},
            "A.",
            json.dumps(CAPTION),
            None,
        ),
    ],
)
def test_prompt_files(example, tmp_path, content, prompt, negative, output_type):
    job = job_of(example, tmp_path, content)
    assert (job.prompt, job.negative_prompt, job.output_type) == (prompt, negative, output_type)


@pytest.mark.parametrize("content", ["A robot arm.\n", json.dumps({"prompt": "A robot arm."})])
def test_a_byte_order_mark_belongs_to_no_prompt(example, tmp_path, content):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    job = read_job(example, prompt_file=path, negative_prompt_file=path)
    assert job.prompt == "A robot arm."
    assert job.negative_prompt == content.strip()


@pytest.mark.parametrize(
    ("content", "output_type", "image", "video", "audio"),
    [
        ({"model_mode": "image2video", "vision_path": "a.jpg"}, "video", "/a.jpg", None, False),
        ({"model_mode": "video2video", "vision_path": "c/d.mp4"}, "video", None, "/c/d.mp4", False),
        (
            {"model_mode": "image2video", "vision_path": "https://example.com/a.jpg"},
            *("video", "https://example.com/a.jpg", None, False),
        ),
        (
            {"model_mode": "image2video", "vision_path": "data:image/png;base64,AA"},
            *("video", "data:image/png;base64,AA", None, False),
        ),
        ({"enable_audio": True}, None, None, None, True),
        ({"model_mode": "text2video", "enable_audio": True}, "video", None, None, True),
    ],
)
def test_a_prompt_file_names_reference_and_sound(
    example, tmp_path, content, output_type, image, video, audio
):
    job = job_of(example, tmp_path, {"prompt": "A."} | content)
    # A relative path starts at the prompt file.
    found = [name and name.replace(str(tmp_path), "") for name in (job.image, job.video)]
    assert (job.output_type, *found, job.enable_audio) == (output_type, image, video, audio)


def test_flags_win_over_the_prompt_file(example, tmp_path):
    content = {"prompt": "A.", "negative_prompt": "file", "model_mode": "text2image"}
    job = job_of(example, tmp_path, content, negative_prompt="flag", output_type="video")
    assert (job.negative_prompt, job.output_type) == ("flag", "video")
    content = {"prompt": "A.", "model_mode": "video2video", "vision_path": "file.mp4"}
    job = job_of(example, tmp_path, content, image_path="flag.jpg", enable_audio=True)
    assert (job.output_type, job.image, job.video) == (None, "flag.jpg", None)
    assert job.enable_audio


def test_a_prompt_may_name_a_file_and_a_long_text_is_none(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.json").write_text(json.dumps(CAPTION))
    Path("n.txt").write_text("blurry\n")
    job = read_job(example, prompt="p.json", negative_prompt="n.txt")
    assert (job.prompt, job.negative_prompt) == (json.dumps(CAPTION), "blurry")
    long = "A robot " * 1000
    assert read_job(example, prompt=long, negative_prompt="").prompt == long


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"prompt": "A.", "steps": 3}, "steps"),
        ({"prompt": 3}, "prompt is no text"),
        ({"prompt": "A.", "model_mode": "text2audio"}, "text2audio"),
        ({"prompt": "A.", "model_mode": "image2video"}, "vision_path for image2video"),
        ({"prompt": "A.", "vision_path": "a.jpg"}, "vision_path with model_mode"),
        ({"prompt": "A.", "model_mode": "text2video", "vision_path": "a.jpg"}, "vision_path with"),
        ({"prompt": "A.", "model_mode": "image2video", "vision_path": 3}, "vision_path is no str"),
        ({"prompt": "A.", "enable_audio": "yes"}, "enable_audio is no bool"),
        ("{broken", "JSON"),
    ],
)
def test_a_bad_prompt_file_is_refused_by_name(example, tmp_path, content, named):
    with pytest.raises(ValueError, match=named):
        job_of(example, tmp_path, content)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--prompt"),
        (["--prompt", "a", "--prompt_file", "b"], "one of the two"),
        (["--prompt", "a", "--negative_prompt", "b", "--negative_prompt_file", "c"], "not both"),
        (["--prompt", "a", "--extra_params", "[1]"], "JSON object"),
        (["--prompt", "a", "--extra_params", "{"], "no JSON"),
        (["--prompt", "a", "--output_type", "sound"], "sound"),
        (["--prompt", "a", "--output_path", "a.png"], "generates a video"),
        (["--prompt", "a", "--num_frames", "1", "--output_path", "a.mp4"], "generates an image"),
        (["--prompt", "a", "--output_path", "a.avi"], "avi"),
        (["--prompt", "a", "--output_path", "a.wav"], "name it mp4"),
        (["--prompt", "a", "--enable_audio", "--output_path", "a.png"], "mp4 or wav"),
        (["--prompt", "a", "--output_path", "no/folder/a.mp4"], "existing folder"),
        (["--prompt_file", "missing.json"], "missing.json"),
        (["--prompt", "folder/mistyped.json"], "no file folder/mistyped.json"),
        (["--prompt", "a", "--negative_prompt", "mistyped.txt"], "no file mistyped.txt"),
        (["--prompt", "a", "--revision", "fp8"], "--revision"),
        (["--prompt", "a", "--visual_gen_args", "missing.yaml"], "missing.yaml"),
    ],
)
def test_bad_options_end_with_a_message_before_anything_is_loaded(
    run, example, monkeypatch, arguments, named
):
    monkeypatch.setattr(example, "VisualGen", None)
    monkeypatch.setattr(example, "cached_tiny_checkpoint", None)
    result = run(*arguments)
    assert result.exit_code != 0 and named in result.output, result.output
    assert not isinstance(result.exception, TypeError) and os.listdir() == []


@pytest.mark.cosmos3
def test_an_image_from_text(run, fast):
    result = run(
        "--prompt", "A robot arm.", "--num_frames", 1, "--height", 64, "--width", 96, *fast
    )
    assert result.exit_code == 0, result.output
    with Image.open("cosmos3_output.png") as image:
        assert (image.format, image.size) == ("PNG", (96, 64))
    assert "random weights, so the result is noise" in result.output
    assert "FP8 linears: 14 understanding, 14 generation" in result.output
    assert re.search(r"^ +0  w8a16 / bf16 / w8a16  t=995  2$", result.output, re.MULTILINE)
    assert '"seed": 3' in result.output and "denoise" in result.output


@pytest.mark.cosmos3
def test_a_video_from_a_caption_file_with_every_option(run, fast, tmp_path):
    Path("caption.json").write_text(json.dumps({"prompt": CAPTION, "model_mode": "text2video"}))
    result = run(
        *("--prompt_file", "caption.json", "--negative_prompt", "blurry"),
        *("--height", 64, "--width", 96, "--num_frames", 9, "--guidance_scale", 3),
        *("--frame_rate", 12),
        *("--disable_duration_template", "--disable_resolution_template", "--use_system_prompt"),
        *("--extra_params", '{"flow_shift": 10.0}', "--output_path", "clip.mp4", *fast),
    )
    assert result.exit_code == 0, result.output
    with av.open("clip.mp4") as container:
        assert len(list(container.decode(video=0))) == 9
    request = json.loads(re.search(r"Request: (\{.*?^\})", result.output, re.S | re.M)[1])
    assert request["prompt"] == json.dumps(CAPTION) and request["negative_prompt"] == "blurry"
    assert (request["num_frames"], request["guidance_scale"]) == (9, 3.0)
    assert request["frame_rate"] == 12.0
    assert request["extra_params"] == {
        "output_type": "video",
        "use_duration_template": False,
        "use_resolution_template": False,
        "use_system_prompt": True,
        "use_guardrails": False,
        "enable_audio": False,
        "condition_video_latent_indexes": None,
        "condition_video_keep": None,
        "flow_shift": 10.0,
        "guidance_interval": None,
    }


def readme_commands() -> list[list[str]]:
    """The arguments of every command of the README but those that it says no test runs."""
    text = (SCRIPT.parent / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(<!-- not run .*? -->\n)?```bash\n(.*?)```", text, re.DOTALL)
    commands = [shlex.split(code.replace("\\\n", " ")) for skipped, code in blocks if not skipped]
    assert all(command[:2] == ["python", f"examples/{NAME}"] for command in commands)
    return [command[2:] for command in commands]


def read_clip(path: str) -> tuple[int, tuple[int, int], float | None]:
    """Frames, (width, height), and seconds of sound."""
    with av.open(path) as container:
        video, sound = container.streams.video[0], container.streams.audio
        seconds = float(sound[0].duration * sound[0].time_base) if sound else None
        return len(list(container.decode(video))), (video.width, video.height), seconds


@pytest.mark.cosmos3
def test_every_command_of_the_readme(run, fast, tmp_path):
    """In its order: the first two write what the others read."""
    (tmp_path / "examples").symlink_to(EXAMPLES.parent)
    for arguments in readme_commands():
        result = run(*arguments, *fast)
        assert result.exit_code == 0, (arguments, result.output)
    with Image.open("image.png") as image:
        assert image.size == (112, 64)
    # 13 frames at 24 a second. The size of the reference is that of the result.
    sounding = pytest.approx(13 / 24, abs=1 / 24)
    for name, sound in (
        ("clip.mp4", None),
        ("sound.mp4", sounding),
        ("from_image.mp4", None),
        ("from_clip.mp4", sounding),
        ("goes_on.mp4", None),
        ("kitchen.mp4", sounding),
    ):
        assert read_clip(name) == (13, (112, 64), sound), name
    assert len(readme_commands()) == 7


@pytest.mark.cosmos3
def test_sound_alone_and_what_was_read_of_a_reference(run, fast):
    Image.new("RGB", (90, 60), "red").save("red.png")
    result = run(
        *("--prompt", "A robot.", "--image_path", "red.png", "--enable_audio", "--height", 64),
        *("--num_frames", 9, "--output_path", "sound.wav", *fast),
    )
    assert result.exit_code == 0, result.output
    with wave.open("sound.wav") as file:
        assert (file.getframerate(), file.getnframes()) == (48000, 18000)
    assert '"width": 90, "height": 60' in result.output
    assert "Sound: 0.375 s, 2 channels, 48000 Hz" in result.output


@pytest.mark.cosmos3
def test_bad_values_end_with_every_violation_and_no_file(run, fast):
    result = run("--prompt", "a", "--height", 100, "--width", 0, *fast)
    assert result.exit_code == 1
    assert "height: expected" in result.output and "width: expected" in result.output
    assert not [name for name in os.listdir() if name.startswith("cosmos3_output")]


@pytest.mark.cosmos3
def test_disable_guardrails_lets_a_checkpoint_load_that_asks_for_them(
    run, fast, example, tiny_fp8_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setenv(example.GUARDRAILS_OFF, "")
    guarded = tmp_path / "guarded"
    guarded.mkdir()
    for item in tiny_fp8_checkpoint.iterdir():
        (guarded / item.name).symlink_to(item)
    index = json.loads((tiny_fp8_checkpoint / "model_index.json").read_text())
    (guarded / "model_index.json").unlink()
    (guarded / "model_index.json").write_text(json.dumps(index | {"enable_safety_checker": True}))
    options = ["--model", guarded, "--prompt", "a", "--num_frames", 1, "--height", 64, *fast]
    result = run(*options, "--width", 64)
    assert result.exit_code == 1 and "guardrails" in result.output
    result = run(*options, "--width", 64, "--disable_guardrails")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "path", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda p: p.name
)
def test_the_configurations_beside_the_example_are_valid(path):
    assert VisualGenArgs.from_yaml(path, model="nvidia/Cosmos3-Nano").model == "nvidia/Cosmos3-Nano"
