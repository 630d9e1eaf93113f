"""Problems for which the TPU kernels are compiled: layers of published models, and each feature at unusual sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from tests.support.problems import Case


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A problem to compile.

    Attributes:
        case: The problem, of which only shapes are used.
        dtype: Element type.
        is_quick: True if every run compiles the problem. Others are compiled only on request.
    """

    case: Case
    dtype: str = "bfloat16"
    is_quick: bool = False


def _square(extent: int, heads: int, window: int, dilation: int = 1, head_dim: int = 32, batch: int = 64) -> Case:
    return Case(
        (extent, extent),
        (window, window),
        dilation=(dilation, dilation),
        batch=batch,
        heads=heads,
        heads_kv=heads,
        head_dim=head_dim,
    )


def _band(tokens: int, window: int, heads: int = 4, head_dim: int = 128, **facts: object) -> Case:
    return Case((tokens,), (window,), heads=heads, heads_kv=heads, head_dim=head_dim, **facts)  # type: ignore[arg-type]


def _video(layout: tuple[int, ...], window: tuple[int, ...], heads: int = 24, **facts: object) -> Case:
    return Case(layout, window, heads=heads, heads_kv=heads, head_dim=128, **facts)  # type: ignore[arg-type]


def _attention(queries: int, keys: int, heads: int = 4, head_dim: int = 128, **facts: object) -> Case:
    return Case((keys,), queries=queries, heads=heads, heads_kv=heads, head_dim=head_dim, **facts)  # type: ignore[arg-type]


def _images() -> Iterator[tuple[str, Compiled]]:
    """Yield layers of image models: NAT and DiNAT for 224 x 224 pixels, DiNAT for 384 x 384 pixels, and HDiT."""
    for stage, (extent, dilation) in enumerate(((56, 8), (28, 4), (14, 2), (7, 1)), start=1):
        yield f"NAT stage {stage}", Compiled(_square(extent, 2**stage, 7), is_quick=stage in (1, 4))
        if dilation > 1:
            dilated = _square(extent, 2**stage, 7, dilation)
            yield f"DiNAT stage {stage}", Compiled(dilated, is_quick=stage == 2)
    for extent, heads, dilation in ((96, 4, 13), (48, 8, 6), (24, 16, 3)):
        yield f"DiNAT at 384, {extent}x{extent}", Compiled(_square(extent, heads, 7, dilation, batch=8))
    for extent, heads in ((256, 2), (128, 4), (64, 6), (32, 12)):
        hdit = _square(extent, heads, 7, head_dim=64, batch=4)
        yield f"HDiT {extent}x{extent}", Compiled(hdit, is_quick=extent == 64)
    yield "HDiT 64x64, float32", Compiled(_square(64, 6, 7, head_dim=64, batch=4), "float32")
    yield "image, window of 80", Compiled(_square(256, 4, 80, head_dim=128, batch=1))
    strided = dataclasses.replace(_square(256, 4, 80, head_dim=128, batch=1), stride=(16, 16))
    yield "image, window of 80, stride", Compiled(strided)


def _videos() -> Iterator[tuple[str, Compiled]]:
    """Yield examples of NATTEN, and layers of the video models HunyuanVideo, Wan and Cosmos."""
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    shapes = ((8, 16, 24), (2, 4, 3)), ((16, 16, 16), (4, 8, 4))
    for layout, window in shapes:
        small = _video(layout, window, heads=1)
        yield f"video {'x'.join(map(str, layout))}", Compiled(small, is_quick=True)
        yield f"video {'x'.join(map(str, layout))}, float32", Compiled(small, "float32")
    for stride in ((1, 1, 1), (16, 8, 8), (6, 8, 8)):
        hunyuan = _video((30, 48, 80), (18, 24, 24), stride=stride)
        name = "x".join(map(str, stride))
        yield f"HunyuanVideo, stride {name}", Compiled(hunyuan, is_quick=stride == (16, 8, 8))
    text = _video((30, 48, 80), (18, 24, 24), stride=(6, 8, 8), additional=256)
    yield "HunyuanVideo with text", Compiled(text)
    yield "Wan 480p", Compiled(_video((21, 30, 52), (11, 15, 26), 12))
    yield "Wan 720p", Compiled(_video((21, 45, 80), (11, 23, 40), 12))
    for frame_window, steps, dilation in (
        ((20, 40), (4, 8), (1, 1)),
        ((4, 16), (1, 1), (11, 5)),
        ((12, 16), (4, 1), (1, 5)),
    ):
        cosmos = _video((16, 44, 80), (16, *frame_window), 16, stride=(1, *steps), dilation=(1, *dilation))
        yield f"Cosmos {frame_window[0]}x{frame_window[1]}, dilation {dilation[0]}x{dilation[1]}", Compiled(cosmos)
    causal = _video((16, 32, 32), (5, 9, 9), 4, is_causal=(True, False, False))
    yield "video, causal frames", Compiled(causal)


