"""Readable names of launches, derived from kernel symbols, custom calls, collectives and XLA's instructions."""

from __future__ import annotations

import dataclasses
import re

from natten_jax.profiler.program import Instruction

#: Operations that a report lists first, in this order.
KNOWN_OPERATIONS = (
    *("FnaForward", "FnaBackward", "FmhaForward", "FmhaBackward"),
    *("Reduction", "TokenPermute", "Elementwise", "Convert"),
)

_LONGEST = 45
_ARCHITECTURES = {"ampere": "Sm80", "hopper": "Sm90", "blackwell": "Sm100"}


@dataclasses.dataclass(frozen=True)
class Name:
    """Name of a launch in a report. Launches with the same name share a row."""

    framework: str
    category: str
    arch: str
    operation: str


# The patterns that begin with ^[^<(]* match only the part of a symbol before its template arguments.
_DELTA = r"^[^<(]*(delta|statistics|dot_do_o|do_dot_o|sum_odo|reduc)"
_PERMUTE, _CONVERT, _ELEMENTWISE = r"^[^<(]*permute", r"^[^<(]*(convert|cast)", r"^[^<(]*(elementwise|clear|fill|scale)"
_HOST, _TPU, _DEVICE = "natten_jax_cpu", "natten_jax_tpu_", "natten_jax"
_CUDNN = r"^__cudnn\$(fmha|fused.*attention)"
_PALLAS = r"^mosaic_gpu|^tpu_custom_call|^triton_kernel_call|^__gpu\$xla\.gpu\.triton"
_MHA = r"mha_(forward|backward)|attention_(forward|backward)"
_BACKWARD = re.compile(r"backward|gradient|bprop|bwd")

# Rules that name a launch by its custom call and its symbol. The first rule that matches both is used. Rules for
# custom calls precede rules for symbols, because a known custom call can launch kernels with arbitrary symbols.
#
# The columns are:
# - a regular expression for the custom call's target in lower case. If the launch has no custom call, or its
#   symbol contains natten_jax, the symbol without template arguments is matched instead. "" matches every launch.
# - a regular expression for the symbol in lower case.
# - the library of the kernel, or "-".
# - the kind of work, or "-".
# - the readable name. "" stands for the cleaned symbol, "{pass_}" for Forward or Backward, and "{operator}" for Fna or
#   Fmha: some kernels of this package implement both operators.
_RULES = (
    ("", r"^memset", "CUDA", "copy", "Memset"),
    ("", r"^memcpy", "CUDA", "copy", "Memcpy"),
    # Custom calls of this package, cuDNN, cuBLAS and Pallas.
    (_HOST + r".*(forward|backward)", "", "natten_jax-cpu", "attention", "{operator}{pass_}"),
    (_TPU + r"(forward|\w*gradient)", "", "natten_jax-tpu", "attention", "{operator}{pass_}"),
    (_DEVICE, _DELTA, "CUTLASS", "reduction", "Reduction"),
    (_DEVICE, _PERMUTE, "CUTLASS", "token permute", "TokenPermute"),
    (_DEVICE, _CONVERT, "CUTLASS", "elementwise", "Convert"),
    (_DEVICE, _ELEMENTWISE, "CUTLASS", "elementwise", "Elementwise"),
    (_DEVICE + r".*fmha_(forward|backward)", "", "CUTLASS", "attention", "Fmha{pass_}"),
    (_DEVICE + r".*(forward|backward)", "", "CUTLASS", "attention", "{operator}{pass_}"),
    ("cudnn", _DELTA, "cuDNN", "reduction", "Reduction"),
    ("cudnn", _CONVERT, "cuDNN", "elementwise", "Convert"),
    (_CUDNN, "", "cuDNN", "attention", "Fmha{pass_}"),
    (r"^__cublas", "", "cuBLAS", "gemm", ""),
    ("", r"mha_preprocess", "Pallas", "reduction", "Reduction"),
    (_PALLAS, _MHA, "Pallas", "attention", "Fmha{pass_}"),
    (_PALLAS, r"softmax", "Pallas", "softmax", ""),
    (_PALLAS, "", "Pallas", "-", ""),
    # Symbols of launches without a custom call.
    ("", r"(cudnn|^sm\d+).*(sdpa|flash.*[fb]prop|fmha|mha)", "cuDNN", "attention", "Fmha{pass_}"),
    ("", r"cudnn", "cuDNN", "-", ""),
    ("", r"mha_(forward|backward)|attention_backward", "Pallas", "attention", "Fmha{pass_}"),
    ("", r"nvjet|cublas|xmma_gemm|gemmsn|gemvnsp|gemv2|splitkreduce", "cuBLAS", "gemm", ""),
    ("", r"(cutlass|cute|flash).*(fmha|flash|attention)", "CUTLASS", "attention", "Fmha{pass_}"),
    ("", r"(cutlass|cute).*(gemm|tensorop|wgmma)", "CUTLASS", "gemm", ""),
    ("", r"cutlass|cute::", "CUTLASS", "-", ""),
    ("", r"triton_softmax|softmax.*triton", "Triton", "softmax", ""),
    ("", r"^gemm_fusion|triton_gemm", "Triton", "gemm", ""),
    ("", r"triton", "Triton", "-", ""),
    ("", r"mosaic|pallas", "Pallas", "-", ""),
)


