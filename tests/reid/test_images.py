"""Image files of every kind: what is decoded how, what is refused, reading and prefetching, the inspection's cache."""

import os
import struct
import threading

import numpy as np
import pytest
import torch
from pictures import draw, png_header, truncate
from PIL import Image

from sextet.core.errors import DataError
from sextet.reid import images
from sextet.reid.images import FileImages, decode, inspect, prefetch, upright_rgb


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def pixels(path, **options):
    return np.asarray(decode(path, **options)[0]).astype(int)


def test_greyscale_fills_all_channels(tmp_path):
    path = tmp_path / "grey.png"
    draw(0).convert("L").save(path)
    image, note = decode(path)
    assert (image.mode, note) == ("RGB", "greyscale")
    assert (np.ptp(np.asarray(image), axis=2) == 0).all()


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    path = tmp_path / "deep.png"
    Image.fromarray(np.arange(32 * 16, dtype=np.uint16).reshape(32, 16) * 128).save(path)
    assert decode(path)[1] == "16-bit"
    assert pixels(path)[..., 0].ravel().tolist() == [value * 128 // 256 for value in range(32 * 16)]


def test_transparency_becomes_white(tmp_path):
    picture = draw(0).convert("RGBA")
    picture.putalpha(Image.fromarray(np.repeat(np.uint8([0, 255]), 8)[None].repeat(32, 0)))
    picture.save(tmp_path / "clear.png")
    assert decode(tmp_path / "clear.png")[1] == "transparent"
    seen = pixels(tmp_path / "clear.png")
    assert (seen[:, :8] == 255).all()
    assert (seen[:, 8:] == np.asarray(draw(0))[:, 8:]).all()


def test_palettes_with_and_without_a_clear_colour(tmp_path):
    palette = draw(0).quantize(8)
    palette.save(tmp_path / "palette.png")
    clear = palette.getpixel((0, 0))
    palette.save(tmp_path / "clear.png", transparency=clear)
    assert decode(tmp_path / "palette.png")[1] == "palette"
    assert (pixels(tmp_path / "palette.png") == np.asarray(palette.convert("RGB"))).all()
    assert decode(tmp_path / "clear.png")[1] == "palette, transparent"
    seen, index = pixels(tmp_path / "clear.png"), np.asarray(palette)
    assert (seen[index == clear] == 255).all()
    assert (seen[index != clear] == np.asarray(palette.convert("RGB"))[index != clear]).all()


def test_cmyk_keeps_its_colours(tmp_path):
    path = tmp_path / "print.jpg"
    Image.new("CMYK", (16, 32), (0, 255, 255, 0)).save(path)
    image, note = decode(path)
    assert note == "CMYK"
    assert np.abs(np.asarray(image).astype(int) - [255, 0, 0]).max() < 8


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_exif_orientation_is_applied(tmp_path, suffix):
    path, exif = tmp_path / f"turned.{suffix}", Image.Exif()
    exif[0x0112] = 6
    upright = Image.new("RGB", (16, 32))
    upright.paste((255, 255, 255), (0, 0, 16, 16))
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    image, note = decode(path, near=(8, 4))
    assert (image.size, note) == ((16, 32), "EXIF-rotated")
    assert pixels(path)[:14].min() > 200 and pixels(path)[18:].max() < 55


def test_exif_without_a_turn_is_no_conversion(tmp_path):
    exif = Image.Exif()
    exif[0x010F] = "Maker"
    draw(0).save(tmp_path / "camera.jpg", exif=exif)
    assert decode(tmp_path / "camera.jpg")[1] == ""


def test_large_jpegs_are_decoded_smaller_but_never_below_what_is_needed(tmp_path):
    path = tmp_path / "large.jpg"
    draw(0, (640, 1280)).save(path, quality=95)
    assert decode(path, near=(64, 32))[0].size == (80, 160)
    assert decode(path, near=(700, 350))[0].size == (640, 1280)
    full = FileImages(tmp_path, ["large.jpg"], (64, 32)).read([0])
    exact = np.asarray(draw(0, (640, 1280)).resize((32, 64), Image.Resampling.BILINEAR))
    assert np.abs(full[0].permute(1, 2, 0).numpy().astype(int) - exact).max() <= 8


BROKEN = {
    "truncated": (lambda path: (draw(0, (64, 128)).save(path), truncate(path)), "truncated"),
    "empty": (lambda path: path.write_bytes(b""), "empty file"),
    "text": (lambda path: path.write_text("<html>not found</html>"), "not a readable"),
    "one pixel": (lambda path: draw(0, (1, 1)).save(path), "1x1 pixels"),
    "absent": (lambda path: None, "No such file"),
    "gif": (lambda path: draw(0).save(path, "GIF"), "not a readable"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_bad_file_is_refused_by_name_and_reason(tmp_path, kind):
    make, reason = BROKEN[kind]
    make(tmp_path / "bad.jpg")
    with pytest.raises(DataError, match=rf"bad\.jpg: .*{reason}") as caught:
        decode(tmp_path / "bad.jpg")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("width, height", [(100_000, 100_000), (12_000, 9_000), (5_000, 5_000)])
def test_too_many_pixels_are_refused_by_the_header(tmp_path, width, height):
    png_header(tmp_path / "bomb.png", width, height)
    with pytest.raises(DataError, match=r"bomb\.png: .*pixels"):
        decode(tmp_path / "bomb.png")


def test_the_limit_of_pixels_is_a_choice(tmp_path):
    draw(0, (16, 32)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="16x32 pixels are over the limit of 511"):
        decode(tmp_path / "a.png", max_pixels=511)
    assert decode(tmp_path / "a.png", max_pixels=512)[0].size == (16, 32)


def test_names_that_terminals_cannot_print_are_escaped(tmp_path):
    name = os.fsdecode(b"bad\xff\n.jpg")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"bad\\udcff\\n\.jpg: empty file"):
        decode(tmp_path / name)
    assert inspect(tmp_path, [name]).problems == inspect(tmp_path, [name]).problems == {name: "empty file"}


@pytest.fixture
def folder(tmp_path):
    for index in range(12):
        draw(index, (16 + index % 3, 32)).save(tmp_path / f"{index}.png")
    return tmp_path


def test_reading_resizes_as_pillow_does(folder):
    batch = FileImages(folder, [f"{i}.png" for i in range(12)], (48, 20)).read(range(12))
    assert (batch.shape, batch.dtype) == ((12, 3, 48, 20), torch.uint8)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    for index, picture in enumerate(batch.permute(0, 2, 3, 1).numpy().astype(int)):
        expected = draw(index, (16 + index % 3, 32)).resize((20, 48), Image.Resampling.BILINEAR)
        assert np.abs(picture - np.asarray(expected)).max() <= 1


def test_reading_does_not_depend_on_the_rest_of_the_batch(folder):
    some = FileImages(folder, [f"{i}.png" for i in range(12)], (32, 16), interpolation="bicubic")
    order = np.random.default_rng(0).permutation(12)
    assert torch.equal(some.read(order), torch.cat([some.read([index]) for index in order]))
    assert some.read([]).shape == (0, 3, 32, 16)


def test_boxes_cut_and_are_clipped_to_the_image(folder):
    some = FileImages(folder, ["0.png"] * 4, (8, 4), boxes=[(2, 4, 6, 12), None, (-5, -5, 99, 99), (16, 0, 20, 9)])
    assert np.array_equal(some.read([0])[0].permute(1, 2, 0), np.asarray(draw(0))[4:12, 2:6])
    assert torch.equal(some.read([1]), some.read([2]))
    with pytest.raises(DataError, match=r"0\.png: box 16,0,20,9 is empty or outside"):
        some.read([3])


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_prefetching_keeps_the_order(folder, threads):
    some = FileImages(folder, [f"{i}.png" for i in range(12)], (32, 16))
    batches = [[5], [0, 1, 2], [11, 3], [4] * 5, [7], [8, 9]]
    for batch, tensor in zip(batches, prefetch(some, batches, threads), strict=True):
        assert torch.equal(tensor, some.read(batch))


def test_an_error_comes_at_its_batch_and_ends_the_threads(folder):
    (folder / "3.png").write_bytes(b"")
    some = FileImages(folder, [f"{i}.png" for i in range(12)], (32, 16))
    stream = prefetch(some, [[0], [1], [3], [2]], threads=2)
    assert len(next(stream)) == len(next(stream)) == 1
    with pytest.raises(DataError, match=r"3\.png: empty file"):
        next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("images")]


def test_closing_stops_reading(folder):
    class Counted(FileImages):
        reads = 0

        def read(self, indices):
            Counted.reads += 1
            return super().read(indices)

    stream = prefetch(Counted(folder, ["0.png"], (32, 16)), ([0] for _ in range(1000)), threads=2)
    next(stream)
    stream.close()
    assert Counted.reads <= 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("images")]


