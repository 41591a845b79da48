"""Settings of person re-identification. "MGN" marks values of the paper (Wang et al. 2018) as its public replications
give them, "fast-reid" those of that toolbox's MGN recipe, "BoT" those of the strong baseline (Luo et al. 2019); RMGL
(Wang et al. 2020) is public only in outline, so its values are our choice unless one of these marks stands beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from sextet.core.config import RunConfig, require
from sextet.core.errors import UsageError, unknown

METHODS = {
    "global": "global",
    "wide": "global, width-matched",
    "bot": "BoT",
    "pcb": "PCB",
    "mgn": "MGN",
    "mgn_globals": "MGN without stripes",
    "rmgl": "RMGL",
    "rmgl_uniform": "RMGL, uniform stripes",
    "rmgl_unshifted": "RMGL, no random shifting",
}
"""Methods and how tables call them."""

VARIANTS = ("standard", "easy", "misaligned", "occluded")
"""Variants of the synthetic benchmark."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network. Fields that a method does not use have no effect on it."""

    backbone: Literal["small", "resnet18", "resnet34", "resnet50", "resnet101", "mobilenetv2"] = "small"
    """Trunk; small is a ResNet of 8 thin layers for CPUs (MGN: resnet50)."""
    width: float = 1.0
    """Factor on the channels of the small trunk."""
    ibn: bool = False
    """Instance and batch normalisation (IBN-a) in the first three stages of a ResNet (fast-reid: yes)."""
    weights: str = ""
    """File of the trunk's weights, .safetensors or .pth with torchvision's names; empty: random (MGN: ImageNet)."""
    feature_size: int = 256
    """Length of each reduced feature (MGN: 256)."""
    branches: str = "1,2,3"
    """Branches by their number of stripes; 1 is the global branch (MGN: 1,2,3). RMGL leaves out 1; PCB: 6 always."""
    test_branch: str = ""
    """Test with the features of this one branch of several ("Branch" in MGN's ablation); empty: with all."""
    classify: Literal["full", "reduced"] = "full"
    """Classify global features before or after the reduction (MGN: full; several replications: reduced); with the
    neck "bn" always after it."""
    pool: Literal["max", "avg", "gem"] = "max"
    """Pooling over whole maps and stripes (MGN: max; fast-reid: gem)."""
    neck: Literal["relu", "bn"] = "relu"
    """After the reduction: BN and ReLU, or BN whose output is classified and tested while triplets see its input."""
    classifier: Literal["linear", "cosine"] = "linear"
    """Linear without bias, or cosines for the circle softmax (fast-reid: cosine)."""
    strict_stripes: bool = True
    """Refuse sizes whose feature map the stripes do not divide; else stripes of unequal height."""
    cut: Literal["input", "res2", "res3", "res4", "output"] = "res2"
    """RMGL: where local paths are cut into bands (the public implementation: res2)."""
    bands: Literal["abp", "uniform"] = "abp"
    """RMGL: bands of the last map by activation-balanced pooling, or of equal height."""
    share_branches: bool = False
    """RMGL: branches share their weights, the variant of small storage."""
    band_bn: Literal["shared", "separate"] = "shared"
    """RMGL: whether bands go through the same batch normalisations as whole maps."""
    head: Literal["parts", "joint"] = "parts"
    """RMGL: one reduction for each feature, or one for all of a branch as in the public implementation."""

    @property
    def stripes(self) -> tuple[int, ...]:
        """The number of stripes of each branch."""
        return tuple(int(part) for part in self.branches.split(","))

    @property
    def full(self) -> bool:
        """Whether global features are classified before their reduction."""
        return self.classify == "full" and self.neck == "relu"

    def __post_init__(self) -> None:
        """Checks sizes and the list of branches."""
        parts = self.branches.split(",")
        require(all(part.isdigit() and int(part) for part in parts), "branches", self.branches, "like 1,2,3")
        require(self.test_branch in ("", *parts), "test_branch", self.test_branch, f"empty or one of {self.branches}")
        require(self.width > 0, "width", self.width, "above 0")
        require(self.feature_size >= 1, "feature_size", self.feature_size, "1 or more")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss: weighted means of the softmax losses and of the triplet losses."""

    softmax: float = 1.0
    """Weight of the mean softmax loss (MGN: 1; replications also 2)."""
    smoothing: float = 0.0
    """Label smoothing (MGN: 0; BoT and fast-reid: 0.1)."""
    circle_scale: float = 64.0
    """Scale of the circle softmax on cosines (fast-reid: 64)."""
    circle_margin: float = 0.35
    """Margin of the circle softmax (fast-reid: 0.35)."""
    metric: float = 1.0
    """Weight of the mean metric loss (MGN: 1; replications also 2)."""
    kind: Literal["triplet", "soft", "circle"] = "triplet"
    """Batch-hard triplets with a margin, with softplus, or the pair-wise circle loss (m 0.6, scale 80)."""
    margin: float = 0.3
    """Margin of the triplets (MGN: 1.2 on raw features; BoT: 0.3)."""
    normalise: bool = False
    """Normalise features before the triplet loss (MGN: no)."""
    features: Literal["globals", "all", "concat"] = "globals"
    """Triplets on global features (MGN), on locals too, or on globals and each branch's joined locals (fast-reid)."""
    ramp_start: float = 0.0
    """Share of the training before which the metric loss has no weight."""
    ramp_end: float = 0.0
    """Share of the training from which it has all of it; between them it grows linearly."""

    def __post_init__(self) -> None:
        """Checks the ramp."""
        require(
            0 <= self.ramp_start <= self.ramp_end <= 1, "ramp_end", self.ramp_end, "from ramp_start (0 or more) to 1"
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Batches, optimiser and schedule."""

    people: int = 16
    """P: people in a batch, over all ranks (MGN: 16; fast-reid: 4)."""
    images: int = 4
    """K: images of each of them (MGN: 4; fast-reid: 16)."""
    epochs: float = 20.0
    """Passes over the training set (MGN: 80; replications up to 500)."""
    epoch: Literal["images", "ids"] = "images"
    """What a pass covers: nearly every image once, or K images of every person (some replications)."""
    name: Literal["sgd", "adam", "amsgrad", "adamw"] = "adam"
    """Optimiser (MGN: sgd with momentum 0.9; replications: amsgrad; fast-reid: adam)."""
    learning_rate: float = 3.5e-4
    """Highest step size (MGN: 0.01; BoT and fast-reid: 3.5e-4; replications of MGN: 2e-4)."""
    trunk_rate: float = 1.0
    """Factor on the step size of what the trunk's weights initialise."""
    weight_decay: float = 5e-4
    """Weight decay (MGN: 5e-4)."""
    warmup: float = 0.0
    """Epochs of linear growth of the step size (MGN: 0; BoT: 10)."""
    schedule: Literal["steps", "cosine"] = "cosine"
    """Fall of the step size: by `decay` at the milestones (MGN), or along a cosine from `cosine_start` to the end."""
    milestones: str = "40,60"
    """Epochs at which the step size falls (MGN: 40,60; BoT: 40,70)."""
    decay: float = 0.1
    """Factor at each milestone (MGN: 0.1)."""
    cosine_start: float = 0.0
    """Epoch at which the cosine begins (fast-reid: 30)."""
    final_rate: float = 0.0
    """Step size at the end of the cosine (fast-reid: 7e-7)."""
    freeze: int = 0
    """Steps in which only the heads learn (fast-reid: 1000)."""
    clip: float = 1e9
    """Gradient norm above which gradients are scaled down; the default never does (MGN: none)."""
    trunk_epochs: float = 0.0
    """Epochs in which a global network learns the trunk from which all branches start, in place of ImageNet."""
    trunk_learning_rate: float = 4e-3
    """Highest step size of that."""

    def __post_init__(self) -> None:
        """Checks counts and milestones."""
        require(self.people >= 2, "people", self.people, "2 or more: triplets need another person")
        require(self.images >= 2, "images", self.images, "2 or more: triplets need another image of the person")
        require(self.epochs > 0, "epochs", self.epochs, "above 0")
        parts = self.milestones.split(",")
        known = all(part.replace(".", "", 1).isdigit() for part in parts)
        require(known, "milestones", self.milestones, "like 40,60")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Random changes of training images, in this order."""

    flip: float = 0.5
    """Probability of a horizontal flip (MGN: 0.5, its only augmentation)."""
    pad_px: int = 0
    """Zero padding before a random crop back to size (BoT and fast-reid: 10)."""
    shift: float = 0.0
    """Probability of random shifting (RMGL uses it; its probability and range are not public)."""
    shift_y: float = 0.1
    """Largest vertical shift as a share of the height."""
    shift_x: float = 0.1
    """Largest horizontal shift as a share of the width."""
    fill: Literal["mean", "zero", "edge", "reflect"] = "mean"
    """What fills the uncovered area of a shift."""
    erase: float = 0.0
    """Probability of random erasing (Zhong et al. 2017; BoT and fast-reid: 0.5; MGN: 0)."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images."""

    format: Literal[
        "synthetic", "market1501", "dukemtmc", "cuhk03_np", "msmt17", "randperson", "personx", "folder", "table"
    ] = "synthetic"
    """Layout of the data set; synthetic is drawn and needs no files."""
    root: str = ""
    """Folder of the data set, or the file of a table (.csv, .parquet)."""
    variant: str = ""
    """synthetic: standard, easy, misaligned, occluded; cuhk03_np: detected, labelled; msmt17: v1, v2; empty: first."""
    people: int = 120
    """Training people of the synthetic set; the test has 5/6 as many others."""
    bad_images: Literal["skip", "stop"] = "skip"
    """What to do with images that cannot be read: leave them out and name them, or stop."""
    readers: int = 2
    """Threads that read images ahead; the result does not depend on them."""
    max_pixels: int = 24_000_000
    """Largest image that is decoded, judged by its header."""

    def __post_init__(self) -> None:
        """Checks that a folder is given where one is needed, and the variant of the synthetic set."""
        if self.format == "synthetic":
            require(self.people >= 12, "data.people", self.people, "12 or more")
            if self.variant not in ("", *VARIANTS):
                raise UsageError(unknown("variant of the synthetic set", self.variant, VARIANTS))
        elif not self.root:
            raise UsageError(f"data.format {self.format} needs --data.root PATH; `sextet data check PATH` looks at one")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How the trained network is tested."""

    same_camera: Literal["exclude", "keep"] = "exclude"
    """Gallery images of the query's person and camera: left out as usual, or kept (sets without cameras)."""
    ap: Literal["standard", "trapezoid", "sklearn"] = "standard"
    """Definition of the average precision (trapezoid: the original Market-1501 code)."""
    flip: bool = True
    """Sum the features of the image and its mirror image (MGN: yes)."""
    multi_query: Literal["none", "mean", "max"] = "none"
    """Pool the features of a query over the further images of its person and camera (Market-1501's gt_bbox)."""
    expand: int = 0
    """Query expansion: nearest images whose features are averaged, for queries and gallery images; 0: none."""
    rerank: bool = True
    """Also report k-reciprocal re-ranking (Zhong et al. 2017)."""
    k1: int = 20
    """Re-ranking: nearest neighbours (Zhong et al. 2017: 20)."""
    k2: int = 6
    """Re-ranking: neighbours of the local query expansion (Zhong et al. 2017: 6)."""
    weight: float = 0.3
    """Re-ranking: weight of the original distance (Zhong et al. 2017: 0.3)."""
    every: float = 0.0
    """Epochs between evaluations during training, by which the best checkpoint is kept; 0: only at the end."""
    batch: int = 64
    """Images at once; the result does not depend on the number of ranks."""

    def __post_init__(self) -> None:
        """Checks the number of neighbours."""
        require(self.expand >= 0, "expand", self.expand, "0 or more")


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """All settings of a run."""

    changeable: ClassVar[frozenset[str]] = RunConfig.changeable | {"data.readers"}

    method: Literal[
        "mgn", "rmgl", "global", "wide", "bot", "pcb", "mgn_globals", "rmgl_uniform", "rmgl_unshifted", "compare"
    ] = "mgn"
    """What to train; compare: several methods over several seeds."""
    height_px: int = 96
    """Height of the network's input (MGN: 384)."""
    width_px: int = 32
    """Width of the network's input (MGN: 128)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    methods: str = "global,wide,pcb,mgn,rmgl"
    """Methods of a comparison."""
    num_seeds: int = 5
    """Seeds of a comparison; seed, seed+1 and so on."""

    @property
    def compared(self) -> list[str]:
        """The methods of a comparison."""
        return [name.strip() for name in self.methods.split(",")]

    @property
    def shown(self) -> str:
        """The method whose network is the run's; of a comparison MGN, or else the last."""
        if self.method != "compare":
            return self.method
        return "mgn" if "mgn" in self.compared else self.compared[-1]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the network's input."""
        return self.height_px, self.width_px

    def __post_init__(self) -> None:
        """Checks what needs no data."""
        super().__post_init__()
        require(self.height_px >= 16 and self.width_px >= 8, "size", self.size, "at least 16 x 8 pixels")
        require(self.num_seeds >= 1, "num_seeds", self.num_seeds, "1 or more")
        for name in self.compared:
            if name not in METHODS:
                raise UsageError(unknown("method", name, METHODS))
