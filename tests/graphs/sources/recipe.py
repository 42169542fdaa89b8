"""What a family file hands over for one graph, and the registry of all graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

RECIPES: dict[str, Recipe] = {}


@dataclass
class Source:
    """A model ready to be traced.

    Attributes
    ----------
    module : torch.nn.Module
        Takes `args`, returns tensors (nested tuples allowed). Its parameters become inputs of the
        graph.
    args : tuple
        Example arguments at the sizes of the golden run.
    rules : list
        Drawing rule for each tensor of `args`, flattened.
    dynamic : optional
        ``dynamic_shapes`` for torch.export, with ``torch.export.Dim`` objects named by their
        meaning.
    version : str
        Packages and versions the model comes from.
    weight_rule : callable, optional
        ``(parameter name, shape) -> rule``; :func:`default_weight_rule` if not given.
    auto : bool
        Export with ``Dim.AUTO`` where `dynamic` names a size: torch cannot prove some true facts
        about declared ranges (that a cache of grouped heads has increasing strides), and refuses
        them.
    keep_attention : bool
        See ``relax_llm_passes.extract.import_exported``.
    mod : optional
        A Relax module made another way; `module` then only computes the golden outputs from the
        arrays named in `reference_inputs`.
    reference : callable, optional
        With `mod`: ``(arrays by input name, dtype) -> outputs`` of the source framework.
    specs : list, optional
        With `mod`: the records of its inputs.
    function : str
        Function of the module to call.
    symbols : dict, optional
        With `mod`: meaning and golden value of its symbolic sizes.
    runs_on : tuple of str
        Target kinds on which stock TVM can run it.
    """

    module: Any = None
    args: tuple[Any, ...] = ()
    rules: list[list[Any]] = field(default_factory=list)
    dynamic: Any = None
    version: str = ""
    weight_rule: Callable[[str, tuple[int, ...]], list[Any]] | None = None
    auto: bool = False
    keep_attention: bool = False
    mod: Any = None
    reference: Callable[[dict[str, Any], str], list[Any]] | None = None
    specs: list[dict[str, Any]] | None = None
    function: str = "main"
    symbols: dict[str, dict[str, Any]] | None = None
    runs_on: tuple[str, ...] = ("llvm", "cuda")


@dataclass
class Recipe:
    """How to make one graph.

    Attributes
    ----------
    name : str
        Name of the graph.
    build : callable
        ``size -> Source`` with size "small" or a key of the family's size table.
    source : str
        Where the model's code comes from, for the table.
    special : str
        What a reader should look for in it.
    tags : tuple of str
        Words to select by.
    """

    name: str
    build: Callable[[str], Source]
    source: str
    special: str
    tags: tuple[str, ...]


def recipe(
    name: str, build: Callable[[str], Source], *, source: str, special: str, tags: str
) -> None:
    """Register a graph. `tags` is a blank-separated list."""
    if name in RECIPES:
        raise ValueError(f"graph {name} is registered twice")
    RECIPES[name] = Recipe(name, build, source, special, tuple(tags.split()))


def default_weight_rule(name: str, shape: tuple[int, ...]) -> list[Any]:
    """Scales under which activations stay near 1 through the layers.

    Vectors named as weights belong to norms: near 1 and no two equal. Matrices are (out, in):
    1/sqrt(in).
    """
    if len(shape) <= 1:
        return ["normal", 0.0 if name.endswith("bias") else 1.0, 0.1]
    if any(word in name for word in ("wte", "embed", "embeddings")):
        return ["normal", 0.0, 0.7]
    return ["normal", 0.0, round(shape[-1] ** -0.5, 4)]
