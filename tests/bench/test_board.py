"""The board of all implementations, biases by features, and counts of bundles of TPU kernels."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from importlib import util
from pathlib import Path
from typing import Any

import board
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_bundles
from benchmarks import Benchmark
from board_problems import problems_for
from lib import bundles, hlo_counts, peers, torch_sides, tpu_visits
from lib.bias_features import by_features
from lib.board_page import page
from lib.bundles import Executions, Program, Span
from lib.history import Record, records
from lib.sides import difference, jax_side
from peers import draw

from natten_jax import na1d, na2d
from natten_jax.problem import problem_of
from tests.support.programs import run_command

BENCH = Path(board.__file__).parent

WINDOWS = {
    "strided and dilated": Benchmark((12, 16), 2, 16, (5, 6), (2, 3), (2, 1), dtype="float32"),
    "causal in time": Benchmark((4, 5, 6), 2, 16, (4, 3, 5), causal=(True, False, False), dtype="float32"),
    "grouped heads": Benchmark((24,), 4, 16, (5,), is_causal=True, dtype="float32", heads_kv=2),
    "no window": Benchmark((24,), 2, 16, dtype="float32"),
}

#: Attention as tokamax has it: its signature, and JAX's arithmetic.
TOKAMAX = """
import jax
__version__ = "0.0-of-a-test"

def dot_product_attention(query, key, value, *, is_causal=False, local_window_size=None):
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, local_window_size=local_window_size, implementation="xla"
    )
"""


class Tags(HTMLParser):
    """Which tags are open, what they refer to, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "span"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "span":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def board_record(path: Path, date: str, milliseconds: float) -> Record:
    figures = {
        "milliseconds": {"natten_jax": milliseconds, "<b>": 8.0},
        "times_ours": {"natten_jax": 1.0, "<b>": 8 / milliseconds},
        "computes_windows": {"natten_jax": True, "<b>": False},
        "differences": {},
        "failures": {"NATTEN": "no & never"},
    }
    problem = {"problem": "na1d 8 k=3", "dtype": "float32", "shape": [1, 8, 1, 8], "forward": figures}
    results = {
        "peers": {"NATTEN": {"about": "PyTorch", "version": None, "absent": "not installed"}},
        "problems": {"sequence": problem},
    }
    return Record(path, {"environment": {"device": "GPU <1>", "date": date}, "results": results})


def test_command_line_measures_who_is_installed_and_names_who_is_not(tmp_path: Path) -> None:
    (tmp_path / "tokamax.py").write_text(TOKAMAX)
    files = {"--json": tmp_path / "board.json", "--page": tmp_path / "site" / "index.html"}
    arguments = ["--problems", "attention", "--passes", "forward", "--turns", "1"]
    arguments += [str(each) for pair in files.items() for each in pair]
    paths = os.pathsep.join(map(str, (tmp_path, BENCH.parent)))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    done = run_command([BENCH / "board.py", *arguments], environment)
    assert done.returncode == 0, done.stderr
    record = json.loads(files["--json"].read_text())
    assert set(record["environment"]) >= {"device", "date", "versions", "commit", "command"}
    found = record["results"]["peers"]
    assert set(found) == {"natten_jax", "XLA", "cuDNN", "Pallas", "tokamax", "NATTEN", "FlexAttention"}
    assert found["tokamax"] == {"about": found["tokamax"]["about"], "version": "0.0-of-a-test", "absent": None}
    assert found["cuDNN"]["absent"] == "needs an NVIDIA GPU"
    figures = record["results"]["problems"]["attention"]["forward"]
    assert {"natten_jax", "XLA", "tokamax"} <= set(figures["milliseconds"])
    assert all(value > 0 for value in figures["milliseconds"].values())
    assert max(figures["differences"].values()) < 1e-4
    text = files["--page"].read_text()
    for said in ("attention", "0.0-of-a-test", "needs an NVIDIA GPU", "bench/results/h200/peers.json"):
        assert said in Tags(text).words
    unknown = run_command([BENCH / "board.py", "--problems", "gone"], environment)
    assert unknown.returncode == 1 and "no problem is called 'gone' on cpu" in unknown.stderr


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_dense_attention_with_a_mask_computes_the_same(name: str, pass_: Any) -> None:
    figures = board.measure(WINDOWS[name], pass_, ("natten_jax", "XLA"), 1, "cpu")
    assert figures["failures"] == {} and figures["differences"]["XLA"] < 1e-5
    assert figures["computes_windows"] == {"natten_jax": True, "XLA": True}
    assert figures["times_ours"]["natten_jax"] == 1


