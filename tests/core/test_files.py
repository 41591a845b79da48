import io
import json
import tarfile
import zipfile

import pytest

from sextet.core import files
from sextet.core.errors import DataError


def test_atomic_write_keeps_the_old_file_when_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "ü folder" / "value.json"
    files.write_json(path, {"a": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match="No space left"):
        files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["value.json"]


def test_json_errors_name_file_line_and_column(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1,\n "b" 2}')
    with pytest.raises(DataError, match=r"x\.json:2:6: not JSON"):
        files.read_json(path)


def test_text_accepts_bom_and_windows_newlines_and_refuses_other_encodings(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes("\ufeffa\r\nb".encode())
    assert files.read_text(path) == "a\nb"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        files.read_text(path)
    path.write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="over the limit"):
        files.read_text(path, max_bytes=10)
    with pytest.raises(DataError, match="cannot read"):
        files.read_text(tmp_path / "absent")


def _tar(path, *members):
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_archives_yield_regular_files_only(tmp_path):
    path = tmp_path / "a.tar.gz"
    _tar(path, (tarfile.TarInfo("dir/ok.txt"), b"hello"))
    assert list(files.archive_members(path)) == [("dir/ok.txt", b"hello")]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("ok.txt", "hello")
    assert list(files.archive_members(tmp_path / "a.zip")) == [("ok.txt", b"hello")]


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "C:\\evil"])
def test_names_that_leave_the_archive_are_refused(tmp_path, name):
    path = tmp_path / "a.tar.gz"
    _tar(path, (tarfile.TarInfo(name), b"x"))
    with pytest.raises(DataError, match="outside the archive"):
        list(files.archive_members(path))


def test_links_and_bombs_and_non_archives_are_refused(tmp_path):
    path = tmp_path / "a.tar.gz"
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    _tar(path, (link, b""))
    with pytest.raises(DataError, match="link or a device"):
        list(files.archive_members(path))
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", b"\0" * 5_000_000)
    with pytest.raises(DataError, match="unpacks to more than"):
        list(files.archive_members(tmp_path / "bomb.zip", max_bytes=1_000_000))
    (tmp_path / "text.tar").write_text("not an archive")
    with pytest.raises(DataError, match="not a readable"):
        list(files.archive_members(tmp_path / "text.tar"))
