"""Answers from vLLM: from an engine that the worker starts, or from a server.

Both get new weights as a folder that vLLM reads. A server tells with which weights it answers: they carry a label of
this generator, and answers under another label are thrown away. After every load the log-probabilities of a few tokens
are compared with our own network's, because a server with other weights, or with another kind of log-probabilities,
spoils a training without any other sign.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener
from urllib.request import Request as HttpRequest

import torch
from torch import Tensor

from sextet.core.device import Device
from sextet.core.errors import DivergenceError, SextetError, UsageError, missing_extra
from sextet.core.seeding import key, numpy_rng
from sextet.core.workers import parse_spec
from sextet.dapo.decoder import Decoder, Shape
from sextet.dapo.export import write_model
from sextet.dapo.foreign import Foreign
from sextet.dapo.generators import Setting, Weights
from sextet.dapo.model import cache_folder
from sextet.dapo.rollout import NOTHING, Answer, Limits, Request
from sextet.dapo.settings import Config

PATIENCE = 1800.0
"""Seconds that a server may be away, to start again with a large model, before the run stops."""
ATTEMPTS = 4
"""Times in a row that every answer may fail before the run stops."""
SILENCE, TOKEN_SECONDS = 120.0, 0.5
"""Seconds that a server may take for an answer, and for each of its tokens on top."""
LOAD_SECONDS = 900.0
CONNECTIONS = 256
MEMORY = 0.4
"""Share of a device's memory that the worker's own engine takes."""
PROBES, PROBE_TOKENS = 8, 16
TOLERANCE = 0.25
"""Largest mean difference of the probes' log-probabilities; that of bf16 on one side is about 0.02."""


class Job(NamedTuple):
    """A text to go on with, the most tokens of the answer, and the seed of its sampling."""

    text: list[int]
    room: int
    seed: int


Sampled = tuple[list[int], list[float], int]
"""Tokens, their log-probabilities, and the number of tokens of the text that had to be computed."""


