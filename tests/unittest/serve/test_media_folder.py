# SPDX-License-Identifier: Apache-2.0
"""The media folder: whole files only, counted, and never more than allowed."""

import os

import pytest

from tensorrt_llm.serve.media_folder import MediaFolder, StorageFullError
from tensorrt_llm.serve.records import JobRecord, StoredFile
from tensorrt_llm.serve.store import JobStore

PNG = b"\x89PNG\r\n\x1a\n" + bytes(92)


@pytest.fixture
def folder(tmp_path):
    folder = MediaFolder(tmp_path / "media", 1000)
    yield folder
    folder.close()


def record(*files: StoredFile) -> JobRecord:
    return JobRecord("image", "image_0", "m", "p", {}, status="completed", files=list(files))


def test_finished_files_move_in_together_and_are_counted(folder):
    for index in range(2):
        (folder.partial / f"image_0-{index}.png").write_bytes(PNG)
    files = folder.publish(["image_0-0.png", "image_0-1.png"])
    assert [file.size for file in files] == [100, 100]
    assert {file.content_type for file in files} == {"image/png"}
    assert not list(folder.partial.iterdir()) and folder.used == 200
    folder.remove(files)
    assert not list(folder.media.iterdir()) and folder.used == 0


def test_a_file_of_another_format_than_its_name_is_not_published(folder):
    (folder.partial / "video_0.mp4").write_bytes(PNG)
    with pytest.raises(ValueError, match="expected mp4, found png"):
        folder.publish(["video_0.mp4"])
    (folder.partial / "image_0-0.jpg").write_bytes(PNG)
    with pytest.raises(ValueError, match="expected jpeg, found png"):
        folder.publish(["image_0-0.jpg"])
    assert not list(folder.media.iterdir()) and folder.used == 0


def test_the_limit_is_kept_and_nothing_is_published_beyond_it(folder):
    (folder.partial / "a.png").write_bytes(PNG)
    folder.publish(["a.png"])
    (folder.partial / "b.png").write_bytes(PNG + bytes(900))
    with pytest.raises(StorageFullError, match="expected 1000 bytes, found 900 bytes"):
        folder.publish(["b.png"])
    assert [path.name for path in folder.media.iterdir()] == ["a.png"] and folder.used == 100
    folder.check_room(900)
    with pytest.raises(StorageFullError):
        folder.check_room(901)
    assert folder.used == 100


def test_a_disk_that_is_nearly_full_counts_like_the_limit(folder, monkeypatch):
    usage = os.statvfs(folder.root)
    spare = 64 * 2**20
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": spare + 50})())
    folder.check_room(50)
    with pytest.raises(StorageFullError, match="found 50 bytes"):
        folder.check_room(51)
    assert usage


def test_files_are_moved_all_or_none(folder, monkeypatch):
    for index in range(2):
        (folder.partial / f"image_0-{index}.png").write_bytes(PNG)
    replace = os.replace

    def fail_at_the_second(source, target):
        if str(source).endswith("1.png"):
            raise OSError("disk error")
        replace(source, target)

    monkeypatch.setattr("os.replace", fail_at_the_second)
    with pytest.raises(OSError, match="disk error"):
        folder.publish(["image_0-0.png", "image_0-1.png"])
    assert not list(folder.media.iterdir()) and folder.used == 0


def test_recovery_keeps_exactly_the_files_of_completed_jobs(folder):
    for name in ("good-0.png", "short-0.png", "nobodys.png"):
        (folder.media / name).write_bytes(PNG)
    for name in (".a.mp4.1234.part", "b.mp4"):
        (folder.partial / name).write_bytes(b"half")
    (folder.uploads / "video_1-image").write_bytes(PNG)
    good = record(StoredFile("good-0.png", 100, "image/png"))
    short = record(StoredFile("short-0.png", 101, "image/png"))
    lost = record(StoredFile("lost-0.png", 100, "image/png"))
    assert folder.recover([good, short, lost]) == [short, lost]
    assert [path.name for path in folder.media.iterdir()] == ["good-0.png"]
    assert not list(folder.partial.iterdir()) and not list(folder.uploads.iterdir())
    assert folder.used == 100


def test_what_an_encoder_left_of_a_job_is_removed_and_of_others_not(folder):
    for name in (".video_a.mp4.12.part", "video_a.mp4", "video_b.mp4"):
        (folder.partial / name).write_bytes(b"half")
    folder.remove_partial("video_a")
    assert [path.name for path in folder.partial.iterdir()] == ["video_b.mp4"]


@pytest.mark.parametrize("there", [False, True])
def test_media_and_prompts_are_for_the_servers_user_alone(tmp_path, there):
    root = tmp_path / "new" / "media"
    if there:
        root.mkdir(parents=True, mode=0o755)
    umask = os.umask(0o022)
    try:
        folder = MediaFolder(root, 1000)
        store = JobStore(folder.database)
    finally:
        os.umask(umask)
    store.insert(record())
    modes = {path.name: path.stat().st_mode & 0o777 for path in root.iterdir()}
    assert {modes[name] for name in ("media", "partial", "uploads")} == {0o700}
    assert {mode for name, mode in modes.items() if name.startswith("jobs.sqlite3")} == {0o600}
    assert root.stat().st_mode & 0o777 == (0o755 if there else 0o700)
    store.close()
    folder.close()


def test_one_server_has_the_folder(folder):
    with pytest.raises(ValueError, match="in use.*TRTLLM_MEDIA_STORAGE_PATH"):
        MediaFolder(folder.root, 1000)
    folder.close()
    MediaFolder(folder.root, 1000).close()


def test_a_folder_that_can_not_be_made_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="can't be used.*file/media"):
        MediaFolder(tmp_path / "file" / "media", 1000)