def _sequences() -> Iterator[tuple[str, Compiled]]:
    """Yield problems on sequences: windows over the ordered nodes of a graph, NATTEN's example, and plain attention."""
    for window in (512, 1024, 2048):
        yield f"band of {window}", Compiled(_band(32768, window), is_quick=window == 1024)
        yield f"band of {window}, causal", Compiled(_band(32768, window, is_causal=(True,)), is_quick=window == 2048)
    yield "band of 2049, 40962 tokens", Compiled(_band(40962, 2049))
    yield "band of 2048, stride 256", Compiled(_band(32768, 2048, stride=(256,)))
    yield "band of 512, dilation 16", Compiled(_band(32768, 512, dilation=(16,)))
    yield "band of 1024, float32", Compiled(_band(16384, 1024), "float32")
    yield "band of 1024, grouped heads", Compiled(_band(16384, 1024).with_heads(8, 2), is_quick=True)
    yield "band of 2, 4099 tokens", Compiled(_band(4099, 2, head_dim=64))
    yield "attention", Compiled(_attention(4096, 4096), is_quick=True)
    yield "attention, causal", Compiled(_attention(8192, 8192, is_causal=(True,)))
    yield "attention to a text", Compiled(_attention(4096, 77, head_dim=64))
    yield "attention, float32", Compiled(_attention(1000, 2000), "float32")
    yield "attention, grouped heads", Compiled(_attention(4096, 4096, is_causal=(True,)).with_heads(8, 1))


def _widths() -> Iterator[tuple[str, Compiled]]:
    """Yield problems of many head dimensions, equal or different for keys and values, some also in float32."""
    for width in (32, 40, 64, 80, 96, 128, 160, 192, 256):
        wide = dataclasses.replace(_square(48, 2, 13, head_dim=width, batch=2))
        yield f"heads of {width}", Compiled(wide, is_quick=width == 256)
        if width in (32, 64, 192, 256):
            yield f"heads of {width}, float32", Compiled(wide, "float32", is_quick=width == 32)
    for width, width_v in ((64, 192), (192, 64), (8, 136)):
        uneven = dataclasses.replace(_square(24, 2, 7, head_dim=width, batch=2), head_dim_v=width_v)
        yield f"heads of {width} and {width_v}", Compiled(uneven)


def _features() -> Iterator[tuple[str, Compiled]]:
    """Yield problems with special shapes or options. Most layout extents are not multiples of the tile extents."""
    yield "one token", Compiled(Case((1, 1), (1, 1)))
    yield "one row", Compiled(Case((1, 13, 1), (1, 5, 1), head_dim=32))
    scaled = Case((37, 41), (9, 12), heads=2, heads_kv=1, head_dim=64, scales=(0.5, -0.1))
    yield "scales", Compiled(scaled, is_quick=True)
    everything = Case(
        (9, 26, 45),
        (4, 6, 11),
        stride=(2, 1, 5),
        dilation=(1, 3, 4),
        is_causal=(False, True, False),
        batch=2,
        heads=6,
        heads_kv=2,
        head_dim=72,
        head_dim_v=48,
        additional=5,
    )
    yield "everything at once", Compiled(everything)
    yield "everything at once, float32", Compiled(everything, "float32")


#: All problems by name.
PROBLEMS: Mapping[str, Compiled] = dict(
    pair for part in (_images, _videos, _sequences, _widths, _features) for pair in part()
)
QUICK = tuple(name for name, problem in PROBLEMS.items() if problem.is_quick)
