"""Generation with a compiled library: the tokens that PyTorch chooses, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_llm_passes import corpus
from relax_llm_passes.cli import main
from relax_llm_passes.errors import InputError
from relax_llm_passes.generation import Generator

ROOT = Path(__file__).resolve().parent.parent
MODULES = ROOT / "tests/graphs/modules"


def fresh_process(*arguments: object) -> str:
    """Run the program in a process that has compiled nothing; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "relax_llm_passes", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """PyTorch's choice, recomputed from all tokens each time, without a cache."""
    torch = pytest.importorskip("torch")
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1)[:, None]], 1)
    return ids[0, len(prompt) :].tolist()


def weights_of(name: str) -> dict[str, np.ndarray]:
    graph = corpus.load(name)
    return {s.name: a for s, a in zip(graph.input_specs, graph.inputs(), strict=True) if s.weight}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with decode and prefill in place, and a file of weights."""
    folder = tmp_path_factory.mktemp("llama")
    files = [str(MODULES / f"llama_{n}.py") for n in ("decode", "prefill_cache")]
    library = str(folder / "m.so")
    code = main(["compile", files[0], "--prefill", files[1], "--kv-cache", "24", "-o", library])
    assert code == 0
    np.savez(folder / "w.npz", **weights_of("llama_decode"))
    return folder


def test_llama_chooses_the_tokens_of_pytorch(llama: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert transformers
    from .graphs.sources.llama import make_model

    torch = pytest.importorskip("torch")
    weights = weights_of("llama_decode")
    model = make_model("small")
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.from_numpy(weights["p_model_" + name.replace(".", "_")]))
    prompt = [3, 14, 15, 92, 65]
    np.savez(llama / "p.npz", ids=np.array([prompt]))
    fresh_process(
        *("run", llama / "m.so", "--generate", 12, "--prompt-ids", llama / "p.npz"),
        *("--params", llama / "w.npz", "--json", llama / "o.json"),
    )
    found = json.loads((llama / "o.json").read_text())
    want = greedy(model, prompt, 12)
    assert found["generated"] == [want] and len(set(want)) > 3
    assert found["prompt"] == [prompt] and found["tokens_per_second"] > 0
    # Without the prefill, token by token through decode: the same.
    record = json.loads((llama / "m.so.json").read_text())
    record["generation"]["prefill"] = None
    machine = Generator.load(llama / "m.so", llama / "w.npz")
    alone = Generator(machine.machine, machine.device, record, _weights(llama))
    assert alone.generate(prompt, 12).tolist() == [want]


def _weights(folder: Path) -> Any:
    from relax_llm_passes.weights import read_weights

    return read_weights(folder / "w.npz")


def test_prompts_weights_and_results(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = str(llama / "m.so")
    out = str(llama / "o.npz")
    ids = []
    for seed in ("1", "1", "2"):
        command = ["run", library, "--generate", "6", "--prompt-ids", "5 6", "--seed", seed]
        assert main([*command, "--output", out]) == 0
        ids.append(np.load(out)["ids"].tolist())
    assert ids[0] == ids[1] != ids[2] and np.shape(ids[0]) == (1, 6)
    text = capsys.readouterr().out
    assert "generated: " + " ".join(map(str, ids[0][0])) in text and "tokens/s" in text
    assert main(["run", library, "--generate", "1", "--prompt-ids", "5"]) == 0
    assert main(["run", library, "--function", "decode_inplace", "--params", "w.npz"]) == 2
    command = ["--function", "decode_inplace", "--params", str(llama / "w.npz"), "--shape", "s17=3"]
    assert main(["run", library, *command]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--generate", "21", "--prompt-ids", "1,2,3,4,5"], "caches hold 24 tokens"),
        (["--generate", "4", "--prompt-ids", "1,97"], "token id 97: the model knows 0 to 96"),
        (["--generate", "4", "--prompt-ids", "1,x"], "expected numbers such as 1,2,3"),
        (["--generate", "4", "--prompt-ids", "none.npz"], "no such file: none.npz"),
        (["--generate", "4", "--prompt-ids", ""], "expected numbers"),
        (["--generate", "4"], "needs a prompt"),
        (["--generate", "0", "--prompt-ids", "1"], "expected at least 1"),
        (["--generate", "2", "--prompt-ids", "1", "--repeat", "3"], "--repeat is not taken"),
        (["--generate", "2", "--prompt-ids", "1", "--params", "none.npz"], "no such file"),
        (["--prompt-ids", "1"], "--prompt-ids is for --generate"),
    ],
)
def test_errors(llama: Path, capsys: Any, arguments: list[str], message: str) -> None:
    assert main(["run", str(llama / "m.so"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_prompts_of_the_wrong_kind(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = llama / "bad.npz"
    command = ["run", str(llama / "m.so"), "--generate", "2", "--prompt-ids", str(path)]
    for arrays, message in (
        ({"a": np.zeros((1, 3))}, "expected token ids"),
        ({"a": np.ones(2, int), "b": np.ones(2, int)}, "expected one array"),
        ({"a": np.ones((2, 3), int)}, "a batch of 2, but the library is compiled for 1"),
        ({"a": np.array([-1])}, "token id -1"),
    ):
        np.savez(path, **arrays)
        assert main(command) == 2
        assert message in capsys.readouterr().err


def test_full_caches_are_refused_in_time(llama: Path) -> None:
    generator = Generator.load(llama / "m.so")
    assert generator.capacity == 24
    generator.reset()
    generator.feed(np.arange(20)[None])
    with pytest.raises(InputError, match="20 are in use and 5 more do not fit"):
        generator.feed(np.arange(5)[None])
    generator.feed(np.arange(4)[None])
    with pytest.raises(InputError, match="24 are in use"):
        generator.feed(np.array([[1]]))


def test_a_library_without_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.small_modules import TEXT

    (tmp_path / "m.py").write_text(TEXT)
    library = str(tmp_path / "m.so")
    assert main(["compile", str(tmp_path / "m.py"), "--target", "llvm", "-o", library]) == 0
    assert main(["run", library, "--generate", "2", "--prompt-ids", "1"]) == 2
    assert "compile FILE --kv-cache ROWS" in capsys.readouterr().err
    command = ["compile", str(tmp_path / "m.py"), "--target", "llvm", "-o", library]
    assert main([*command, "--kv-cache", "9"]) == 2
    assert "no caches to keep" in capsys.readouterr().err
    assert main([*command, "--kv-cache", "0"]) == 2


@pytest.mark.parametrize(
    ("decode", "prefill"),
    [
        ("rwkv5_package_decode", "rwkv5_package_prefill6"),
        pytest.param("rwkv7_package_decode", None, marks=pytest.mark.slow),
        pytest.param("rwkv4_hf_decode", None, marks=pytest.mark.slow),
        pytest.param("rwkv5_mlc_decode", "rwkv5_mlc_prefill", marks=pytest.mark.slow),
    ],
)
def test_states_are_carried(tmp_path: Path, decode: str, prefill: str | None) -> None:
    """Against the same graph, compiled without any pass of this package and driven by hand."""
    import tvm
    from tvm import relax

    graph = corpus.load(decode)
    library = str(tmp_path / "m.so")
    second = ["--prefill", str(MODULES / f"{prefill}.py")] if prefill else []
    assert main(["compile", str(MODULES / f"{decode}.py"), *second, "-o", library]) == 0
    specs = list(zip(graph.input_specs, graph.inputs(), strict=True))
    states = {s.name: a for s, a in specs if not s.weight and a.dtype.kind == "f"}
    np.savez(tmp_path / "w.npz", **weights_of(decode))
    generator = Generator.load(library, tmp_path / "w.npz", states=states)
    prompt = [5, 6, 7, 8, 1, 2, 3, 4]  # six at once, then one by one
    got = generator.generate(prompt, 12)
    built = tvm.compile(graph.mod, "llvm", relax_pipeline="default_build")
    machine = relax.VirtualMachine(built, tvm.cpu())
    held = [tvm.runtime.tensor(a) for a in states.values()]
    rest = [tvm.runtime.tensor(a) for s, a in specs if s.weight]
    ids, shape = specs[0][1], specs[0][1].shape
    text = list(prompt)
    for i in range(len(prompt) + 11):
        token = tvm.runtime.tensor(np.full(shape, text[i], ids.dtype))
        logits, *held = machine[graph.function](token, *held, *rest)
        if i + 1 >= len(prompt):
            text.append(int(logits.numpy().reshape(-1).argmax()))
    assert got.tolist() == [text[len(prompt) :]]
    # Zero states, another text.
    fresh = Generator.load(library, tmp_path / "w.npz")
    assert fresh.generate(prompt, 12).shape == (1, 12)
    with pytest.raises(InputError, match="is no state"):
        Generator.load(library, states={"x": np.zeros(3, "float32")})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mpt", "llama", "gptj", "neox"])
def test_from_a_model_folder_64_tokens(tmp_path: Path, kind: str) -> None:
    """config.json and random safetensors to tokens, by four commands; against PyTorch's own
    recomputation and its decoding with a cache."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **sizes}
    config = {
        "mpt": lambda: transformers.MptConfig(
            d_model=64, n_heads=4, n_layers=2, max_seq_len=128, expansion_ratio=2, **sizes
        ),
        "llama": lambda: transformers.LlamaConfig(
            num_key_value_heads=2, intermediate_size=96, max_position_embeddings=128, **common
        ),
        "gptj": lambda: transformers.GPTJConfig(
            n_embd=64, n_head=4, n_layer=2, n_positions=128, rotary_dim=8, **sizes
        ),
        "neox": lambda: transformers.GPTNeoXConfig(
            intermediate_size=96, max_position_embeddings=128, **common
        ),
    }[kind]()
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    module, library = tmp_path / "m.py", tmp_path / "m.so"
    fresh_process("extract", tmp_path, "--mode", "generate", "-o", module)
    fresh_process("compile", module, "--kv-cache", 80, "-o", library)
    prompt = [3, 14, 15, 92, 65]
    fresh_process(
        *("run", library, "--generate", 64, "--prompt-ids", "3,14,15,92,65"),
        *("--params", tmp_path, "--json", tmp_path / "o.json"),
    )
    (found,) = json.loads((tmp_path / "o.json").read_text())["generated"]
    assert found == greedy(model, prompt, 64)
    model.generation_config.eos_token_id = None  # 64 tokens, whatever they are
    ids = torch.tensor([prompt])
    cached = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, pad_token_id=0
    )
    assert found == cached[0, len(prompt) :].tolist()
