"""Named benchmark problems from practice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from natten_jax.problem import Problem, problem_of

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A problem whose query, key and value have the same layout.

    If ``kernel_size`` is ``None``, every query attends to all keys of the layout; with ``is_causal``, to all keys that
    are not later. Keys and values have ``heads`` heads unless ``heads_kv`` is given. ``is_causal`` applies to every
    dimension. ``causal`` sets each dimension separately and overrides ``is_causal``.
    """

    layout: Shape
    heads: int
    head_dim: int
    kernel_size: Shape | None = None
    stride: Shape | None = None
    dilation: Shape | None = None
    is_causal: bool = False
    batch: int = 1
    dtype: str = "bfloat16"
    additional_kv: int = 0
    heads_kv: int | None = None
    causal: tuple[bool, ...] | None = None

    @property
    def shape(self) -> Shape:
        """Shape of the query and of the output."""
        return self.batch, *self.layout, self.heads, self.head_dim

    @property
    def kv_shape(self) -> Shape:
        """Shape of key and value."""
        return *self.shape[:-2], self.heads_kv or self.heads, self.head_dim

    @property
    def additional_shape(self) -> Shape:
        """Shape of additional keys and values."""
        return self.batch, self.additional_kv, *self.kv_shape[-2:]

    @property
    def problem(self) -> Problem:
        """The problem as a :class:`natten_jax.problem.Problem`."""
        return problem_of(
            self.layout,
            self.kernel_size or None,
            self.stride or 1,
            self.dilation or 1,
            self.is_causal if self.causal is None else self.causal,
            operator="fna" if self.kernel_size else "fmha",
            batch=self.batch,
            heads=self.heads,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            dtype=self.dtype,
            additional_kv=self.additional_kv,
        )

    @property
    def label(self) -> str:
        """Two-line label for charts."""
        text = label(self.layout, self.kernel_size, self.stride)
        if self.is_causal:
            return f"{self.tokens} tokens,\n{self.batch * self.heads} heads"
        if self.dilation is not None:
            return f"{text}, dilation {extents(self.dilation)}"
        return text.replace("no window", f"heads of {self.head_dim}") if self.kernel_size is None else text

    @property
    def tokens(self) -> int:
        """Number of tokens of a batch entry."""
        return math.prod(self.layout)


KINDS = {1: "sequence", 2: "image", 3: "video"}


def extents(values: Sequence[int]) -> str:
    """Join extents with "x", as in 48x80."""
    return "x".join(map(str, values))


def label(layout: Sequence[int], kernel_size: Sequence[int] | None, stride: Sequence[int] | None = None) -> str:
    """Return a two-line label of a problem for charts."""
    what = f"{KINDS[len(layout)]} {extents(layout)}"
    if kernel_size is None:
        return f"{what},\nno window"
    if stride is None or set(stride) == {1}:
        return f"{what},\nwindow {extents(kernel_size)}"
    return f"{what},\nstride {extents(stride)}"


_IMAGE = Benchmark((256, 256), 24, 128)
_VIDEO = Benchmark((30, 48, 80), 24, 128, kernel_size=(18, 24, 24))
_SEQUENCE = Benchmark((32768,), 1, 128, kernel_size=(2048,))


def _video(**changes: Any) -> Benchmark:
    return dataclasses.replace(_VIDEO, **changes)


def _image(window: int, **changes: Any) -> Benchmark:
    return dataclasses.replace(_IMAGE, kernel_size=(window, window), **changes)


def _sequence(stride: int) -> Benchmark:
    return dataclasses.replace(_SEQUENCE, stride=(stride,))


BENCHMARKS: dict[str, Benchmark] = {
    "1d": _SEQUENCE,
    "1d-s256": _sequence(256),
    "1d-s2048": _sequence(2048),
    "2d": _image(80),
    "2d-s16": _image(80, stride=(16, 16)),
    # Two pairs of problems. In each pair, only the second problem is dilated, and both problems have equal work.
    "2d-w40": _image(40),
    "2d-w40-d2": _image(40, dilation=(2, 2)),
    "2d-w16": _image(16),
    "2d-w16-d16": _image(16, dilation=(16, 16)),
    "3d": _VIDEO,
    "3d-s16x8x8": _video(stride=(16, 8, 8)),
    **{f"1d-add{tokens}": dataclasses.replace(_SEQUENCE, additional_kv=tokens) for tokens in (256, 1024)},
    **{f"2d-add{tokens}": _image(80, additional_kv=tokens) for tokens in (256, 1024)},
    **{f"3d-s16x8x8-add{tokens}": _video(stride=(16, 8, 8), additional_kv=tokens) for tokens in (256, 1024)},
    "self-32768": Benchmark((32768,), 1, 128),
    "self-2x16384": Benchmark((16384,), 16, 128, batch=2),
    "self-4x8192-d64": Benchmark((8192,), 32, 64, batch=4),
    **{f"self-2x8192-d{width}": Benchmark((8192,), 16, width, batch=2) for width in (32, 64, 96, 128, 192, 256)},
    **{
        f"causal-{tokens}": Benchmark((tokens,), 32, 128, is_causal=True, batch=4, dtype="float16")
        for tokens in (1024, 2048, 4096, 8192, 16384)
    },
    # Causal sequences with few heads, like the share of one device if several devices split the heads.
    **{
        f"causal-{tokens}-h{heads}": Benchmark((tokens,), heads, 128, is_causal=True)
        for tokens, heads in ((8192, 16), (16384, 4), (32768, 8))
    },
}