def test_inspection_decodes_a_file_once_until_it_changes(folder, monkeypatch, cache_folder):
    (folder / "3.png").write_bytes(b"")
    draw(0).convert("L").save(folder / "4.png")
    names, seen = [f"{i}.png" for i in range(12)], []
    monkeypatch.setattr(images, "decode", lambda path, **options: (seen.append(path.name), decode(path, **options))[1])
    first = inspect(folder, names)
    assert (first.problems, first.converted) == ({"3.png": "empty file"}, {"4.png": "greyscale"})
    assert sorted(seen) == sorted(names)
    seen.clear()
    assert inspect(folder, names) == first
    assert seen == []
    draw(3).save(folder / "3.png")
    assert inspect(folder, names).problems == {}
    assert seen == ["3.png"]
    assert not list(folder.glob(".*")) and len(list(cache_folder.rglob("*.json"))) == 1


def test_inspection_survives_a_damaged_or_unwritable_cache(folder, cache_folder, monkeypatch):
    (folder / "3.png").write_bytes(b"")
    names = [f"{i}.png" for i in range(12)]
    first = inspect(folder, names)
    (index,) = cache_folder.rglob("*.json")
    for content in ("{", "[]", '{"format": "sextet-images/1", "files": {"3.png": 7}}', '{"format": "other"}'):
        index.write_text(content)
        assert inspect(folder, names) == first
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "0.png"))
    assert inspect(folder, names) == first