# fmt: off
_COPYING = frozenset((
    "bitcast", "broadcast", "concatenate", "copy", "copy-start", "copy-done", "dynamic-slice", "dynamic-update-slice",
    "gather", "get-tuple-element", "iota", "pad", "reshape", "reverse", "slice", "transpose", "tuple",
))
# fmt: on

# Parts of a scope path that JAX's transformations add. They do not describe the operation.
_SILENT_SCOPES = re.compile(
    r"(body|branch_\d+_fun|checkpoint|closed_call|cond|custom_partitioning|eval_jaxpr|rematted_computation|remat|while|"
    r"\w+\(.*\)|\W.*|.*->.*)"
)


def name(symbol: str, instruction: Instruction, operator: str, scope: str = "") -> Name:
    """Return the name of a launch.

    Args:
        symbol: Symbol of the kernel. On a CPU: target of the custom call, or name of the instruction.
        instruction: Instruction that launched the kernel.
        operator: ``"fna"`` or ``"fmha"``. The operator in the name if the instruction has no plan.
        scope: Scope path of the launch. It is used if the instruction has no scope path.
    """
    lowered = symbol.lower().replace("(anonymous namespace)::", "")
    target, function = instruction.target.lower(), _own_name(lowered)
    caller = function if "natten_jax" in function or not target else target
    if kind := kind_of_collective(symbol, instruction):
        return Name("NCCL" if _NCCL.search(symbol) else "XLA", "collective", "-", kind)
    for caller_pattern, pattern, framework, category, operation in _RULES:
        if re.search(caller_pattern, caller) and re.search(pattern, lowered):
            if instruction.plan is not None:
                operator = instruction.plan.backend.operator
            is_backward = _BACKWARD.search(caller if "natten_jax" in caller else f"{target} {lowered}")
            pass_ = "Backward" if is_backward else "Forward"
            operation = operation.format(operator=operator.capitalize(), pass_=pass_)
            if not operation:
                is_fusion = instruction.opcode == "fusion" or "fusion" in lowered
                operation = clean(_without_number(symbol) if is_fusion else symbol)
            arch = _arch(lowered if _arch(lowered) != "-" else target) if category == "attention" else "-"
            return Name(framework, category, arch, operation)
    is_cpp = not instruction.opcode and re.search(r"[<(:]|^_Z", symbol)
    if is_cpp or instruction.opcode == "custom-call":  # a kernel of an unknown library
        return Name("-", "-", "-", clean(instruction.target or symbol))
    return _name_of_xla(symbol, instruction, scope)


def clean(symbol: str) -> str:
    """Remove return type, anonymous namespaces, template arguments and parameters from a symbol, and shorten it."""
    symbol = re.sub(r"^(void|int|bool|float)\s+", "", symbol)
    symbol = symbol.replace("(anonymous namespace)::", "").removeprefix("cudnn_generated_")
    return shorten(_own_name(symbol).replace("::", ".").strip())


def _own_name(symbol: str) -> str:
    """Return a symbol without its template arguments and parameters."""
    return re.split(r"[<(]", symbol, maxsplit=1)[0]


