"""Local media: regular files below one folder, whatever links say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindstream.plugin.media.formats import MediaError
from mindstream.plugin.media.local import open_local


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "inputs"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.png").write_bytes(b"0123456789")
    return folder


def read(path: Path | str, root: Path, limit: int = 10) -> bytes:
    with open_local(str(path), str(root), limit) as file:
        return file.read()


def test_inside(root: Path) -> None:
    assert read(root / "sub" / "a.png", root) == b"0123456789"
    assert read(f"{root}/sub/../sub//a.png", root) == b"0123456789"


def test_a_link_that_stays_inside_is_followed(root: Path) -> None:
    (root / "link.png").symlink_to("sub/a.png")
    (root / "folder").symlink_to("sub")
    assert read(root / "link.png", root) == b"0123456789"
    assert read(root / "folder" / "a.png", root) == b"0123456789"


def test_the_folder_itself_may_be_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert read(link / "sub" / "a.png", link) == b"0123456789"
    assert read(root / "sub" / "a.png", link) == b"0123456789"


def test_outside_is_refused_with_one_text_whether_it_exists_or_not(root: Path) -> None:
    (root / "file.png").symlink_to(root.parent / "secret.png")
    (root / "up").symlink_to("..")
    (root / "dangling.png").symlink_to(root.parent / "nothing.png")
    outside = [
        root.parent / "secret.png",
        root.parent / "nothing.png",
        root / ".." / "secret.png",
        root / "file.png",
        root / "up" / "secret.png",
        root / "dangling.png",
        Path(f"{root}-other/a.png"),
        root,
    ]
    texts = set()
    for path in outside:
        with pytest.raises(MediaError) as caught:
            read(path, root)
        texts.add(str(caught.value))
    assert texts == {f"is not a file below {root}"}


def test_a_link_put_there_after_the_check_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = os.path.realpath

    def swap_then_answer(path: str) -> str:
        answer = resolved(path)
        if path.endswith("a.png"):
            (root / "sub" / "a.png").unlink()
            (root / "sub").rmdir()
            (root / "sub").symlink_to(root.parent)
            (root.parent / "a.png").write_bytes(b"secret")
        return answer

    monkeypatch.setattr(os.path, "realpath", swap_then_answer)
    with pytest.raises(MediaError, match="cannot be opened below"):
        read(root / "sub" / "a.png", root)


def test_only_regular_files(root: Path) -> None:
    os.mkfifo(root / "pipe.png")
    for path in (root / "pipe.png", root / "sub"):
        with pytest.raises(MediaError, match="is not a regular file"):
            read(path, root)


def test_missing(root: Path) -> None:
    with pytest.raises(MediaError, match="No such file"):
        read(root / "none.png", root)
    with pytest.raises(MediaError, match=f"cannot be opened below {root}/none"):
        read(root / "none" / "a.png", root / "none")


def test_too_large(root: Path) -> None:
    with pytest.raises(MediaError, match="at most 9 bytes, got 10"):
        read(root / "sub" / "a.png", root, 9)


def test_no_descriptor_is_lost(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in (root / "sub", root / "sub" / "a.png", root / "sub" / "none.png"):
        with pytest.raises(MediaError):
            read(path, root, 9)
    assert len(os.listdir("/proc/self/fd")) == before
