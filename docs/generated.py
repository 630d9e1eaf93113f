"""Update the generated parts of the pages: tables of flags and backends, and outputs of commands.

``make tables`` runs this program. A table is between two comments, and the first comment names the table. Only commands
whose output is the same on every machine are run:

- commands with ``--compute-capability``, which do not need a GPU. The output is in the code block after the command.
- commands that fail. Such a command follows a ``$``, and the error message is below it in the same code block.

If the output in a page ends with ``...``, the new output is truncated to the same number of lines.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from natten_jax import backends
from natten_jax.autotuning.tables import TunedPass, TunedTable
from natten_jax.backends.base import Backend, heads_rejection
from natten_jax.backends.select import CHOICES, used_arguments_of
from natten_jax.ops.config_queries import query_names
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId
from natten_jax.problem import OPERATORS, problem_of
from natten_jax.profiler.options import ELEMENT_TYPES, FOREIGN_FLAGS, profiler_parser

DOCS = Path(__file__).parent
PAGES = tuple(sorted(DOCS.glob("*.md")))
WIDTH = 100  # width of the terminal in which commands run, in columns

_TABLE = re.compile(r"(<!-- table: ([^>\n]+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_PROFILER = r"python -m natten_jax\.profiler (?:[^\n`]|\\\n)*"
_SAMPLE = re.compile(
    rf"```sh\n(?P<asked>{_PROFILER}--compute-capability[^\n`]*)\n```\n```(?:text|none)\n(?P<output>.*?)```"
    rf"|```text\n\$ (?P<failing>{_PROFILER})\n(?P<message>.*?)```",
    re.DOTALL,
)
_MORE = "...\n"


def generated(text: str) -> str:
    """Return the text of a page with updated tables and outputs."""
    text = _TABLE.sub(lambda match: f"{match[1]}\n{table(match[2])}\n\n{match[3]}", text)
    return _SAMPLE.sub(_sample, text)


def table(name: str) -> str:
    """Return the table of this name in Markdown."""
    if name.startswith("flags "):
        return _flags(name.removeprefix("flags "))
    return _TABLES[name]()


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(*names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)


# The profiler's flags ------------------------------------------------------------------------------------------------


def flag_groups() -> dict[str, list[argparse.Action]]:
    """Return the flags in the profiler's help, by the title of their group."""
    return {
        str(group.title): [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        for group in profiler_parser()._action_groups
    }


def _flags(title: str) -> str:
    rows = ((_code(*_spellings(each)), _value(each), *_default_and_help(each)) for each in flag_groups()[title])
    return _markdown(("option", "value", "default", "what it does"), rows)


def _spellings(action: argparse.Action) -> list[str]:
    return sorted(action.option_strings, key=len)


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None and action.metavar is None:
        return _code(*action.choices)
    return f"`{action.metavar}{' ...' if action.nargs == '+' else ''}`"


def _default_and_help(action: argparse.Action) -> tuple[str, str]:
    """Return the default of a flag, and the flag's help text without the default.

    The default is read from the help text, or from the parser if the help text does not state a default.
    """
    text = _with_code(action.help or "")
    if action.required:
        return "required", text.replace(" (required)", "")
    said = re.search(r" \(default: ([^()]*)\)", text)
    if said is not None:
        return said[1], text.replace(said[0], "")
    default = {None: "none", False: "off", argparse.SUPPRESS: ""}.get(action.default, action.default)
    return str(default), text


def _with_code(text: str) -> str:
    """Format the flags in a text as code. Otherwise, their double hyphens would become dashes."""
    return re.sub(r"(?<![\w-])(--?[a-z][\w-]*)", r"`\1`", text)


def _element_types() -> str:
    return _markdown(("short", "or in full"), ((_code(short), _code(name)) for short, name in ELEMENT_TYPES.items()))


def _foreign_flags() -> str:
    rows = ((_code(name), _with_code(advice)) for name, advice in FOREIGN_FLAGS.items())
    return _markdown(("option", "message"), rows)


# The backends --------------------------------------------------------------------------------------------------------


def _names(backend: Backend) -> str:
    return _code(f"{backend.family}-*")


def _devices() -> str:
    def row(backend: Backend) -> Sequence[str]:
        has = backend.capabilities
        devices = "every device of XLA" if has.platform is None else str(has.platform)
        devices = {"platform cpu only": "CPUs", "platform tpu only": "TPUs"}.get(devices, devices)
        devices += " (only if named)" if has.is_by_name_only else ""
        step, most = has.head_dim_step, has.largest_head_dim
        others = f", padded with zeros to a multiple of {step}" if step > 1 else ""
        if has.head_widths:
            others = f", padded with zeros to {' or '.join(map(str, has.head_widths))}"
        widths = "any" if most is None else f"up to {most}{others}"
        passes = "any derivative, forward mode included" if has.is_plain_jax else ", ".join(PASSES)
        small = "" if has.converts_float8_to is None else "; 8-bit floats after conversion, forward only"
        if has.float8_dtypes:
            small = f"; {', '.join(has.float8_dtypes)} in forward passes, if `backend=` names {_names(backend)}"
        types = ", ".join(has.dtypes) + small
        return _names(backend), devices, types, widths, passes, _schedules(backend)

    header = ("backend", "devices", "element types", "`head_dim`, `head_dim_v`", "passes", "`kernel_schedule`")
    return _markdown(header, map(row, backends.registered()))


def _schedules(backend: Backend) -> str:
    return ", ".join(f"`{schedule}`" for schedule in backend.capabilities.schedules.get("forward", ())) or "none"


_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
_HEAD_DIMS = (64, 128, 256)


def _tiles() -> str:
    rows = []
    for backend in backends.registered():
        alike: dict[tuple[tuple[str, ...], ...], list[Device]] = {}
        for device in _devices_of(backend):
            cells = tuple(tuple(_largest(backend, device, pass_, width) for width in _HEAD_DIMS) for pass_ in PASSES)
            alike.setdefault(cells, []).append(device)
        for cells, devices in alike.items():
            capabilities = (".".join(map(str, device.compute_capability or ())) for device in devices)
            name = _names(backend) + (f" on {', '.join(capabilities)}" if len(alike) > 1 else "")
            rows += [(name, pass_, *pass_cells) for pass_, pass_cells in zip(PASSES, cells, strict=True)]
    return _markdown(("backend", "pass", *(f"heads of {width}" for width in _HEAD_DIMS)), rows)


def _devices_of(backend: Backend) -> list[Device]:
    gpus = [Device("cuda", capability, is_present=False) for capability in _CAPABILITIES]
    platform = backend.capabilities.platform
    return [gpu for gpu in gpus if platform is not None and platform.has(gpu)] or [Device("cpu")]


def _largest(backend: Backend, device: Device, pass_: Pass, head_dim: int) -> str:
    problem = problem_of((64, 64), 33, head_dim=head_dim, dtype="bfloat16")
    if heads_rejection(backend.capabilities, problem) is not None:
        return "none"
    return " and ".join(map(str, backend.capabilities.largest_tiles(problem, device, pass_)))


def _performance_arguments() -> str:
    def row(name: str) -> Sequence[str]:
        parts: dict[bool, list[Backend]] = {True: [], False: []}
        for backend in backends.registered():
            parts[name in used_arguments_of(backend)].append(backend)
        having, others = (", ".join(map(_names, part)) for part in parts.values())
        reason = f"{others}: {CHOICES[name].lacking}" if others else "none"
        return _code(name), CHOICES[name].pass_, having, reason

    return _markdown(("argument", "pass", "used by", "ignored by, and the reason"), map(row, CHOICES))


def _queries() -> str:
    def row(backend: Backend) -> Sequence[str]:
        names = (
            f"get_{infix}configs_for_{backend.capabilities.query_family or backend.family}" for infix in ("", "bwd_")
        )
        return _code(*(BackendId(backend.family, each) for each in OPERATORS)), _code(*(f"{name}_*" for name in names))

    return _markdown(("backends", "functions, with `fna` or `fmha` for `*`"), map(row, backends.registered()))


def _configuration_queries() -> str:
    def row(prefix: str, operator: str) -> Sequence[str]:
        return tuple(f"`get_{infix}configs_for_{prefix}_{operator}`" for infix in ("", "bwd_"))

    names = [each for each in query_names() if each.startswith("get_configs_for_")]
    rows = (row(*each.removeprefix("get_configs_for_").rsplit("_", 1)) for each in names)
    return _markdown(("forward pass", "backward pass"), rows)


# Measured configurations ----------------------------------------------------------------------------------------------


def _tuned_problems() -> str:
    found: dict[str, dict[tuple[str, Pass], str]] = {}
    for table in _tuned_tables():
        for each in table.passes:
            found.setdefault(each.label, {})[table.device, each.plan.pass_] = _milliseconds(each)
    every = {column for cells in found.values() for column in cells}
    columns = sorted(every, key=lambda column: (column[0], PASSES.index(column[1])))
    titles = [f"{product}, {'forward' if pass_ == 'forward' else 'both'}" for product, pass_ in columns]
    rows = [(label, *(cells.get(column, "") for column in columns)) for label, cells in found.items()]
    return _markdown(("problem", *titles), rows or [("none in this version",)])


def _tuned_devices() -> str:
    def row(table: TunedTable) -> Sequence[str]:
        problems = {each.plan.problem for each in table.passes}
        changed = [each for each in table.passes if not each.is_default]
        return table.device, str(len(problems)), str(len(table.passes)), str(len(changed))

    header = ("device", "problems", "passes", "faster than by default")
    return _markdown(header, map(row, _tuned_tables()))


def _tuned_tables() -> list[TunedTable]:
    """Return the tables of all devices, with all measured passes.

    A table includes the passes for which the default configuration was kept.
    """
    files = (DOCS.parent / "bench" / "results" / "tuned").glob("*.json")
    tables = [TunedTable.from_text(file.read_text(encoding="utf-8")) for file in files]
    return sorted(tables, key=lambda table: table.device)


def _milliseconds(each: TunedPass) -> str:
    default, found = (f"{1e3 * seconds:.3g}" for seconds in (each.default_seconds, each.seconds))
    return default if found == default else f"{default} → {found}"


_TABLES: dict[str, Callable[[], str]] = {
    "element types": _element_types,
    "foreign flags": _foreign_flags,
    "backends": _devices,
    "largest tiles": _tiles,
    "performance arguments": _performance_arguments,
    "queries": _queries,
    "configuration queries": _configuration_queries,
    "tuned devices": _tuned_devices,
    "tuned problems": _tuned_problems,
}


# Outputs of commands --------------------------------------------------------------------------------------------------


def _sample(match: re.Match[str]) -> str:
    kind = "output" if match["asked"] else "message"
    command, shown = match["asked"] or match["failing"], match[kind]
    printed = run(command, fails=kind == "message")
    if shown.endswith(_MORE):
        lines = shown.count("\n") - 1
        printed = "".join(printed.splitlines(keepends=True)[:lines]) + _MORE
    return match[0].removesuffix(f"{shown}```") + f"{printed}```"


def run(command: str, *, fails: bool) -> str:
    """Run a command without GPUs, and return its output.

    Args:
        command: The command.
        fails: True if the command must fail. The output then begins with the error message.

    Raises:
        RuntimeError: The command failed although ``fails`` is false, or succeeded although ``fails`` is true.
    """
    arguments = [sys.executable, *shlex.split(command.replace("\\\n", " "))[1:]]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": str(WIDTH), "PYTHONUTF8": "1"}
    finished = subprocess.run(
        arguments, env=environment, capture_output=True, encoding="utf-8", cwd=DOCS.parent, timeout=300, check=False
    )
    if (finished.returncode != 0) != fails:
        raise RuntimeError(f"{command}: exit status {finished.returncode}\n{finished.stderr}")
    lines = (finished.stderr + finished.stdout if fails else finished.stdout).splitlines()
    return textwrap.dedent("\n".join(line.rstrip() for line in lines)) + "\n"


def main() -> None:
    """Update every page whose generated parts are outdated."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := generated(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
