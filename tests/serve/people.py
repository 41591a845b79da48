"""A page to search for people without a trained network: features are mean colours of stripes."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from sextet.core.files import write_json
from sextet.reid import demo
from sextet.reid.settings import Config, DataConfig
from sextet.reid.synthetic import draw_data
from sextet.serve import Options

SIZE = (96, 32)


@dataclass
class Colours:
    """Takes what the real Embedder takes; "balanced" cuts depend on the picture."""

    seed: int = 0
    method: str = "mgn"
    contrast: float = 1.0
    size: tuple[int, int] = SIZE
    calls: int = 0

    @property
    def config(self):
        return Config(method=self.method, seed=self.seed, data=DataConfig(variant="easy", people=12))

    def embed(self, images, *, batch=64):
        self.calls += 1
        if not isinstance(images, torch.Tensor):
            arrays = [np.asarray(image.resize(self.size[::-1])) for image in images]
            images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
        stripes = images.float().unflatten(2, (12, -1)).mean((3, 4)).flatten(1)
        stripes = (stripes - stripes.mean(1, keepdim=True)) / 128
        stripes = stripes.sign() * stripes.abs() ** self.contrast
        return torch.nn.functional.normalize(stripes).numpy()

    def cuts(self, image):
        assert isinstance(image, Image.Image)
        shift = np.asarray(image.convert("L").resize((1, 1))).item() / 2550
        return {"global": [0.0, 1.0], "part-2": [0.0, 0.5, 1.0], "local-3": [0.0, 0.25 + shift, 0.6 + shift, 1.0]}


def make_page(run, monkeypatch, embedder=None, models=None):
    """A finished run of one model, or of several as a comparison keeps them (method to Colours); returns its Demo."""
    folders = {run / "models" / name: model for name, model in (models or {}).items()}
    folders = folders or {run / "final": embedder or Colours()}
    for folder, model in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_text(str(model.contrast))
        write_json(folder / "config.json", {"seed": model.seed})
    monkeypatch.setattr(demo, "load", folders.__getitem__)
    monkeypatch.setattr(demo, "load_data", lambda data, size, *, seed: draw_data("easy", size, people=12, seed=seed))
    return demo.demo([run], Options())
