"""Attention problems of published models.

``tune_models.py`` tunes these problems for the package's tables of configurations.

A problem has the layout of the model's tokens at the published resolution. The extents are the numbers of frames and
pixels, divided by the downsampling factor of the encoder and by the patch size. For videos, the batch size is 1, as in
generation and in training. For images, the batch is one device's share of a training batch. The most important problems
come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks import Benchmark


@dataclasses.dataclass(frozen=True)
class ModelProblem:
    """The attention of some layers of a model.

    Attributes:
        model: Name of the model.
        layers: Description of the layers that have this attention.
        source: Publication that states the shapes.
        benchmark: The problem.
    """

    model: str
    layers: str
    source: str
    benchmark: Benchmark

    @property
    def label(self) -> str:
        """Name of the model and description of the layers."""
        return f"{self.model}, {self.layers}"


_HUNYUAN = "HunyuanVideo (2024), 720p, with NATTEN's windows: natten.org, Generalized Neighborhood Attention (2025)"
_STA = "Fast Video Generation with Sliding Tile Attention (2025): 768 x 1280 pixels, tiles of 6 x 8 x 8 tokens"
_WAN = "Wan 2.1 (2025): patches of 4 x 16 x 16 pixels, 81 frames; no windows of its own, here half of each axis"
_COSMOS = "Cosmos-Predict2 (2025): windows of its sparse models; 720p, 16 latent frames at 10 a second and 24 at 16"
_NAT = "Neighborhood Attention Transformer (2022), 224 x 224 pixels"
_DINAT = "Dilated Neighborhood Attention Transformer (2022), 224 x 224 pixels: the dilations of every other layer"
_HDIT = "Hourglass Diffusion Transformers (2024): patches of 4 x 4 pixels, windows of 7 x 7 in all but the inner levels"


def _video(layout: tuple[int, ...], heads: int, window: tuple[int, ...], **facts: Any) -> Benchmark:
    return Benchmark(layout, heads, 128, window, **facts)


def _videos() -> Iterator[ModelProblem]:
    layout = (30, 48, 80)
    for stride, source in (((1, 1, 1), _HUNYUAN), ((16, 8, 8), _HUNYUAN), ((6, 8, 8), _STA)):
        name = f"18x24x24, stride {'x'.join(map(str, stride))}"
        yield ModelProblem("HunyuanVideo", name, source, _video(layout, 24, (18, 24, 24), stride=stride))
    yield ModelProblem("Wan 2.1 1.3B", "480p, 11x15x26", _WAN, _video((21, 30, 52), 12, (11, 15, 26)))
    yield from _cosmos("Cosmos-Predict2 2B", 16, 16)


def _more_videos() -> Iterator[ModelProblem]:
    yield ModelProblem("Wan 2.1 14B", "720p, 11x23x40", _WAN, _video((21, 45, 80), 40, (11, 23, 40)))
    sliding = _video((18, 48, 80), 40, (18, 24, 24), stride=(6, 8, 8))
    yield ModelProblem("Wan 2.1 14B", "768x1280, 18x24x24, stride 6x8x8", _STA, sliding)
    with_text = _video((30, 48, 80), 24, (18, 24, 24), stride=(6, 8, 8), additional_kv=256)
    yield ModelProblem("HunyuanVideo", "18x24x24, stride 6x8x8, 256 tokens of text", _STA, with_text)
    yield from _cosmos("Cosmos-Predict2 14B", 16, 40)
    yield from _cosmos("Cosmos-Predict2 2B, 24 frames", 24, 16)
    for window in ((30, 24, 24), (18, 24, 40), (30, 40, 40)):
        name = f"{'x'.join(map(str, window))}, stride 6x8x8"
        yield ModelProblem("HunyuanVideo", name, _STA, _video((30, 48, 80), 24, window, stride=(6, 8, 8)))


def _cosmos(model: str, frames: int, heads: int) -> Iterator[ModelProblem]:
    """Yield the problems of a Cosmos model. Each window contains all frames."""
    for window, stride, dilation in (
        ((12, 24), (4, 8), (1, 1)),
        ((20, 40), (4, 8), (1, 1)),
        ((28, 56), (4, 8), (1, 1)),
        ((4, 16), (1, 1), (11, 5)),
        ((12, 16), (4, 1), (1, 5)),
    ):
        name = f"{window[0]}x{window[1]}, stride {stride[0]}x{stride[1]}, dilation {dilation[0]}x{dilation[1]}"
        benchmark = _video((frames, 44, 80), heads, (frames, *window), stride=(1, *stride), dilation=(1, *dilation))
        yield ModelProblem(model, name, _COSMOS, benchmark)


def _images() -> Iterator[ModelProblem]:
    for stage, (extent, dilation) in enumerate(((56, 8), (28, 4), (14, 2), (7, 1)), start=1):
        plain = Benchmark((extent, extent), 2**stage, 32, (7, 7), batch=128)
        yield ModelProblem("NAT-Tiny", f"stage {stage}", _NAT, plain)
        if dilation > 1:
            dilated = dataclasses.replace(plain, dilation=(dilation, dilation))
            yield ModelProblem("DiNAT-Tiny", f"stage {stage}, dilation {dilation}", _DINAT, dilated)
    for trained_on, batch, levels in (
        ("ImageNet-256", 32, ((64, 6), (32, 12))),
        ("FFHQ-1024", 4, ((256, 2), (128, 4), (64, 6))),
        ("Oxford Flowers", 32, ((64, 2), (32, 4))),
    ):
        for level, (extent, heads) in enumerate(levels, start=1):
            benchmark = Benchmark((extent, extent), heads, 64, (7, 7), batch=batch)
            yield ModelProblem(f"HDiT, {trained_on}", f"level {level}", _HDIT, benchmark)


def _more_images() -> Iterator[ModelProblem]:
    for stage, (extent, dilation) in enumerate(((56, 8), (28, 4), (14, 2), (7, 1)), start=1):
        plain = Benchmark((extent, extent), 2 ** (stage + 1), 32, (7, 7), batch=64)
        yield ModelProblem("NAT-Base", f"stage {stage}", _NAT, plain)
        if dilation > 1:
            dilated = dataclasses.replace(plain, dilation=(dilation, dilation))
            yield ModelProblem("DiNAT-Base", f"stage {stage}, dilation {dilation}", _DINAT, dilated)


MODEL_PROBLEMS = (*_videos(), *_images(), *_more_videos(), *_more_images())
