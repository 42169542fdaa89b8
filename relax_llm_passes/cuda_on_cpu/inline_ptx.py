"""Inline PTX: each ``asm`` statement becomes a call of a C++ function with the same effect.

An instruction is looked up by its opcode with the modifiers that do not change its meaning here
removed. The C++ side is ``device/emu_ptx.h``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from ..errors import UnsupportedError

__all__ = ["translate_asm"]

_ASM = re.compile(r"\b(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(")


@dataclass
class _Operands:
    outputs: list[str]
    inputs: list[str]

    def name(self, text: str) -> str:
        """The C++ expression of a PTX operand: ``%3``, ``[%3]`` or an immediate."""
        text = text.strip()
        m = re.fullmatch(r"%(\d+)", text)
        if m:
            return f"({(self.outputs + self.inputs)[int(m.group(1))]})"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
            return text
        raise UnsupportedError(f"inline PTX: cannot read the operand {text!r}")


def _split(text: str, separator: str) -> list[str]:
    """Split at the separator outside brackets, braces, parentheses and strings."""
    parts = [""]
    depth = 0
    quoted = False
    i = 0
    while i < len(text):
        c = text[i]
        if c == '"' and (i == 0 or text[i - 1] != "\\"):
            quoted = not quoted
        if not quoted:
            depth += (c in "([{") - (c in ")]}")
        if c == separator and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += c
        i += 1
    return parts


def _expressions(section: str) -> list[str]:
    found = []
    for part in _split(section, ","):
        if not part.strip():
            continue
        m = re.match(r'\s*"[^"]*"\s*\((.*)\)\s*$', part, re.DOTALL)
        if m is None:
            raise UnsupportedError(f"inline PTX: cannot read the operand list at {part.strip()!r}")
        found.append(m.group(1))
    return found


def _registers(text: str, operands: _Operands) -> list[str]:
    """The expressions of ``{%0, %1}`` or of a single operand."""
    text = text.strip()
    if text.startswith("{"):
        return [operands.name(t) for t in text[1:-1].split(",")]
    return [operands.name(text)]


def _address(text: str, operands: _Operands) -> str:
    m = re.fullmatch(r"\[\s*(%\d+)\s*(?:\+\s*(\d+))?\s*\]", text.strip())
    if m is None:
        raise UnsupportedError(f"inline PTX: cannot read the address {text.strip()!r}")
    return f"(uint64_t)({operands.name(m.group(1))}) + {m.group(2) or 0}"


def _ldmatrix(opcode: str, args: list[str], operands: _Operands) -> str:
    m = re.fullmatch(
        r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?(?:\.shared)?(?:::cta)?\.b16",
        # CUTLASS writes the shape last.
        re.sub(r"\.(x[124](?:\.trans)?)\.m8n8\.", r".m8n8.\1.", opcode),
    )
    if m is None:
        raise UnsupportedError(f"inline PTX: {opcode} is not emulated")
    outputs = _registers(args[0], operands)
    pointers = ", ".join(f"(uint32_t*)&{o}" for o in outputs)
    return (
        f"emu_ldmatrix<{m.group(1)}, {'true' if m.group(2) else 'false'}>"
        f"(EMU_SITE, {_address(args[1], operands)}, {pointers});"
    )


def _mma(opcode: str, args: list[str], operands: _Operands) -> str:
    m = re.fullmatch(
        r"mma\.sync\.aligned\.(m\d+n\d+k\d+)\.row\.col\.(\w+)\.(\w+)\.(\w+)\.(\w+)", opcode
    )
    supported = {
        ("m16n8k8", "f16", "f16"),
        ("m16n8k8", "bf16", "bf16"),
        ("m16n8k4", "tf32", "tf32"),
        ("m16n8k8", "tf32", "tf32"),
        ("m16n8k16", "f16", "f16"),
        ("m16n8k16", "bf16", "bf16"),
        ("m16n8k16", "s8", "s8"),
        ("m16n8k32", "s8", "s8"),
    }
    if m is None or (m.group(1), m.group(3), m.group(4)) not in supported:
        raise UnsupportedError(f"inline PTX: {opcode} is not emulated")
    shape, d_type, a_type, _, c_type = m.groups()
    if d_type != c_type or d_type not in ("f32", "f16", "s32"):
        raise UnsupportedError(f"inline PTX: {opcode} is not emulated")
    k = shape.split("k")[1]
    d, a, b, c = (_registers(t, operands) for t in args)
    lists = [
        f"EmuRegisters{{{', '.join(f'(void*)&{x}' for x in d)}}}",
        *(f"EmuWords{{{', '.join(f'emu_word({x})' for x in group)}}}" for group in (a, b, c)),
    ]
    return f"emu_mma<{k}, Emu_{a_type}, Emu_{d_type}>(EMU_SITE, {', '.join(lists)});"


def _cp_async(opcode: str, args: list[str], operands: _Operands) -> str:
    if opcode == "cp.async.commit_group":
        return "emu_async_commit();"
    if opcode == "cp.async.wait_all":
        return "{ emu_async_commit(); emu_async_wait(0); }"
    if opcode == "cp.async.wait_group":
        return f"emu_async_wait({operands.name(args[0])});"
    if not re.fullmatch(
        r"cp\.async\.c[ag]\.shared(::cta)?\.global(\.L2::(cache_hint|64B|128B|256B))*", opcode
    ):
        raise UnsupportedError(f"inline PTX: {opcode} is not emulated")
    size = operands.name(args[2])
    used = operands.name(args[3]) if len(args) > 3 and ".cache_hint" not in opcode else size
    return (
        f"emu_async_copy((void*)emu_shared_pointer({_address(args[0], operands)}), "
        f"(const void*)({_address(args[1], operands)}), {size}, {used}, EMU_SITE);"
    )


_WIDTH = re.compile(r"(?:\.v([24]))?\.[bus](16|32|64)$")


def _memory(opcode: str, args: list[str], operands: _Operands) -> str:
    """``ld`` and ``st``; cache hints change nothing here."""
    m = re.fullmatch(
        r"(ld|st)\.(global|shared)(?:\.(?:lu|ca|cg|cs|wt|L2::(?:64|128|256)B))*"
        r"((?:\.v[24])?\.[bus](?:16|32|64))",
        opcode,
    )
    if m is None:
        raise UnsupportedError(f"inline PTX: {opcode} is not emulated")
    kind, space, suffix = m.groups()
    width = _WIDTH.search(suffix)
    assert width is not None
    group, place = args if kind == "ld" else reversed(args)
    address = _address(place, operands)
    pointer = f"emu_shared_pointer({address})" if space == "shared" else f"(char*)({address})"
    values = _registers(group, operands)
    if len(values) != int(width[1] or 1):
        raise UnsupportedError(f"inline PTX: {opcode} with {len(values)} registers")
    passed = ", ".join(f"&{v}" if kind == "ld" else v for v in values)
    name = "emu_ptx_load" if kind == "ld" else "emu_ptx_store"
    return f"{name}<{int(width[2]) // 8}>(EMU_SITE, {pointer}, {passed});"


def _move(opcode: str, args: list[str], operands: _Operands) -> str:
    to, value = (operands.name(t) for t in args)
    return f"emu_ptx_move(&{to}, {value});"


def _bar_sync(opcode: str, args: list[str], operands: _Operands) -> str:
    if opcode in ("bar.sync", "barrier.sync", "barrier.cta.sync") and args == ["0"]:
        return "emu_barrier(EMU_SITE);"
    raise UnsupportedError(f"inline PTX: {opcode} {', '.join(args)} is not emulated")


def _dp4a(opcode: str, args: list[str], operands: _Operands) -> str:
    types = {"u32": "uint8_t", "s32": "int8_t"}
    _, a, b = opcode.split(".")
    d, x, y, c = (operands.name(t) for t in args)
    return f"{d} = emu_dp4a<{types[a]}, {types[b]}>({x}, {y}, {c});"


_FAMILIES = {
    "ldmatrix.": _ldmatrix,
    "mma.sync": _mma,
    "cp.async": _cp_async,
    "bar.sync": _bar_sync,
    "barrier": _bar_sync,
    "dp4a.": _dp4a,
    "ld.": _memory,
    "st.": _memory,
    "mov.b": _move,
}

# cp.async under a predicate, zeros when it is false (TVM's InjectPTXAsyncCopy).
_PREDICATED_COPY = re.compile(
    r"\{\.reg\.predp;setp\.eq\.u32p,%3,1;@pcp\.async\.c[ag]\.shared\.global\[%0\],\[%1\],%2;"
    r"@!pst\.shared\.(?:v[24]\.)?u32\[%0\],\{%4(?:,%4)*\};\}"
)

# Statements that are more than one instruction, by their text without white space.
_WHOLE = {
    "{.reg.u64smem_int;cvta.to.shared.u64smem_int,%1;cvt.u32.u64%0,smem_int;}": (
        "{0} = emu_shared_address((const void*)({1}));"
    ),
    "{.reg.u64addr;cvta.to.shared.u64addr,%1;cvt.u32.u64%0,addr;}": (
        "{0} = emu_shared_address((const void*)({1}));"
    ),
}


def _instruction(text: str, operands: _Operands) -> str:
    m = re.match(r"\s*([\w.:]+)\s*(.*)$", text, re.DOTALL)
    if m is None:
        raise UnsupportedError(f"inline PTX: {text.strip()!r} is not emulated")
    opcode = m.group(1)
    args = [a.strip() for a in _split(m.group(2), ",") if a.strip()]
    for family, translate in _FAMILIES.items():
        if opcode.startswith(family):
            return translate(opcode, args, operands)
    raise UnsupportedError(f"inline PTX: {opcode} is not emulated (in {text.strip()!r})")


_PREDICATED = re.compile(r"\s*@(!?)(p\w*)\s+(.*)$", re.DOTALL)
_SET_PREDICATE = re.compile(r"\s*setp\.ne\.b32\s+(p\w*)\s*,\s*(%\d+)\s*,\s*0\s*$")
_DECLARE_PREDICATE = re.compile(r"\s*\.reg\s+\.pred\s+(p\w*)\s*$")


def _instruction_or_predicate(text: str, operands: _Operands) -> str:
    """One instruction, which may declare, set or stand under a predicate."""
    if m := _DECLARE_PREDICATE.match(text):
        return f"bool emu_{m[1]} = false;"
    if m := _SET_PREDICATE.match(text):
        return f"emu_{m[1]} = {operands.name(m[2])} != 0;"
    if m := _PREDICATED.match(text):
        return f"if ({m[1]}emu_{m[2]}) {{ {_instruction(m[3], operands)} }}"
    return _instruction(text, operands)


def _statement(content: str) -> str:
    sections = _split(content, ":")
    # A string literal may hold colons (shared::cta); _split leaves those alone.
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0]))
    template = template.replace("\\n", " ").replace("\\t", " ")
    operands = _Operands(
        _expressions(sections[1]) if len(sections) > 1 else [],
        _expressions(sections[2]) if len(sections) > 2 else [],
    )
    bare = re.sub(r"\s", "", template)
    if _PREDICATED_COPY.fullmatch(bare):
        to, source, size, predicate, _ = operands.inputs
        return (
            f"emu_predicated_copy(emu_shared_pointer({to}), (const void*)({source}), {size}, "
            f"{predicate}, EMU_SITE);"
        )
    whole = _WHOLE.get(bare)
    if whole is not None:
        return whole.format(*(operands.outputs + operands.inputs))
    scope = re.fullmatch(r"\s*\{(\s*\.reg\b.*)\}\s*;?\s*", template, re.DOTALL)
    instructions = [t for t in _split(scope[1] if scope else template, ";") if t.strip()]
    if not instructions:
        return ";"  # an empty asm statement: a barrier for the compiler only
    return " ".join(_instruction_or_predicate(t, operands) for t in instructions)


def _or_failure(content: str) -> str:
    """As `_statement`; what is not emulated stops the launch that reaches it."""
    try:
        return _statement(content)
    except UnsupportedError as error:
        return f'emu_fail("unsupported", {json.dumps(str(error))}, EMU_SITE);'


def translate_asm(code: str, strict: bool = True) -> str:
    """Replace every inline ``asm`` statement; line numbers are kept.

    Parameters
    ----------
    code : str
        Source text.
    strict : bool
        False for headers, of which little is used: an instruction that is not emulated fails when
        it is reached.

    Raises
    ------
    UnsupportedError
        An instruction is not emulated; the message names it.
    """
    translate = _statement if strict else _or_failure
    out: list[str] = []
    position = 0
    for m in _ASM.finditer(code):
        depth = 0
        quoted = False
        end = m.end() - 1
        while True:
            c = code[end]
            if c == '"' and code[end - 1] != "\\":
                quoted = not quoted
            if not quoted:
                depth += (c == "(") - (c == ")")
            if depth == 0:
                break
            end += 1
        statement = code[m.start() : end + 1]
        after = end + 1
        while code[after].isspace():
            after += 1
        if code[after] != ";":
            raise UnsupportedError(f"cannot read the asm statement {statement[:60]!r}")
        text = translate(code[m.end() : end])
        out += [code[position : m.start()], f"{{ {text} }}", "\n" * statement.count("\n")]
        position = after + 1
    out.append(code[position:])
    return "".join(out)
