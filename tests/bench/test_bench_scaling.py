"""The benchmark of 1, 2, 4, ... devices: what it records of the host's, what it predicts of GPUs, and its picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

pytest.importorskip("matplotlib")
BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))

import part_tiles  # noqa: E402
import plot  # noqa: E402
from devices.predictions import relative_errors  # noqa: E402
from devices.problems import curves  # noqa: E402
from lib.implementations import ours  # noqa: E402

from natten_jax.execution import custom_vjp  # noqa: E402
from natten_jax.halo import halos_of  # noqa: E402
from natten_jax.performance import PASSES  # noqa: E402
from natten_jax.plan.plan import Request  # noqa: E402
from tests.support.programs import output_of, run_python  # noqa: E402

SCALING = """
import sys
sys.path.append({bench!r})
import scaling
sys.exit(scaling.main())
"""
MEASURE = "--devices 16 --small --families cpu --turns 1 --calls 1 --seconds 0 --pause 0 --passes forward+backward"


def record_of(file: Path, *arguments: str, devices: int) -> tuple[dict[str, Any], str]:
    """What the benchmark saves and prints on some of the host's devices."""
    result = run_python(SCALING.format(bench=str(BENCH)), *arguments, "--json", str(file), devices=devices)
    return json.loads(file.read_text()), output_of(result)


def points(record: dict[str, Any], row: str) -> dict[int, dict[str, Any]]:
    return {point["devices"]: point for point in record["results"][row]["points"]}


def test_measures_every_number_of_devices_and_says_which_cannot_share(tmp_path: Path) -> None:
    splits = "--rows", "strong", "weak", "--splits", "width-s6x8x8", "time-s1x1x1", "heads"
    record, output = record_of(tmp_path / "figures.json", *MEASURE.split(), *splits, devices=8)
    assert set(record["environment"]) >= {"device", "versions", "commit", "command"}
    prefix = "cpu forward+backward, "
    rows = "strong heads", "strong time-s1x1x1", "strong width-s6x8x8", "weak width-s6x8x8", "weak heads"
    assert list(record["results"]) == [prefix + row for row in rows]
    for row in record["results"]:
        assert row in output
        by_devices = points(record, row)
        assert list(by_devices) == [1, 2, 4, 8]  # sixteen there are not
        for devices, point in by_devices.items():
            if "time" in row and devices > 2:
                assert f"{devices} devices cannot share" in point["skipped"] and "measured" not in point
                continue
            measured = point["measured"]
            assert point["predicted"] is None and "relative error" not in point
            assert measured["milliseconds"] > 0
            assert measured["efficiency"] == pytest.approx(measured["speedup"] / devices)
            assert measured["difference"] < 1e-5
            exchanges = devices > 1 and "heads" not in row
            assert bool(measured["collectives"]) == exchanges
        assert by_devices[1]["measured"]["speedup"] == 1
    weak = points(record, f"{prefix}weak width-s6x8x8")
    assert [weak[devices]["problem"].split()[1] for devices in weak] == ["2x8x16", "2x8x32", "2x8x64", "2x8x128"]

    picture = tmp_path / "pictures" / "scaling.svg"
    plot.draw_scaling(record, picture)
    content = picture.read_text()
    assert all(text in content for text in ("strong scaling", "weak scaling", "width", "stride 6x8x8"))
    with pytest.raises(ValueError, match="no such figures"):
        plot.draw_scaling(record, picture, ["sequence"])


def test_measures_a_training_step(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("sklearn")
    record, _ = record_of(tmp_path / "figures.json", *MEASURE.split(), "--rows", "training", devices=2)
    by_devices = points(record, "training step, strong batch")
    assert list(by_devices) == [1, 2]
    assert all(point["measured"]["difference"] < 1e-5 for point in by_devices.values())


def test_predicts_without_measuring(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    record, _ = record_of(file, "--devices", "16", "--predict-only", devices=1)
    assert len(record["results"]) == 2 * (11 + 5)  # passes, and splits of both kinds
    for row in record["results"]:
        for devices, point in points(record, row).items():
            assert "measured" not in point
            if "skipped" not in point:
                predicted = point["predicted"]
                assert predicted["milliseconds"] > 0
                assert 0 < predicted["speedup"] < 1.2 * devices
                assert 0 <= predicted["exposed milliseconds"] < predicted["milliseconds"]
    heads = points(record, "hopper forward, strong heads")
    assert "skipped" in heads[16] and heads[8]["predicted"]["exposed milliseconds"] == 0
    assert points(record, "hopper forward, weak sequence")[8]["predicted"]["efficiency"] > 0.8
    picture = tmp_path / "scaling.svg"
    plot.draw_scaling(record, picture)
    assert "nothing was measured" in picture.read_text()


def test_errors_of_predictions() -> None:
    predicted, measured = {"milliseconds": 12.0, "efficiency": 0.9}, {"milliseconds": 10.0, "efficiency": 1.0}
    assert relative_errors(predicted, measured) == pytest.approx({"milliseconds": 0.2, "efficiency": -0.1})


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["width-s1x1x1", "width-s6x8x8", "height-s16x8x8", "sequence"])
def test_a_part_alone_computes_what_it_would_among_others(name: str, devices: int) -> None:
    (curve,) = (each for each in curves("strong", is_small=True) if each.name == name)
    benchmark = curve.on_one.benchmark
    problem, parts = curve.share(devices), curve.parts(devices)
    halos = [halo.evened() for halo in halos_of(problem, parts)]
    operands, cotangent = part_tiles.draw(curve, halos)
    found = custom_vjp.forward(Request(problem, backend="cpu-fna", parts=parts), operands)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, benchmark.shape, benchmark.dtype) for key in keys]
    starts = [halo.parts // 2 * halo.part for halo in halos]
    lengths = [halo.part for halo in halos]
    expected = part_tiles.cut(ours(benchmark, "cpu")(*arrays[1:]), starts, lengths)
    assert part_tiles.difference(found.out, expected) < 1e-6
    assert (cotangent == part_tiles.cut(arrays[0], starts, lengths)).all()


def test_a_part_with_the_tiles_of_the_whole_is_not_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    flags = ["--family", "cpu", "--splits", "width-s6x8x8", "--devices", "4", "--json", str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["part_tiles.py", *flags])
        assert part_tiles.main() == 0
    rows = json.loads(file.read_text())["results"]
    assert list(rows) == [f"cpu {pass_}, width-s6x8x8 over 4" for pass_ in PASSES]
    output = capsys.readouterr().out
    for name, row in rows.items():
        assert name in output
        assert len({json.dumps(tiles) for tiles in row["tiles"].values()}) == 1 and "speedup" not in row
