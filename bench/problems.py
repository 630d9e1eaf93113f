"""Problems with names, as people run them."""

from __future__ import annotations

import dataclasses
import math

from natten_jax.problem import Problem

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A problem of equal query, key and value layouts; without a window, self attention."""

    layout: Shape
    heads: int
    head_dim: int
    kernel_size: Shape | None = None
    stride: Shape | None = None
    dilation: Shape | None = None
    is_causal: bool = False
    batch: int = 1
    dtype: str = "bfloat16"

    @property
    def shape(self) -> Shape:
        """Of query, key and value."""
        return self.batch, *self.layout, self.heads, self.head_dim

    @property
    def problem(self) -> Problem:
        """The problem as the backends see it."""
        ones = (1,) * len(self.layout)
        return Problem(
            operator="fna" if self.kernel_size else "fmha",
            batch=self.batch,
            query_layout=self.layout,
            kv_layout=self.layout,
            heads=self.heads,
            heads_kv=self.heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            dtype=self.dtype,
            kernel_size=self.kernel_size or self.layout,
            stride=self.stride or ones,
            dilation=self.dilation or ones,
            is_causal=(self.is_causal,) * len(self.layout),
            scale=self.head_dim**-0.5,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a batch entry."""
        return math.prod(self.layout)


_IMAGE = {"layout": (256, 256), "heads": 24, "head_dim": 128}
_VIDEO = {"layout": (30, 48, 80), "heads": 24, "head_dim": 128, "kernel_size": (18, 24, 24)}
_SEQUENCE = {"layout": (32768,), "heads": 1, "head_dim": 128, "kernel_size": (2048,)}

BENCHMARKS: dict[str, Benchmark] = {
    "1d": Benchmark(**_SEQUENCE),  # type: ignore[arg-type]
    "1d-s256": Benchmark(**_SEQUENCE, stride=(256,)),  # type: ignore[arg-type]
    "1d-s2048": Benchmark(**_SEQUENCE, stride=(2048,)),  # type: ignore[arg-type]
    "2d": Benchmark(**_IMAGE, kernel_size=(80, 80)),  # type: ignore[arg-type]
    "2d-s16": Benchmark(**_IMAGE, kernel_size=(80, 80), stride=(16, 16)),  # type: ignore[arg-type]
    "2d-w40": Benchmark(**_IMAGE, kernel_size=(40, 40)),  # type: ignore[arg-type]
    "2d-w40-d2": Benchmark(**_IMAGE, kernel_size=(40, 40), dilation=(2, 2)),  # type: ignore[arg-type]
    "3d": Benchmark(**_VIDEO),  # type: ignore[arg-type]
    "3d-s16x8x8": Benchmark(**_VIDEO, stride=(16, 8, 8)),  # type: ignore[arg-type]
    "self-32768": Benchmark((32768,), 1, 128),
    "self-2x16384": Benchmark((16384,), 16, 128, batch=2),
    "self-4x8192-d64": Benchmark((8192,), 32, 64, batch=4),
    "self-8192-d256": Benchmark((8192,), 16, 256, batch=2),
    **{
        f"causal-{tokens}": Benchmark((tokens,), 32, 128, is_causal=True, batch=4, dtype="float16")
        for tokens in (1024, 2048, 4096, 8192, 16384)
    },
}
