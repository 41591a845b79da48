"""Networks for other programs: ONNX, torch.export and safetensors, each read again and compared before it stays.

The graphs take pixels from 0 to 255 and give the vectors of ``Embedder.embed``: normalisation, the mirror image and
the scaling to length 1 are inside. Only resizing to ``size`` is left to the program that runs them.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sextet
from sextet.core.errors import DataError, UsageError, missing_extra, unknown
from sextet.core.seeding import torch_rng
from sextet.reid.augment import MEAN, STD
from sextet.reid.evaluate import Embedder

FILES = {"onnx": "model.onnx", "torch": "model.pt2", "safetensors": "model.safetensors"}
DEFAULT = "onnx"
TOLERANCE = 1e-4
"""Largest difference of a vector's entries between a file and the network."""
BATCHES = (1, 2, 5)

Runner = Callable[[Tensor], Tensor]


class Exported(nn.Module):
    """What the graphs compute: float pixels (B, 3, H, W) from 0 to 255 -> vectors (B, D) of length 1."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: Embedder) -> None:
        super().__init__()
        self.network, self.flip = model.network, model.config.evaluation.flip
        for name, values in (("mean", MEAN), ("deviation", STD)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1) * 255)

    def forward(self, pixels: Tensor) -> Tensor:
        """RGB (B, 3, H, W) -> (B, D)."""
        x = (pixels - self.mean) / self.deviation
        if not self.flip:
            return functional.normalize(self.network(x))
        features: Tensor = self.network(torch.cat((x, x.flip(3))))
        return functional.normalize(features.unflatten(0, (2, -1)).sum(0))


def export(directory: Path, format: str, out: Path) -> dict[str, Any]:
    """Writes the network of a finished run for other programs and checks what was written; ``sextet export``.

    Args:
        directory: A run, or its ``final`` folder.
        format: onnx (dynamic batch, for ONNX Runtime), torch (for ``torch.export.load``) or safetensors (weights,
            settings and model card; what ``sextet.load`` reads).
        out: Folder to write to.

    Returns:
        The file, its size in bytes, and the largest difference from the network over batches of 1, 2 and 5 images.

    Raises:
        UsageError: Unknown format, a package that is missing, no finished run.
        DataError: The file gives other vectors than the network; it was deleted.
    """
    if format not in FILES:
        raise UsageError(unknown("format", format, FILES))
    model: Embedder = sextet.load(str(directory))
    about = {
        "sextet": sextet.__version__,
        "method": model.config.shown,
        "input": "RGB pixels, float32 from 0 to 255, (batch, 3, height, width)",
        "output": f"vectors of length 1, float32 (batch, {model.feature_size})",
        "height": str(model.size[0]),
        "width": str(model.size[1]),
        "feature_size": str(model.feature_size),
    }
    part, target = out / f".part-{format}", out / FILES[format]
    write = {"onnx": write_onnx, "torch": write_torch, "safetensors": write_weights}[format]
    part.mkdir(parents=True, exist_ok=True)
    try:
        run = write(model, about, part / FILES[format], directory)
        largest = max(difference(model, run, batch) for batch in BATCHES)
        if not largest <= TOLERANCE:
            raise DataError(
                f"{target} would differ from the network by {largest:.1e} (allowed: {TOLERANCE:.0e}); not written"
            )
        for file in part.iterdir():
            file.replace(out / file.name)
    finally:
        shutil.rmtree(part)
    return {"file": str(target), "bytes": target.stat().st_size, "largest_difference": largest, **about}


def write_onnx(model: Embedder, about: dict[str, str], path: Path, directory: Path) -> Runner:
    """Writes ONNX with a dynamic batch; returns it as ONNX Runtime runs it.

    Raises:
        UsageError: onnx, onnxscript or onnxruntime is not installed.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - the exporter needs it
    except ImportError as error:
        raise missing_extra(error.name or "onnx", "export", "ONNX export") from error
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporter, about its own future
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            Exported(model).eval(), (example(model),), dynamo=True, verbose=False,
            input_names=["pixels"], output_names=["vectors"],
            dynamic_shapes={"pixels": {0: torch.export.Dim("batch")}},
        )  # fmt: skip
    proto = program.model_proto  # type: ignore[union-attr]
    for key, value in about.items():
        proto.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(proto)
    onnx.save(proto, str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(["vectors"], {"pixels": pixels.numpy()})[0])


def write_torch(model: Embedder, about: dict[str, str], path: Path, directory: Path) -> Runner:
    """Writes the program that ``torch.export.load`` reads; returns it read again."""
    shapes = {"pixels": {0: torch.export.Dim("batch")}}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(Exported(model).eval(), (example(model),), dynamic_shapes=shapes)
        with path.open("wb") as handle:
            torch.export.save(program, handle, extra_files={"sextet.json": json.dumps(about)})
        with path.open("rb") as handle:
            again = torch.export.load(handle).module()
    return again


def write_weights(model: Embedder, about: dict[str, str], path: Path, directory: Path) -> Runner:
    """Copies weights, settings and model card; returns the network read from the copies."""
    source = directory if (directory / path.name).exists() else directory / "final"
    for name in (path.name, "config.json", "README.md"):
        shutil.copyfile(source / name, path.parent / name)
    return Exported(sextet.load(str(path.parent)))


def example(model: Embedder) -> Tensor:
    """Pixels to trace with; two images, as the tracers take one for a constant."""
    return torch.full((2, 3, *model.size), 128.0)


@torch.no_grad()
def difference(model: Embedder, run: Runner, batch: int) -> float:
    """Largest difference between the vectors of ``run`` and of the network, for smooth random pictures."""
    height, width = model.size
    coarse = torch.rand(batch, 3, height // 8, width // 8, generator=torch_rng(batch, "export"))
    images = (255 * functional.interpolate(coarse, model.size, mode="bilinear")).round().to(torch.uint8)
    expected = torch.from_numpy(model.embed(images))
    return float((run(images.float()) - expected).abs().max())