def test_who_computes_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(benchmark: Benchmark, cotangent: jax.Array, arrays: Any, pass_: Any, platform: str) -> Any:
        function = peers.PEERS["natten_jax"]
        side = function.make(benchmark, cotangent, arrays, pass_, platform)
        return dataclasses.replace(side, result=lambda: [2 * each for each in side.result()])

    def lost(benchmark: Benchmark, cotangent: jax.Array, arrays: Any, pass_: Any, platform: str) -> Any:
        return jax_side(lambda q, k, v: q * jnp.nan, cotangent, arrays, pass_, platform, is_same=True)

    every = {**peers.PEERS, "twice": peers.Peer("jax", twice, ""), "lost": peers.Peer("jax", lost, "")}
    monkeypatch.setattr(board, "PEERS", every)
    figures = board.measure(WINDOWS["no window"], "forward", ("natten_jax", "twice", "lost"), 1, "cpu")
    assert list(figures["milliseconds"]) == ["natten_jax"]
    assert figures["failures"]["twice"] == "its result differs from natten_jax's by 1 of the largest entry"
    assert "differs" in figures["failures"]["lost"]


def test_dense_attention_without_room_says_so() -> None:
    big = Benchmark((32768,), 1, 16, (5,), dtype="float32")
    with pytest.raises(ValueError, match="its logits would take 4 GiB"):
        peers._xla(big)


def test_packages_that_cannot_be_imported_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_peer.py").write_text("raise OSError('no\\nlibrary')")
    monkeypatch.syspath_prepend(str(tmp_path))
    peer = peers.Peer("broken_peer", peers.PEERS["natten_jax"].make, "")
    assert peer.absence("cpu") == "cannot be imported: OSError: no library"
    assert peers.Peer("no_such_peer", peer.make, "").absence("cpu") == "not installed"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_list_holds_every_kind_of_problem(platform: str) -> None:
    problems = [each.problem for each in problems_for(platform).values()]
    assert {each.rank for each in problems} == {1, 2, 3} and {each.operator for each in problems} == {"fna", "fmha"}
    for fact in ("stride", "dilation"):
        assert any(max(getattr(each, fact)) > 1 for each in problems)
    assert any(each.is_causal[0] and not all(each.is_causal) for each in problems)
    assert len(set(problems)) == len(problems)


@pytest.mark.parametrize("name", WINDOWS)
def test_masks_of_flexattention_are_the_windows(name: str) -> None:
    torch = pytest.importorskip("torch")
    benchmark = WINDOWS[name]
    tokens = torch.arange(benchmark.tokens)
    sees = torch_sides._mask(benchmark.problem.axes, "cpu")(0, 0, tokens[:, None], tokens[None])
    np.testing.assert_array_equal(sees.numpy(), peers._dense_mask(benchmark))


def test_difference_is_relative_to_the_largest_entry() -> None:
    assert difference([np.array([1.0, -4.0])], [np.array([[1.0], [-3.0]])]) == 0.25


def test_every_record_has_a_device_a_day_and_what_its_program_measured() -> None:
    found = records(sorted((BENCH / "results").rglob("*.json")))
    by_name = {each.name.removeprefix("bench/results/"): each for each in found}
    assert [each.date for each in found] == sorted((each.date for each in found), reverse=True)
    assert all("not named" not in each.device for each in found)
    times = {(each.what, each.who): each.milliseconds for each in by_name["h200/peers.json"].figures}
    assert times["1-D 32768, window 2048, forward", "NATTEN"] == 0.1152
    times = {(each.what, each.who): each.milliseconds for each in by_name["h200/small.json"].figures}
    assert times["NAT s1, forward", "copy"] == pytest.approx(0.024736)
    times = {(each.what, each.who): each.milliseconds for each in by_name["h200/backward.json"].figures}
    assert times["1d, cold", "cudnn"] == 2.227536
    assert by_name["h200/peers.json"].date == "2026-11-22" and by_name["cpu/kernels.json"].device.startswith("AMD EPYC")
    assert by_name["h200/backward.json"].facts["command"].startswith("bench/run.py")


def test_files_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    plain = {"environment": {"device": "GPU"}, "results": {"a": {"milliseconds": {"x": 2}}}}
    (tmp_path / "plain.json").write_text(json.dumps(plain))
    (only,) = records(sorted(tmp_path.glob("*.json")))
    assert (only.device, only.date, only.facts, only.is_board) == ("GPU", "", {}, False)
    assert [dataclasses.astuple(each) for each in only.figures] == [("a", "x", 2)]


