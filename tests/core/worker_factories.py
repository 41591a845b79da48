"""Objects that test workers host; a module of its own, so that a worker process imports little."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np


class Toy:
    def __init__(self, config):
        self.config, self.weights, self.calls, self.loads = config, None, 0, 0
        self.log = []

    def load_weights(self, weights):
        self.weights = weights
        self.loads += 1

    def echo(self, value, *, extra=None):
        return (value, extra) if extra is not None else value

    def draw(self, seed):
        """A result that depends on the key's seed and the weights only, never on the worker."""
        noise = np.random.default_rng(seed).normal(size=3)
        return noise * self.config["scale"] + (self.weights["bias"] if self.weights else 0)

    def forward(self, x):
        import torch

        layer = self.weights["layers"][0]
        return torch.tanh(x @ layer["matrix"].T + layer["bias"].to(x.dtype))

    def state(self, value):
        """The worker's own array and, if torch is loaded, tensor, changed at every call."""
        self.calls += 1
        if not hasattr(self, "array"):
            self.array = np.zeros(3)
            self.tensor = sys.modules["torch"].zeros(3) if "torch" in sys.modules else None
        self.array += value
        if self.tensor is not None:
            self.tensor += value
        return self.array, self.tensor

    def count(self):
        self.calls += 1
        return self.calls, self.loads, self.weights and self.weights["version"]

    def threads(self):
        import torch

        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    def fail(self, text):
        raise ValueError(text)

    def unsendable(self):
        return lambda: None

    def pid(self):
        return os.getpid()

    def ignored(self):
        return [signal.getsignal(stop) == signal.SIG_IGN for stop in (signal.SIGINT, signal.SIGTERM)]

    def nap(self, seconds):
        time.sleep(seconds)
        return seconds

    def once(self, marker, value, how):
        """Dies or hangs at its first call anywhere, then answers."""
        try:
            Path(marker).touch(exist_ok=False)
        except FileExistsError:
            return value, self.weights and self.weights["version"]
        return self.end(how)

    def orphan(self, marker):
        """Dies at its first call and leaves a child that holds all its open files."""
        if Path(marker).exists():
            return "again"
        Path(marker).touch()
        if os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        return self.end("SIGKILL")

    def end(self, how):
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        if how == "hang":
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(600)


def toy(config):
    return Toy(config)


def broken(config):
    raise RuntimeError(f"no {config}")


def dying(config):
    sys.stderr.write("cannot start\n")
    sys.stderr.flush()
    os._exit(7)