def shorten(text: str) -> str:
    """Replace everything after the first 45 characters of a text by an ellipsis."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def order(named: Name) -> int:
    """Return the rank of an operation in a report. Operations outside ``KNOWN_OPERATIONS`` are last."""
    return [*KNOWN_OPERATIONS, named.operation].index(named.operation)


def _name_of_xla(symbol: str, instruction: Instruction, scope: str) -> Name:
    opcodes = instruction.fused or frozenset({instruction.opcode} - {"", "fusion"})
    if opcodes and opcodes - _COPYING <= {"convert"} and "convert" in opcodes:
        return Name("XLA", "elementwise", "-", "Convert")
    path = instruction.scope or scope
    category = _category(symbol, opcodes)
    label, kernel = _scope_label(path), _without_number(symbol)
    if kernel == "fusion" and opcodes - _COPYING:
        kernel = f"fusion of {', '.join(sorted(opcodes - _COPYING))}"
    product = "conv_general_dilated" if "convolution" in opcodes else "dot_general"
    if category == "gemm" and opcodes and product not in label:  # the scope of a fusion can lack its matrix product
        label = f"{product} + {label}" if label else product
    if label and "transpose(" in path:
        label = f"{label} (backward)"  # JAX names the scope of a transposed function transpose(...)
    if label and category == "copy" and label not in kernel:
        label = f"{kernel} [{label}]"  # XLA adds copies for primitives: name both
    return Name("XLA", category, "-", shorten(label or kernel))


def _without_number(name_of_xla: str) -> str:
    """Remove the numeric suffix that makes an instruction's name unique."""
    return re.sub(r"([._]\d+)+$", "", name_of_xla)


def _category(symbol: str, opcodes: frozenset[str]) -> str:
    if not opcodes:
        opcodes = frozenset(re.findall(r"[a-z][a-z-]*", symbol.lower()))  # a fusion's name contains its opcodes
    if opcodes & {"while", "conditional", "call"}:
        return "control flow"
    if opcodes & {"dot", "convolution", "gemm"}:
        return "gemm"
    if "softmax" in opcodes or (opcodes & {"reduce"} and opcodes & {"exponential"}):
        return "softmax"
    if opcodes & {"reduce", "reduce-window", "reduction"}:
        return "reduction"
    if opcodes - {"fusion", "wrapped", "loop", "input", "dynamic", "update"} <= _COPYING:
        return "copy"
    return "elementwise"


def _scope_label(path: str) -> str:
    """Return the last scope and the primitive of a path, without the parts that JAX's transformations add.

    Return an empty string for a path without a slash, because such a path is the name of an argument.
    """
    if "/" not in path:
        return ""
    *scopes, primitive = [part for part in path.split("/") if not _SILENT_SCOPES.fullmatch(part)] or [""]
    return "/".join([*scopes[-1:], primitive])


def _arch(lowered: str) -> str:
    if match := re.search(r"sm_?(1\d\d|[5-9]\d)", lowered):  # in a mangled symbol, other digits can follow
        return f"Sm{match[1]}"
    return next((arch for family, arch in _ARCHITECTURES.items() if family in lowered), "-")


# Name or opcode of a collective. Asynchronous collectives have a suffix for their start, update or end. A number makes
# the name of an instruction unique.
_COLLECTIVE_INSTRUCTION = re.compile(
    r"(all-gather|all-reduce|ragged-all-to-all|all-to-all|collective-broadcast|collective-permute|reduce-scatter)"
    r"(-start|-update|-done)?([._]\d+)*"
)

# Symbol of an NCCL kernel. The kernel for collective permutations and all-to-all is SendRecv.
_NCCL = re.compile(r"\bnccl(?:Dev)?Kernel_([a-z]+)", re.IGNORECASE)


def kind_of_collective(symbol: str, instruction: Instruction) -> str | None:
    """Return the kind of a collective launch, such as ``all-gather``, or ``None`` for other launches.

    Args:
        symbol: Symbol of a GPU kernel. On a CPU: name of the instruction.
        instruction: Instruction that launched the kernel.
    """
    for opcode in (instruction.opcode or symbol, *sorted(instruction.fused)):
        if kind := kind_of_collective_instruction(opcode):
            return kind
    match = _NCCL.search(symbol)
    return None if match is None else re.sub("(?<=[a-z])(?=[A-Z])", "-", match[1]).lower()


def kind_of_collective_instruction(name: str) -> str | None:
    """Return the kind of a collective instruction from its name or opcode, or ``None`` for other instructions."""
    match = _COLLECTIVE_INSTRUCTION.fullmatch(name)
    return None if match is None else match[1]
