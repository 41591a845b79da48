"""A generator that takes a while for every ticket, and notes when; for workers in processes."""

import json
import os
import time
from pathlib import Path

from sextet.dapo.generators import Generator


class SlowGenerator(Generator):
    def generate(self, requests, limits):
        started = time.monotonic()
        time.sleep(float(os.environ["SLOW_SECONDS"]))
        found = super().generate(requests, limits)
        with Path(os.environ["SLOW_NOTES"]).open("a") as notes:
            notes.write(json.dumps([started, time.monotonic()]) + "\n")
        return found


def make_slow_generator(setting):
    return SlowGenerator(setting)
