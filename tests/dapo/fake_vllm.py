"""Stand-ins for vLLM that really sample from a small decoder: a server on loopback, and the module."""

import contextlib
import json
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import torch

from sextet.core.files import read_json
from sextet.dapo.decoder import Decoder, Shape
from sextet.dapo.model import read_weights


class Network:
    """The model of a folder, as vLLM has it: in a place that new weights are read into."""

    def __init__(self, folder, *, mode="raw_logprobs"):
        self.mode = mode
        self.read(folder)

    def read(self, folder):
        self.model = Decoder(Shape.of(read_json(Path(folder) / "config.json")))
        weights = {name: value.float() for name, value in read_weights(Path(folder)).items()}
        tied = weights["model.embed_tokens.weight"]
        assert torch.equal(weights.pop("lm_head.weight", tied), tied)
        self.model.load_state_dict(weights)

    @torch.no_grad()
    def complete(self, text, settings):
        """Tokens and log-probabilities, with the names of vLLM's sampling parameters."""
        rng = torch.Generator().manual_seed(settings["seed"])
        tokens, logp = [], []
        while len(tokens) < settings["max_tokens"]:
            ids = torch.tensor([[*text, *tokens]])
            length = ids.shape[1]
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            logits = self.model(ids, torch.arange(length)[None], mask)[0, -1] @ self.model.head.T
            scaled = (logits / settings["temperature"]).log_softmax(-1)
            order = scaled.argsort(descending=True)
            kept = scaled[order].exp().cumsum(0) - scaled[order].exp() < settings["top_p"]
            p = torch.zeros_like(scaled).scatter(0, order[kept], scaled[order[kept]].exp())
            tokens.append(int(torch.multinomial(p, 1, generator=rng)))
            shown = logits.log_softmax(-1) if self.mode == "raw_logprobs" else (p / p.sum()).log()
            logp.append(float(shown[tokens[-1]]))
            if tokens[-1] in settings["stop_token_ids"]:
                break
        return tokens, logp


class FakeServer:
    """``vllm serve FOLDER`` in threads. ``faults`` says what happens to the next completions, one each."""

    def __init__(self, folder, *, mode="raw_logprobs"):
        self.folder, self.mode, self.faults, self.requests, self.loads = folder, mode, [], [], []
        self.ignores_weights = self.always = None
        self.lock, self.port = threading.Lock(), 0
        self.start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        """Starts, again with the weights that it is started with, on the same port."""
        self.network, self.label = Network(self.folder, mode=self.mode), "default"
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def stop(self):
        """Ends as by kill: nothing listens any more."""
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def restart_after(self, seconds):
        def again():
            time.sleep(seconds)
            self.start()

        threading.Thread(target=again).start()

    def reply(self, path, body):
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.loads.append(body["kwargs"]["weights_path"])
            if not self.ignores_weights:
                self.network.read(body["kwargs"]["weights_path"])
            return {"results": [None]}
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return {"success": True}
        if path == "/health" or path.startswith("/reset_prefix_cache"):
            return {}
        assert path == "/v1/completions" and body["return_token_ids"] and body["ignore_eos"] and body["n"] == 1
        tokens, logp = self.network.complete(body["prompt"], body)
        choice = {"index": 0, "text": "", "token_ids": tokens, "logprobs": {"token_logprobs": logp}}
        return {"choices": [choice], "usage": {"prompt_tokens_details": None}}

    def fault(self):
        with self.lock:
            return self.faults.pop(0) if self.faults else self.always

    def _handler(fake):  # noqa: N805 - self is the request's
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.answer(None)

            def do_POST(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body):
                fault = None
                if self.path == "/v1/completions":
                    fault = fake.fault()
                    fake.requests.append(body)
                if callable(fault):
                    fault = fault()
                if fault == "drop":
                    return
                if fault == "hang":
                    time.sleep(2)
                code = 200
                try:
                    data = json.dumps(fake.reply(self.path, body)).encode()
                except Exception as error:  # as vLLM does
                    code, data = 500, json.dumps({"error": {"message": str(error)}}).encode()
                if isinstance(fault, int):
                    code = fault
                if isinstance(fault, bytes):
                    data = fault
                with contextlib.suppress(OSError):
                    self.send_response(code)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

        return Handler


def fake_module():
    """A module ``vllm`` with what is used of it; ``made`` are the engines."""
    module = types.ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.made = []

    class LLM:
        def __init__(self, model, **options):
            self.options, self.reloads, self.resets = options, 0, 0
            self.network = Network(model, mode=options["logprobs_mode"])
            module.made.append(self)

        def collective_rpc(self, method, kwargs):
            assert method == "reload_weights"
            self.reloads += 1
            self.network.read(kwargs["weights_path"])

        def reset_prefix_cache(self):
            self.resets += 1

        def generate(self, prompts, settings, use_tqdm):
            outputs = []
            for prompt, setting in zip(prompts, settings, strict=True):
                text = prompt["prompt_token_ids"]
                tokens, logp = self.network.complete(text, vars(setting))
                places = [{token: SimpleNamespace(logprob=value)} for token, value in zip(tokens, logp, strict=True)]
                done = SimpleNamespace(token_ids=tokens, logprobs=places)
                outputs.append(SimpleNamespace(outputs=[done], prompt_token_ids=text, num_cached_tokens=1))
            return outputs

    module.LLM, module.SamplingParams = LLM, SimpleNamespace
    return module
