"""The comparison of attention implementations (``board.py``), recorded results, and bundle counts of TPU kernels."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
from importlib import util
from pathlib import Path
from typing import Any

import board
import jax
import jax.numpy as jnp
import pytest
import tpu_bundles
from benchmarks import Benchmark
from lib import peers
from lib.history import records
from lib.sides import jax_side

from tests.support.programs import run_command

BENCH = Path(board.__file__).parent

WINDOWS = {
    "strided and dilated": Benchmark((12, 16), 2, 16, (5, 6), (2, 3), (2, 1), dtype="float32"),
    "causal in time": Benchmark((4, 5, 6), 2, 16, (4, 3, 5), causal=(True, False, False), dtype="float32"),
    "grouped heads": Benchmark((24,), 4, 16, (5,), is_causal=True, dtype="float32", heads_kv=2),
    "no window": Benchmark((24,), 2, 16, dtype="float32"),
}

#: Source of a module that replaces tokamax. Its attention function has tokamax's signature, and calls ``jax.nn``.
TOKAMAX = """
import jax
__version__ = "0.0-of-a-test"

def dot_product_attention(query, key, value, *, is_causal=False, local_window_size=None):
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, local_window_size=local_window_size, implementation="xla"
    )
"""


def words(page: str) -> str:
    """Return the text of an HTML page, without tags and style sheets."""
    return html.unescape(re.sub(r"<style.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL))


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
        assert said in words(text)
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


def test_every_record_has_a_device_a_date_and_measurements() -> None:
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


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="the compiler for TPUs, libtpu, is not installed")
def test_a_kernel_is_compiled_and_counted() -> None:
    (row,) = (row for row in tpu_bundles.ROWS if row.name == "64x64 k7")
    found = tpu_bundles.count("v5e", row, "forward", "natten_jax")
    kernel = found["kernels"]["natten_jax_tpu_forward"]
    assert 0 < kernel["units"]["MATMUL"] < kernel["bundles"] <= found["program"]