def test_inspection_counts_what_is_done(folder):
    calls = []
    inspect(folder, [f"{i}.png" for i in range(12)], progress=lambda *counts: calls.append(counts))
    assert calls[-1] == (12, 12)


@pytest.mark.parametrize(
    "data, text",
    [
        (b"", "empty file"),
        (b"GIF89a", "not a readable JPEG, PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not a readable JPEG, PNG"),
        (b"BM" + bytes(8) + struct.pack("<IIiiHHI", 54, 40, 100_000, 100_000, 1, 24, 0) + bytes(20), "pixels"),
    ],
    ids=["empty", "cut short", "a program for a printer", "a header of ten thousand million pixels"],
)
def test_bytes_that_are_no_image_are_refused(data, text):
    with pytest.raises(DataError, match=f"^image: .*{text}"):
        decode(data)


def test_files_their_bytes_and_pillow_images_give_the_same_picture(tmp_path):
    sideways, exif = draw(0), Image.Exif()
    exif[0x0112] = 6  # the camera's right side is up
    sideways.save(tmp_path / "phone.png", exif=exif)
    Image.fromarray(np.arange(32 * 16, dtype=np.uint16).reshape(32, 16) * 128).save(tmp_path / "deep.png")
    for path in tmp_path.iterdir():
        with Image.open(path) as opened:
            found = upright_rgb(opened)
        for image, note in (found, decode(path.read_bytes())):
            assert note == decode(path)[1] != "" and np.array_equal(image, decode(path)[0])
    assert decode(tmp_path / "phone.png")[0].size == sideways.size[::-1]
