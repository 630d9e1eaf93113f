"""The board: what is timed and checked beside natten_jax, and the page of all records."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import board
from benchmarks import Benchmark
from board_problems import problems_for
from lib import peers, torch_sides
from lib.board_page import page
from lib.history import Record, records
from lib.sides import difference, jax_side
from peers import draw

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
    done = subprocess.run(
        [sys.executable, BENCH / "board.py", *arguments],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
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
    unknown = subprocess.run(
        [sys.executable, BENCH / "board.py", "--problems", "gone"],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
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
