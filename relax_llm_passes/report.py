"""What each pass did: matches, refusals with their reasons, time; as text and as JSON.

A report is collected per run of a pipeline. Passes never print: they write to the record that
the registry hands them, and whoever runs them decides what to show.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["PassRecord", "Refusal", "Report", "collect", "current"]


@dataclass(frozen=True)
class Refusal:
    """Why something that looked like a match was left alone. Falsy, so `if match:` reads well.

    Attributes
    ----------
    reason : str
        What was found and what was expected.
    kind : str
        The composite kind that was refused ("gemm", "attention", ...).
    function, binding : str
        Where: the Relax function and the variable.
    """

    reason: str
    kind: str = ""
    function: str = ""
    binding: str = ""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        where = ".".join(p for p in (self.function, self.binding) if p)
        return " ".join(p for p in (self.kind, f"at {where}:" if where else "", self.reason) if p)


@dataclass
class PassRecord:
    """One run of one pass.

    Attributes
    ----------
    name : str
        Registered name.
    seconds : float
        Wall time of the run.
    matched : Counter[str]
        Matches by kind.
    refusals : list[Refusal]
        Near misses, each with its reason.
    notes : list[str]
        Anything else that a reader should know ("disabled by PassContext").
    fuses : bool
        True for a pass that is expected to match something; a report says so when it did not.
    """

    name: str
    seconds: float = 0.0
    matched: Counter[str] = field(default_factory=Counter)
    refusals: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fuses: bool = False
    bindings: dict[str, list[str]] = field(default_factory=dict)

    def match(self, kind: str, n: int = 1, function: str = "", binding: str = "") -> None:
        """Count `n` matches of `kind`."""
        self.matched[kind] += n
        if binding:
            self.bindings.setdefault(kind, []).append(
                f"{function}.{binding}" if function else binding
            )

    def refuse(
        self, refusal: Refusal | str, kind: str = "", function: str = "", binding: str = ""
    ) -> Refusal:
        """Record a refusal and return it."""
        if isinstance(refusal, str):
            refusal = Refusal(refusal, kind, function, binding)
        self.refusals.append(refusal)
        return refusal

    def note(self, text: str) -> None:
        """Record a remark."""
        self.notes.append(text)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "name": self.name,
            "seconds": round(self.seconds, 6),
            "matched": dict(self.matched),
            "bindings": dict(self.bindings),
            "refused": [asdict(r) for r in self.refusals],
            "notes": list(self.notes),
        }


@dataclass
class Report:
    """The records of a pipeline's run, in order."""

    target: str = ""
    passes: list[PassRecord] = field(default_factory=list)

    def add(self, record: PassRecord) -> PassRecord:
        """Append a record and return it."""
        self.passes.append(record)
        return record

    @property
    def seconds(self) -> float:
        """Total wall time of the passes."""
        return sum(p.seconds for p in self.passes)

    def matched(self, name: str | None = None) -> Counter[str]:
        """Return matches by kind, of the pass called `name` or of all passes."""
        total: Counter[str] = Counter()
        for p in self.passes:
            if name is None or p.name == name:
                total += p.matched
        return total

    def refused(self, name: str | None = None) -> list[Refusal]:
        """Return refusals of the pass called `name`, or of all passes."""
        return [r for p in self.passes if name is None or p.name == name for r in p.refusals]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "target": self.target,
            "seconds": round(self.seconds, 6),
            "passes": [p.to_dict() for p in self.passes],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_text(self, refusals: int = 5, times: bool = True) -> str:
        """Return a table for people.

        Parameters
        ----------
        refusals : int
            How many distinct reasons to print per pass; the rest is counted.
        times : bool
            Print the time column.
        """
        lines = [f"target {self.target}"] if self.target else []
        width = max([len(p.name) for p in self.passes], default=4)
        for p in self.passes:
            parts = [f"{p.name:<{width}}"]
            if times:
                parts.append(f"{p.seconds * 1e3:9.1f} ms")
            if p.matched:
                parts.append(", ".join(f"{k} {n}" for k, n in sorted(p.matched.items())))
            elif p.fuses and not p.notes:
                parts.append("matched nothing")
            if p.refusals:
                parts.append(f"refused {len(p.refusals)}")
            lines.append("  ".join(parts).rstrip())
            lines.extend(f"{'':<{width}}  note: {n}" for n in p.notes)
            grouped = Counter((r.kind, r.reason) for r in p.refusals)
            first = {(r.kind, r.reason): r for r in reversed(p.refusals)}
            for key, n in list(grouped.items())[:refusals]:
                times_text = f" ({n} times, first here)" if n > 1 else ""
                lines.append(f"{'':<{width}}  refused {first[key]}{times_text}")
            if len(grouped) > refusals:
                lines.append(f"{'':<{width}}  ... and {len(grouped) - refusals} other reasons")
        return "\n".join(lines)


_CURRENT: contextvars.ContextVar[Report | None] = contextvars.ContextVar(
    "relax_llm_passes_report", default=None
)


def current() -> Report | None:
    """Return the report being collected, or None outside of `collect()`."""
    return _CURRENT.get()


@contextlib.contextmanager
def collect(report: Report | None = None) -> Iterator[Report]:
    """Collect the records of every registered pass that runs inside the block.

    Examples
    --------
    >>> with relax_llm_passes.report.collect() as report:
    ...     mod = relax_llm_passes.get_pass("CanonicalizeBindings")(mod)
    >>> print(report.to_text())
    """
    report = Report() if report is None else report
    token = _CURRENT.set(report)
    try:
        yield report
    finally:
        _CURRENT.reset(token)