def test_page_needs_no_other_file_and_follows_the_theme_and_the_width(tmp_path: Path) -> None:
    boards = [board_record(tmp_path / f"{day}.json", f"2026-11-{day}", day / 10) for day in (25, 20)]
    text = page(boards)
    tags = Tags(text)
    assert tags.open == [] and tags.sources == [] and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    assert "GPU <1>" in tags.words and "<b> (dense)" in tags.words and "NATTEN: no & never" in tags.words
    assert "not installed" in tags.words
    # The newest board's figures, then natten_jax's over time, the oldest first.
    assert "3.20x" in tags.words
    (over_time,) = re.findall(r"over time.*?</table>", text, re.DOTALL)
    assert re.findall(r">([\d.-]+)<", over_time) == ["2026-11-20", "2026-11-25", "2", "2.5"]
    assert "over time" not in page(boards[:1])


def test_an_unfinished_board_has_a_page() -> None:
    _, *arrays = draw(WINDOWS["no window"])
    assert len(arrays) == 3
    empty = {"peers": {}, "problems": {"sequence": {"problem": "p", "dtype": "float32", "shape": [1]}}}
    assert "sequence" in Tags(page([Record(Path("b.json"), {"results": empty})])).words


@pytest.mark.parametrize(
    ("operator", "layout", "window"),
    [
        (na2d, (9, 12), {"kernel_size": (3, 5)}),
        (na2d, (14, 13), {"kernel_size": (3, 4), "dilation": (4, 2)}),
        (na1d, (20,), {"kernel_size": 6, "is_causal": True}),
    ],
)
def test_features_add_a_relative_bias(operator: Any, layout: tuple[int, ...], window: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    query, key, value, cotangent = rng.standard_normal((4, 2, *layout, 3, 8)).astype(np.float32)
    problem = problem_of(layout, **window)
    table = rng.standard_normal((3, *problem.bias_shape)).astype(np.float32)

    def own(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array) -> jax.Array:
        return operator(query, key, value, **window, relative_bias=table, backend="cpu-fna")

    def plain(*arrays: jax.Array, scale: float) -> jax.Array:
        return operator(*arrays, **window, scale=scale, backend="cpu-fna")

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(function: Callable[..., jax.Array], *arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(function, *arrays)
        return out, *pullback(cotangent)

    found, expected = (with_gradients(each, query, key, value, table) for each in (by_features(plain, problem), own))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    assert not np.allclose(expected[0], plain(query, key, value, scale=8**-0.5), atol=1e-2)


#: The form of what the compiler writes: a loop over a grid of 8 steps and two for copies, a part for the first step of
#: a tile, and two that multiply, of which a step takes one.
KERNEL = "\n".join(
    [
        "= control target key start",
        "LB: loop body",
        "= control target key end",
        "     0   :  { %s1 = smov.u32 0 } /* Start region 1 */",
        "   0x1 LB: > { %s2 = sadd.s32 1, %s3_s4  ;;  %s3_s4 = sphi %s1, %s2 }",
        "   0x2   : > { %5 = sbr.rel (%p1) target = $region9 }",
        *(f"   {at:#x}   :  {{}}" for at in range(0x3, 0x7)),
        "   0x7   : > { %6 = sbr.rel (%p2) target = $region5 }",
        *(f"   {at:#x}   :  {{}}" for at in range(0x8, 0xC)),
        *(f"   {at:#x}   : > {{ %7 = vst [vmem:[%s9] sm:$0xff] %v1 }}" for at in range(0xC, 0xC + 24)),
        "  0x24 PF: > { %8 = smov.u32 3 } /* Start/End empty region 5 :: Start region 6 */",
        "  0x25   : > { %9 = sbr.rel (%p3) target = $region7 }",
        *(f"  {at:#x}   :  {{}}" for at in range(0x26, 0x2A)),
        *(f"  {at:#x}   : > {{ %10 = vmatmul.bf16 %v1 }}" for at in range(0x2A, 0x30)),
        "  0x30 PF: > { %11 = sbr.rel (%p4) target = $region8 } /* Start/End empty region 7 */",
        *(f"  {at:#x}   :  {{}}" for at in range(0x31, 0x35)),
        *(f"  {at:#x}   : > {{ %12 = vmatmul.bf16 %v1 }}" for at in range(0x35, 0x3F)),
        "  0x3f PF: > { %13 = smov.u32 3 } /* Start/End empty region 8 */",
        "  0x40 PF: > { %p7 = scmp.ge.s32.totalorder %s2, 10 /* loop exit test */ } /* Start/End empty region 9 */",
        "  0x41   :  { %14 = sbr.rel (!%p7) target = $region100 }",
    ]
)

UTILIZATION = """== CAPACTIY:
MATMUL, VALU
    4     4
== UTILIZATION:
1 2
0 4
"""

LOOP = """HloModule jit_f

%condition (arg: (s32[])) -> pred[] {
  %arg = (s32[]) parameter(0)
  %constant.1 = s32[] constant(12)
  %i = s32[] get-tuple-element(%arg), index=0
  ROOT %lt = pred[] compare(%i, %constant.1), direction=LT, metadata={op_name="while"}
}

%fused.1 (p: f32[8]) -> f32[8] {
  ROOT %n.1 = f32[8] negate(%p)
}

%fused.2 (p: f32[8]) -> f32[8] {
  ROOT %n.2 = f32[8] negate(%p)
}

%body (arg: (s32[])) -> (s32[]) {
  %a = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused.1
  ROOT %b = f32[8]{0} fusion(%y), kind=kLoop, calls=%fused.2
}

ENTRY %main (q: f32[8]) -> f32[8] {
  %w = (s32[]) while(%t), condition=%condition, body=%body
  ROOT %c = f32[8]{0} copy(%q)
}
"""


def test_loops_and_branches_are_found() -> None:
    program = Program.parse(KERNEL)
    assert program.count == 0x42
    grid, steps, prepared, first, second = program.spans
    assert grid == Span(1, 0x41, 10)
    assert steps == Span(7, 0x40) and prepared == Span(0xC, 0x24)
    assert first == Span(0x2A, 0x30) and second == Span(0x35, 0x3F)
    assert [program.multiplies(span) for span in program.spans] == [True, True, False, True, True]


def test_a_kernels_bundles_are_counted() -> None:
    program = Program.parse(KERNEL)
    weights = bundles.of_kernel(program, Executions(steps=8, active=7, tiles=4, bodies=(5, 2)))
    outside = 2 + 6 * 10 + 10
    of_steps = 0x40 - 7 - 24 - 6 - 10
    assert sum(weights) == outside + of_steps * 8 + 24 * 4 + 6 * 5 + 10 * 2


def test_a_kernel_with_other_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="the kernel has 2 parts that multiply, not 3"):
        bundles.of_kernel(Program.parse(KERNEL), Executions(8, 8, 8, (1, 2, 3)))


def test_units_are_read() -> None:
    names, capacities, used = bundles.utilization(UTILIZATION)
    assert names == ["MATMUL", "VALU"] and capacities == [4, 4]
    assert bundles.totals([10, 1], used) == [10, 24]


def test_loops_of_a_program_are_counted() -> None:
    hlo = hlo_counts.Hlo.parse(LOOP)
    assert [(name, times) for name, _, times in hlo.executed()] == [("a", 12), ("b", 12), ("c", 1)]
    texts = hlo.computations["body"]
    assert hlo.signature(texts["a"]) == hlo.signature(texts["b"]) != hlo.signature(hlo.computations["main"]["c"])


def test_blocks_of_flat_tokens_are_those_of_the_mask() -> None:
    problem = problem_of((6, 8), (3, 5), (2, 1), is_causal=(True, False))
    sees = np.zeros((6, 8, 6, 8), bool)
    for x, y in np.ndindex(6, 8):
        ends = [axis.bounds(np.asarray(at), (n, n)) for axis, at, n in zip(problem.axes, (x, y), (6, 8), strict=True)]
        sees[x, y, int(ends[0][0]) : int(ends[0][1]), int(ends[1][0]) : int(ends[1][1])] = True
    pairs = sees.reshape(6, 8, 12, 4).any(axis=(1, 3))
    assert tpu_visits.blocks_of_flat_tokens(problem, 8, 4) == (6, int(pairs.sum(axis=1).max()), int(pairs.sum()))


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="the compiler for TPUs, libtpu, is not installed")
def test_a_kernel_is_compiled_and_counted() -> None:
    (row,) = (row for row in tpu_bundles.ROWS if row.name == "64x64 k7")
    found = tpu_bundles.count("v5e", row, "forward", "natten_jax")
    kernel = found["kernels"]["natten_jax_tpu_forward"]
    assert 0 < kernel["units"]["MATMUL"] < kernel["bundles"] <= found["program"]
