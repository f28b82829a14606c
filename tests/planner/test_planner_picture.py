"""Pictures on disk are whole, or what was there before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_dcp_mla.planner import picture
from vllm_dcp_mla.planner.request import RequestError

figures = pytest.importorskip("matplotlib.figure")


@pytest.fixture
def figure():
    return figures.Figure(figsize=(1, 1))


def test_a_file_that_cannot_be_written_is_as_it_was(figure, tmp_path, monkeypatch):
    old, new = tmp_path / "old.png", tmp_path / "new.png"
    old.write_bytes(b"abc")
    real = Path.write_bytes

    def full(self, content):
        real(self, content[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for file in (old, new):
        with pytest.raises(RequestError) as caught:
            picture.save(figure, str(file), 50)
        assert caught.value.problems == [
            f"--plot cannot write {file}: No space left on device; name another file."
        ]
    assert old.read_bytes() == b"abc"
    assert os.listdir(tmp_path) == ["old.png"]


def test_a_file_keeps_its_permissions_and_a_link_its_place(figure, tmp_path):
    real = tmp_path / "folder" / "real.svg"
    real.parent.mkdir()
    real.write_text("before")
    real.chmod(0o640)
    link = tmp_path / "link.svg"
    link.symlink_to(real)
    picture.save(figure, str(link), 50)
    assert link.is_symlink()
    assert real.read_text().startswith("<?xml")
    assert real.stat().st_mode & 0o777 == 0o640
    assert os.listdir(real.parent) == ["real.svg"]


def test_a_device_is_written_to_and_not_replaced(figure, tmp_path):
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        picture.save(figure, str(pipe), 50)
        assert reader.stdout.read().startswith(b"\x89PNG")
    assert not pipe.is_file()


def test_a_file_that_must_not_be_written_is_left(figure, tmp_path, monkeypatch):
    file = tmp_path / "mine.pdf"
    file.write_text("mine")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(RequestError, match="Permission denied"):
        picture.save(figure, str(file), 50)
    assert file.read_text() == "mine"


def test_settings_of_matplotlib_that_it_refuses_are_said():
    program = (
        "from vllm_dcp_mla.planner.picture import check_library\n"
        "from vllm_dcp_mla.planner.request import RequestError\n"
        "try: check_library()\n"
        "except RequestError as error: print(error.problems[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "MPLBACKEND": "nonsense"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert "'nonsense' is not a valid value for backend" in done.stdout
    assert "correct MPLBACKEND" in done.stdout
