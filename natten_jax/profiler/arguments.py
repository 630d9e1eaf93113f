"""The profiler's command line: its flags, and the checks that need nothing but the flags."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from natten_jax import backends
from natten_jax.problem import KernelSchedule, Shape
from natten_jax.profiler.baselines import BASELINES
from natten_jax.version import __version__

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}

#: Baselines of NATTEN's profiler that do not exist in JAX, and what to use in their place.
_FOREIGN_BASELINES = {
    "xformers": "cudnn (fused attention on NVIDIA GPUs), pallas (on GPUs, too) and xla (anywhere): use --backend cudnn",
    "fav2": "cudnn (fused attention on NVIDIA GPUs), pallas (on GPUs, too) and xla (anywhere): use --backend cudnn",
}

_TILE_FLAGS = ("q_tile", "kv_tile", "backward_q_tile", "backward_kv_tile")

_EXAMPLES = """\
examples:
  # Self attention over a video of 8 x 16 x 24 tokens, head dim 128
  %(prog)s -i 8 16 24 -d 128

  # Neighborhood attention with a 2 x 4 x 3 window
  %(prog)s -i 8 16 24 -d 128 -w 2 4 3

  # Forward and backward, strided, causal in the first dimension, grouped query heads
  %(prog)s -i 16 32 32 -n 8 --heads-kv 2 -w 8 16 16 -s 2 4 4 -c 1 0 0 --backprop

  # The plain XLA baseline (self attention only), in bfloat16, full results to a file
  %(prog)s -i 4096 -d 64 --dtype bf16 --backend xla --json xla.json
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to profile and how, checked and with every default filled in.

    Attributes:
        input_size: Token layout.
        batch_size: Batch size.
        heads: Query heads.
        heads_kv: Key/value heads.
        dim: Head dim of query and key.
        dim_value: Head dim of value and output.
        window_size: Window extents; the token layout itself is self attention.
        stride: Queries per dimension that share a window.
        dilation: Distance between neighboring tokens of a window.
        causal: Per dimension, whether later keys are hidden.
        dtype: Element type as the command line spells it.
        backprop: Whether the backward pass is profiled, too.
        add_kv: Additional key/value tokens.
        backend: Backend or baseline; ``None`` is the operator's own choice.
        fmha_backend: Backend of attention, where that runs; ``None`` is the operator's own choice.
        q_tile: Query tile shape of the forward pass.
        kv_tile: Key/value tile shape of the forward pass.
        backward_q_tile: Query tile shape of the backward pass.
        backward_kv_tile: Key/value tile shape of the backward pass.
        schedule: Kernel schedule, where the backend has any.
        persistent: Whether persistent tile scheduling may be used.
        warmup_steps: Runs before the measurement.
        iterations: Measured runs.
        json: Where the full results go.
    """

    input_size: Shape
    batch_size: int
    heads: int
    heads_kv: int
    dim: int
    dim_value: int
    window_size: Shape
    stride: Shape
    dilation: Shape
    causal: tuple[bool, ...]
    dtype: str
    backprop: bool
    add_kv: int
    backend: str | None
    fmha_backend: str | None
    q_tile: Shape | None
    kv_tile: Shape | None
    backward_q_tile: Shape | None
    backward_kv_tile: Shape | None
    schedule: str | None
    persistent: bool
    warmup_steps: int
    iterations: int
    json: Path | None

    @property
    def rank(self) -> int:
        """Number of token dimensions."""
        return len(self.input_size)

    @property
    def is_baseline(self) -> bool:
        """Whether a baseline of JAX is profiled instead of this package's operators."""
        return self.backend in BASELINES


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; a usage error prints one sentence and exits with status 2."""
    parser = _parser()
    given = parser.parse_args(argv)
    rank = len(given.input_size)
    if rank > 3:
        parser.error(f"-i/--input-size takes 1 to 3 integers, one per token dimension, got {rank}")
    for name in ("window_size", "stride", "dilation", *_TILE_FLAGS):
        value = getattr(given, name)
        if value is not None and len(value) != rank:
            _wrong_count(parser, name, value, given.input_size)
    _check_backends(parser, given)
    if given.backend in BASELINES:
        _check_baseline(parser, given)

    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(given).items()
    }
    values["window_size"] = values["window_size"] or values["input_size"]
    values["stride"] = values["stride"] or (1,) * rank
    values["dilation"] = values["dilation"] or (1,) * rank
    values["heads_kv"] = values["heads_kv"] or given.heads
    values["dim_value"] = values["dim_value"] or given.dim
    causal = values["causal"] or (False,)
    if len(causal) not in (1, rank):
        _wrong_count(parser, "causal", causal, values["input_size"], "or one for all, ")
    values["causal"] = causal if len(causal) == rank else causal * rank
    options = Options(**values)
    _check_problem(parser, options)
    _check_tiles(parser, options)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: the folder {str(options.json.parent)!r} does not exist")
    return options


def _check_backends(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    fna, fmha, baselines = backends.backend_names("fna"), backends.backend_names("fmha"), tuple(BASELINES)
    if given.backend in _FOREIGN_BASELINES:
        parser.error(
            f"--backend {given.backend} is a baseline of PyTorch; JAX's are {_FOREIGN_BASELINES[given.backend]}"
        )
    if given.backend in fmha:
        parser.error(f"--backend {given.backend} is an attention backend: name it with --fmha-backend")
    if given.backend is not None and given.backend not in fna + baselines:
        parser.error(
            f"--backend {given.backend} is unknown; choose one of {', '.join(fna)}, or a baseline: "
            f"{', '.join(baselines)}"
        )
    if given.fmha_backend is not None and given.fmha_backend not in fmha:
        parser.error(f"--fmha-backend {given.fmha_backend} is unknown; choose one of {', '.join(fmha)}")


def _check_baseline(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.add_kv:
        parser.error(f"--add-kv does not go with --backend {given.backend}, which computes self attention only")
    ignored = ["window_size", "stride", "dilation", "causal", "fmha_backend", *_TILE_FLAGS, "schedule"]
    flags = [_flag(name) for name in ignored if getattr(given, name) is not None]
    if flags:
        print(
            f"{parser.prog}: warning: --backend {given.backend} computes self attention only: "
            f"{', '.join(flags)} ignored",
            file=sys.stderr,
        )
    for name in ignored:
        setattr(given, name, None)


def _check_problem(parser: argparse.ArgumentParser, options: Options) -> None:
    inputs, windows = options.input_size, options.window_size
    if any(w > x for w, x in zip(windows, inputs, strict=True)):
        parser.error(f"window size {_text(windows)} exceeds input size {_text(inputs)}: each window must fit the input")
    if any(s > w for s, w in zip(options.stride, windows, strict=True)):
        parser.error(
            f"stride {_text(options.stride)} exceeds window size {_text(windows)}: "
            "each stride must be at most its window"
        )
    if any(d * w > x for d, w, x in zip(options.dilation, windows, inputs, strict=True)):
        parser.error(
            f"dilation {_text(options.dilation)} times window size {_text(windows)} exceeds input size "
            f"{_text(inputs)}: each dilated window must fit the input"
        )
    if options.heads % options.heads_kv:
        parser.error(f"--heads {options.heads} must be a multiple of --heads-kv {options.heads_kv}")


def _check_tiles(parser: argparse.ArgumentParser, options: Options) -> None:
    for prefix in ("", "backward_"):
        names = f"{prefix}q_tile", f"{prefix}kv_tile"
        given = [name for name in names if getattr(options, name) is not None]
        if len(given) == 1:
            (missing,) = set(names) - set(given)
            parser.error(f"{_flag(given[0])} was given without {_flag(missing)}: give both or neither")


def _wrong_count(
    parser: argparse.ArgumentParser, name: str, value: Sequence[object], inputs: Sequence[int], alternative: str = ""
) -> NoReturn:
    parser.error(
        f"{_flag(name)} takes {len(inputs)} value(s), {alternative}one per dimension of the input size "
        f"{_text(inputs)}, got {len(value)}"
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(shape: Sequence[int]) -> str:
    return " ".join(map(str, shape))


def _at_least(minimum: int) -> Any:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return integer


def _boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not a truth value: write true, false, 1 or 0")
    return values[text.lower()]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One sentence, without the usage: with this many flags it would bury the message.
        self.exit(2, f"{self.prog}: error: {message} (--help explains all options)\n")


def _parser() -> argparse.ArgumentParser:
    positive, natural = _at_least(1), _at_least(0)
    parser = _Parser(
        prog="natten-jax-profiler",
        description="Measure what neighborhood attention launches on this machine's default JAX device.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"natten_jax {__version__}")

    problem = parser.add_argument_group("problem")
    problem.add_argument(
        "-i", "--input-size", nargs="+", type=positive, required=True, metavar="X",
        help="token layout, 1 to 3 integers: sequence length; height width; depth height width (required)",
    )  # fmt: skip
    problem.add_argument("-b", "--batch-size", type=positive, default=1, metavar="B", help="batch size (default: 1)")
    problem.add_argument("-n", "--heads", type=positive, default=1, metavar="H", help="query heads (default: 1)")
    problem.add_argument(
        "--heads-kv", type=positive, metavar="H", help="key/value heads, a divisor of --heads (default: --heads)"
    )
    problem.add_argument(
        "-d", "--dim", type=positive, default=64, metavar="D", help="head dim of query and key (default: 64)"
    )
    problem.add_argument(
        "--dim-value", type=positive, metavar="D", help="head dim of value and output (default: --dim)"
    )
    problem.add_argument(
        "-w", "--window-size", nargs="+", type=positive, metavar="W",
        help="window per dimension (default: the input size, which is self attention)",
    )  # fmt: skip
    problem.add_argument(
        "-s", "--stride", nargs="+", type=positive, metavar="S",
        help="queries that share a window, per dimension (default: 1s)",
    )  # fmt: skip
    problem.add_argument(
        "--dilation", nargs="+", type=positive, metavar="N",
        help="distance between neighboring tokens of a window, per dimension (default: 1s)",
    )  # fmt: skip
    problem.add_argument(
        "-c", "--causal", nargs="+", type=_boolean, metavar="C",
        help="true, false, 1 or 0 per dimension, or one for all (default: false)",
    )  # fmt: skip
    problem.add_argument("--dtype", choices=tuple(DTYPES), default="fp16", help="element type (default: fp16)")
    problem.add_argument("--backprop", action="store_true", help="profile forward and backward pass")
    problem.add_argument(
        "--add-kv", type=natural, default=0, metavar="N", help="additional key/value tokens (default: 0)"
    )

    backend = parser.add_argument_group("backend and configuration")
    backend.add_argument(
        "--backend", metavar="NAME",
        help=f"{', '.join(backends.backend_names('fna'))} (default: the best that runs the problem), or a baseline "
        f"that computes self attention: {', '.join(BASELINES)}",
    )  # fmt: skip
    backend.add_argument(
        "--fmha-backend", metavar="NAME",
        help=f"{', '.join(backends.backend_names('fmha'))}: runs self attention and additional key/value tokens",
    )  # fmt: skip
    for name, what in zip(_TILE_FLAGS, ("query", "key/value") * 2, strict=True):
        which = "backward" if name.startswith("backward") else "forward"
        backend.add_argument(
            _flag(name), nargs="+", type=positive, metavar="T",
            help=f"{what} tile shape of the {which} pass (default: the backend's choice)",
        )  # fmt: skip
    backend.add_argument(
        "--schedule",
        choices=[str(schedule) for schedule in KernelSchedule],
        help="kernel schedule, where the backend has several",
    )
    backend.add_argument(
        "--persistent", action=argparse.BooleanOptionalAction, default=True,
        help="persistent tile scheduling, where the backend has it (default: on)",
    )  # fmt: skip

    measurement = parser.add_argument_group("measurement and output")
    measurement.add_argument(
        "--warmup-steps", type=natural, default=10, metavar="N", help="runs before the measurement (default: 10)"
    )
    measurement.add_argument("--iterations", type=positive, default=20, metavar="N", help="measured runs (default: 20)")
    measurement.add_argument("--json", type=Path, metavar="PATH", help="write the full results to a file")
    return parser