class Probe(NamedTuple):
    """Tokens to sample after a load, and our own log-probabilities (B, V) of all of them."""

    jobs: list[Job]
    limits: Limits
    expected: Tensor

    @classmethod
    def of(cls, setting: Setting, state: dict[str, Tensor], seed: int) -> Probe:
        """Returns one token after each of a few random texts."""
        config, shape = setting.config.sampling, Shape.of(setting.record)
        texts = numpy_rng(0, "rollout", "probe", seed).integers(0, setting.record["vocab_size"], (PROBES, PROBE_TOKENS))
        with torch.device("meta"):
            model: Any = Decoder(shape) if setting.builtin and shape is not None else None
        model = model or Foreign.load(Path(setting.folder))
        model.load_state_dict(state, assign=True, strict=False)
        mask = torch.full((PROBE_TOKENS, PROBE_TOKENS), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            places = torch.arange(PROBE_TOKENS).expand(PROBES, -1)
            states = model.eval()(torch.from_numpy(texts), places, mask)[:, -1]
            expected = (states @ model.head.T / config.temperature).log_softmax(-1)
        jobs = [Job(text, 1, number) for number, text in enumerate(texts.tolist())]
        return cls(jobs, Limits(max_tokens=1, stop=(), temperature=config.temperature, top_p=config.top_p), expected)

    def verify(self, name: str, found: Sequence[Sampled]) -> None:
        """Raises SextetError where the log-probabilities are not those of the weights that were loaded."""
        pairs = zip(self.expected, found, strict=True)
        difference = sum(abs(float(row[tokens[0]]) - logp[0]) for row, (tokens, logp, _) in pairs) / PROBES
        if not difference <= TOLERANCE:
            raise SextetError(
                f"{name}: log-probabilities of a few tokens differ by {difference:.2f} on average from those of this "
                "run's weights. A server must serve the model that is trained, not quantised; with --logprobs-mode "
                f"processed_logprobs if sampling.temperature (here {self.limits.temperature}) is not 1, else without"
            )


def ready(config: Config) -> None:
    """Raises UsageError where the configured backend cannot be used: wrong name, no package, no server."""
    name = config.rollout.backend
    if name == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise missing_extra("vllm", "vllm", 'rollout.backend "vllm"')
        return
    if not name.startswith(("http://", "https://")):
        raise UsageError(f'rollout.backend "{name}" is not builtin, vllm or the address of a vLLM server, http://...')
    if config.workers != "inline" and parse_spec(config.workers)[1] != 1:
        raise UsageError(
            f'several workers (workers "{config.workers}") would load weights into one server one over the other; set '
            "workers to inline or process:1: vLLM answers many requests at the same time by itself"
        )
    try:
        Server(name).call("/weight_info", seconds=10)
    except Trouble as error:
        raise UsageError(absent(name, str(error))) from error


def absent(address: str, reason: str) -> str:
    """Returns what to tell of a server that does not answer."""
    return (
        f"{address}: no vLLM server answers ({reason}). Start one: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL "
        f"--port {address.rpartition(':')[2]}; then go on with a run that was under way: sextet resume RUN"
    )


def sampling(limits: Limits) -> dict[str, Any]:
    """What is the same for all jobs, in the names of both forms; nothing is left to defaults of the model."""
    return {
        "n": 1, "temperature": limits.temperature, "top_p": limits.top_p, "top_k": 0, "min_p": 0.0, "logprobs": 0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop_token_ids": sorted(limits.stop), "ignore_eos": True,
    }  # fmt: skip


class InProcess:
    """``vllm.LLM``, whose engine is a child process of the worker."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.llm: Any = None

    def load(self, folder: Path, probe: Probe | None) -> None:
        """Starts the engine with the first weights; others it reads into the same memory. Then tries the probe."""
        import vllm

        config = self.config
        try:
            if self.llm is None:
                self.llm = vllm.LLM(
                    model=str(folder), dtype=str(self.dtype).removeprefix("torch."), skip_tokenizer_init=True,
                    max_model_len=config.task.max_prompt_tokens + config.sampling.max_tokens,
                    max_num_seqs=config.rollout.slots, gpu_memory_utilization=MEMORY, enable_prefix_caching=True,
                    enforce_eager=not torch.cuda.is_available(), generation_config="vllm", disable_log_stats=True,
                    logprobs_mode="raw_logprobs" if config.sampling.temperature == 1 else "processed_logprobs",
                )  # fmt: skip
            else:
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                self.llm.reset_prefix_cache()
        except Exception as error:  # of many kinds, over a process boundary
            raise SextetError(f"vLLM could not take the weights in {folder}: {error}; see its log above") from error
        if probe is not None:
            probe.verify("vLLM", self.sample(probe.jobs, probe.limits))

    def sample(self, jobs: Sequence[Job], limits: Limits) -> list[Sampled]:
        """Returns an answer to each job."""
        import vllm

        prompts = [{"prompt_token_ids": job.text} for job in jobs]
        common = sampling(limits) | {"detokenize": False}
        settings = [vllm.SamplingParams(**common, max_tokens=job.room, seed=job.seed) for job in jobs]
        try:
            outputs = self.llm.generate(prompts, settings, use_tqdm=False)
        except Exception as error:
            raise SextetError(f"vLLM failed: {error}; go on with the run: sextet resume RUN") from error
        found: list[Sampled] = []
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            pairs = zip(tokens, output.outputs[0].logprobs, strict=True)
            new = len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
            found.append((tokens, [float(place[token].logprob) for token, place in pairs], new))
        return found


class Trouble(Exception):  # noqa: N818 - may pass
    """A server did not answer as it should; it may the next time."""


class Server:
    """A running ``vllm serve``. What fails is sent again; a server that was restarted gets the weights again."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.opener = build_opener(ProxyHandler({}))  # proxies are for the world outside
        self.headers = {"Content-Type": "application/json"}
        if os.environ.get("VLLM_API_KEY"):
            self.headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
        self.folder, self.label = Path(), ""
        self.probe: Probe | None = None
        self.broken = threading.Event()

    def call(self, path: str, body: dict[str, Any] | None = None, *, seconds: float = 60.0) -> Any:
        """Returns the JSON of a POST, or of a GET where there is no body.

        Raises:
            Trouble: It may be better next time.
            SextetError: It will not: the server refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            with self.opener.open(HttpRequest(self.address + path, data, self.headers), timeout=seconds) as response:
                return json.loads(response.read() or b"{}")
        except HTTPError as error:
            said = f"{path}: HTTP {error.code} {error.read(400).decode(errors='replace')}"
            if error.code == 404:
                said += "; it must be vLLM 0.32 or newer, started with VLLM_SERVER_DEV_MODE=1"
            if error.code < 500 and error.code not in (408, 429):
                raise SextetError(f"{self.address} refuses {said}") from error
            raise Trouble(said) from error
        except (OSError, HTTPException, ValueError) as error:
            raise Trouble(f"{path}: {error or type(error).__name__}") from error

    def load(self, folder: Path, probe: Probe | None) -> None:
        """Adopts the weights of a folder, which the server must see under the same path, and tries the probe."""
        self.folder, self.probe, self.label = folder, probe, f"sextet-{secrets.token_hex(8)}"
        self.revive()

    def revive(self) -> None:
        """Waits until the server is there, and loads the weights again where it has others."""
        pause, deadline = 0.5, time.monotonic() + PATIENCE
        while True:
            try:
                if not self._current():
                    self._push()
                return
            except Trouble as error:
                if time.monotonic() + pause > deadline:
                    raise SextetError(absent(self.address, f"for {PATIENCE:.0f} s; the last: {error}")) from error
                time.sleep(pause)
                pause = min(2 * pause, 20.0)

    def _current(self) -> bool:
        """Whether the server has the weights of this generator; after a restart it has those it starts with."""
        value = self.call("/weight_info", seconds=30)
        return isinstance(value, dict) and value.get("weight_version") == self.label

    def _push(self) -> None:
        order = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        try:
            self.call("/collective_rpc", order, seconds=LOAD_SECONDS)
        except Trouble as error:
            if not isinstance(error.__cause__, HTTPError):
                raise
            self.call("/health")  # an engine that has died is another trouble, which may pass
            raise SextetError(
                f"{self.address} could not read the weights in {self.folder}: {error}. The server must see that folder "
                "under the same path (set SEXTET_CACHE to one that both see) and serve a model of the same shape"
            ) from error
        self.call("/reset_prefix_cache?reset_running_requests=true", {})
        if self.probe is not None:
            self.probe.verify(self.address, [self._answer(job, self.probe.limits) for job in self.probe.jobs])
        self.call("/update_weight_version", {"new_version": self.label})

    def sample(self, jobs: Sequence[Job], limits: Limits) -> list[Sampled]:
        """Returns an answer to each job.

        Raises:
            SextetError: The server is away, hangs or answers nonsense for too long.
        """
        found: dict[int, Sampled] = {}
        failed = 0
        with ThreadPoolExecutor(min(len(jobs), CONNECTIONS)) as threads:
            while missing := [index for index in range(len(jobs)) if index not in found]:
                self.broken.clear()
                results = list(threads.map(lambda index: self._try(jobs[index], limits), missing))
                good = {i: result for i, result in zip(missing, results, strict=True) if isinstance(result, tuple)}
                troubles = [str(result) for result in results if isinstance(result, Trouble) and str(result)]
                try:
                    if good and not self._current():
                        good, troubles = {}, ["it has other weights; no one else may load weights into it"]
                except Trouble as error:
                    good, troubles = {}, [str(error)]
                found |= good
                failed = 0 if good else failed + 1
                if failed == ATTEMPTS:
                    raise SextetError(
                        f"{self.address} failed {failed} times in a row ({troubles[0]}); look at its log, restart it, "
                        "and go on: sextet resume RUN"
                    )
                if troubles:
                    time.sleep(0.2 * 2**failed)
                    self.revive()
        return [found[index] for index in range(len(jobs))]

    def _try(self, job: Job, limits: Limits) -> Sampled | Trouble:
        """Returns an answer, or why there is none; nothing is sent any more after a failure."""
        try:
            return Trouble() if self.broken.is_set() else self._answer(job, limits)
        except Trouble as error:
            self.broken.set()
            return error

    def _answer(self, job: Job, limits: Limits) -> Sampled:
        body = {"prompt": job.text, "max_tokens": job.room, "seed": job.seed, "return_token_ids": True}
        value = self.call("/v1/completions", sampling(limits) | body, seconds=SILENCE + TOKEN_SECONDS * job.room)
        try:
            choice, cached = value["choices"][0], value["usage"].get("prompt_tokens_details") or {}
            tokens, logp = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            whole = len(tokens) == job.room or tokens[-1] in limits.stop
            if not whole or len(tokens) != len(logp) or not all(-9000 < item <= 1e-3 for item in logp):
                raise ValueError(f"{len(tokens)} tokens with log-probabilities {logp[:3]}")
            return [int(token) for token in tokens], logp, len(job.text) - (cached.get("cached_tokens") or 0)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Trouble(f"an answer that is none: {error or type(error).__name__}") from error


class VllmGenerator:
    """The generator of a worker; see `generators.Generator`."""

    def __init__(self, setting: Setting) -> None:
        config, sizes = setting.config, setting.config.sampling
        if sizes.top_p < 1 and sizes.temperature != 1 and config.loss.old == "rollout":
            raise UsageError(
                "vLLM has no log-probabilities at a temperature before top-p: set sampling.top_p or "
                "sampling.temperature to 1, or loss.old to recompute"
            )
        ready(config)
        self.setting, self.version, self.loaded = setting, 0, False
        self.dtype = Device(config.device, config.precision, threads=config.threads).dtype
        name = config.rollout.backend
        self.backend = InProcess(config, self.dtype) if name == "vllm" else Server(name)
        self.home = cache_folder()
        self.home.mkdir(parents=True, exist_ok=True)

    def load_weights(self, weights: Weights) -> None:
        """Takes the policy's weights and their version.

        Raises:
            SextetError: They did not arrive.
        """
        setting, state = self.setting, {name: value.float() for name, value in weights["model"].items()}
        self.version = int(weights["version"])
        folder = tempfile.TemporaryDirectory(prefix="vllm-", dir=self.home, ignore_cleanup_errors=True)
        # on CPUs vLLM keeps a copy of tied output embeddings, which only weights of their own name refresh
        write_model(setting.record, state, Path(folder.name), self.dtype, head=True)
        probe = setting.builtin or not self.loaded  # to read a network of transformers each time would take too long
        self.backend.load(Path(folder.name), Probe.of(setting, state, self.version) if probe else None)
        self.folder, self.loaded = folder, True  # a server that is restarted reads it again; the one before goes

    def generate(self, requests: Sequence[Request], limits: Limits) -> tuple[list[list[Answer]], int]:
        """Returns the answers of each request, and the number of prompt tokens that were computed.

        Raises:
            DivergenceError: A log-probability is not finite.
            SextetError: vLLM does not answer.
        """
        answers = [dict(request.begun) for request in requests]
        places, jobs, computed = [], [], 0
        for index, request in enumerate(requests):
            for number in request.numbers:
                begun = request.begun.get(number, NOTHING)
                room, count = limits.max_tokens - len(begun.tokens), len(begun.tokens)
                if room > 0 and not begun.stopped:
                    seed = key(limits.seed, *request.key, number, count)
                    places.append((index, number, begun))
                    jobs.append(Job([*request.prompt, *begun.tokens], min(room, limits.slice_tokens or room), seed))
        sampled = self.backend.sample(jobs, limits) if jobs else []
        for (index, number, begun), (tokens, logp, new) in zip(places, sampled, strict=True):
            if not all(map(math.isfinite, logp)):
                raise DivergenceError("the logits of a sampled token are not finite: the weights have diverged")
            computed += new
            answers[index][number] = Answer(
                tokens=begun.tokens + tokens,
                logp=begun.logp + logp,
                versions=begun.versions + [self.version] * len(tokens),
                stopped=tokens[-1] in limits.stop,
            )
        ordered = [
            [found[number] for number in request.numbers] for found, request in zip(answers, requests, strict=True)
        ]
        return ordered, computed


def make_vllm_generator(setting: Setting) -> VllmGenerator:
    """Makes the generator of the backend ``vllm``, or of a server's address.

    Raises:
        UsageError: The package or the server is missing, or the settings do not go together.
    """
    return VllmGenerator(setting)
